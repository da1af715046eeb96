"""Random scans of many kinds, for tests of the whole path: blobs that lie anyhow, in any file."""

import gzip
import itertools
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from nibabel import nifti2
from numpy.typing import NDArray
from scipy.spatial.transform import Rotation

from tests.support.nifti_files import by_nibabel
from tests.support.oracle import Array
from tests.support.scan_files import WORLDS, as_metaimage, as_nifti, as_nrrd

ScanKind = Literal["flipped", "oblique", "sheared", "thin", "blank", "padded"]
TYPES: Final = ("u1", "i2", "u2", "i4", "f4", "f8")
EXTENT: Final = 20
"""Most voxels along an axis of a grid."""

LEAST_SCALE: Final = 0.6
"""Least size of the voxels of a scan, in those of the model that sees it."""


@dataclass(frozen=True, slots=True)
class RandomScan:
    """A file, and what it holds as others read it.

    Attributes:
        content: The file.
        voxels: (i j k).
        affine: Voxel index -> mm, RAS.
    """

    content: bytes
    voxels: Array
    affine: Array


def make_random_scan(
    kind: ScanKind, spacing_mm: tuple[float, ...], rng: np.random.Generator
) -> RandomScan:
    """Make a scan of blobs with values up to 100, or of one value.

    Args:
        kind: ``flipped`` has axes along those of the world; ``sheared`` ones that are nearer to the
            same axis of the world than to another; ``thin`` is one voxel wide along one of them;
            ``padded`` has planes of a value of their own on some sides.
        spacing_mm: Of the model that sees it.
        rng: What it is made of.
    """
    scale = np.ones(3) if rng.random() < 0.3 else rng.uniform(LEAST_SCALE, 1.6, 3)
    spacing = scale * spacing_mm
    # No longer than so many voxels of the model, whichever axis comes to lie along which.
    longest = EXTENT * min(spacing_mm) / spacing
    shape = np.maximum(6, longest * rng.uniform(0.6, 1.0, 3)).astype(int)
    if kind == "thin":
        shape[rng.integers(3)] = 1
    voxels = np.full(shape, 57.0)
    if kind != "blank":
        voxels = _blobs(shape, spacing, rng) + rng.normal(0, rng.choice([0.0, 0.5, 2.0]), shape)
    if kind == "padded":
        voxels = _pad(voxels, rng)
    affine = np.eye(4)
    affine[:3, :3] = _directions(kind, rng) * spacing
    affine[:3, 3] = rng.uniform(-100, 100, 3)
    return encode(voxels, affine, rng)


def _blobs(shape: NDArray[np.int64], spacing: Array, rng: np.random.Generator) -> Array:
    """Make some Gaussians of any width, whole or cut."""
    voxels, indices = np.zeros(shape), np.moveaxis(np.indices(tuple(shape)), 0, -1)
    for _ in range(rng.integers(1, 3)):
        away_mm = (indices - rng.uniform(-1, shape)) * spacing
        sigma_mm = rng.uniform(1.2, 2.5) * spacing.max()
        blob = np.exp(-0.5 * (away_mm**2).sum(axis=-1) / sigma_mm**2)
        voxels = np.maximum(voxels, rng.uniform(60, 100) * blob)
    return np.asarray(voxels)


def _pad(voxels: Array, rng: np.random.Generator) -> Array:
    """Pad what is left of a scan so that it stays as large, with what may be brighter than it."""
    shape, voxels = voxels.shape, voxels[2:-2, 2:-2, 2:-2]
    before = [int(rng.integers(0, 5)) for _ in range(3)]
    width = [(first, 4 - first) for first in before]
    value = rng.choice([-3000.0, 0.0, 30.0, voxels.min()])
    padded = np.pad(voxels, width, constant_values=value)
    assert padded.shape == shape
    return padded


def _directions(kind: ScanKind, rng: np.random.Generator) -> Array:
    """Choose where the axes of a scan point to in RAS, in columns of length 1."""
    turn = np.eye(3)[:, rng.permutation(3)] * rng.choice([-1, 1], 3)
    if kind == "sheared":
        while True:
            columns = rng.normal(size=(3, 3))
            columns /= np.linalg.norm(columns, axis=0)
            if abs(np.linalg.det(columns)) > 0.2 and _each_alone_is_mirrored(columns):
                return np.asarray(columns)
    if kind != "flipped":
        turn = Rotation.from_rotvec(rng.normal(0, 0.3, 3)).as_matrix() @ turn
    return np.asarray(turn)


def _each_alone_is_mirrored(columns: Array) -> bool:
    """Say whether axes are a mirror image of the world's that come nearest, the signs aside."""
    orders = [np.eye(3)[:, list(order)] for order in itertools.permutations(range(3))]
    nearest = max(orders, key=lambda order: float((order * np.abs(columns)).sum()))
    signs = np.sign((nearest * columns).sum(axis=0))
    return float(np.linalg.det(nearest * signs) * np.linalg.det(columns)) < 0


def encode(
    voxels: Array, affine: Array, rng: np.random.Generator, *, scaled: bool = True
) -> RandomScan:
    """Write a file in any format and type; if so told, half of NIfTI files scale values."""
    dtype = np.dtype(rng.choice(TYPES))
    if dtype.kind != "f":
        limits = np.iinfo(dtype)
        voxels = np.clip(np.round(voxels), limits.min, limits.max)
    stored, form, zipped = voxels.astype(dtype), rng.integers(4), bool(rng.random() < 0.5)
    if form == 0:
        space, encoding = str(rng.choice(list(WORLDS))), "gzip" if zipped else "raw"
        content = as_nrrd(stored, affine, space=space, encoding=encoding)
        return RandomScan(content, stored.astype(np.float64), affine)
    if form == 1:
        order = np.dtype(dtype).newbyteorder(">" if rng.random() < 0.5 else "<")
        content = as_metaimage(stored.astype(order), affine, zipped=zipped)
        return RandomScan(content, stored.astype(np.float64), affine)
    header = bytearray(as_nifti(stored, affine))
    if scaled and rng.random() < 0.5:
        record = np.frombuffer(header, nifti2.header_dtype, count=1)
        record["scl_slope"], record["scl_inter"] = rng.choice([0.5, 2.0, -1.0]), -10.0
    content = gzip.compress(header, 1) if zipped else bytes(header)
    read, read_affine = by_nibabel(content)
    return RandomScan(content, read.astype(np.float64), read_affine)
