"""Folders of small scans and landmark files to train on, and the commands that do."""

import csv
import os
import signal
from collections.abc import Mapping
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch
from jaxtyping import Float64
from scipy.spatial.transform import Rotation
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from typer.testing import CliRunner

from app.cli.main import app
from app.geometry import Points, transform
from app.io.slicer import markups_json
from app.training.data.specimens import Specimen
from app.training.fit import loop
from tests.unit.preprocessing.test_grid import oblique_affine

NAMES = ("nasion", "bregma", "lambda", "tip left", "tip right", "base")
SHAPE = (28, 34, 30)
TYPICAL = np.array(
    [[8.0, 0, 2], [2, 1, 7], [-7, 0, 6], [4, 6, -3], [4, -6, -3], [-6, 0, -5]], dtype=np.float64
)
"""Positions in mm around the middle of the scan."""

BLOBS = ("a", "b", "c", "d", "e")
BLOB_SHAPE = (38, 44, 34)
SMALL = ("--filters", "4,4,8", "--batch", 1, "--device", "cpu", "--steps", 1)
TILES = (*SMALL, "--tile", 32, "--spacing", 1.5)
"""Options of trainings that take a second."""

Affine = Float64[np.ndarray, "4 4"]


def make_positions(seed: int) -> Points:
    """Draw one subject's landmarks near the typical ones, in mm around the middle of its scan."""
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
    """Return the middle of a scan, in mm, RAS."""
    return transform(affine, (np.array(SHAPE) - 1) / 2)


def points_of(seed: int) -> dict[str, np.ndarray]:
    """Return one subject's landmarks by name, in mm, RAS."""
    positions = make_positions(seed) + middle_of(make_affine(seed))
    return dict(zip(NAMES, positions, strict=True))


def write_data(folder: Path, count: int = 6) -> Path:
    """Write data without issues: scans ``s0`` and so on, and their landmark files."""
    (folder / "scans").mkdir(parents=True)
    (folder / "landmarks").mkdir()
    for seed in range(count):
        write_scan(folder / "scans" / f"s{seed}.nii.gz", seed, make_affine(seed))
        write_points(folder, f"s{seed}", points_of(seed))
    return folder


def landmarkd(*words: object) -> str:
    """Run the command in this process; returns its output, and raises what it raises."""
    result = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def write_specimen(folder: Path, name: str, seed: int) -> None:
    """Write a scan with a bright block at each landmark of ``BLOBS``, and its landmark file."""
    rng = np.random.default_rng(seed)
    affine = oblique_affine(seed)
    affine[:3, :3] /= np.abs(np.linalg.det(affine[:3, :3])) ** (1 / 3)
    index = rng.uniform(8, 26, (len(BLOBS), 3))
    voxels = rng.normal(size=BLOB_SHAPE).astype(np.float32)
    for size, (i, j, k) in enumerate(index.astype(int), start=1):
        voxels[i - 2 : i + 2, j - 2 : j + 2, k - 2 : k + 2] += 10 * size
    (folder / "scans").mkdir(parents=True, exist_ok=True)
    (folder / "landmarks").mkdir(exist_ok=True)
    nib.Nifti1Image(voxels, affine).to_filename(folder / "scans" / f"{name}.nii.gz")
    rows = ["name,x,y,z"]
    for label, point in zip(BLOBS, transform(affine, index), strict=True):
        rows.append(f"{label},{','.join(str(mm) for mm in point)}")
    (folder / "landmarks" / f"{name}.csv").write_text("\n".join(rows) + "\n")


def write_specimens(folder: Path, *names: str) -> Path:
    """Write several specimens; see ``write_specimen``."""
    for seed, name in enumerate(names):
        write_specimen(folder, name, seed)
    return folder


def read_csv(path: Path) -> list[dict[str, str]]:
    """Read the rows of a table."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def interrupt_after(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Send an interrupt (Ctrl-C) during a step of the trainings that follow."""
    done = []
    optimiser_step = loop.optimiser_step

    def interrupt(
        network: nn.Module, optimiser: torch.optim.Optimizer, schedule: LRScheduler
    ) -> None:
        optimiser_step(network, optimiser, schedule)
        done.append(1)
        if len(done) == steps:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(loop, "optimiser_step", interrupt)


def blob_specimen(seed: int) -> Specimen:
    """Make a scan with one bright blob at each landmark, far apart."""
    affine = oblique_affine(seed)
    affine[:3, :3] *= 0.5 / np.abs(np.linalg.det(affine[:3, :3])) ** (1 / 3)
    index = np.stack(np.meshgrid(*[np.arange(n) for n in (50, 60, 55)], indexing="ij"), axis=-1)
    world = transform(affine, index.astype(np.float64))
    points = transform(affine, np.array([[20.0, 25, 20], [30, 40, 35], [33, 20, 30]]))
    voxels = sum(np.exp(-0.5 * ((world - point) ** 2).sum(-1) / 1.2**2) for point in points)
    return Specimen(torch.from_numpy(voxels).float(), affine, points)
