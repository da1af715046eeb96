"""scores and offsets -> rows of votes: the kernels of ``app.voting.cuda.votes``.

They run on CUDA, and in Triton's interpreter on any machine. Functions that are compiled have no
annotations: their types are those they are called with. An index that is multiplied by a step is of
64 bits, as a field may have more elements than 32 can number.
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
    room,
    walk,
    steps,
    limits,
    places,
    activation: tl.constexpr,
    lead: tl.constexpr,
    channels: tl.constexpr,
    last: tl.constexpr,
    align: tl.constexpr,
    tile: tl.constexpr,
):
    """Look at one block of voxels; append the votes of those chunks of it that have any."""
    block: tl.constexpr = tile[0]
    width: tl.constexpr = tile[1]
    chunk: tl.constexpr = tile[2]
    program = tl.program_id(0).to(tl.int64)
    lines, parts, length = walk
    line, part = program // parts, program % parts
    here = scores + (line // lines * steps[0] + line % lines * steps[1]) * align
    # All but the smallest step come in units of align, so that loads are known to be aligned.
    voxel = tl.cast(steps[2], tl.int64) * (align if last else 1)
    channel = tl.cast(steps[3], tl.int64) * (1 if last else align)
    length = tl.cast(length, tl.int64) * (1 if last else align)
    at = part * block + tl.arange(0, block)
    inside = at < length
    background = tl.zeros((block,), tl.float32)
    if activation == SOFTMAX:
        background = _widened(tl.load(here + at * voxel, mask=inside, other=0.0))
    found = tl.zeros((block, width), tl.int32)
    # From channel 0 where that is where a load of 16 bytes begins.
    for start in range(0 if last else lead, channels, width):
        number = start + tl.arange(0, width).to(tl.int64)
        wanted = inside[:, None] & (number < channels)[None, :]
        score = tl.load(here + at[:, None] * voxel + (number * channel)[None, :], wanted, 0.0)
        counts = wanted & (number >= lead)[None, :]
        found |= _may_pass(_widened(score), background, limits[0], counts).to(tl.int32)
    if tl.max(tl.max(found, 1), 0) > 0:
        for piece in range(block // chunk):
            these = part * block + piece * chunk + tl.arange(0, chunk)
            voxels = (here + these * voxel, channel, these < length, line * length + these)
            name = program * (block // chunk) + piece
            kind: tl.constexpr = (activation, lead, channels, tile[3])
            _append_chunk(voxels, offsets, room, name, limits, places, kind)


@triton.jit
@no_type_check
def _append_chunk(voxels, offsets, room, chunk, limits, places, kind: tl.constexpr):
    """Append the votes of a few voxels, one after the other, and say how many there are."""
    activation: tl.constexpr = kind[0]
    lead: tl.constexpr = kind[1]
    channels: tl.constexpr = kind[2]
    wide: tl.constexpr = kind[3]
    start, step, inside, number = voxels
    channel = tl.arange(0, wide).to(tl.int64)
    wanted = inside[:, None] & (channel < channels)[None, :]
    score = _widened(tl.load(start[:, None] + (channel * step)[None, :], wanted, 0.0))
    background = tl.sum(tl.where((channel == 0)[None, :], score, 0.0), 1)
    if activation != SOFTMAX:
        background = tl.zeros_like(background)
    keep = _may_pass(score, background, limits[0], wanted & (channel >= lead)[None, :])
    if tl.max(tl.max(keep.to(tl.int32), 1), 0) > 0:
        probability = _probabilities(score, channel < channels, activation)
        bad = keep & (probability != probability)  # noqa: PLR0124 - as only a NaN does
        tl.store(room[3] + 1, 1, mask=tl.max(tl.max(bad.to(tl.int32), 1), 0) > 0)
        keep &= probability >= limits[1]
        cast = (keep & (probability >= limits[1]), probability, number, channel - lead)
        _write_votes(offsets, room, chunk, places, cast, channels - lead)


@triton.jit
@no_type_check
def _write_votes(offsets, room, chunk, places, cast, landmarks: tl.constexpr):
    """Say where votes point, and append those that point anywhere."""
    keep, probability, number, landmark = cast
    landmark = landmark[None, :]
    columns, keys, chunk_of, table, counts, starts, capacity = room
    (plane, line), _, axes, numbers, steps, _, _, profiles, (across, between) = places
    index = (number // plane, number % plane // line, number % line)
    voxel = index[0] * numbers[0] + index[1] * numbers[1] + index[2] * numbers[2]
    begin = index[0] * steps[0] + index[1] * steps[1] + index[2] * steps[2]
    begin = offsets + begin[:, None] + landmark * between
    points = (
        _point(begin, across, keep, index, places, 0),
        _point(begin, across, keep, index, places, 1),
        _point(begin, across, keep, index, places, 2),
    )
    for axis in tl.static_range(3):
        keep &= tl.abs(points[axis][1]) < float("inf")
    flat = tl.reshape(keep.to(tl.int32), (keep.shape[0] * keep.shape[1],))
    total = tl.sum(flat, 0).to(tl.int64)
    if total > 0:
        first = tl.atomic_add(table, total)
        tl.store(counts + chunk, total)
        tl.store(starts + chunk, first)
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
        tl.store(keys + row, voxel[:, None] * landmarks + landmark, mask=keep)
        tl.store(chunk_of + row, chunk, mask=keep)


@triton.jit
@no_type_check
def _widened(scores):
    """Compute with at least 32 bits."""
    return scores.to(tl.float32) if scores.dtype.primitive_bitwidth < 32 else scores


@triton.jit
@no_type_check
def _may_pass(score, background, limit, counts):
    """Tell which scores may pass; not by "reaches the limit", which a NaN does not."""
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
        # Below this the exponential overflows, and no limit is as low. A NaN stays what it is.
        score = 1.0 / (1.0 + tl.exp(-tl.where(score < -700.0, -700.0, score)))
    return score.to(tl.float32)


@triton.jit
@no_type_check
def _point(begin, across, keep, index, places, axis: tl.constexpr):
    """Say where votes come from and where they point, along one axis of the walk."""
    _, stride, axes, _, _, centres, scales, _, _ = places
    source = index[axis].to(tl.float32) * stride + centres[axis]
    offset = tl.load(begin + tl.cast(axes[axis], tl.int64) * across, mask=keep, other=0.0)
    source = tl.broadcast_to(source[:, None], keep.shape)
    return source, source + offset.to(tl.float32) * scales[axis]


@triton.jit(do_not_specialize=["found"])
@no_type_check
def order_votes(room, ordered, capacity, found, landmarks, block: tl.constexpr):
    """Move votes to where their chunk's begin."""
    columns, keys, chunk_of, moves = room
    target, landmark, key_of = ordered
    row = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = row < found
    to = row + tl.load(moves + tl.load(chunk_of + row, mask=inside, other=0), mask=inside, other=0)
    for column in tl.static_range(8):
        value = tl.load(columns + tl.cast(capacity, tl.int64) * column + row, mask=inside)
        tl.store(target + tl.cast(found, tl.int64) * column + to, value, mask=inside)
    key = tl.load(keys + row, mask=inside, other=0)
    tl.store(landmark + to, key % landmarks, mask=inside)
    tl.store(key_of + to, key, mask=inside)
