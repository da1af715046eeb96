"""bytes of a network's output -> VotesAnswer: its landmarks, or its votes as a file.

No model is needed, and no device: bringing the arrays to one would take longer than reading them.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from blake3 import blake3

from app.errors import BadParameter, TooLarge
from app.geometry import Affine, axis_codes, spacing_of
from app.inference.detector import Detection, StageTimes, VolumeInfo
from app.io import VolumeLimits
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
    filter_rows_in_blocks,
    filter_votes_in_blocks,
    locate,
    make_field,
    read_archive,
    write_heatmaps,
)

RADIUS: Final = 10.0
"""Default voting radius in voxels, of the geometric mean of their edges."""

MOST_RADIUS: Final = 64
"""Voxels; the number of voters around a place is counted column by column."""

MOST_SMOOTHING: Final = 8
"""Voxels; every tap of a wider Gaussian costs a pass over the heatmap."""

MOST_LANDMARKS: Final = 256
"""Of one file; likewise."""

MOST_VOTES: Final = 1 << 24
"""Of one file, 40 bytes each; a network's landmarks seldom get a hundredth of it."""


@dataclass(frozen=True, slots=True)
class VotesQuestion:
    """What is asked about a file of arrays.

    Attributes:
        layout: How the arrays are laid out.
        threshold: Least probability of a vote.
        radius_mm: Distance from a landmark within which voxels vote for it; None: ``RADIUS``.
        smooth_mm: Sigma of the Gaussian that smooths heatmaps; 0: none.
        sample_shape: Part of the array that counts; None: all of it.
        names: Of the landmarks; none: their numbers.
        limits: What the file may need.
        file: The votes are wanted as this file; None: their landmarks are wanted.
        asked_s: ``time.perf_counter()`` when this was asked.
    """

    layout: Layout
    threshold: float
    radius_mm: float | None
    smooth_mm: float
    sample_shape: tuple[int, int, int] | None
    names: tuple[str, ...]
    limits: VolumeLimits
    file: VotesFormat | None
    asked_s: float


@dataclass(frozen=True, slots=True)
class VotesAnswer:
    """What the votes say.

    Attributes:
        detection: The landmarks, none if a file is wanted, and what belongs to them.
        file: The file wanted; None if landmarks are.
    """

    detection: Detection
    file: bytes | None


def answer_votes(content: bytes, question: VotesQuestion, go_on: Callable[[], None]) -> VotesAnswer:
    """Read a file of arrays, collect its votes and say what is asked about them.

    Args:
        content: A safetensors or npz file.
        question: What is asked.
        go_on: Is called now and then, and ends the work by raising.

    Returns:
        The answer.

    Raises:
        NotAnArchive: The bytes are something else.
        BrokenArchive: The file is broken.
        TooLarge: Over a limit.
        BadArrays: An array is not what the question or the other arrays ask for.
        BadParameter: The question does not fit the arrays.
    """
    start = time.perf_counter()
    archive = read_archive(content, question.limits.inflated_bytes)
    # Longer than all the rest for a large file, so only where it is told.
    digest = blake3(content).hexdigest() if question.file is None else ""
    decoded = time.perf_counter()
    go_on()
    affine = np.eye(4) if archive.affine is None else check_affine(archive.affine)
    field = _field_of(archive, question)
    readout = _readout_of(field, question, affine)
    specs = _specs_of(question.names, readout.landmarks)
    prepared = time.perf_counter()
    landmarks: tuple[Landmark, ...] = ()
    file = None
    if question.file is not None and question.file.write_rows is not None:
        threshold, shape = question.threshold, readout.shape
        rows = filter_rows_in_blocks(field, threshold, shape, MOST_VOTES, go_on)
        filtered = time.perf_counter()
        file = question.file.write_rows(rows, go_on)
    else:
        votes = filter_votes_in_blocks(field, question.threshold, MOST_VOTES, go_on)
        filtered = time.perf_counter()
        go_on()
        if question.file is None:
            landmarks = locate(votes, readout, GridFrame(np.eye(4), affine), specs)
        else:
            file = write_heatmaps(votes, readout, affine, question.smooth_mm, go_on)
    timing = StageTimes(
        decode=1e3 * (decoded - start),
        prepare=1e3 * (prepared - decoded),
        queue=1e3 * (start - question.asked_s),
        vote=1e3 * (filtered - prepared),
        locate=1e3 * (time.perf_counter() - filtered),
    )
    volume = _describe(readout, affine, digest)
    return VotesAnswer(Detection(volume, landmarks, (), tiles=0, timing=timing), file)


def _field_of(archive: Archive, question: VotesQuestion) -> Field:
    """View the arrays as a field, checked whole."""
    # Votes are float32 whatever they come from. Halved here, doubles need no loops compiled for
    # them; the types of 16 bits share theirs with those of the service's own networks.
    offsets, probs, scores = (
        array.float() if array is not None and array.dtype == torch.float64 else array
        for array in (archive.offsets, archive.probs, archive.scores)
    )
    field = make_field(offsets=offsets, probs=probs, scores=scores, layout=question.layout)
    _, landmarks, *shape = field.offsets.shape
    voxels, axis = int(np.prod(shape)), max(shape)
    limits = question.limits
    if voxels > limits.voxels or axis > limits.axis:
        raise TooLarge(
            f"array 'offsets': expected at most {limits.voxels:,} voxels and {limits.axis:,} along "
            f"an axis, got {voxels:,} and {axis:,}"
        )
    if landmarks > MOST_LANDMARKS:
        raise TooLarge(
            f"array 'offsets': expected at most {MOST_LANDMARKS} landmarks, got {landmarks}"
        )
    check_values(field)
    return field


def _readout_of(field: Field, question: VotesQuestion, affine: Affine) -> Readout:
    """Say how the votes are counted."""
    _, landmarks, i, j, k = field.offsets.shape
    shape = question.sample_shape or (i, j, k)
    if any(not 1 <= part <= size for part, size in zip(shape, (i, j, k), strict=True)):
        raise BadParameter(
            f"query.sample_shape: expected 1 to {i},{j},{k}, the voxels of the arrays, "
            f"got {','.join(str(part) for part in shape)}"
        )
    spacing = spacing_of(affine)
    finest = float(spacing.min())
    radius = question.radius_mm or RADIUS * float(np.cbrt(spacing.prod()))
    if question.radius_mm and not finest <= radius <= MOST_RADIUS * finest:
        raise BadParameter(
            f"query.radius_mm: expected {finest:g} to {MOST_RADIUS * finest:g} (1 to {MOST_RADIUS} "
            f"voxels), got {radius:g}"
        )
    if question.smooth_mm > MOST_SMOOTHING * finest:
        raise BadParameter(
            f"query.smooth_mm: expected at most {MOST_SMOOTHING * finest:g} ({MOST_SMOOTHING} "
            f"voxels), got {question.smooth_mm:g}"
        )
    x, y, z = (float(mm) for mm in spacing)
    radius = min(radius, MOST_RADIUS * finest)
    return Readout(landmarks, shape, (x, y, z), radius)


def _specs_of(names: tuple[str, ...], landmarks: int) -> tuple[LandmarkSpec, ...]:
    """Name the landmarks."""
    if names and len(names) != landmarks:
        raise BadParameter(f"query.names: expected {landmarks} names, got {len(names)}")
    return tuple(LandmarkSpec(name=name) for name in names or map(str, range(landmarks)))


def _describe(readout: Readout, affine: Affine, digest: str) -> VolumeInfo:
    return VolumeInfo(
        shape=readout.shape,
        spacing_mm=readout.spacing_mm,
        orientation=axis_codes(affine),
        affine=affine,
        digest=digest,
    )
