"""Folders of scans and landmark files -> Specimens, ready to be posed."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from app.frames import Affine, Points, Voxels, spacing_of, transform
from app.grid import normalise, resample
from app.manifest import IntensitySpec
from app.posed import smooth_for
from app.volume import read_volume
from models.landmark_files import landmark_stem, read_landmarks


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


def pair_files(scans: Path, landmarks: Path) -> list[tuple[str, Path, Path]]:
    """Pair scans and landmark files by name.

    Raises:
        ValueError: A scan has no landmark file; a landmark file without a scan is no error.
    """
    by_stem = {landmark_stem(path): path for path in sorted(landmarks.iterdir()) if path.is_file()}
    pairs = []
    for scan in sorted(path for path in scans.iterdir() if path.name.endswith((".nii", ".nii.gz"))):
        stem = scan.name.removesuffix(".gz").removesuffix(".nii")
        if stem not in by_stem:
            raise ValueError(f"expected a landmark file for {scan.name}, found none of that name")
        pairs.append((stem, scan, by_stem[stem]))
    if not pairs:
        raise ValueError("expected .nii or .nii.gz scans, found none")
    return pairs


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
    outside = outside_volume(points, volume.affine, volume.voxels.shape)
    if outside:
        raise ValueError(
            f"expected all landmarks of {name} inside its volume, got {outside} outside: "
            "do the files share one frame (LPS or RAS)?"
        )
    values = torch.from_numpy(np.ascontiguousarray(volume.voxels)).float()
    coarse, _ = resample(values, (window_mm or spacing_mm) / spacing_of(volume.affine))
    values = normalise_like(values, coarse, intensity)
    values = smooth_for(values, spacing_mm, volume.affine)
    return Specimen(name=name, voxels=values, to_world=volume.affine, points=points)


def normalise_like(values: Voxels, coarse: Voxels, intensity: IntensitySpec) -> Voxels:
    """Normalise fine values by the bounds that the rule finds in the coarse ones."""
    if intensity.method != "percentile":
        return normalise(values, intensity)
    bounds = np.percentile(coarse.numpy(), [intensity.lower, intensity.upper])
    return normalise(
        values, IntensitySpec(method="window", lower=float(bounds[0]), upper=float(bounds[1]))
    )


def outside_volume(points: Points, affine: Affine, shape: Sequence[int]) -> int:
    """Count points that lie outside a volume."""
    index = transform(np.linalg.inv(affine), points)
    inside = (index >= -0.5) & (index <= np.asarray(shape) - 0.5)
    return int((~inside & np.isfinite(points)).any(axis=1).sum())
