"""model folder -> mean shape: where its landmarks lie on average, for the constellation."""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Float64

from app.errors import ModelRefused
from app.geometry import Points
from app.model.files import read_tensors
from app.model.manifest import Manifest


@dataclass(frozen=True)
class Shape:
    """The mean constellation of a model's landmarks.

    Attributes:
        mean: Positions in mm in any right-handed frame; a NaN row is a landmark not in the shape.
        tolerance_mm: A mode this near to its expected position agrees with a fit.
        modes: How many modes per landmark to choose among.
        surroundings: Places in the same frame, in mm, that tell look-alikes apart.
    """

    mean: Float64[np.ndarray, "landmarks 3"]
    tolerance_mm: float
    modes: int = 4
    surroundings: Float64[np.ndarray, "places 3"] = field(default_factory=lambda: np.empty((0, 3)))

    @cached_property
    def known(self) -> Bool[np.ndarray, " landmarks"]:
        """Which landmarks are in the shape."""
        known: np.ndarray = np.isfinite(self.mean).all(axis=1)
        return known


def load_shape(folder: Path, manifest: Manifest) -> Shape | None:
    """Load a model's mean shape, and what its manifest says of it; None if that has no ``shape``.

    Raises:
        ModelRefused: The file is missing, has another hash, or holds another number of landmarks.
    """
    if manifest.shape is None:
        return None
    key = f"{folder.name}: shape.mean"
    tensors = read_tensors(folder, "shape.mean", manifest.shape.mean, manifest.shape.sha256)
    if "mean" not in tensors:
        raise ModelRefused(f"{key}: expected a tensor 'mean', got {sorted(tensors)}")
    mean = tensors["mean"]
    expected, got = [len(manifest.landmarks), 3], list(mean.shape)
    if got != expected or not mean.is_floating_point():
        raise ModelRefused(
            f"{key}: expected floats of shape {expected}, got {mean.dtype} of shape {got}"
        )
    if mean.isinf().any():
        raise ModelRefused(f"{key}: expected finite positions, or NaN where unknown, got infinity")
    points, spec = mean.double().numpy(), manifest.shape
    surroundings = place_surroundings(points, manifest)
    return Shape(points, spec.tolerance_mm, spec.modes, surroundings)


def place_surroundings(mean: Points, manifest: Manifest) -> Float64[np.ndarray, "places 3"]:
    """Find the places that tell a model's look-alikes apart, in the frame of its mean shape.

    Args:
        mean: The mean shape, mm; NaN where unknown.
        manifest: Of the model, whose landmarks they are.

    Raises:
        ModelRefused: One of the two landmarks that tell of a place has none, or both have the same.
    """
    rows = {landmark.name: row for row, landmark in enumerate(manifest.landmarks)}
    places = []
    for place in manifest.shape.surroundings if manifest.shape else ():
        end, start = mean[rows[place.beyond]], mean[rows[place.seen_from]]
        places.append(end + place.mm * (end - start) / np.linalg.norm(end - start))
    surroundings = np.array(places).reshape(-1, 3)
    if not np.isfinite(surroundings).all():
        raise ModelRefused(
            f"{manifest.name}: shape.surroundings: expected landmarks that have a place in the "
            "mean shape, each its own, got others"
        )
    return surroundings
