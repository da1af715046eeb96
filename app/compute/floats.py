"""Numbers of any float type, read as float32 by compiled loops.

NumPy knows no bfloat16, and Numba no float16: numbers of 16 bits come as integers of the same bits,
uint16 and int16.
"""

from typing import Final, no_type_check

import numpy as np
import torch
from numba.extending import overload
from numba.np.numpy_support import as_dtype
from torch import Tensor

BFLOAT16: Final = np.dtype(np.uint16)
FLOAT16: Final = np.dtype(np.int16)
"""Types that numbers of 16 bits have as integers."""

BITS: Final = {torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}


def as_numbers(tensor: Tensor) -> np.ndarray:
    """View a tensor's memory as an array whose numbers ``value`` reads."""
    bits = BITS.get(tensor.dtype)
    return tensor.numpy() if bits is None else tensor.view(torch.int16).numpy().view(bits)


@no_type_check
def value(flat, index):
    """Read a number as float32."""
    return _reader_of(flat.dtype)(flat, index)


@overload(value)
@no_type_check
def _value(flat, index):
    """Let compiled code choose the reader once, by the type of the numbers."""
    del index  # Numba wants the arguments of the functions to choose from.
    return _reader_of(as_dtype(flat.dtype))


@no_type_check
def _reader_of(dtype):
    return {BFLOAT16: _read_bfloat16, FLOAT16: _read_float16}.get(dtype, _read_number)


@no_type_check
def _read_number(flat, index):
    return np.float32(flat[index])


@no_type_check
def _read_bfloat16(flat, index):
    """It is the upper half of a float32."""
    return np.uint32(np.uint32(flat[index]) << np.uint32(16)).view(np.float32)


@no_type_check
def _read_float16(flat, index):
    """Move its bits to where float32 has them, and correct for the other bias of exponents."""
    bits = np.uint32(np.uint16(flat[index]))
    size = np.uint32((bits & np.uint32(0x7FFF)) << np.uint32(13))
    finite = np.float32(size.view(np.float32) * np.float32(2.0**112)).view(np.uint32)
    # Infinity and NaN have the highest exponent in either type.
    size = finite if size < np.uint32(0x0F800000) else np.uint32(size | np.uint32(0x7F800000))
    return np.uint32(size | ((bits & np.uint32(0x8000)) << np.uint32(16))).view(np.float32)
