"""Random outputs of networks in any layout and type, with queries for them, for tests of votes."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.spatial.transform import Rotation

from tests.support.oracle import Array


@dataclass(frozen=True, slots=True)
class RandomArrays:
    """What a client sends, and asks.

    Attributes:
        arrays: By name, in any memory order.
        query: As in a URL.
    """

    arrays: dict[str, NDArray[np.floating]]
    query: dict[str, str]


def make_random_arrays(rng: np.random.Generator) -> RandomArrays:
    """Make balls of votes, and votes that point anywhere, for some landmarks."""
    landmarks, query = int(rng.choice([1, 2, 3, 5])), dict[str, str]()
    shape = tuple(int(edge) for edge in rng.integers(4, 12, 3) // rng.choice([1, 1, 1, 12], 3) + 1)
    affine, arrays = _random_affine(rng), dict[str, NDArray[np.floating]]()
    if rng.random() < 0.6:
        arrays["affine"] = affine.astype(str(rng.choice(["f4", "f8"])))
    spacing = np.linalg.norm(affine[:3, :3], axis=0) if arrays else np.ones(3)
    radius = 10 * np.cbrt(spacing.prod())
    if rng.random() < 0.8:
        radius = spacing.min() * rng.choice([rng.uniform(1.001, 5), 63.9])
        query["radius_mm"] = repr(float(radius))
    probs, offsets = _balls(shape, landmarks, spacing, min(radius, 5 * spacing.max()), rng)
    arrays |= _scores(probs, query, rng)
    if rng.random() < 0.5:
        query["order"], offsets = "landmark", offsets.swapaxes(-1, -2)
    arrays["offsets"] = offsets.reshape(*shape, -1)
    _lay_out(arrays, query, rng)
    if rng.random() < 0.7:
        query["threshold"] = str(rng.choice([0, 0.1, 0.3, 0.9, 1.0]))
    if rng.random() < 0.4:
        query["sample_shape"] = ",".join(str(rng.integers(1, size + 1)) for size in shape)
    if rng.random() < 0.5:
        query["smooth_mm"] = repr(float(rng.uniform(0.1, 3) * spacing.min()))
    return RandomArrays(arrays, query)


def _lay_out(
    arrays: dict[str, NDArray[np.floating]], query: dict[str, str], rng: np.random.Generator
) -> None:
    """Choose types, axes and memory order of the arrays of a network."""
    types = rng.choice(["f2", "f4", "f8"], 2) if rng.random() < 0.6 else ["f4", "f4"]
    is_first, is_fortran = rng.random(2) < 0.4
    if is_first:
        query["channels"] = "first"
    for name in arrays.keys() - {"affine"}:
        array = arrays[name].astype(str(types[int(name == "offsets")]))
        array = np.moveaxis(array, -1, 0) if is_first else array
        arrays[name] = np.asfortranarray(array) if is_fortran else array


def _random_affine(rng: np.random.Generator) -> Array:
    affine = np.eye(4)
    affine[:3, :3] = Rotation.from_rotvec(rng.normal(0, 0.6, 3)).as_matrix()
    affine[:3, :3] *= rng.choice([0.3, 0.5, 1.0, 1.7, 3.0], 3)
    if rng.random() < 0.4:
        affine[:3, :3] @= np.eye(3) + rng.normal(0, 0.15, (3, 3))
    affine[:3, 0] *= rng.choice([-1, 1])
    affine[:3, 3] = rng.uniform(-50, 50, 3)
    return affine


def _balls(
    shape: tuple[int, ...], landmarks: int, spacing: Array, radius: float, rng: np.random.Generator
) -> tuple[Array, Array]:
    """Let voxels vote: probabilities (i j k landmarks), offsets (i j k 3 landmarks)."""
    voxels = np.moveaxis(np.indices(shape), 0, -1)
    probs, offsets = np.zeros((*shape, landmarks)), rng.normal(0, 2, (*shape, 3, landmarks))
    for landmark in range(landmarks):
        for _ in range(rng.integers(0, 3)):
            away = rng.uniform(-1.5, np.add(shape, 0.5)) - voxels
            near = np.linalg.norm(away * spacing, axis=-1) <= radius
            scatter = rng.normal(0, rng.choice([0.0, 0.02, 0.3]), (near.sum(), 3))
            probs[near, landmark] = rng.uniform(0.3, 1) * rng.uniform(0.8, 1, near.sum())
            offsets[near, :, landmark] = away[near] + scatter
        if rng.random() < 0.4:
            odd = rng.random(shape) < 0.1
            probs[odd, landmark] = rng.uniform(0, 1, odd.sum())
    if rng.random() < 0.2:
        offsets[rng.random(offsets.shape) < 0.03] = rng.choice([np.nan, np.inf, 6e4])
    return probs, offsets


def _scores(probs: Array, query: dict[str, str], rng: np.random.Generator) -> dict[str, Array]:
    """Make probabilities or scores, with or without a background."""
    has_background, is_score = rng.random(2) < 0.5
    if rng.random() < 0.3:
        query["background"] = str(bool(has_background)).lower()
    background = 1 - probs.max(axis=-1, keepdims=True)
    values = np.concatenate([background, probs], axis=-1) if has_background else probs
    if not is_score:
        return {"probs": values}
    if rng.random() < 0.4:
        words = ["sigmoid", "softmax"] if has_background else ["sigmoid"]
        query["activation"] = str(rng.choice(words))
    odds = np.log((values + 1e-3) / (1 - values + 1e-3))
    return {"scores": odds + rng.normal(0, 0.1, values.shape)}
