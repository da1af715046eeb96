"""Bytes of a network's output -> its landmarks, or its votes or heatmaps as a file.

Uses neither a model nor an accelerator: copying the arrays to one would take longer than all else.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import torch
from blake3 import blake3

from app.errors import BadParameter, TooLarge
from app.geometry import Affine, spacing_of
from app.inference.detector import Detection, StageTimes, VolumeInfo
from app.io import Content, VolumeLimits
from app.model import Field, LandmarkSpec
from app.voting import (
    Archive,
    GridFrame,
    Landmark,
    Layout,
    Readout,
    VotesFormat,
    check_affine,
    check_values,
    concat_votes,
    count_array_bytes,
    filter_in_blocks,
    filter_rows,
    filter_votes,
    locate,
    make_field,
    read_archive,
    write_heatmaps,
)

DEFAULT_RADIUS: Final = 10.0
"""Default voting radius in voxels, of the geometric mean of their edges."""

MAX_RADIUS: Final = 64
"""In voxels; the time to count the voters around a position grows with its square."""

MAX_SMOOTHING: Final = 8
"""In voxels; every tap of a wider Gaussian costs a pass over the heatmap."""

MAX_LANDMARKS: Final = 256
"""Of one file, for the same reason."""

MAX_VOTES: Final = 1 << 24
"""Of one file, 40 bytes each; a network's landmarks seldom have a hundredth of it."""


VOTE_BYTES: Final = 140
"""Memory per vote, as measured: its columns, these again while they are joined, a line of CSV."""

ARRAY_COPIES: Final = 3
"""Times that arrays are in memory: as they are stored, and in float32, which takes twice as much of
the two types of 16 bits."""

BYTES_PER_VOTE: Final = 8
"""Least that arrays hold per voxel and landmark: four numbers of 16 bits."""

BASE_BYTES: Final = 16 << 20
"""Memory of any request."""


@dataclass(frozen=True, slots=True)
class VotesRequest:
    """What a client wants to know of a file of arrays.

    Attributes:
        layout: How the arrays are laid out.
        threshold: Minimum probability of a vote.
        radius_mm: Distance from a landmark within which voxels vote for it; None:
            ``DEFAULT_RADIUS``.
        smooth_mm: Sigma of the Gaussian that smooths heatmaps; 0: none.
        sample_shape: Part of the array that counts; None: all of it.
        names: Of the landmarks; empty: their numbers.
        limits: Maximum size of the arrays.
        max_votes: Maximum number of votes.
        file: Format of the file to return; None: return the landmarks.
        received_s: When the request was complete, by ``time.perf_counter()``.
    """

    layout: Layout
    threshold: float
    radius_mm: float | None
    smooth_mm: float
    sample_shape: tuple[int, int, int] | None
    names: tuple[str, ...]
    limits: VolumeLimits
    max_votes: int
    file: VotesFormat | None
    received_s: float


def forecast_votes(content: Content, max_memory: int) -> tuple[int, int]:
    """Say what a file of arrays will take; nothing of it is read but its directory.

    Returns:
        Bytes that it may take with all votes that it may have, and how many these are: as many as
        fit. More than ``max_memory`` if not even its arrays fit.

    Raises:
        BrokenArchive: The file is broken.
    """
    arrays = count_array_bytes(content)
    memory = BASE_BYTES + ARRAY_COPIES * arrays
    votes = min(MAX_VOTES, arrays // BYTES_PER_VOTE, max(0, max_memory - memory) // VOTE_BYTES)
    return memory + votes * VOTE_BYTES, votes


def answer_votes(
    content: Content, request: VotesRequest, check_cancelled: Callable[[], None]
) -> tuple[Detection, bytes | None]:
    """Read a file of arrays, filter its votes, and make landmarks or a file of them.

    Args:
        content: A safetensors or npz file.
        request: What is wanted.
        check_cancelled: Called now and then; raises once nobody waits for the answer any more.

    Returns:
        The landmarks, none if a file is wanted; and the file, if one is.

    Raises:
        NotAnArchive: The bytes are something else.
        BrokenArchive: The file is broken.
        TooLarge: Over a limit.
        BadArrays: An array does not fit the request or the other arrays.
        BadParameter: The request does not fit the arrays.
    """
    start = time.perf_counter()
    archive = read_archive(content, request.limits.inflated_bytes)
    # Takes longer than all the rest for a large file, so only where the answer has it.
    digest = blake3(content).hexdigest() if request.file is None else ""
    decoded = time.perf_counter()
    check_cancelled()
    affine = np.eye(4) if archive.affine is None else check_affine(archive.affine)
    field = _field_of(archive, request)
    readout = _readout_of(field, request, affine)
    specs = _specs_of(request.names, readout.landmarks)
    prepared = time.perf_counter()
    landmarks: tuple[Landmark, ...] = ()
    file = None
    bounds = (request.max_votes, check_cancelled)
    if request.file is not None and request.file.write_rows is not None:
        list_rows = partial(filter_rows, sample_shape=readout.shape)
        rows = torch.cat(filter_in_blocks(field, request.threshold, list_rows, *bounds))
        filtered = time.perf_counter()
        file = request.file.write_rows(rows, check_cancelled)
    else:
        votes = concat_votes(filter_in_blocks(field, request.threshold, filter_votes, *bounds))
        filtered = time.perf_counter()
        check_cancelled()
        if request.file is None:
            landmarks = locate(votes, readout, GridFrame(np.eye(4), affine), specs)
        else:
            file = write_heatmaps(votes, readout, affine, request.smooth_mm, check_cancelled)
    times = (request.received_s, start, decoded, prepared, filtered, time.perf_counter())
    volume = VolumeInfo(readout.shape, affine, digest)
    return Detection(volume, landmarks, (), tiles=0, timing=_timing_of(times)), file


def _timing_of(times: tuple[float, ...]) -> StageTimes:
    """Turn the moments at which stages began and ended into their times in ms."""
    queue, decode, prepare, vote, locate_ = (1e3 * float(ms) for ms in np.diff(times))
    return StageTimes(decode=decode, prepare=prepare, queue=queue, vote=vote, locate=locate_)


def _field_of(archive: Archive, request: VotesRequest) -> Field:
    """View the arrays as a field, checked whole."""
    # Votes are float32 whatever they come from: no loops are compiled for doubles, nor for arrays
    # of two types; one type of 16 bits shares its loops with the service's own networks.
    arrays = (archive.offsets, archive.probs, archive.scores)
    types = {array.dtype for array in arrays if array is not None}
    shared = types.pop() if types in ({torch.float16}, {torch.bfloat16}) else torch.float32
    offsets, probs, scores = (array if array is None else array.to(shared) for array in arrays)
    field = make_field(offsets=offsets, probs=probs, scores=scores, layout=request.layout)
    _, landmarks, *shape = field.offsets.shape
    voxels, axis = int(np.prod(shape)), max(shape)
    limits = request.limits
    if voxels > limits.voxels or axis > limits.axis:
        raise TooLarge(
            f"array 'offsets': expected at most {limits.voxels:,} voxels and {limits.axis:,} along "
            f"an axis, got {voxels:,} and {axis:,}"
        )
    if landmarks > MAX_LANDMARKS:
        raise TooLarge(
            f"array 'offsets': expected at most {MAX_LANDMARKS} landmarks, got {landmarks}"
        )
    check_values(field)
    return field


def _readout_of(field: Field, request: VotesRequest, affine: Affine) -> Readout:
    """Say how the votes are counted."""
    _, landmarks, i, j, k = field.offsets.shape
    shape = request.sample_shape or (i, j, k)
    if any(not 1 <= part <= size for part, size in zip(shape, (i, j, k), strict=True)):
        raise BadParameter(
            f"query.sample_shape: expected 1 to {i},{j},{k}, the voxels of the arrays, "
            f"got {','.join(str(part) for part in shape)}"
        )
    spacing = spacing_of(affine)
    finest = float(spacing.min())
    radius = request.radius_mm or DEFAULT_RADIUS * float(np.cbrt(spacing.prod()))
    if request.radius_mm and not finest <= radius <= MAX_RADIUS * finest:
        raise BadParameter(
            f"query.radius_mm: expected {finest:g} to {MAX_RADIUS * finest:g} (1 to {MAX_RADIUS} "
            f"voxels), got {radius:g}"
        )
    if request.smooth_mm > MAX_SMOOTHING * finest:
        raise BadParameter(
            f"query.smooth_mm: expected at most {MAX_SMOOTHING * finest:g} ({MAX_SMOOTHING} "
            f"voxels), got {request.smooth_mm:g}"
        )
    x, y, z = (float(mm) for mm in spacing)
    radius = min(radius, MAX_RADIUS * finest)
    return Readout(landmarks, shape, (x, y, z), radius)


def _specs_of(names: tuple[str, ...], landmarks: int) -> tuple[LandmarkSpec, ...]:
    """Name the landmarks."""
    if names and len(names) != landmarks:
        raise BadParameter(f"query.names: expected {landmarks} names, got {len(names)}")
    return tuple(LandmarkSpec(name=name) for name in names or map(str, range(landmarks)))
