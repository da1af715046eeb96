"""Numbers of 16 bits: each is read as torch reads it."""

import numpy as np
import pytest
import torch

from app.compute import numba_jit, value
from app.compute.floats import BITS


@numba_jit
def read_all(line: np.ndarray, numbers: np.ndarray) -> None:
    for x in range(len(numbers)):
        numbers[x] = value(line, x)


@pytest.mark.parametrize("dtype", BITS)
def test_every_number_of_16_bits_is_read_as_torch_reads_it(dtype: torch.dtype) -> None:
    bits = np.arange(1 << 16, dtype=np.int32).astype(np.int16)
    expected = torch.from_numpy(bits).view(dtype).float().numpy()
    numbers = np.empty(1 << 16, dtype=np.float32)
    read_all(bits.view(BITS[dtype]), numbers)
    np.testing.assert_array_equal(numbers, expected)
