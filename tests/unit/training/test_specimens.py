"""Specimens are prepared for training as scans are for the network in service."""

import os
from collections.abc import Callable
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from app.geometry import transform
from app.io.volume import read_volume
from app.model.sections import InputSpec, IntensitySpec
from app.preprocessing import Pose, index_grid, make_posed_grid
from app.preprocessing.grid import make_grid
from app.training.data.specimens import (
    SpecimenFiles,
    list_files,
    load_specimen,
    merged,
    pair_files,
)
from tests.support.detached_files import write_mhd
from tests.support.dicom_files import PLACE, as_dicom, zipped
from tests.support.scan_files import as_metaimage, as_nifti, as_nrrd
from tests.unit.io.test_cases import kept

SHAPE = (20, 24, 28)
RULE = IntensitySpec(method="percentile", lower=2.0, upper=97.0)


def test_two_files_of_one_name_are_no_pair(tmp_path: Path) -> None:
    for name in ("one.nii", "one.nrrd"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "one.csv").write_text("name,x,y,z\na,1,2,3\n")
    with pytest.raises(ValueError, match="expected one file of a name, got several named one"):
        pair_files(tmp_path, tmp_path)


def test_hidden_files_are_neither_scans_nor_landmarks(tmp_path: Path) -> None:
    for name in ("a.nii.gz", "a.mrk.json", "._a.nii.gz", "._a.mrk.json", ".DS_Store"):
        (tmp_path / name).touch()
    files = list_files(tmp_path, tmp_path)
    assert (list(files.scans), list(files.landmarks), files.others) == (["a"], ["a"], ())


def test_a_header_and_voxels_in_another_file_are_one_scan(tmp_path: Path) -> None:
    voxels = np.random.default_rng(1).gamma(2.0, 50.0, SHAPE).astype(np.int16)
    (tmp_path / "a.raw").write_bytes(write_mhd(tmp_path / "a.mhd", "a.raw", voxels, PLACE))
    (tmp_path / "a.csv").write_text("name,x,y,z\na,1,2,3\n")
    files = list_files(tmp_path, tmp_path)
    assert (list(files.scans), list(files.landmarks), files.others) == (["a"], ["a"], ())
    with merged(files.pairs()) as (scans, landmarks):
        (linked,) = pair_files(scans, landmarks)
        specimen = load_specimen(linked, ["a"], 1.0, RULE)
    assert specimen.voxels.shape == SHAPE
    assert_allclose(specimen.to_world, PLACE, atol=1e-9)


def test_files_whose_names_are_no_utf_8_have_names_that_records_can_hold(tmp_path: Path) -> None:
    for name in (b"Caf\xe9.nii.gz", b"Caf\xe9.mrk.json"):
        (tmp_path / os.fsdecode(name)).touch()
    (files,) = pair_files(tmp_path, tmp_path, [r"Caf\xe9"])
    assert files.name == r"Caf\xe9"
    assert files.scan.exists()


@pytest.mark.parametrize(
    ("suffix", "write"),
    [("nrrd", as_nrrd), ("mha", as_metaimage), ("zip", lambda a, p: zipped(as_dicom(a, p)))],
)
def test_scans_of_every_format_become_specimens(
    tmp_path: Path, suffix: str, write: Callable[[np.ndarray, np.ndarray], bytes]
) -> None:
    voxels = np.random.default_rng(1).gamma(2.0, 50.0, SHAPE).astype(np.int16)
    point = transform(PLACE, np.array([5.0, 6, 7]))
    (tmp_path / f"one.{suffix}").write_bytes(write(voxels, PLACE))
    (tmp_path / "one.csv").write_text(f"name,x,y,z\na,{','.join(map(str, point))}\n")
    (files,) = pair_files(tmp_path, tmp_path)
    specimen = load_specimen(files, ["a"], 1.0, RULE)
    assert files.name == "one"
    assert specimen.voxels.shape == SHAPE
    np.testing.assert_allclose(specimen.to_world, PLACE, atol=1e-9)


def test_voxel_values_are_those_of_the_grid_in_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Percentiles of a large scan are read from a sample of its voxels, here from few."""
    monkeypatch.setattr("app.preprocessing.intensity.PERCENTILE_SAMPLES", 500)
    voxels = np.random.default_rng(1).gamma(2.0, 50.0, SHAPE).astype(np.float32)
    path = tmp_path / "one.nii"
    image = nib.Nifti1Image(voxels, np.eye(4))
    image.header.set_xyzt_units("mm")
    image.to_filename(path)
    (tmp_path / "one.csv").write_text("name,x,y,z\na,5,6,7\n")
    (files,) = pair_files(tmp_path, tmp_path)
    specimen = load_specimen(files, ["a", "b"], 1.0, RULE)
    spec = InputSpec(
        orientation="RAS", spacing_mm=(1.0, 1.0, 1.0), tile_shape="whole", intensity=RULE
    )
    grid = make_grid(read_volume(path.read_bytes()), spec, torch.device("cpu"))
    values = specimen.values_at(index_grid(grid.voxels.shape, grid.to_volume))
    torch.testing.assert_close(values, grid.voxels, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(specimen.points, [[5, 6, 7], [np.nan] * 3])


def bright_spots(folder: Path) -> SpecimenFiles:
    """Write a scan with spots far brighter than the upper percentile."""
    random = np.random.default_rng(1)
    voxels = random.gamma(2.0, 50.0, SHAPE).astype(np.float32)
    voxels[random.random(SHAPE) < 0.01] += 3000
    (folder / "one.nii").write_bytes(as_nifti(voxels, np.diag([-1.0, 1.0, 1.0, 1.0])))
    (folder / "one.csv").write_text("name,x,y,z\na,-5,6,7\n")
    (files,) = pair_files(folder, folder)
    return files


@pytest.mark.parametrize("spacing_mm", [1.5, 2.0, 3.1])
def test_first_network_is_trained_on_the_values_of_the_coarser_grid_in_service(
    tmp_path: Path, spacing_mm: float
) -> None:
    files = bright_spots(tmp_path)
    specimen = load_specimen(files, ["a"], spacing_mm, RULE)
    spec = InputSpec(
        orientation="RAS", spacing_mm=(spacing_mm,) * 3, tile_shape="whole", intensity=RULE
    )
    grid = make_grid(read_volume(files.scan.read_bytes()), spec, torch.device("cpu"))
    values = specimen.values_at(index_grid(grid.voxels.shape, grid.to_volume))
    torch.testing.assert_close(values, grid.voxels, rtol=0, atol=1e-6)


def test_second_network_is_trained_on_the_values_of_the_posed_grid_in_service(
    tmp_path: Path,
) -> None:
    files = bright_spots(tmp_path)
    volume, cpu = read_volume(files.scan.read_bytes()), torch.device("cpu")
    coarse = InputSpec(
        orientation="RAS", spacing_mm=(3.0, 3.0, 3.0), tile_shape="whole", intensity=RULE
    )
    window = make_grid(volume, coarse, cpu).window
    assert window is not None
    fine = InputSpec(
        orientation="RAS", spacing_mm=(1.5, 1.5, 1.5), tile_shape=(12, 8, 16), intensity=RULE
    )
    turn = np.array([[0.8, -0.6, 0, -9], [0.6, 0.8, 0, 11], [0, 0, 1, 13], [0, 0, 0, 1.0]])
    grid = make_posed_grid(volume, Pose(turn, 1.0), fine, window, cpu)
    specimen = load_specimen(files, ["a"], 1.5, RULE, window_spacing_mm=3.0)
    values = specimen.values_at(index_grid(grid.voxels.shape, grid.to_volume))
    # The service keeps values in 16 bits here.
    torch.testing.assert_close(values, grid.voxels, rtol=0, atol=2.0**-15)


def test_landmarks_that_a_person_found_absent_are_told_from_unknown_ones(tmp_path: Path) -> None:
    path, _ = kept(tmp_path)
    voxels = np.random.default_rng(1).gamma(2.0, 50.0, SHAPE).astype(np.int16)
    (tmp_path / "case.nii").write_bytes(as_nifti(voxels, np.diag([-9.0, -9.0, 9.0, 1.0])))
    files = SpecimenFiles("case", tmp_path / "case.nii", path)
    specimen = load_specimen(files, "ecba", 9.0, RULE)
    assert specimen.absent == {1}
    assert load_specimen(files, "ecba", 9.0, RULE, "absent").absent == {0, 1}
    assert np.isfinite(specimen.points).all(axis=1).tolist() == [False, False, True, True]
