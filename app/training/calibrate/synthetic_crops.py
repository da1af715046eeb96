"""Volume -> halves of it, in which landmarks are absent, and blank scans of its shape."""

from typing import Final

import numpy as np

from app.geometry import translation
from app.io import Volume

NOISE_SEED: Final = 3
NOISE_RANGE: Final = (0.0, 255.0)


def halves(volume: Volume) -> tuple[Volume, ...]:
    """Cut a scan in half along each axis that has two voxels; positions in mm are kept."""
    parts: list[Volume] = []
    for axis, size in enumerate(volume.voxels.shape):
        if middle := size // 2:
            parts += [crop(volume, axis, 0, middle), crop(volume, axis, middle, size)]
    return tuple(parts)


def crop(volume: Volume, axis: int, first: int, last: int) -> Volume:
    """Cut a slab out of a scan, from its first voxel along an axis to the one after its last.

    Returns:
        The slab, with an affine that keeps the position of every voxel.
    """
    part = [slice(None)] * 3
    part[axis] = slice(first, last)
    start = np.zeros(3)
    start[axis] = first
    voxels = np.ascontiguousarray(volume.voxels[tuple(part)])
    return Volume(voxels, volume.affine @ translation(start))


def blanks(volume: Volume) -> tuple[Volume, ...]:
    """Make blank scans of a scan's shape and affine: zeros, and white noise."""
    shape = volume.voxels.shape
    noise = np.random.default_rng(NOISE_SEED).uniform(*NOISE_RANGE, shape).astype(np.float32)
    empty = np.zeros(shape, dtype=np.float32)
    return tuple(Volume(voxels, volume.affine) for voxels in (empty, noise))
