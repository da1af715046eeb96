"""Votes -> bytes of the votes themselves: rows as text or array, heatmaps as NIfTI."""

import io
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from isal import igzip
from nibabel import nifti1

from app.geometry import Affine, spacing_of
from app.voting.heatmaps import COUNTER_BYTES, aggregate
from app.voting.readout import Readout
from app.voting.votes import Votes, vote_rows

COLUMNS: Final = "landmark,probability,x,y,z\n"
"""Of rows; x, y and z are in voxels, along i, j and k."""

ROW: Final = "%d,%.9g,%.9g,%.9g,%.9g\n"
"""Nine digits give every float32 back."""

ROWS_AT_ONCE: Final = 1 << 16

COMPRESSION: Final = 1
"""Heatmaps are mostly zeros, which the fastest level packs as well."""

ALIGNED: Final = 2
"""NIfTI's code of an affine that maps to the space of some scan."""


@dataclass(frozen=True, slots=True)
class Frame:
    """What the votes of one array point into.

    Attributes:
        readout: The part of the array that counts, and how votes are counted there.
        affine: Voxel index -> mm, RAS.
    """

    readout: Readout
    affine: Affine


@dataclass(frozen=True, slots=True)
class VotesFormat:
    """One way to write votes.

    Attributes:
        name: As in ``?format=``; also the file suffix.
        media_type: As in ``Accept`` and ``Content-Type``.
        write: Turns votes into bytes; calls its last argument now and then.
    """

    name: str
    media_type: str
    write: Callable[[Votes, Frame, Callable[[], None]], bytes]


def write_rows_csv(votes: Votes, frame: Frame, go_on: Callable[[], None]) -> bytes:
    """Write ``vote_rows`` as CSV with a header."""
    rows = vote_rows(votes, frame.readout.shape).numpy()
    parts = [COLUMNS]
    for first in range(0, len(rows), ROWS_AT_ONCE):
        go_on()
        some = rows[first : first + ROWS_AT_ONCE]
        parts.append(ROW * len(some) % tuple(some.ravel().tolist()))
    return "".join(parts).encode()


def write_rows_npy(votes: Votes, frame: Frame, go_on: Callable[[], None]) -> bytes:
    """Write ``vote_rows`` as an .npy file: float32, (rows, 5)."""
    go_on()
    file = io.BytesIO()
    np.save(file, vote_rows(votes, frame.readout.shape).numpy(), allow_pickle=False)
    return file.getvalue()


def write_heatmaps(votes: Votes, frame: Frame, go_on: Callable[[], None]) -> bytes:
    """Write ``aggregate`` as gzip NIfTI-1: float32, i j k landmark.

    Only as many heatmaps as are counted at once are in memory. All of them together are smaller
    than the arrays that the votes came from.
    """
    readout = frame.readout
    together = max(1, COUNTER_BYTES // (8 * math.prod(readout.shape)))
    file = io.BytesIO()
    # The time of writing is left out, so that the same votes give the same bytes.
    stream: io.BufferedIOBase = igzip.IGzipFile("", "wb", COMPRESSION, file, mtime=0)
    with stream:
        stream.write(_nifti_head(frame))
        for first in range(0, readout.landmarks, together):
            go_on()
            chosen = range(first, min(first + together, readout.landmarks))
            heatmaps = aggregate(votes, chosen, readout)
            # In NIfTI i runs fastest.
            stream.write(heatmaps.permute(0, 3, 2, 1).contiguous().numpy().data)
    return file.getvalue()


def _nifti_head(frame: Frame) -> bytes:
    header = nifti1.Nifti1Header(endianness="<")
    header.set_data_shape((*frame.readout.shape, frame.readout.landmarks))
    header.set_data_dtype(np.float32)
    header.set_zooms((*spacing_of(frame.affine), 1.0))
    header.set_sform(frame.affine, ALIGNED)
    header.set_xyzt_units("mm")
    header["magic"] = b"n+1"
    header["vox_offset"] = nifti1.Nifti1Header.single_vox_offset
    head: bytes = header.binaryblock
    return head + bytes(nifti1.Nifti1Header.single_vox_offset - len(head))


# In order of preference, after the formats of landmarks.
VOTES_FORMATS: Final = (
    VotesFormat("rows.csv", "text/csv", write_rows_csv),
    VotesFormat("rows.npy", "application/x-npy", write_rows_npy),
    VotesFormat("nii.gz", "application/gzip", write_heatmaps),
)
