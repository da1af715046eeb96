"""model folder -> mean shape: where its landmarks lie on average, for the constellation."""

from pathlib import Path

import numpy as np
from jaxtyping import Float64

from app.errors import ModelRefused
from app.model.files import read_tensors
from app.model.manifest import Manifest

Mean = Float64[np.ndarray, "landmarks 3"]
"""Mean position of every landmark in mm; NaN for one that the shape does not know."""


def load_shape(folder: Path, manifest: Manifest) -> Mean | None:
    """Load a model's mean shape.

    Returns:
        Mean positions in mm, or None if the manifest has no section ``shape``.

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
    return mean.double().numpy()


def place_surroundings(manifest: Manifest, mean: Mean) -> Float64[np.ndarray, "places 3"]:
    """Locate a model's surroundings in the frame of its mean shape, in mm."""
    rows = {landmark.name: row for row, landmark in enumerate(manifest.landmarks)}
    places = []
    for place in manifest.shape.surroundings if manifest.shape else ():
        end, start = mean[rows[place.beyond]], mean[rows[place.seen_from]]
        places.append(end + place.mm * (end - start) / np.linalg.norm(end - start))
    return np.array(places).reshape(-1, 3)
