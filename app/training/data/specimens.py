"""Folders of scans and landmark files -> Specimens, ready to be posed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from jaxtyping import Bool

from app.compute import Voxels
from app.geometry import Affine, Points, spacing_of, transform
from app.io import is_landmark_file, landmark_stem, read_landmarks, read_volume
from app.model import IntensitySpec
from app.preprocessing import find_window, normalise, resample, smooth_for

SCAN_SUFFIXES: Final = (".nii", ".nii.gz")


@dataclass(frozen=True, slots=True)
class Specimen:
    """One scan with its landmarks.

    Attributes:
        name: File name without endings.
        voxels: Values normalised as the model wants them and smoothed for its spacing, but still at
            the scan's own resolution, float32.
        to_world: Voxel index -> mm, RAS.
        points: Landmarks in mm, RAS; NaN where the file has none.
    """

    name: str
    voxels: Voxels
    to_world: Affine
    points: Points


@dataclass(frozen=True, slots=True)
class Files:
    """What two folders hold, sorted by name.

    Attributes:
        scans: Scans by name.
        landmarks: Landmark files by name.
        doubled: Names that two scans, or two landmark files, have.
        others: Files of another kind.
    """

    scans: Mapping[str, Path]
    landmarks: Mapping[str, Path]
    doubled: tuple[str, ...]
    others: tuple[Path, ...]

    def pairs(self) -> list[tuple[str, Path, Path]]:
        """List name, scan and landmark file of every scan that has one."""
        return [
            (name, scan, self.landmarks[name])
            for name, scan in self.scans.items()
            if name in self.landmarks
        ]


def list_files(scans: Path, landmarks: Path) -> Files:
    """List the scans of one folder and the landmark files of another, or of the same."""
    found: tuple[dict[str, Path], dict[str, Path]] = ({}, {})
    doubled, others = [], []
    for path in sorted({path for folder in (scans, landmarks) for path in folder.iterdir()}):
        if path.parent == scans and path.name.endswith(SCAN_SUFFIXES):
            kind, name = found[0], path.name.removesuffix(".gz").removesuffix(".nii")
        elif path.parent == landmarks and is_landmark_file(path):
            kind, name = found[1], landmark_stem(path)
        elif path.is_file() and not path.name.startswith("."):
            others.append(path)
            continue
        else:
            continue
        if name in kind:
            doubled.append(name)
        kind[name] = path
    return Files(*found, tuple(doubled), tuple(others))


def pair_files(scans: Path, landmarks: Path) -> list[tuple[str, Path, Path]]:
    """Pair scans and landmark files by name.

    Raises:
        ValueError: A scan has no landmark file; a landmark file without a scan is no error.
    """
    files = list_files(scans, landmarks)
    for name, scan in files.scans.items():
        if name not in files.landmarks:
            raise ValueError(f"expected a landmark file for {scan.name}, found none of that name")
    if not files.scans:
        raise ValueError("expected .nii or .nii.gz scans, found none")
    return files.pairs()


def landmark_names(pairs: Sequence[tuple[str, Path, Path]]) -> list[str]:
    """List all landmark names of the files, in order of first appearance."""
    names: dict[str, None] = {}
    for _, _, path in pairs:
        names.update(dict.fromkeys(read_landmarks(path)))
    return list(names)


def read_points(pair: tuple[str, Path, Path], names: Sequence[str]) -> Points:
    """Read the landmarks of one scan in the order of names, in mm, RAS; NaN where it has none."""
    found = read_landmarks(pair[2])
    missing = np.full(3, np.nan)
    return np.stack([found.get(label, missing) for label in names])


def load_specimen(
    pair: tuple[str, Path, Path],
    names: Sequence[str],
    spacing_mm: float,
    intensity: IntensitySpec,
    window_mm: float | None = None,
) -> Specimen:
    """Read one scan and its landmarks and prepare it for posing.

    The percentiles come from the scan at the model's spacing, or at that of the first model if this
    is a second one, as in the service; the smoothing is the service's too, so that a posed sample
    equals what the service would make of such a scan.

    Args:
        pair: Name, scan and landmark file.
        names: Landmarks in the order wanted.
        spacing_mm: Of the model's grid.
        intensity: The model's rule.
        window_mm: Spacing at which percentiles are taken; None: that of the grid.

    Raises:
        ValueError: A landmark lies outside the scan.
    """
    name, scan, _ = pair
    volume = read_volume(scan.read_bytes())
    points = read_points(pair, names)
    known = np.isfinite(points).all(axis=1)
    outside = int((known & ~inside_volume(points, volume.affine, volume.voxels.shape)).sum())
    if outside:
        raise ValueError(
            f"expected all landmarks of {name} inside its volume, got {outside} outside: "
            "do the files share one frame (LPS or RAS)?"
        )
    values = torch.from_numpy(np.ascontiguousarray(volume.voxels)).float()
    coarse, _ = resample(values, (window_mm or spacing_mm) / spacing_of(volume.affine))
    values = normalise(values, intensity, find_window(coarse, intensity))
    values = smooth_for(values, spacing_mm, volume.affine)
    return Specimen(name=name, voxels=values, to_world=volume.affine, points=points)


def inside_volume(
    points: Points, affine: Affine, shape: Sequence[int]
) -> Bool[np.ndarray, " landmarks"]:
    """Say which points lie in a volume, up to the faces of its outermost voxels; NaN does not."""
    index = transform(np.linalg.inv(affine), points)
    return np.asarray(((index >= -0.5) & (index <= np.asarray(shape) - 0.5)).all(axis=1))
