"""Grid -> votes, in NumPy float64: the second part of the reference of the whole path."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from app.model.manifest import Manifest
from app.model.sections import WHOLE, InputSpec
from tests.support.oracle import Array, probabilities_of

Network: TypeAlias = Callable[[Array], Array]
"""Answers for one tile, (i j k), what its network answers; without the axis of tiles."""

LEAST_IMPORTANCE = 1e-3
"""Of a voxel of a tile, as MONAI bounds it."""


@dataclass(frozen=True, slots=True)
class ReferenceVotes:
    """Votes, one row each; positions in grid voxels.

    Attributes:
        landmark: Which landmark, (votes,).
        source: Centre of the field voxel that votes, (votes, 3).
        position: Where it points, (votes, 3).
        probability: (votes,).
        weight: Probability times the importance of the voxel in its tile, (votes,).
    """

    landmark: NDArray[np.int64]
    source: Array
    position: Array
    probability: Array
    weight: Array


@dataclass(frozen=True, slots=True)
class Coordinates:
    """What a network says of each landmark that answers coordinates.

    Attributes:
        position: In grid voxels, (landmarks, 3).
        presence: (landmarks,).
        sigma: Standard deviation in grid voxels, (landmarks, 3); None if it does not say one.
    """

    position: Array
    presence: Array
    sigma: Array | None


@dataclass(frozen=True, slots=True)
class _Tile:
    """One tile: its first voxel, and the importance of its field voxels, whatever others say."""

    origin: tuple[int, ...]
    importance: Array


def votes_of(grid: Array, manifest: Manifest, networks: Sequence[Network]) -> ReferenceVotes:
    """Let all tiles of a grid vote, or the mean of their heatmaps.

    Args:
        grid: As ``reference_grid`` makes it, (i j k).
        manifest: Of a model that answers votes or heatmaps.
        networks: Its members.
    """
    network, stride = average(networks, manifest), manifest.network.output_stride
    edges, tiles = _plan(grid.shape, manifest.input, stride)
    field = [-(-size // stride) for size in grid.shape]
    # Past the ends, there is room for what a tile reaches over; it votes for nothing.
    room = max(edges) // stride
    total = np.zeros([size + 2 * room for size in field])
    spans = [_span(tile.origin, edges, stride, room) for tile in tiles]
    for tile, span in zip(tiles, spans, strict=True):
        total[span] += tile.importance
    answers = [network(_extract(grid, tile.origin, edges)) for tile in tiles]
    kept = tuple(slice(room, room + size) for size in field)
    if manifest.network.output == "heatmaps":
        mean = np.zeros((len(answers[0]), *total.shape))
        for tile, span, answer in zip(tiles, spans, answers, strict=True):
            mean[:, *span] += answer * tile.importance
        heatmaps = mean / np.where(total > 0, total, 1.0)
        if manifest.network.activation == "spatial_softmax":
            heatmaps = _over_voxels(heatmaps, total > 0)
        heatmaps = heatmaps[:, *kept]
        offsets = np.zeros((3, len(manifest.landmarks), *field))
        return _cast(manifest, heatmaps, offsets, np.ones(field), (0, 0, 0))
    votes = []
    for tile, span, answer in zip(tiles, spans, answers, strict=True):
        scores, offsets = _split(answer, manifest)
        if manifest.network.offset_unit == "mm":
            offsets = offsets / np.reshape(manifest.input.spacing_mm, (3, 1, 1, 1, 1))
        importance = tile.importance / total[span]
        votes.append(_cast(manifest, scores, offsets, importance, tile.origin))
    columns = ("landmark", "source", "position", "probability", "weight")
    return ReferenceVotes(*[np.concatenate([getattr(v, name) for v in votes]) for name in columns])


def coordinates_of(grid: Array, manifest: Manifest, networks: Sequence[Network]) -> Coordinates:
    """Read what the networks of a model answer, on average, for a grid that fits one tile."""
    edges, tiles = _plan(grid.shape, manifest.input, 1)
    answer = average(networks, manifest)(_extract(grid, tiles[0].origin, edges))
    scale, first = np.ones(3), 0.0
    if manifest.network.coordinate_unit == "mm":
        scale = 1 / np.array(manifest.input.spacing_mm)
    if manifest.network.coordinate_unit == "fraction":
        scale, first = np.array(edges, np.float64), -0.5
    extras = dict(zip(manifest.network.coordinate_extras, answer[:, 3:].T, strict=True))
    presence = extras.get("presence", np.ones(len(answer)))
    if manifest.network.activation == "sigmoid":
        presence = 1 / (1 + np.exp(-presence))
    variance = extras.get("log_variance")
    sigma = None if variance is None else np.exp(variance / 2)[:, None] * scale
    return Coordinates(answer[:, :3] * scale + first + tiles[0].origin, presence, sigma)


def average(networks: Sequence[Network], manifest: Manifest) -> Network:
    """Average what members answer, each also for the mirror images of a tile."""
    axes = ["ijk".index(letter) for letter in manifest.network.mirror]
    if len(networks) == 1 and not axes:
        return networks[0]
    flips = [flip for n in range(len(axes) + 1) for flip in itertools.combinations(axes, n)]

    def answer(tile: Array) -> Array:
        answers = [
            _unmirror(network(np.flip(tile, flip)), flip, tile.shape, manifest)
            for flip in flips
            for network in networks
        ]
        if manifest.network.output == "coordinates":
            return _average_coordinates(np.stack(answers), manifest)
        parts = [_split(one, manifest) for one in answers]
        scores = np.mean([scores for scores, _ in parts], axis=0)
        if manifest.network.output == "heatmaps":
            return np.asarray(scores)
        weights = [_probabilities(scores, manifest) for scores, _ in parts]
        pairs = zip(weights, parts, strict=True)
        offsets = sum(weight * offset for weight, (_, offset) in pairs) / sum(weights)
        return _join(np.asarray(scores), np.asarray(offsets), manifest)

    return answer


def _average_coordinates(answers: Array, manifest: Manifest) -> Array:
    """Average (members landmarks columns); a variance becomes that of all together."""
    mean, extras = answers.mean(axis=0), manifest.network.coordinate_extras
    if "log_variance" in extras:
        column = 3 + extras.index("log_variance")
        apart = ((answers[..., :3] - mean[:, :3]) ** 2).mean(axis=(0, 2))
        mean[:, column] = np.log(np.exp(answers[..., column]).mean(axis=0) + apart)
    return np.asarray(mean)


def _unmirror(
    answer: Array, flip: tuple[int, ...], edges: tuple[int, ...], manifest: Manifest
) -> Array:
    """Turn the answer for a tile mirrored along some axes into one for the tile itself."""
    names = [landmark.name for landmark in manifest.landmarks]
    partners = list(range(len(names)))
    if any(manifest.input.orientation[axis] in "LR" for axis in flip):
        partners = [names.index(one.mirror or one.name) for one in manifest.landmarks]
    if manifest.network.output == "coordinates":
        answer = answer[partners]
        spacing = manifest.input.spacing_mm
        for axis in flip:
            ends = {"voxel": edges[axis] - 1, "mm": (edges[axis] - 1) * spacing[axis]}
            answer[:, axis] = ends.get(manifest.network.coordinate_unit, 1.0) - answer[:, axis]
        return answer
    scores, offsets = _split(np.flip(answer, tuple(axis + 1 for axis in flip)), manifest)
    signs = np.reshape([-1.0 if axis in flip else 1.0 for axis in range(3)], (3, 1, 1, 1, 1))
    background = len(scores) - len(names)
    order = [*range(background), *(background + partner for partner in partners)]
    offsets = offsets[:, partners] * signs if offsets.size else offsets
    return _join(scores[order], offsets, manifest)


def _split(answer: Array, manifest: Manifest) -> tuple[Array, Array]:
    """Split an answer into scores (channels i j k) and offsets (3 landmarks i j k)."""
    landmarks, shape = len(manifest.landmarks), answer.shape[1:]
    scores = landmarks + (manifest.network.activation == "softmax")
    offsets = answer[scores:]
    if manifest.network.offset_order == "axis":
        return answer[:scores], offsets.reshape(3, -1, *shape)
    return answer[:scores], offsets.reshape(-1, 3, *shape).swapaxes(0, 1)


def _join(scores: Array, offsets: Array, manifest: Manifest) -> Array:
    """Undo ``_split``."""
    if manifest.network.offset_order == "landmark":
        offsets = offsets.swapaxes(0, 1)
    return np.concatenate([scores, offsets.reshape(-1, *scores.shape[1:])])


def _probabilities(scores: Array, manifest: Manifest) -> Array:
    """Turn scores, or mean heatmaps, into probabilities of the landmarks."""
    activation = manifest.network.activation or "none"
    if activation in ("sigmoid", "softmax"):
        return probabilities_of(scores, activation, background=activation == "softmax")
    # The values of heatmaps may exceed their peak a little.
    return np.minimum(scores / (manifest.network.heatmap_peak or 1.0), 2.0)


def _over_voxels(heatmaps: Array, answered: NDArray[np.bool_]) -> Array:
    """Take the softmax of each heatmap over all voxels that the network answers."""
    scores = np.where(answered, heatmaps, -np.inf)
    most = scores.max(axis=(1, 2, 3), keepdims=True)
    exponential = np.exp(scores - most)
    return np.asarray(exponential / exponential.sum(axis=(1, 2, 3), keepdims=True))


def _cast(
    manifest: Manifest, scores: Array, offsets: Array, importance: Array, origin: Sequence[int]
) -> ReferenceVotes:
    """Cast the votes of a field's voxels that reach the threshold; offsets are in grid voxels."""
    probabilities = _probabilities(scores, manifest)
    landmark, *field = np.nonzero(probabilities >= manifest.voting.threshold)
    stride = manifest.network.output_stride
    source = np.array(origin) + (np.stack(field, axis=1) + 0.5) * stride - 0.5
    probability = probabilities[landmark, *field]
    i, j, k = field
    position = source + offsets[:, landmark, i, j, k].T
    return ReferenceVotes(landmark, source, position, probability, probability * importance[*field])


def _plan(
    shape: Sequence[int], spec: InputSpec, stride: int
) -> tuple[tuple[int, ...], list[_Tile]]:
    """Cover a grid with tiles; gives their edges in voxels, too."""
    if spec.tile_shape == WHOLE:
        step = math.lcm(spec.divisor, stride)
        edges = tuple(step * -(-size // step) for size in shape)
    else:
        edges = spec.tile_shape
    axes = [_starts(*axis, spec, stride) for axis in zip(shape, edges, strict=True)]
    lines = []
    for edge in edges:
        size = edge // stride
        centre = size // 2 if spec.tile_layout == "nnunet" else (size - 1) / 2
        lines.append(np.exp(-0.5 * ((np.arange(size) - centre) / (size * spec.tile_sigma)) ** 2))
    importance = np.einsum("i,j,k->ijk", *lines)
    if spec.tile_layout == "monai":
        importance = np.maximum(importance, LEAST_IMPORTANCE)
    return edges, [_Tile(origin, importance) for origin in itertools.product(*axes)]


def _starts(size: int, edge: int, spec: InputSpec, stride: int) -> list[int]:
    """Put tiles along an axis, at multiples of the stride."""
    if size <= edge:
        return [0 if spec.tile_layout == "even" else -((edge - size) // 2 // stride * stride)]
    last, step = -(-(size - edge) // stride), edge * (1 - spec.tile_overlap)
    if spec.tile_layout != "nnunet":
        step = max(stride, int(step) // stride * stride)
    count = math.ceil(last * stride / step) + 1
    if spec.tile_layout == "monai":
        return [min(index * (int(step) // stride), last) * stride for index in range(count)]
    return [int(start) * stride for start in np.round(np.linspace(0, last, count))]


def _span(origin: Sequence[int], edges: Sequence[int], stride: int, room: int) -> tuple[slice, ...]:
    """Say which field voxels a tile covers, counted from ``room`` before the grid."""
    firsts = [first // stride + room for first in origin]
    return tuple(
        slice(first, first + edge // stride) for first, edge in zip(firsts, edges, strict=True)
    )


def _extract(grid: Array, origin: Sequence[int], edges: Sequence[int]) -> Array:
    """Take a tile out of a grid, with zeros past its ends."""
    tile = np.zeros(edges)
    from_grid, to_tile = [], []
    for first, edge, size in zip(origin, edges, grid.shape, strict=True):
        low, high = max(first, 0), min(first + edge, size)
        from_grid.append(slice(low, high))
        to_tile.append(slice(low - first, high - first))
    tile[tuple(to_tile)] = grid[tuple(from_grid)]
    return tile
