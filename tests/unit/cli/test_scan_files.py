"""Which scans the command finds, and how it names their answers."""

import gzip
import os
from pathlib import Path

import numpy as np
import pytest
from nibabel.testing import data_path
from typer.testing import CliRunner, Result

from app.cli.main import app
from app.cli.scan_files import list_scans, open_scan, read_scan, size_of
from app.errors import NotAVolume
from app.io import LandmarksAnswer, read_volume
from app.shapes import read_cohort
from tests.support.detached_files import write_mhd
from tests.support.dicom_files import as_dicom
from tests.support.services import toy_scan


@pytest.fixture
def scans(tmp_path: Path) -> Path:
    folder = tmp_path / "scans"
    folder.mkdir()
    (folder / "one.nii").write_bytes(toy_scan())
    return folder


def run(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture
def two_heads(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / folder / "head.nii" for folder in ("one", "two")]
    for path in paths:
        path.parent.mkdir()
        path.write_bytes(toy_scan())
    return paths


def test_detect_names_scans_of_one_name_by_their_folders_too(
    models: Path, two_heads: list[Path], tmp_path: Path
) -> None:
    two_heads[1].write_bytes(b"no scan")
    words = ("--models-dir", models)
    result = run("detect", *two_heads, "-o", tmp_path / "out", *words)
    assert f"{two_heads[1]}: expected a NIfTI" in result.stderr
    two_heads[1].write_bytes(toy_scan())
    (tmp_path / "other.nii").write_bytes(toy_scan())
    run("detect", *two_heads, tmp_path / "other.nii", "-o", tmp_path / "out", *words, "--resume")
    found = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert found == ["one_head.json", "other.json", "two_head.json"]
    run("detect", *two_heads, "-o", tmp_path / "all.csv", *words)
    assert read_cohort(tmp_path / "all.csv").specimens == ("one_head", "two_head")


def test_detect_refuses_scans_whose_answers_would_overwrite_each_other(
    models: Path, two_heads: list[Path], tmp_path: Path
) -> None:
    (tmp_path / "two_head.nii").write_bytes(toy_scan())
    for scans in ([two_heads[0]] * 2, [*two_heads, tmp_path / "two_head.nii"]):
        result = run("detect", *scans, "-o", tmp_path / "out", "--models-dir", models)
        assert result.exit_code == 1
        for words in (f"{scans[-2]} and {scans[-1]}", "different names", scans[-1].stem):
            assert words in result.stderr
        assert not (tmp_path / "out").exists()


def test_detect_says_what_of_a_folder_it_does_not_read(
    models: Path, scans: Path, tmp_path: Path
) -> None:
    for name in ("a.raw", "notes.txt", ".hidden", "._one.nii"):
        (scans / name).touch()
    (scans / "more").mkdir()
    result = run("detect", scans, "-o", tmp_path / "out", "--models-dir", models)
    assert result.exit_code == 0, result.output
    assert "3 not read, as names of scans end in .nii, .nii.gz, " in result.stderr
    assert ": a.raw, more, notes.txt\n" in result.stderr
    (scans / "one.nii").unlink()
    result = run("detect", scans, "-o", tmp_path / "out", "--models-dir", models)
    assert result.exit_code == 1
    assert "expected scans (.nii, .nii.gz, " in result.stderr


def test_detect_refuses_a_scan_and_its_compressed_copy(
    models: Path, scans: Path, tmp_path: Path
) -> None:
    (scans / "one.nii.gz").write_bytes(gzip.compress(toy_scan()))
    result = run("detect", scans, "-o", tmp_path / "out", "--models-dir", models)
    assert result.exit_code == 1
    assert "whose answers would both be named one\n" in result.stderr


def test_a_folder_that_cannot_be_read_does_not_stop_the_others(
    models: Path, tmp_path: Path
) -> None:
    """Nothing was answered, as of hundreds of patients one had a file that is not let read."""
    for name in ("a", "broken", "c"):
        (tmp_path / name).mkdir()
        for number, content in enumerate(as_dicom(np.ones((20, 18, 24), np.int16))):
            (tmp_path / name / f"I{number}").write_bytes(content)
    first = tmp_path / "broken" / "I0"
    first.unlink()
    first.symlink_to("/proc/self/mem")  # A file whose beginning nobody can read, not even root.
    folders = [tmp_path / name for name in ("a", "broken", "c")]
    result = run("detect", *folders, "-o", tmp_path / "all.csv", "--models-dir", models)
    assert result.exit_code == 1
    assert "\nbroken: [Errno 5] Input/output error\n" in result.stderr
    assert read_cohort(tmp_path / "all.csv").specimens == ("a", "c")


def test_a_pipe_in_a_folder_is_not_waited_for(models: Path, tmp_path: Path) -> None:
    """But is read if it is given, as of a shell's <(gunzip -c scan.nii.gz)."""
    scans = tmp_path / "scans"
    scans.mkdir()
    (scans / "one.nii").write_bytes(toy_scan())
    os.mkfifo(scans / "two.nii")
    result = run("detect", scans, "-o", tmp_path / "all.csv", "--models-dir", models)
    assert result.exit_code == 0
    assert read_cohort(tmp_path / "all.csv").specimens == ("one",)
    assert "two.nii" in result.stderr
    assert list(list_scans([scans / "two.nii"])) == [scans / "two.nii"]


def test_an_empty_file_among_dicom_files_may_be_a_slice_that_was_not_copied(
    models: Path, tmp_path: Path
) -> None:
    """A series whose last files had not been copied was answered as a whole one, without a word."""
    folder = tmp_path / "series"
    folder.mkdir()
    for number, content in enumerate(as_dicom(np.ones((20, 18, 24), np.int16))):
        (folder / f"I{number:02}").write_bytes(content if number < 20 else b"")
    result = run("detect", folder, "-o", tmp_path / "found.json", "--models-dir", models)
    assert result.exit_code == 0, result.output
    assert "empty files beside those of the scan: 4; was all of it copied?" in result.stderr
    for file in folder.iterdir():
        file.write_bytes(b"")
    assert list(list_scans([folder])) == []
    with pytest.raises(NotAVolume, match="folder of DICOM files, got none"):
        read_scan(folder)


def test_a_header_is_joined_with_its_voxels(models: Path, scans: Path, tmp_path: Path) -> None:
    volume = read_volume(toy_scan())
    header = scans / "two.mhd"
    voxels = write_mhd(header, "two.raw", volume.voxels, volume.affine)
    header.with_name("two.raw").write_bytes(voxels)
    (scans / "other.raw").touch()
    words = ("--models-dir", models)
    result = run("detect", scans, "-o", tmp_path / "out", *words)
    assert result.exit_code == 0, result.output
    one, two = (
        LandmarksAnswer.model_validate_json((tmp_path / "out" / f"{name}.json").read_bytes())
        for name in ("one", "two")
    )
    assert two.landmarks == one.landmarks
    assert "1 not read" in result.stderr
    assert "other.raw" in result.stderr
    assert size_of(header) == sum(file.stat().st_size for file in scans.glob("two.*"))
    with open_scan(header) as file:
        assert file.read() == read_scan(header)
    (tmp_path / "link.csv").symlink_to(scans / "two.raw")
    result = run("detect", header, "-o", tmp_path / "link.csv", *words)
    assert "expected another file than those that are read" in result.stderr
    assert (scans / "two.raw").read_bytes() == voxels
    (scans / "two.raw").unlink()
    result = run("detect", scans, "-o", tmp_path / "out", *words)
    assert result.exit_code == 1
    assert "voxels of two.mhd in one file beside it, got none" in result.stderr


def test_what_is_converted_is_uploaded_in_parts_as_it_is_at_once(tmp_path: Path) -> None:
    path = tmp_path / "scan.mnc"
    path.write_bytes((Path(str(data_path)) / "tiny.mnc").read_bytes())
    with open_scan(path) as file:
        content = file.read()
    assert content == read_scan(path)
    assert read_volume(content).voxels.shape == (10, 20, 20)
