"""Many scans by the command: one table, and going on where a run has stopped."""

import csv
import os
from pathlib import Path
from threading import Thread

import nibabel as nib
import numpy as np
import pytest
from typer.testing import CliRunner, Result

from app.cli.batch import LongTable
from app.cli.main import app
from app.cli.scan_files import name_answers, read_scan
from app.shapes import read_cohort
from tests.support.answers import make_answer
from tests.support.dicom_files import as_dicom, zipped
from tests.support.model_folders import make_model_folder
from tests.support.required import needs_reports
from tests.support.services import MODEL, ServiceProcess, toy_scan

LANDMARKS = 3


@pytest.fixture
def scans(tmp_path: Path) -> Path:
    folder = tmp_path / "scans"
    folder.mkdir()
    for name, edge in (("one", 24), ("two", 26), ("three", 28)):
        (folder / f"{name}.nii").write_bytes(toy_scan((edge, 26, 18)))
    return folder


def run(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_several_scans_make_one_table_and_a_summary(
    models: Path, scans: Path, tmp_path: Path
) -> None:
    table = tmp_path / "all.csv"
    result = run("detect", scans, "-o", table, "--models-dir", models)
    assert result.exit_code == 0, result.output
    rows = read(table)
    assert [row["scan"] for row in rows] == [
        name for name in ("one", "three", "two") for _ in range(LANDMARKS)
    ]
    found = sum(bool(row["i"]) for row in rows)
    assert f"3 scans, {found} of {3 * LANDMARKS} landmarks" in result.stderr
    assert str(table) in result.stderr.replace("\n", "")


def test_a_frame_of_several_is_chosen_by_its_number(models: Path, tmp_path: Path) -> None:
    scan = tmp_path / "scan.nii"
    voxels = np.stack([np.zeros((24, 26, 18)), np.ones((24, 26, 18))], axis=-1)
    nib.Nifti1Image(voxels.astype(np.float32), np.eye(4)).to_filename(scan)
    words = ("detect", scan, "--format", "json", "--models-dir", models)
    assert run(*words).exit_code != 0
    assert run(*words, "--frame", 1).exit_code == 0
    assert run(*words, "--frame", 2).exit_code != 0


def test_a_csv_of_one_scan_is_the_table_too_unless_slicers_is_asked_for(
    models: Path, scans: Path, tmp_path: Path
) -> None:
    series = tmp_path / "series"
    series.mkdir()
    for number, file in enumerate(as_dicom(np.ones((20, 18, 24), np.int16))):
        (series / f"I{number}").write_bytes(file)
    table = tmp_path / "x.csv"
    for scan, name in ((scans / "one.nii", "one"), (series, "series")):
        result = run("detect", scan, "-o", table, "--models-dir", models)
        assert result.exit_code == 0, result.output
        assert [row["scan"] for row in read(table)] == [name] * LANDMARKS
    run("detect", series, "-o", table, "--format", "csv", "--models-dir", models)
    assert table.read_text().startswith("label,l,p,s,defined")
    all_scans = tmp_path / "all.csv"
    result = run("detect", scans, "-o", all_scans, "--format", "csv", "--models-dir", models)
    assert "expected -o FOLDER for several scans as csv" in result.stderr
    assert not all_scans.exists()


def test_a_scan_without_any_landmark_asks_once_whether_it_is_for_the_model(
    tmp_path: Path, scans: Path
) -> None:
    models = tmp_path / "models"
    models.mkdir()
    make_model_folder(models, voting={"threshold": 0.999})
    result = run("detect", scans, "-o", tmp_path / "all.csv", "--models-dir", models)
    assert result.exit_code == 0, result.output
    assert "The model is for: " in result.stderr
    assert result.stderr.count("No landmark") == 1


def test_warnings_about_scans_are_said_whatever_the_format_holds(
    models: Path, scans: Path, tmp_path: Path
) -> None:
    """3D Slicer would show the second scan elsewhere than its landmarks."""
    image = nib.Nifti1Image.from_bytes((scans / "two.nii").read_bytes())
    turned = image.affine @ np.diag([-1.0, -1.0, 1.0, 1.0])
    image.set_sform(image.affine, code=1)
    image.set_qform(turned, code=1)
    (scans / "two.nii").write_bytes(image.to_bytes())
    for name in ("one", "three"):
        content = bytearray((scans / f"{name}.nii").read_bytes())
        content[123] = 0  # xyzt_units
        (scans / f"{name}.nii").write_bytes(content)
    options = ("--models-dir", models)
    result = run("detect", scans / "two.nii", "-o", tmp_path / "two.mrk.json", *options)
    assert result.exit_code == 0, result.output
    assert "two.nii: the qform disagrees with the sform" in result.stderr
    result = run("detect", scans, "-o", tmp_path / "all.csv", *options)
    assert "one.nii and 1 more: the file does not name its unit of length" in result.stderr
    assert result.stderr.count("the file does not name its unit of length") == 1
    assert "two.nii: the qform disagrees with the sform" in result.stderr


def test_a_table_is_resumed_where_it_was_cut_off(models: Path, scans: Path, tmp_path: Path) -> None:
    """The last scan is done again: nobody knows whether its rows are complete."""
    table = tmp_path / "all.csv"
    run("detect", scans, "-o", table, "--models-dir", models)
    whole = table.read_text()
    lines = whole.splitlines(keepends=True)
    table.write_text("".join(lines[: 1 + LANDMARKS + 1])[:-9])  # within the second scan
    result = run("detect", scans, "-o", table, "--resume", "--models-dir", models)
    assert result.exit_code == 0, result.output
    assert table.read_text() == whole
    assert "2 scans, " in result.stderr
    assert "1 scan left out, answered before" in result.stderr


def test_a_table_goes_on_with_other_scans_and_loses_none(
    models: Path, scans: Path, tmp_path: Path
) -> None:
    table = tmp_path / "all.csv"
    for batch in (("one", "two"), ("three",)):
        paths = [scans / f"{name}.nii" for name in batch]
        result = run("detect", *paths, "-o", table, "--resume", "--models-dir", models)
        assert result.exit_code == 0, result.output
    names = [row["scan"] for row in read(table)]
    assert names == [name for name in ("one", "two", "three") for _ in range(LANDMARKS)]


def test_a_table_escapes_what_is_not_utf8_in_the_name_of_a_scan(tmp_path: Path) -> None:
    table = tmp_path / "all.csv"
    names = name_answers([Path(os.fsdecode(b"M\xfcller.nii")), Path("M\xfcller.nii")])
    sink = LongTable(table, names, resume=False)
    for path in names:
        sink.write(path, make_answer(["x"], np.zeros((1, 3))))
    assert read_cohort(table).specimens == ("M\\xfcller", "M\xfcller")
    resumed = LongTable(table, names, resume=True)
    assert [resumed.has(path) for path in names] == [True, False]


def test_answers_are_told_apart_where_case_does_not_count() -> None:
    """As on macOS and Windows, where of two answers the second took the place of the first."""
    names = name_answers([Path("ct/Mouse.nii"), Path("mr/mouse.nii"), Path("mr/rat.nii")])
    assert list(names.values()) == ["ct_Mouse", "mr_mouse", "rat"]
    names = name_answers([Path("ct/A.nii"), Path("CT/a.nii"), Path("CT/b.nii")])
    assert list(names.values()) == ["A", "a", "b"]  # No folder tells them apart there.


def test_a_table_is_started_again_unless_it_is_resumed(
    models: Path, scans: Path, tmp_path: Path
) -> None:
    table = tmp_path / "all.csv"
    table.write_text("something else\n")
    refused = run("detect", scans, "-o", table, "--resume", "--models-dir", models)
    assert "expected a table of all scans" in str(refused.exception)
    assert table.read_text() == "something else\n"
    assert run("detect", scans, "-o", table, "--models-dir", models).exit_code == 0
    assert len(read(table)) == 3 * LANDMARKS


@pytest.fixture
def two_models(models: Path, tmp_path: Path) -> Path:
    both = tmp_path / "both"
    both.mkdir()
    (both / MODEL).symlink_to(models / MODEL)
    make_model_folder(both, "other")
    return both


def test_a_table_names_the_model_of_each_row(models: Path, scans: Path, tmp_path: Path) -> None:
    table = tmp_path / "all.csv"
    run("detect", scans / "one.nii", "-o", table, "--models-dir", models)
    assert list(read(table)[0])[-2:] == ["model", "version"]
    assert {(row["model"], row["version"]) for row in read(table)} == {(MODEL, "1.0.0")}
    assert read_cohort(table).specimens == ("one",)


@pytest.mark.parametrize("output", ["all.csv", "out/"])
def test_answers_of_another_model_are_not_resumed(
    two_models: Path, scans: Path, tmp_path: Path, output: str
) -> None:
    words = ("detect", scans, "-o", f"{tmp_path}/{output}", "--models-dir", two_models, "-m")
    run(*words, MODEL)
    files = [tmp_path / output] if output == "all.csv" else sorted((tmp_path / output).iterdir())
    before = [path.read_bytes() for path in files]
    result = run(*words, "other", "--resume")
    assert result.exit_code == 1
    assert f"--resume: expected answers of other 1.0.0, got those of {MODEL} 1.0.0" in result.stderr
    assert [path.read_bytes() for path in files] == before
    assert run(*words, MODEL, "--resume").exit_code == 0


def test_a_service_of_another_model_does_not_resume_a_table(
    two_models: Path, scans: Path, tmp_path: Path
) -> None:
    table = tmp_path / "all.csv"
    run("detect", scans, "-o", table, "--models-dir", two_models, "-m", MODEL)
    before = table.read_bytes()
    service = ServiceProcess(two_models, DEFAULT_MODEL="other")
    try:
        result = run("detect", scans, "-o", table, "--resume", "--url", service.url)
        same = run("detect", scans, "-o", table, "--resume", "--url", service.url, "-m", MODEL)
    finally:
        service.kill()
    assert result.exit_code == 1
    assert "--resume: expected answers of other 1.0.0" in result.stderr
    assert table.read_bytes() == before
    assert same.exit_code == 0


def test_scans_are_answered_though_the_service_restarts_among_them(
    models: Path, scans: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    services = [ServiceProcess(models)]
    port = str(services[0].port)

    def restart_before_two(path: Path) -> bytes:
        if path.stem == "two" and len(services) == 1:
            services[0].kill()
            Thread(target=lambda: services.append(ServiceProcess(models, PORT=port))).start()
        return read_scan(path)

    monkeypatch.setattr("app.cli.batch.read_scan", restart_before_two)
    try:
        result = run("detect", scans, "-o", tmp_path / "all.csv", "--url", services[0].url)
    finally:
        for service in services:
            service.kill()
    assert result.exit_code == 0, result.output
    assert len(services) == 2


def test_a_table_that_names_no_model_is_resumed(models: Path, scans: Path, tmp_path: Path) -> None:
    table = tmp_path / "all.csv"
    run("detect", scans, "-o", table, "--models-dir", models)
    rows = read(table)
    with table.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0])[:-2], extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    result = run("detect", scans, "-o", table, "--resume", "--models-dir", models)
    assert result.exit_code == 0, result.output
    assert "1 scan, " in result.stderr
    models_of = {row["scan"]: (row["model"], row["version"]) for row in read(table)}
    assert models_of == {"one": ("", ""), "three": ("", ""), "two": (MODEL, "1.0.0")}


def test_a_folder_is_resumed_and_nothing_in_it_computed_again(
    models: Path, scans: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    run("detect", scans, "-o", out, "--models-dir", models)
    (out / "two.json").write_text("corrected by hand")
    (out / "one.json").unlink()
    result = run("detect", scans, "-o", out, "--resume", "--models-dir", models)
    assert result.exit_code == 0, result.output
    assert (out / "two.json").read_text() == "corrected by hand"
    assert "1 scan, " in result.stderr
    assert sorted(path.name for path in out.iterdir()) == ["one.json", "three.json", "two.json"]


def test_a_scan_that_fails_is_counted_and_stops_no_other(
    models: Path, scans: Path, tmp_path: Path
) -> None:
    (scans / "broken.nii").write_bytes(b"nothing")
    table = tmp_path / "all.csv"
    result = run("detect", scans, "-o", table, "--models-dir", models)
    assert result.exit_code == 1
    assert "broken.nii: " in result.stderr
    assert "1 failed" in result.stderr
    assert len(read(table)) == 3 * LANDMARKS


@needs_reports
def test_images_that_no_report_can_be_made_of_stop_no_other_report(
    models: Path, tmp_path: Path
) -> None:
    scans = tmp_path / "scans"
    scans.mkdir()
    voxels = np.ones((20, 18, 24), np.int16)
    private = as_dicom(voxels, SOPClassUID="1.3.46.670589.11.0.0.12.1")
    for name, files in (("a", private), ("b", as_dicom(voxels, PatientSex="U"))):
        (scans / f"{name}.zip").write_bytes(zipped(files))
    out = tmp_path / "out"
    result = run("detect", scans, "-o", out, "--format", "dcm", "--models-dir", models)
    assert result.exit_code == 1
    assert "a.zip: expected images of a standard SOP class" in result.stderr
    assert [path.name for path in out.iterdir()] == ["b.dcm"]


@pytest.mark.parametrize("resume", [[], ["--resume"]])
def test_a_run_that_answers_nothing_leaves_the_table_that_is_there(
    models: Path, scans: Path, tmp_path: Path, resume: list[str]
) -> None:
    table = tmp_path / "all.csv"
    run("detect", scans, "-o", table, "--models-dir", models)
    before = table.read_bytes()
    result = run("detect", scans, "-o", table, "-m", "none", "--models-dir", models, *resume)
    assert result.exit_code != 0
    assert table.read_bytes() == before


@pytest.mark.parametrize("output", ["all.csv", "out"])
def test_ctrl_c_keeps_what_was_answered_and_says_how_to_go_on(
    models: Path, scans: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str
) -> None:
    def read_until_two(path: Path) -> bytes:
        if path.name == "two.nii":
            raise KeyboardInterrupt
        return read_scan(path)

    words = ("detect", scans, "-o", tmp_path / output, "--models-dir", models)
    with monkeypatch.context() as patch:
        patch.setattr("app.cli.batch.read_scan", read_until_two)
        stopped = run(*words)
    assert stopped.exit_code == 130
    assert "2 scans, " in stopped.output
    assert "interrupted; --resume goes on from here" in stopped.output
    resumed = run(*words, "--resume")
    assert resumed.exit_code == 0
    # The last scan of a table is done again: its rows may have been cut off.
    assert f"{'2 scans' if output == 'all.csv' else '1 scan'}, " in resumed.output
    if output == "all.csv":
        assert len(read(tmp_path / output)) == 3 * LANDMARKS
    else:
        assert len(list((tmp_path / output).iterdir())) == 3


def test_answers_to_links_have_the_names_of_the_links(
    models: Path, scans: Path, tmp_path: Path
) -> None:
    """As git-annex and DataLad keep scans: under names made of their content."""
    links = tmp_path / "links"
    links.mkdir()
    for name in ("one", "two"):
        (links / f"sub-{name}.nii").symlink_to(scans / f"{name}.nii")
    result = run("detect", links, "-o", tmp_path / "out", "--models-dir", models)
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "sub-one.json",
        "sub-two.json",
    ]


def test_a_scan_that_is_not_there_is_named_once(models: Path, scans: Path, tmp_path: Path) -> None:
    scan = tmp_path / "none.nii"
    result = run("detect", scan, scans, "-o", tmp_path / "all.csv", "--models-dir", models)
    assert result.exit_code == 1
    assert "\nnone.nii: No such file or directory\n" in result.stderr


@pytest.mark.parametrize("name", ["all.csv", "one.json"])
def test_the_folder_of_the_output_is_made(
    models: Path, scans: Path, tmp_path: Path, name: str
) -> None:
    target = tmp_path / "new" / "folder" / name
    result = run("detect", scans / "one.nii", "-o", target, "--models-dir", models)
    assert result.exit_code == 0, result.output
    assert target.is_file()


def test_an_answer_that_cannot_be_written_ends_the_run(
    models: Path, scans: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    (out / "three.json").mkdir(parents=True)
    (scans / "broken.nii").write_bytes(b"nothing")
    result = run("detect", scans, "-o", out, "--models-dir", models)
    assert result.exit_code == 1
    assert "broken.nii: expected a NIfTI" in result.stderr
    assert f"cannot read or write {out / 'three.json'}: Is a directory" in result.stderr
    assert sorted(path.name for path in out.iterdir()) == ["one.json", "three.json"]


def test_a_file_of_no_format_is_not_written(models: Path, scans: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.xlsx"
    result = run("detect", scans / "one.nii", "-o", target, "--models-dir", models)
    assert result.exit_code == 1
    assert "ending in one of .json" in result.stderr
    assert not target.exists()
