"""Folders of small scans and landmark files, as people have them, to train on and to spoil."""

from collections.abc import Mapping
from pathlib import Path

import nibabel as nib
import numpy as np
from jaxtyping import Float64
from scipy.spatial.transform import Rotation
from typer.testing import CliRunner

from app.cli.main import app
from app.geometry import Points, transform
from app.io.slicer import markups_json

NAMES = ("nasion", "bregma", "lambda", "tip left", "tip right", "base")
SHAPE = (28, 34, 30)
TYPICAL = np.array(
    [[8.0, 0, 2], [2, 1, 7], [-7, 0, 6], [4, 6, -3], [4, -6, -3], [-6, 0, -5]], dtype=np.float64
)
"""Places in mm around the middle of the scan."""

Affine = Float64[np.ndarray, "4 4"]


def make_places(seed: int) -> Points:
    """Draw one subject's landmarks, near the typical ones, in mm around the middle of its scan."""
    rng = np.random.default_rng(seed)
    return np.asarray(TYPICAL * rng.uniform(0.9, 1.1) + rng.normal(0, 0.15, TYPICAL.shape))


def make_affine(seed: int) -> Affine:
    """Draw a right-handed affine of voxels of 1 mm, far from the origin."""
    affine = np.eye(4)
    affine[:3, :3] = Rotation.random(random_state=seed).as_matrix()
    affine[:3, 3] = (40.0 + seed, -70.0, 25.0)
    return affine


def write_scan(path: Path, seed: int, affine: Affine, unit: str = "mm") -> None:
    """Write a scan of seeded noise."""
    voxels = np.random.default_rng(seed).normal(100, 20, SHAPE).astype(np.float32)
    image = nib.Nifti1Image(voxels, affine)
    image.header.set_xyzt_units(unit)
    image.to_filename(path)


def write_points(folder: Path, name: str, points: Mapping[str, np.ndarray]) -> None:
    """Write landmarks, in mm, RAS, as a Slicer Markups file."""
    text = markups_json(list(points), np.stack(list(points.values())))
    (folder / "landmarks" / f"{name}.mrk.json").write_text(text)


def middle_of(affine: Affine) -> np.ndarray:
    """Say where the middle of a scan lies, in mm, RAS."""
    return transform(affine, (np.array(SHAPE) - 1) / 2)


def points_of(seed: int) -> dict[str, np.ndarray]:
    """Give one subject's landmarks by name, in mm, RAS."""
    places = make_places(seed) + middle_of(make_affine(seed))
    return dict(zip(NAMES, places, strict=True))


def write_data(folder: Path, count: int = 6) -> Path:
    """Write sound data: scans ``s0`` and so on, and their landmark files."""
    (folder / "scans").mkdir(parents=True)
    (folder / "landmarks").mkdir()
    for seed in range(count):
        write_scan(folder / "scans" / f"s{seed}.nii.gz", seed, make_affine(seed))
        write_points(folder, f"s{seed}", points_of(seed))
    return folder


def landmarkd(*words: object) -> str:
    """Run the command in this process; gives what it says, and raises what it raises."""
    result = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output
