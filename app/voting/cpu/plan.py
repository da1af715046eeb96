"""Field -> Plan: what the compiled loops take: a field's memory and the order to read it in.

Any memory layout is read in place, by strides. Where voxels are evenly spaced in memory, they are
read as one long sequence, cut into rows that fit the nearer caches; otherwise row by row along k.
"""

from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Float32, Int64
from torch import Tensor

from app.compute import as_numbers
from app.model import Field
from app.voting.cpu.activations import NONE, SIGMOID, SOFTMAX
from app.voting.reference import Placement, score_limit

ACTIVATIONS: Final = {"none": NONE, "sigmoid": SIGMOID, "softmax": SOFTMAX}

ROW_NUMBERS: Final = 1 << 12
"""Numbers in a row whose length is free: few enough for the nearer caches with all else, and so
many that memory is fetched ahead though each channel is somewhere else in it."""

MIN_PROBABILITY: Final = 1e-30
"""Least probability of any vote: a score's limit for less would not hold in float32."""

Profile = Float32[np.ndarray, " voxels"]


class Flat(NamedTuple):
    """The memory of a tensor as one axis.

    Attributes:
        numbers: All numbers that the tensor spans; those of 16 bits as integers of the same bits.
        strides: The tensor's strides.
    """

    numbers: np.ndarray
    strides: tuple[int, ...]


class RowLayout(NamedTuple):
    """How scores are divided into rows: voxels evenly spaced in memory, in their order.

    A row is all voxels along k; or, where all voxels are evenly spaced, as many as fit the nearer
    caches, because every row costs a little of its own.

    Attributes:
        voxels: In all.
        width: Voxels of a row; the last row may have fewer.
        height: Rows of a plane.
        plane_stride: From one plane to the next, in numbers.
        row_stride: From one row to the next, in numbers.
    """

    voxels: int
    width: int
    height: int
    plane_stride: int
    row_stride: int

    @property
    def length(self) -> int:
        """How many rows there are."""
        return -(-self.voxels // self.width)


class Layer(NamedTuple):
    """The network's last layer, which computes offsets from features; without any, of size 0.

    Attributes:
        weight: For each axis, landmark and feature.
        bias: For each axis and landmark.
    """

    weight: Float32[np.ndarray, "3 landmarks features"]
    bias: Float32[np.ndarray, "3 landmarks"]


NO_LAYER: Final = Layer(np.zeros((3, 0, 0), np.float32), np.zeros((3, 0), np.float32))


class Plan(NamedTuple):
    """What the loops take.

    Attributes:
        scores: The field's scores.
        offsets: The field's offsets; or the features that ``layer`` computes them from, as if
            these were landmarks of one axis.
        layer: ``NO_LAYER`` where offsets are there.
        shape: Voxels along i, j and k.
        channels: Of the scores.
        first_channel: Of a landmark; a background's lies before.
        activation: One of ``ACTIVATIONS``.
        rows: How the scores are divided into rows.
        runs: Where the numbers to compare begin, from the first number of a row on: one run per
            landmark; or one run of all channels where those of a voxel lie side by side.
        run_stride: From one voxel of a run to the next, in numbers.
        limits: Least score that may pass, for every number of a run.
        background: What is subtracted from the scores: the scores, whose first channel it is, or
            as many zeros.
        background_moves: 1 if the background advances with the rows, else 0.
        threshold: Least probability.
        stride: Grid voxels per field voxel.
        first_centre: Grid index of the first field voxel's centre, along each axis.
        offset_scale: Grid voxels per unit of offset, along each axis.
        profiles: How much a voxel counts, along each axis; may go on beyond the field.
    """

    scores: Flat
    offsets: Flat
    layer: Layer
    shape: tuple[int, int, int]
    channels: int
    first_channel: int
    activation: int
    rows: RowLayout
    runs: Int64[np.ndarray, " runs"]
    run_stride: int
    limits: Float32[np.ndarray, " numbers"]
    background: np.ndarray
    background_moves: int
    threshold: np.float32
    stride: np.float32
    first_centre: Float32[np.ndarray, " 3"]
    offset_scale: Float32[np.ndarray, " 3"]
    profiles: tuple[Profile, ...]


def make_plan(field: Field, threshold: float, placement: Placement) -> Plan:
    """Plan how to filter a field; takes the arguments of ``app.voting.votes.filter_votes``."""
    channels, i, j, k = field.scores.shape
    first = int(field.background)
    strides = field.scores.stride()
    runs, run_stride, per_voxel = np.arange(first, channels) * strides[0], strides[3], 1
    softmax = field.activation == "softmax"
    if not softmax and strides[0] == 1 and strides[3] >= channels:
        runs, per_voxel = np.zeros(1, dtype=np.int64), channels
    rows = _divide_into_rows(field.scores, per_voxel)
    limit = threshold  # For probabilities this is exact, so that no capacity is left unused.
    if field.activation != "none":
        limit = score_limit(field, threshold)
        threshold = max(threshold, MIN_PROBABILITY)
    limits = np.full((rows.width, per_voxel), limit, dtype=np.float32)
    if per_voxel > 1:
        limits[:, :first] = np.inf
    scores, layer = flatten(field.scores), field.layer
    importance = placement.importance
    return Plan(
        scores=scores,
        offsets=flatten(field.offsets if layer is None else layer.features[None]),
        layer=NO_LAYER if layer is None else Layer(layer.weight.numpy(), layer.bias.numpy()),
        shape=(i, j, k),
        channels=channels,
        first_channel=first,
        activation=ACTIVATIONS[field.activation],
        rows=rows,
        runs=runs,
        run_stride=run_stride,
        limits=limits.ravel(),
        background=scores.numbers if softmax else np.zeros(limits.size, scores.numbers.dtype),
        background_moves=int(softmax),
        threshold=np.float32(threshold),
        stride=np.float32(placement.stride),
        first_centre=np.array(placement.first_centre, dtype=np.float32),
        offset_scale=np.array(field.offset_scale, dtype=np.float32),
        profiles=(
            (np.ones(max(i, j, k), dtype=np.float32),) * 3
            if importance is None
            else tuple(profile.numpy() for profile in importance)
        ),
    )


def _divide_into_rows(scores: Tensor, per_voxel: int) -> RowLayout:
    """Divide scores into rows, where so many numbers of each voxel are compared side by side."""
    _, depth, height, width = scores.shape
    _, *strides = scores.stride()
    voxels = depth * height * width
    if strides[0] == height * strides[1] and strides[1] == width * strides[2]:
        size = max(1, min(voxels, ROW_NUMBERS // per_voxel))
        return RowLayout(voxels, size, -(-voxels // size), 0, size * strides[2])
    return RowLayout(voxels, width, height, strides[0], strides[1])


def flatten(tensor: Tensor) -> Flat:
    """View the memory that a tensor spans as one axis."""
    span = 1 + sum(
        stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    )
    return Flat(as_numbers(tensor.detach().as_strided((span,), (1,))), tensor.stride())
