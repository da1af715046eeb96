"""Votes -> sums around modes on CUDA: what ``app.voting.modes.sum_modes`` does on the CPU.

The same steps in the same numbers: cells, the highest of each landmark, mean shift, and the sums
around where it ends. Nothing is copied to the host in between, so it synchronises only once, at the
end. Whether modes stand still is decided on the device, too: once all do, they are not moved again.
"""

import math
from typing import Final

import numpy as np
import torch
import triton
from jaxtyping import Float64, Int64
from numpy.typing import NDArray
from torch import Tensor

from app.voting.cuda.modes_kernels import add_to_cells, add_to_modes
from app.voting.readout import (
    FIRST_REACH,
    FREE_STEPS,
    MAX_STEPS,
    MERGE_REACH,
    SETTLED,
    TERMS,
    Cells,
    Readout,
)
from app.voting.reference import FIXED_ONE, to_fixed

BLOCK: Final = 256
"""Votes per program."""

Columns = tuple[Tensor, Tensor, Tensor, Tensor]
"""Landmark, position, source and weight of votes, as in ``app.voting.votes.Votes``."""


class ModeFinder:
    """Finds the modes of one scan's votes; holds what all steps need, on the device.

    Args:
        votes: Votes for the landmarks of ``readout``, in any order.
        readout: The grid and its voting radius.
        count: Most modes per landmark.
        cells: The cells that peaks are found in.
    """

    def __init__(self, votes: Columns, readout: Readout, count: int, cells: Cells) -> None:
        self._cells = cells
        self._readout = readout
        self._count = count
        landmark, position, source, weight = votes
        self._weight = to_fixed(weight)
        self._landmark = landmark.contiguous()
        self._votes = (
            self._landmark,
            position,
            position.stride(),
            source,
            source.stride(),
            self._weight,
        )
        self._units = self._filled([mm / readout.reach_mm for mm in readout.spacing_mm])

    def find(self) -> tuple[NDArray[np.float64], ...]:
        """Find the modes.

        Returns:
            What ``app.voting.modes.ModeSums`` holds: centres, sums and total.
        """
        with torch.cuda.device_of(self._weight):
            centres = self._mean_shift(self._peaks() / self._readout.reach_mm)
            sums = self._sums(centres, 1.0, TERMS).double()
            total = torch.zeros(self._readout.landmarks, dtype=torch.int64, device=sums.device)
            total.index_add_(0, self._landmark, self._weight)
            parts = (centres, sums / FIXED_ONE, total.double() / FIXED_ONE)
            flat = torch.cat([part.flatten() for part in parts]).cpu()
        sizes = [part.numel() for part in parts]
        pieces = zip(flat.split(sizes), parts, strict=True)
        return tuple(piece.view(part.shape).numpy() for piece, part in pieces)

    def _filled(self, numbers: list[float]) -> Float64[Tensor, " n"]:
        """Make a tensor of numbers without a copy that would synchronise."""
        filled = torch.empty(len(numbers), dtype=torch.float64, device=self._weight.device)
        for index, number in enumerate(numbers):
            filled[index].fill_(number)
        return filled

    def _grid(self) -> tuple[int]:
        return (triton.cdiv(max(1, len(self._weight)), BLOCK),)

    def _peaks(self) -> Float64[Tensor, "landmarks modes 3"]:
        """Find each landmark's highest cells, each out of reach of those before it; in mm."""
        cells, readout = self._cells, self._readout
        heights = self._heights()
        indices = torch.arange(heights[0].numel(), device=heights.device)
        _, b, c = cells.shape
        peaks = []
        for _ in range(self._count):
            flat = heights.flatten(1)
            top = flat.amax(1, keepdim=True)
            # Not argmax, which of several equal cells may return any.
            first = torch.where(flat == top, indices, len(indices)).amin(1)
            index = (first // (b * c), first // c % b, first % c)
            missing = top[:, 0] == 0
            peak, square = [], torch.zeros(1, dtype=torch.float64, device=heights.device)
            for axis, mm in enumerate(readout.spacing_mm):
                positions = _cell_centres(cells, axis, mm, indices)
                peak.append(positions.index_select(0, index[axis]).masked_fill(missing, math.nan))
                distance = (positions - peak[axis][:, None]) ** 2
                shape = [1, 1, 1]
                shape[axis] = -1
                square = square + distance.view(len(distance), *shape)
            heights = heights.masked_fill(square <= readout.reach_mm**2, 0)
            peaks.append(torch.stack(peak, 1))
        return torch.stack(peaks, 1)

    def _heights(self) -> Int64[Tensor, "landmarks a b c"]:
        """Sum the votes in and around each cell that is hit, by weights 1 2 1 along each axis."""
        cells, landmarks = self._cells, self._readout.landmarks
        table = torch.zeros(landmarks, *cells.shape, dtype=torch.int64, device=self._weight.device)
        add_to_cells[self._grid()](
            self._votes,
            (cells.edge, cells.shape, cells.first),
            table,
            len(self._weight),
            block=BLOCK,
            enable_fp_fusion=False,
        )
        around = table
        for axis in (1, 2, 3):
            size = table.shape[axis] - 1
            wider = 2 * around
            wider.narrow(axis, 1, size).add_(around.narrow(axis, 0, size))
            wider.narrow(axis, 0, size).add_(around.narrow(axis, 1, size))
            around = wider
        return around.masked_fill_(table == 0, 0)

    def _mean_shift(
        self, centres: Float64[Tensor, "landmarks modes 3"]
    ) -> Float64[Tensor, "landmarks modes 3"]:
        """Move every mode to the mean of the votes within reach of it until all stand still."""
        mm = [
            edge * mm for edge, mm in zip(self._cells.edge, self._readout.spacing_mm, strict=True)
        ]
        error = math.hypot(*mm) / 2 / self._readout.reach_mm
        settled = torch.zeros((), dtype=torch.bool, device=centres.device)
        for step in range(MAX_STEPS):
            sums = self._sums(centres, error + FIRST_REACH if step == 0 else 1.0, 4).double()
            moved = centres + sums[..., 1:] / sums[..., :1]
            if step == 0:
                centres = _merge(moved)
                continue
            if step >= FREE_STEPS:
                settled = settled | ~((moved - centres).abs() > SETTLED).any()
            centres = torch.where(settled, centres, moved)
        return centres

    def _sums(
        self, centres: Float64[Tensor, "landmarks modes 3"], reach: float, terms: int
    ) -> Int64[Tensor, "landmarks modes terms"]:
        """Sum the terms of the modes over the votes within reach."""
        sums = torch.zeros(*centres.shape[:2], terms, dtype=torch.int64, device=centres.device)
        add_to_modes[self._grid()](
            self._votes,
            centres.contiguous(),
            self._units,
            self._filled([reach]),
            sums,
            len(self._weight),
            modes=self._count,
            all_terms=terms == TERMS,
            block=BLOCK,
            enable_fp_fusion=False,
        )
        return sums


def _cell_centres(cells: Cells, axis: int, mm: float, indices: Tensor) -> Float64[Tensor, " cells"]:
    """Compute the centres of cells along an axis, in mm."""
    edge, first = cells.edge[axis], cells.first[axis]
    return (indices[: cells.shape[axis]].double() * edge + (first + (edge - 1) / 2)) * mm


def _merge(
    centres: Float64[Tensor, "landmarks modes 3"],
) -> Float64[Tensor, "landmarks modes 3"]:
    """Drop modes that are near one from a higher peak, as ``app.voting.cpu.modes.merge`` does."""
    merged = centres.clone()
    for later in range(1, merged.shape[1]):
        gap = (merged[:, :later] - merged[:, later, None]).norm(dim=2)
        merged[:, later].masked_fill_((gap < MERGE_REACH).any(1, keepdim=True), math.nan)
    return merged
