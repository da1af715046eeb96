"""Scans to send: real skulls where they are at hand, and generated ones of any size."""

import gzip
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Final

import nibabel as nib
import numpy as np

from app.geometry import Affine
from app.phantom import make_phantom
from tests.benchmarks.surroundings import ROOT

MODELS: Final = ROOT / "models"
PHANTOM: Final = MODELS / "phantom"
SKULL: Final = MODELS / "mouse-skull"

SKULL_SHAPE: Final = (170, 170, 143)
SKULL_MM: Final = 0.141

ONE_TILE_MM: Final = 92.0
"""A scan that is no longer is one tile of the phantom model, which covers 96 mm."""

HUGE: Final = (300, 296, 304)
LEVEL: Final = 6
"""Of gzip; what dcm2niix and most other tools use."""


def real_scans() -> Path | None:
    """Find the folder of real scans; None: there is none."""
    beside = ROOT.parent / "shared" / "data"
    folder = Path(os.environ.get("LANDMARKD_DATA", beside))
    return folder if (folder / "mouse-skull").is_dir() else None


def skulls(count: int) -> tuple[list[bytes], str]:
    """Get different .nii.gz files of skulls.

    Args:
        count: How many, 24 at most.

    Returns:
        Their bytes, and a note: real scans, or generated ones of their size.
    """
    data = real_scans()
    files = [] if data is None else sorted((data / "mouse-skull" / "scans").glob("*.nii.gz"))
    files = files[:count]
    if len(files) == count:
        return [file.read_bytes() for file in files], "real scans"
    spacing = np.diag([SKULL_MM] * 3 + [1.0])
    voxels = [enlarge(make_phantom(seed).volume.voxels, SKULL_SHAPE) for seed in range(count)]
    return [pack(array, spacing) for array in voxels], "generated scans, no real ones here"


def small_scans(count: int) -> list[bytes]:
    """Make different scans that are one tile each of the phantom model."""
    contents = []
    for seed in range(count):
        volume = make_phantom(seed).volume
        spacing = np.linalg.norm(volume.affine[:3, :3], axis=0)
        i, j, k = (ONE_TILE_MM / spacing).astype(int)
        contents.append(pack(volume.voxels[:i, :j, :k], volume.affine))
    return contents


def large_scans(count: int, shape: Sequence[int] = HUGE, spacing_mm: float = 1.0) -> list[bytes]:
    """Make different scans of one shape, filled with copies of a phantom."""
    affine = np.diag([spacing_mm] * 3 + [1.0])
    voxels = (make_phantom(seed).volume.voxels for seed in range(count))
    return [pack(enlarge(array, shape), affine, level=1) for array in voxels]


def enlarge(voxels: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """Repeat an array until it fills a shape."""
    repeats = [-(-wanted // size) for wanted, size in zip(shape, voxels.shape, strict=True)]
    i, j, k = shape
    return np.asfortranarray(np.tile(voxels, repeats)[:i, :j, :k])


def pack(voxels: np.ndarray, affine: Affine, *, level: int = LEVEL) -> bytes:
    """Write a NIfTI file; level 0: not zipped."""
    image = nib.Nifti1Image(voxels, affine)
    image.header.set_xyzt_units("mm")
    content: bytes = image.to_bytes()
    return gzip.compress(content, level, mtime=0) if level else content


@cache
def head_like(shape: tuple[int, int, int]) -> bytes:
    """Make an int16 .nii.gz like a head: a noisy ellipsoid in air, which is zero."""
    random = np.random.default_rng(4)
    axes = np.meshgrid(*[np.linspace(-1.1, 1.1, size) for size in shape], indexing="ij")
    voxels = (800 + 200 * axes[0] + random.normal(0, 25, shape)).astype(np.int16)
    voxels[sum(axis**2 for axis in axes) > 1] = 0
    return pack(np.asfortranarray(voxels), np.diag([0.9, 1.0, 1.1, 1.0]))
