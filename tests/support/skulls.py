"""Real skulls, and transformations of scans."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations, product
from pathlib import Path
from typing import Final

import numpy as np
import torch
from scipy.spatial.transform import Rotation

from app.geometry import Affine, Points, transform, translation
from app.inference.detector import Detector
from app.io.volume import Volume, read_volume
from app.preprocessing import index_grid, sample_at
from app.voting import positions_of

MODEL: Final = Path(__file__).resolve().parents[2] / "models" / "mouse-skull"
SKULLS: Final = ("BTBR_T_Itpr3tf_j", "NOD_SHILTJ", "NU_J")
"""Of strains without a near relative among the others; ``mouse-skull`` has learned from all."""

BRAINS: Final = (
    "avg152T1_LR_nifti2.nii.gz",
    "with_extension.nii.gz",
    "aniso_vox.nii.gz",
    "someones_anatomy.nii.gz",
    "anatomical.nii",
)


def scan_path(data: Path, name: str) -> Path:
    """Return the path of a skull's scan."""
    return data / "mouse-skull" / "scans" / f"{name}.nii.gz"


def landmarks_path(data: Path, name: str) -> Path:
    """Return the path of its landmarks."""
    return data / "mouse-skull" / "landmarks" / f"{name}.mrk.json"


def read_skull(data: Path, name: str) -> Volume:
    """Read a skull."""
    return read_volume(scan_path(data, name).read_bytes())


def read_brain(data: Path, name: str) -> Volume:
    """Read a brain, scaled to the size of a mouse's, because its own size would be refused."""
    volume = read_volume((data / "uploads" / name).read_bytes())
    affine = volume.affine.copy()
    affine[:3] *= 0.1
    return replace(volume, affine=affine)


def find(detector: Detector, volume: Volume) -> tuple[Points, np.ndarray]:
    """Return positions, NaN if missing, and which landmarks are detected."""
    marks = detector.detect(volume).landmarks
    return positions_of(marks), np.array([mark.status == "detected" for mark in marks])


def turn(volume: Volume, seed: int) -> tuple[Volume, Affine]:
    """Rotate the subject about the middle of its scan at random; return the motion, too."""
    random = np.random.default_rng(seed)
    motion = np.eye(4)
    motion[:3, :3] = Rotation.random(random_state=random).as_matrix()
    middle = transform(volume.affine, (np.array(volume.voxels.shape) - 1) / 2)
    shift = random.uniform(-0.2, 0.2, 3)
    motion = translation(middle + shift) @ motion @ translation(-middle)
    old_from_new = np.linalg.inv(volume.affine) @ np.linalg.inv(motion) @ volume.affine
    where = index_grid(volume.voxels.shape, old_from_new)
    voxels = sample_at(torch.from_numpy(volume.voxels.astype(np.float32)), where)
    return Volume(voxels.numpy(), volume.affine), motion


def stored_in_all_orders(volume: Volume) -> Iterator[Volume]:
    """Store the same scan with its array axes permuted and flipped, in all 48 ways."""
    for order, flips in product(permutations(range(3)), product((False, True), repeat=3)):
        old_from_new = np.zeros((4, 4))
        old_from_new[3, 3] = 1
        for new, old in enumerate(order):
            old_from_new[old, new] = -1 if flips[new] else 1
            old_from_new[old, 3] = volume.voxels.shape[old] - 1 if flips[new] else 0
        backwards = tuple(axis for axis in range(3) if flips[axis])
        voxels = np.flip(volume.voxels.transpose(order), backwards)
        yield Volume(voxels, volume.affine @ old_from_new)
