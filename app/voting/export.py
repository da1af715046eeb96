"""Votes -> files: rows as CSV or .npy, heatmaps as NIfTI."""

import io
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Final

import numpy as np
from jaxtyping import Float
from torch import Tensor

from app.geometry import Affine
from app.io import Format, write_gzip, write_nifti_start
from app.voting.heatmaps import aggregate
from app.voting.readout import Readout
from app.voting.votes import Rows, Votes

HEADER: Final = "landmark,probability,x,y,z\n"
"""Of CSV rows; x, y and z are in voxels, along i, j and k."""

ROW: Final = "%d,%.9g,%.9g,%.9g,%.9g\n"
"""Nine digits give every float32 back."""

ROWS_AT_ONCE: Final = 1 << 11
"""Rows are written while no other thread can run: 65,536 take a twentieth of a second."""

HEATMAP_BYTES: Final = 128 << 20
"""Heatmaps in memory at once, but one at least."""


@dataclass(frozen=True, slots=True)
class VotesFormat(Format):
    """A file format for votes.

    Attributes:
        write_rows: Writes rows; calls its last argument now and then. None: the format holds
            heatmaps, which ``write_heatmaps`` writes.
    """

    write_rows: Callable[[Rows, Callable[[], None]], bytes] | None = None


def write_rows_csv(rows: Rows, check_cancelled: Callable[[], None]) -> bytes:
    """Write rows as CSV with a header."""
    table = rows.numpy()
    file = io.BytesIO()
    file.write(HEADER.encode())
    for first in range(0, len(table), ROWS_AT_ONCE):
        check_cancelled()
        some = table[first : first + ROWS_AT_ONCE]
        file.write((ROW * len(some) % tuple(some.ravel().tolist())).encode())
    return file.getvalue()


def write_rows_npy(rows: Rows, check_cancelled: Callable[[], None]) -> bytes:
    """Write rows as an .npy file: float32, (rows, 5)."""
    check_cancelled()
    file = io.BytesIO()
    np.save(file, rows.numpy(), allow_pickle=False)
    return file.getvalue()


def write_heatmaps(
    votes: Votes,
    readout: Readout,
    affine: Affine,
    smooth_mm: float,
    check_cancelled: Callable[[], None],
) -> bytes:
    """Write the heatmaps of all landmarks as gzip NIfTI-1: float32, i j k landmark.

    Only a few heatmaps are in memory at once. All of them together are smaller than the arrays that
    the votes came from.

    Args:
        votes: Votes of one array.
        readout: The part of the array that counts.
        affine: Voxel index -> mm, RAS.
        smooth_mm: Sigma of a Gaussian over the heatmaps; 0: none.
        check_cancelled: Is called between heatmaps; ends the work by raising.
    """
    together = max(1, HEATMAP_BYTES // (4 * math.prod(readout.shape)))

    def heatmaps() -> Iterator[Float[Tensor, "i j k"]]:
        for first in range(0, readout.landmarks, together):
            check_cancelled()
            chosen = range(first, min(first + together, readout.landmarks))
            yield from aggregate(votes, chosen, readout, smooth_mm)

    return write_volumes((*readout.shape, readout.landmarks), affine, heatmaps())


def write_volumes(
    shape: tuple[int, ...], affine: Affine, parts: Iterable[Float[Tensor, "i j k"]]
) -> bytes:
    """Write volumes as gzip NIfTI-1: float32, i j k, and landmark where there are four axes.

    Args:
        shape: Of all volumes together.
        affine: Voxel index -> mm, RAS.
        parts: Their planes along k, in order: volumes, or slabs of them.
    """
    # In NIfTI i runs fastest.
    voxels = (part.permute(2, 1, 0).contiguous().numpy().data for part in parts)
    start = write_nifti_start(shape, affine, np.dtype(np.float32))
    return write_gzip(chain([start], voxels))


# In order of preference, after the formats of landmarks.
VOTES_FORMATS: Final = (
    VotesFormat("rows.csv", "text/csv", write_rows_csv),
    VotesFormat("rows.npy", "application/x-npy", write_rows_npy),
    VotesFormat("nii.gz", "application/gzip"),
)
