"""model folder -> mean shape: where its landmarks lie on average, for the constellation."""

from pathlib import Path

import numpy as np
from jaxtyping import Float64
from safetensors import SafetensorError
from safetensors.numpy import load

from app.errors import ModelRefused
from app.model.files import read_verified
from app.model.manifest import Manifest

Mean = Float64[np.ndarray, "landmarks 3"]
"""Mean position of every landmark in mm; NaN for one that the shape does not know."""


def load_shape(folder: Path, manifest: Manifest) -> Mean | None:
    """Load a model's mean shape.

    Args:
        folder: The model folder.
        manifest: Its manifest.

    Returns:
        Mean positions in mm, or None if the manifest has no section ``shape``.

    Raises:
        ModelRefused: The file is missing, has another hash, or holds another number of landmarks.
    """
    if manifest.shape is None:
        return None
    key = f"{folder.name}: shape.mean"
    data = read_verified(folder, "shape", "mean", manifest.shape.mean, manifest.shape.sha256)
    try:
        tensors = load(data)
    except SafetensorError as error:
        raise ModelRefused(f"{key}: not safetensors: {error}") from None
    if "mean" not in tensors:
        raise ModelRefused(f"{key}: expected a tensor 'mean', got {sorted(tensors)}")
    mean = tensors["mean"]
    expected = (len(manifest.landmarks), 3)
    if mean.shape != expected or mean.dtype.kind != "f":
        raise ModelRefused(
            f"{key}: expected floats of shape {expected}, got {mean.dtype} of shape {mean.shape}"
        )
    if np.isinf(mean).any():
        raise ModelRefused(f"{key}: expected finite positions, or NaN where unknown, got infinity")
    return mean.astype(np.float64)
