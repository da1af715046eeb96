"""rows -> heatmaps by NumPy's unbuffered addition."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float32
from numpy.typing import NDArray


def add_up(
    rows: Float32[np.ndarray, "rows 5"], landmarks: int, shape: Sequence[int]
) -> NDArray[np.float64]:
    """Sum probabilities per landmark and voxel; votes that round to outside are left out."""
    total = np.zeros((landmarks, *shape))
    voxel = np.floor(rows[:, 2:].astype(np.float64) + 0.5).astype(np.int64)
    inside = ((voxel >= 0) & (voxel < np.array(shape))).all(axis=1)
    i, j, k = voxel[inside].T
    np.add.at(total, (rows[inside, 0].astype(np.int64), i, j, k), rows[inside, 1])
    return total
