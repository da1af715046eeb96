"""The kernel of ``app.voting.cuda.votes``: scores and offsets -> votes.

It runs on CUDA, and in Triton's interpreter on any machine. An index that is multiplied by a
stride has 64 bits, as a field may have more elements than 32 bits can number.
"""

from typing import Final, no_type_check

import triton
import triton.language as tl

SIGMOID: Final = tl.constexpr(1)
SOFTMAX: Final = tl.constexpr(2)


@triton.jit
@no_type_check
def append_votes(
    scores,
    offsets,
    buffers,
    layout,
    strides,
    limits,
    geometry,
    activation: tl.constexpr,
    first_channel: tl.constexpr,
    channels: tl.constexpr,
    last: tl.constexpr,
    align: tl.constexpr,
    tile: tl.constexpr,
):
    """Test the scores of one block of voxels; append the votes of its chunks that have any."""
    block: tl.constexpr = tile[0]
    width: tl.constexpr = tile[1]
    chunk: tl.constexpr = tile[2]
    program = tl.program_id(0).to(tl.int64)
    lines, parts, length = layout
    line, part = program // parts, program % parts
    base = scores + (line // lines * strides[0] + line % lines * strides[1]) * align
    # All but the smallest stride come in units of align, so that loads are known to be aligned.
    voxel = tl.cast(strides[2], tl.int64) * (align if last else 1)
    channel = tl.cast(strides[3], tl.int64) * (1 if last else align)
    length = tl.cast(length, tl.int64) * (1 if last else align)
    at = part * block + tl.arange(0, block)
    inside = at < length
    background = tl.zeros((block,), tl.float32)
    if activation == SOFTMAX:
        background = _widen(tl.load(base + at * voxel, mask=inside, other=0.0))
    found = tl.zeros((block, width), tl.int32)
    # From channel 0 where that is where a load of 16 bytes begins.
    for start in range(0 if last else first_channel, channels, width):
        number = start + tl.arange(0, width).to(tl.int64)
        valid = inside[:, None] & (number < channels)[None, :]
        score = tl.load(base + at[:, None] * voxel + (number * channel)[None, :], valid, 0.0)
        counts = valid & (number >= first_channel)[None, :]
        found |= _may_pass(_widen(score), background, limits[0], counts).to(tl.int32)
    if tl.max(tl.max(found, 1), 0) > 0:
        for piece in range(block // chunk):
            these = part * block + piece * chunk + tl.arange(0, chunk)
            voxels = (base + these * voxel, channel, these < length, line * length + these)
            kind: tl.constexpr = (activation, first_channel, channels, tile[3])
            _append_chunk(voxels, offsets, buffers, limits, geometry, kind)


@triton.jit
@no_type_check
def _append_chunk(voxels, offsets, buffers, limits, geometry, kind: tl.constexpr):
    """Append the votes of a chunk of voxels."""
    activation: tl.constexpr = kind[0]
    first_channel: tl.constexpr = kind[1]
    channels: tl.constexpr = kind[2]
    wide: tl.constexpr = kind[3]
    start, stride, inside, number = voxels
    channel = tl.arange(0, wide).to(tl.int64)
    valid = inside[:, None] & (channel < channels)[None, :]
    score = _widen(tl.load(start[:, None] + (channel * stride)[None, :], valid, 0.0))
    background = tl.sum(tl.where((channel == 0)[None, :], score, 0.0), 1)
    if activation != SOFTMAX:
        background = tl.zeros_like(background)
    keep = _may_pass(score, background, limits[0], valid & (channel >= first_channel)[None, :])
    if tl.max(tl.max(keep.to(tl.int32), 1), 0) > 0:
        probability = _probabilities(score, channel < channels, activation)
        invalid = keep & (probability != probability)  # noqa: PLR0124 - as only a NaN does
        tl.store(buffers[2] + 1, 1, mask=tl.max(tl.max(invalid.to(tl.int32), 1), 0) > 0)
        keep &= probability >= limits[1]
        cast = (keep & (probability >= limits[1]), probability, number, channel - first_channel)
        _write_votes(offsets, buffers, geometry, cast)


@triton.jit
@no_type_check
def _write_votes(offsets, buffers, geometry, cast):
    """Compute votes, and append those with a finite position."""
    keep, probability, number, landmark = cast
    landmark = landmark[None, :]
    columns, landmarks, count, capacity = buffers
    sizes, _, axes, strides, _, _, profiles, spans = geometry
    plane, line = sizes
    across, between = spans
    index = (number // plane, number % plane // line, number % line)
    begin = index[0] * strides[0] + index[1] * strides[1] + index[2] * strides[2]
    begin = offsets + begin[:, None] + landmark * between
    points = (
        _point(begin, across, keep, index, geometry, 0),
        _point(begin, across, keep, index, geometry, 1),
        _point(begin, across, keep, index, geometry, 2),
    )
    for axis in tl.static_range(3):
        keep &= tl.abs(points[axis][1]) < float("inf")
    flat = tl.reshape(keep.to(tl.int32), (keep.shape[0] * keep.shape[1],))
    total = tl.sum(flat, 0).to(tl.int64)
    if total > 0:
        first = tl.atomic_add(count, total)
        row = first + tl.reshape(tl.cumsum(flat, 0) - flat, keep.shape)
        keep &= row < capacity
        weight = probability
        for axis in tl.static_range(3):
            source, position = points[axis]
            target = columns + row + tl.cast(axes[axis], tl.int64) * capacity
            tl.store(target, source, mask=keep)
            tl.store(target + tl.cast(capacity, tl.int64) * 3, position, mask=keep)
            if profiles[axis] is not None:
                profile = profiles[axis] + tl.broadcast_to(index[axis][:, None], keep.shape)
                weight *= tl.load(profile, mask=keep, other=0.0).to(tl.float32)
        tl.store(columns + row + tl.cast(capacity, tl.int64) * 6, probability, mask=keep)
        tl.store(columns + row + tl.cast(capacity, tl.int64) * 7, weight, mask=keep)
        tl.store(landmarks + row, tl.broadcast_to(landmark, keep.shape), mask=keep)


@triton.jit
@no_type_check
def _widen(scores):
    """Compute with at least 32 bits."""
    return scores.to(tl.float32) if scores.dtype.primitive_bitwidth < 32 else scores


@triton.jit
@no_type_check
def _may_pass(score, background, limit, counts):
    """Test which scores may pass: not by ``>=``, which is false for NaN."""
    return ((score - background[:, None] < limit) ^ True) & counts


@triton.jit
@no_type_check
def _probabilities(score, known, activation: tl.constexpr):
    """Compute probabilities as torch does: in float64, rounded in the end."""
    if activation == SOFTMAX:
        score = tl.where(known[None, :], score.to(tl.float64), float("-inf"))
        part = tl.exp(score - tl.max(score, 1)[:, None])
        score = part / tl.sum(part, 1)[:, None]
    if activation == SIGMOID:
        score = score.to(tl.float64)
        # Below this the exponential overflows, and no limit is as low. NaN stays NaN.
        score = 1.0 / (1.0 + tl.exp(-tl.where(score < -700.0, -700.0, score)))
    return score.to(tl.float32)


@triton.jit
@no_type_check
def _point(begin, across, keep, index, geometry, axis: tl.constexpr):
    """Compute sources and positions along one axis."""
    _, stride, axes, _, centres, scales, _, _ = geometry
    source = index[axis].to(tl.float32) * stride + centres[axis]
    offset = tl.load(begin + tl.cast(axes[axis], tl.int64) * across, mask=keep, other=0.0)
    source = tl.broadcast_to(source[:, None], keep.shape)
    return source, source + offset.to(tl.float32) * scales[axis]
