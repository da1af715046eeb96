"""rows -> heatmaps by three Python loops: what P1 started from; for small arrays only."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float32
from numpy.typing import NDArray


def add_up(
    rows: Float32[np.ndarray, "rows 5"], landmarks: int, shape: Sequence[int]
) -> NDArray[np.float64]:
    """Sum probabilities per landmark and voxel, visiting every voxel of the array."""
    votes: dict[tuple[int, ...], list[tuple[int, float]]] = {}
    for landmark, probability, *position in rows.tolist():
        voxel = tuple(int(np.floor(p + 0.5)) for p in position)
        votes.setdefault(voxel, []).append((int(landmark), probability))
    total = np.zeros((landmarks, *shape))
    for i in range(shape[0]):
        for j in range(shape[1]):
            for k in range(shape[2]):
                for landmark, probability in votes.get((i, j, k), ()):
                    total[landmark, i, j, k] += probability
    return total
