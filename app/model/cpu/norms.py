"""Group norms of channels-last tiles, compiled for the CPU.

Voxels are summed in parts whose number depends on the tile alone, so that neither the other tiles
of its batch nor the number of threads changes a bit of the result: PyTorch sums in parts that
depend on both (``group_norm_kernel.cpp`` of ATen). It is also faster, most of all in bfloat16,
where PyTorch reads groups of fewer than 8 channels number by number, and all with one thread.
"""

from functools import partial
from typing import Final

import numpy as np
import torch
from numba.extending import overload
from numba.np.numpy_support import as_dtype
from torch import Tensor

from app.compute import BFLOAT16, as_numbers, numba_jit, run_split, value

TYPES: Final = (torch.float32, torch.bfloat16)

AXES: Final = (0, 2, 3, 4, 1)
"""Those of a batch of tiles, in the order of channels-last memory."""

MIN_ROW: Final = 128
"""Numbers of a row at least, if the voxels can be grouped so: shorter loops are no faster."""

ROWS_PER_SUM: Final = 64
"""Rows that are summed in float32, before float64."""

NUMBERS_PER_PART: Final = 1 << 18
"""Numbers that are summed at once."""

PARTS_PER_THREAD: Final = 4
"""Parts that are worth a thread of their own: a quarter of a millisecond. For about as long,
those of a convolution wait for the next one, and leave others less of the cores."""


def can_norm(tiles: Tensor) -> bool:
    """Say whether ``norm_groups`` takes these tiles."""
    return (
        tiles.dtype in TYPES
        and tiles.dim() == len(AXES)
        and tiles.numel() > 0
        and tiles.is_contiguous(memory_format=torch.channels_last_3d)
    )


def norm_groups(
    tiles: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """Compute a group norm (Wu and He 2018), ``torch.nn.functional.group_norm``.

    Args:
        tiles: (tiles channels i j k), channels last in memory, of one of ``TYPES``.
        groups: Into which the channels are divided, each with its own mean and variance.
        weight: Of each channel, after the norm; None: 1.
        bias: Of each channel, after the norm; None: 0.
        eps: Added to the variance.

    Returns:
        As ``tiles``, rounded once.
    """
    channels = tiles.shape[1]
    gain = np.ones(channels) if weight is None else weight.detach().double().numpy()
    offset = np.zeros(channels) if bias is None else bias.detach().double().numpy()
    normed = torch.empty_like(tiles)
    for tile, out in zip(_voxels(tiles), _voxels(normed), strict=True):
        mean, variance = _moments(_as_rows(tile), groups, channels)
        factor = gain / np.sqrt(variance + eps)
        _scale_tile(tile, factor, offset - mean * factor, out)
    return normed


def _voxels(tiles: Tensor) -> np.ndarray:
    """View the memory of tiles as (tiles voxels channels)."""
    numbers = as_numbers(tiles.detach().permute(AXES))
    return numbers.reshape(len(tiles), -1, tiles.shape[1])


def _as_rows(tile: np.ndarray) -> np.ndarray:
    """View a tile as rows of some voxels each, as many as divide it evenly."""
    voxels, channels = tile.shape
    together = 1
    while together * channels < MIN_ROW and voxels % (2 * together) == 0:
        together *= 2
    return tile.reshape(-1, together * channels)


def _moments(rows: np.ndarray, groups: int, channels: int) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and variance of each channel's group, (channels)."""
    height = -(-NUMBERS_PER_PART // rows.shape[1])
    parts = -(-len(rows) // height)
    sums = np.zeros((parts, 2, rows.shape[1]))
    run_split(partial(_sum_up, rows, height, sums), parts, PARTS_PER_THREAD)
    each = sums.sum(axis=0).reshape(2, -1, groups, channels // groups)
    mean, square = each.sum(axis=(1, 3)) / (rows.size // groups)
    variance = np.maximum(square - mean**2, 0.0)
    return np.repeat(mean, channels // groups), np.repeat(variance, channels // groups)


def _scale_tile(tile: np.ndarray, factor: np.ndarray, shift: np.ndarray, out: np.ndarray) -> None:
    """Multiply the numbers of each channel by a factor, and add a number."""
    rows, normed = _as_rows(tile), _as_rows(out)
    terms = np.stack([factor, shift]).astype(np.float32)
    factors, shifts = np.tile(terms, rows.shape[1] // len(factor))
    per_thread = PARTS_PER_THREAD * NUMBERS_PER_PART
    scale = partial(_scale, rows, factors, shifts, normed)
    run_split(scale, len(rows), -(-per_thread // rows.shape[1]))


@numba_jit
def _sum_up(rows, height, sums, first, last):
    """Sum the numbers and their squares by column, for parts of so many rows."""
    width = rows.shape[1]
    ones, squares = np.empty(width, np.float32), np.empty(width, np.float32)
    for part in range(first, last):
        end = min((part + 1) * height, len(rows))
        for block in range(part * height, end, ROWS_PER_SUM):
            ones[:], squares[:] = 0, 0
            for row in range(block, min(block + ROWS_PER_SUM, end)):
                _add(rows[row], ones, squares)
            for x in range(width):
                sums[part, 0, x] += ones[x]
                sums[part, 1, x] += squares[x]


# Each of these is one loop over one row in a function of its own: only such loops are vectorised.


@numba_jit
def _add(row, ones, squares):
    for x in range(len(row)):
        number = value(row, x)
        ones[x] += number
        squares[x] += number * number


@numba_jit
def _scale(rows, factors, shifts, normed, first, last):
    for row in range(first, last):
        _scale_row(rows[row], factors, shifts, normed[row])


@numba_jit
def _scale_row(row, factors, shifts, normed):
    for x in range(len(row)):
        put(normed, x, value(row, x) * factors[x] + shifts[x])


def put(row, index, number):
    """Write a float32, rounded to the type of the row; in compiled code only."""


@overload(put)
def _put(row, index, number):
    del index, number
    return _put_bfloat16 if as_dtype(row.dtype) == BFLOAT16 else _put_number


def _put_number(row, index, number):
    row[index] = number


def _put_bfloat16(row, index, number):
    """Round to the nearest, ties to even. NaN stays NaN, as those that come from bfloat16 do."""
    bits = np.float32(number).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    row[index] = np.uint16((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))
