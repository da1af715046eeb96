"""The training command, from folders of files to a folder that serves."""

from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch

from app.detector import Detector
from app.frames import transform
from app.loading import load_checked
from app.volume import read_volume
from models.train import main
from tests.test_grid import oblique_affine

NAMES = ("a", "b", "c", "d", "e")
SHAPE = (38, 44, 34)


def write_specimen(folder: Path, name: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    affine = oblique_affine(seed)
    affine[:3, :3] /= np.abs(np.linalg.det(affine[:3, :3])) ** (1 / 3)
    index = rng.uniform(8, 26, (len(NAMES), 3))
    voxels = rng.normal(size=SHAPE).astype(np.float32)
    for size, (i, j, k) in enumerate(index.astype(int), start=1):
        voxels[i - 2 : i + 2, j - 2 : j + 2, k - 2 : k + 2] += 10 * size
    (folder / "scans").mkdir(parents=True, exist_ok=True)
    (folder / "landmarks").mkdir(exist_ok=True)
    nib.Nifti1Image(voxels, affine).to_filename(folder / "scans" / f"{name}.nii.gz")
    rows = ["name,x,y,z"]
    for label, point in zip(NAMES, transform(affine, index), strict=True):
        rows.append(f"{label},{','.join(str(mm) for mm in point)}")
    (folder / "landmarks" / f"{name}.csv").write_text("\n".join(rows) + "\n")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for seed, name in enumerate(("one", "two", "three")):
        write_specimen(folder, name, seed)
    return folder


def run(data: Path, output: Path, *words: object) -> None:
    small = ["--filters", 4, 4, 8, "--batch", 1, "--device", "cpu"]
    words = (data / "scans", data / "landmarks", "-o", output, *small, *words)
    main([str(word) for word in words])


@pytest.mark.parametrize("kind", [(), ("--tile", 16)])
def test_training_writes_a_folder_that_serves(
    data: Path, tmp_path: Path, kind: tuple[object, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "mine"
    run(data, folder, "--steps", 2, "--validate", "two", *kind)
    model = load_checked(folder, torch.device("cpu"))
    assert [mark.name for mark in model.manifest.landmarks] == list(NAMES)
    assert (model.shape is None) == bool(kind)
    scan = (data / "scans" / "one.nii.gz").read_bytes()
    assert len(Detector(model).detect(read_volume(scan)).landmarks) == len(NAMES)
    assert "step 2:" in capsys.readouterr().out


def test_training_goes_on_where_it_was_and_keeps_what_people_wrote(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "mine"
    run(data, folder, "--steps", 1)
    manifest = folder / "model.toml"
    described = manifest.read_text().replace('description = ""', 'description = "bones"')
    manifest.write_text(described)
    first = (folder / "weights.safetensors").read_bytes()
    run(data, folder, "--steps", 1)
    assert (folder / "weights.safetensors").read_bytes() == first
    assert load_checked(folder, torch.device("cpu")).manifest.description == "bones"
    assert "step 1:" in capsys.readouterr().out


def test_training_can_start_from_the_weights_of_a_model(data: Path, tmp_path: Path) -> None:
    run(data, tmp_path / "first", "--steps", 1)
    run(data, tmp_path / "second", "--steps", 1, "--start", tmp_path / "first")
    assert load_checked(tmp_path / "second", torch.device("cpu")).manifest.name == "second"


def test_scan_without_landmarks_is_named(tmp_path: Path) -> None:
    other = tmp_path / "data"
    write_specimen(other, "one", 1)
    (other / "landmarks" / "one.csv").rename(other / "landmarks" / "uno.csv")
    with pytest.raises(ValueError, match=r"landmark file for one\.nii\.gz"):
        run(other, tmp_path / "mine", "--steps", 1)


def test_points_outside_their_scan_are_refused_before_anything_is_trained(
    tmp_path: Path,
) -> None:
    other = tmp_path / "data"
    write_specimen(other, "one", 1)
    path = other / "landmarks" / "one.csv"
    path.write_text(path.read_text() + "f,5000,0,0\n")
    with pytest.raises(ValueError, match=r"inside its volume, got 1 outside"):
        run(other, tmp_path / "mine", "--steps", 1)


def test_unknown_scan_to_validate_on_is_named(data: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="none named"):
        run(data, tmp_path / "mine", "--validate", "four")


@pytest.mark.parametrize("filters", [("4", "8"), ("4", "4", "6")])
def test_filters_that_no_network_can_have_are_refused(tmp_path: Path, filters: list[str]) -> None:
    write_specimen(tmp_path, "one", 1)
    with pytest.raises(SystemExit, match="at least 3 multiples of 4, got"):
        main(
            [
                *[str(tmp_path / part) for part in ("scans", "landmarks")],
                "-o",
                "m",
                "--filters",
                *filters,
            ]
        )
