"""Field -> Votes on a CPU, compiled: one pass over the scores, and nothing kept but votes.

The torch code of ``app.survivors`` and ``app.votes`` says what is computed, and serves devices that
have no kernel. Here it is one loop per row of voxels along k. A row is first compared with a limit,
which the compiler turns into vector instructions; probabilities are computed and offsets read for
the few voxels that may pass. Rows are shared out among torch's threads.

Functions that are compiled have no annotations: their types are those they are called with.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final, no_type_check

import numpy as np
import torch
from jaxtyping import Float32
from numba import njit
from torch import Tensor

from app.errors import NetworkFailed
from app.network import Field
from app.survivors import Profiles, score_limit

SIGMOID: Final = 1
SOFTMAX: Final = 2
ACTIVATIONS: Final = {"none": 0, "sigmoid": SIGMOID, "softmax": SOFTMAX}

VOXELS_PER_THREAD: Final = 1 << 19
"""Fewer are not worth a thread of their own: they take a few milliseconds."""

CAPACITY: Final = 1 << 16
"""Votes for which there is room at first, 2.5 MB that are not touched before they are needed; the
room doubles when it is full."""

Columns = tuple[np.ndarray, Float32[np.ndarray, "8 n"]]
"""Landmarks; source, position, probability and weight."""


def collect_votes(
    field: Field,
    threshold: float,
    stride: int,
    origin: Sequence[int],
    importance: Profiles | None,
) -> Columns:
    """Do what ``app.votes.filter_votes`` does, with the same arguments, on the CPU.

    Returns:
        The landmark of each vote; and one row each of its source's and its position's three
        coordinates, its probability and its weight.

    Raises:
        NetworkFailed: As ``filter_votes``.
    """
    channels, depth, height, width = field.scores.shape
    if importance is None:
        profiles = [np.ones(size, dtype=np.float32) for size in (depth, height, width)]
    else:
        profiles = [profile.numpy() for profile in importance]
    lead = int(field.background)
    activation = ACTIVATIONS[field.activation]
    centre = np.array([first + 0.5 * stride - 0.5 for first in origin], dtype=np.float32)
    work = (
        *_memory_of(field.scores),
        field.scores.stride(),
        *_memory_of(field.offsets),
        field.offsets.stride(),
        (channels, height, width, lead, activation),
        (np.float32(score_limit(field, threshold)), np.float32(threshold)),
        (np.float32(stride), centre, np.array(field.offset_scale, dtype=np.float32)),
        tuple(profiles),
    )
    rows = depth * height
    threads = max(1, min(torch.get_num_threads(), rows * width // VOXELS_PER_THREAD))
    bounds = [rows * part // threads for part in range(threads + 1)]
    if threads == 1:
        parts = [_filter_rows(*work, 0, rows)]
    else:
        with ThreadPoolExecutor(threads) as pool:
            parts = list(pool.map(partial(_filter_rows, *work), bounds[:-1], bounds[1:]))
    if any(bad for _, _, bad in parts):
        raise NetworkFailed("expected scores that are numbers, got NaN or infinite ones")
    if threads == 1:
        landmark, columns, _ = parts[0]
        return landmark, columns
    return (
        np.concatenate([landmark for landmark, _, _ in parts]),
        np.concatenate([columns for _, columns, _ in parts], axis=1),
    )


def _memory_of(tensor: Tensor) -> tuple[np.ndarray, Float32[np.ndarray, " halves"] | None]:
    """View the memory that a tensor spans as one line of numbers.

    Returns:
        The line, and for types of 16 bits, which come as their bits, what each of these means.
    """
    span = 1 + sum(
        step * (size - 1) for step, size in zip(tensor.stride(), tensor.shape, strict=True)
    )
    line = tensor.detach().as_strided((span,), (1,))
    if tensor.element_size() != 2:
        return line.numpy(), None
    halves = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(tensor.dtype)
    return line.view(torch.int16).numpy().view(np.uint16), halves.float().numpy()


def _compiled(**options: Any) -> Any:  # noqa: ANN401 - as numba's own decorator
    return njit(cache=True, nogil=True, error_model="numpy", **options)


@_compiled(inline="always")
@no_type_check
def _value(line, table, index):
    """Read a number of either kind of line."""
    return np.float32(line[index]) if table is None else table[line[index]]


@_compiled()
@no_type_check
def _row_may_pass(line, table, base, sizes, step, limit):
    """Say whether anything in a row of scores that lie side by side may pass; NaN may."""
    channels, _, width, lead, activation = sizes
    background = line[base : base + width]
    found = np.int32(0)
    for channel in range(lead, channels):
        start = base + channel * step
        row = line[start : start + width]
        # No way out of the loop on success: so it becomes vector instructions.
        if activation == SOFTMAX:
            for k in range(width):
                score = _value(row, table, k) - _value(background, table, k)
                found |= np.int32(not score < limit)
        else:
            for k in range(width):
                found |= np.int32(not _value(row, table, k) < limit)
    return found != 0


@_compiled(inline="always")
@no_type_check
def _voxel_may_pass(line, table, start, sizes, step, limit):
    """Say whether a landmark may pass at a voxel; NaN may, so that it is found."""
    channels, _, _, lead, activation = sizes
    background = np.float32(0.0)
    if activation == SOFTMAX:
        background = _value(line, table, start)
    for channel in range(lead, channels):
        if not _value(line, table, start + channel * step) - background < limit:
            return True
    return False


@_compiled()
@no_type_check
def _probabilities(line, table, start, step, activation, room):
    """Compute the probabilities of all channels of a voxel."""
    channels = len(room)
    highest = -np.inf
    for channel in range(channels):
        room[channel] = _value(line, table, start + channel * step)
        if not room[channel] <= highest:
            highest = room[channel]
    if activation == SIGMOID:
        for channel in range(channels):
            room[channel] = 1.0 / (1.0 + np.exp(-room[channel]))
    elif activation == SOFTMAX:
        total = 0.0
        for channel in range(channels):
            room[channel] = np.exp(room[channel] - highest)
            total += room[channel]
        for channel in range(channels):
            room[channel] /= total


@_compiled()
@no_type_check
def _doubled(landmarks, columns):
    """Make room for twice as many votes."""
    count = len(landmarks)
    more_landmarks = np.empty(2 * count, dtype=landmarks.dtype)
    more_landmarks[:count] = landmarks
    more_columns = np.empty((len(columns), 2 * count), dtype=columns.dtype)
    more_columns[:, :count] = columns
    return more_landmarks, more_columns


@_compiled()
@no_type_check
def _filter_rows(
    scores,
    score_table,
    score_steps,
    offsets,
    offset_table,
    offset_steps,
    sizes,
    limits,
    places,
    profiles,
    first,
    last,
):
    """Collect the votes of some rows; says last whether a score is not a number."""
    channels, height, width, lead, activation = sizes
    limit, threshold = limits
    stride, centre, scale = places
    landmarks = np.empty(CAPACITY, dtype=np.int64)
    columns = np.empty((8, CAPACITY), dtype=np.float32)
    probability = np.empty(channels, dtype=np.float64)
    count, bad = 0, False
    for row in range(first, last):
        i = row // height
        j = row - i * height
        base = i * score_steps[1] + j * score_steps[2]
        if score_steps[3] == 1 and not _row_may_pass(
            scores, score_table, base, sizes, score_steps[0], limit
        ):
            continue
        for k in range(width):
            start = base + k * score_steps[3]
            if not _voxel_may_pass(scores, score_table, start, sizes, score_steps[0], limit):
                continue
            _probabilities(scores, score_table, start, score_steps[0], activation, probability)
            for channel in range(lead, channels):
                p = np.float32(probability[channel])
                bad |= np.isnan(p)
                if not p >= threshold:
                    continue
                if count == len(landmarks):
                    landmarks, columns = _doubled(landmarks, columns)
                place = (channel - lead) * offset_steps[1] + i * offset_steps[2]
                place += j * offset_steps[3] + k * offset_steps[4]
                finite = True
                for axis in range(3):
                    index = (i, j, k)[axis]
                    source = np.float32(index) * stride + centre[axis]
                    offset = _value(offsets, offset_table, place + axis * offset_steps[0])
                    columns[axis, count] = source
                    columns[3 + axis, count] = source + offset * scale[axis]
                    finite &= np.isfinite(columns[3 + axis, count])
                weight = p * profiles[0][i] * profiles[1][j] * profiles[2][k]
                landmarks[count] = channel - lead
                columns[6, count] = p
                columns[7, count] = weight
                count += finite
    return landmarks[:count], columns[:, :count], bad
