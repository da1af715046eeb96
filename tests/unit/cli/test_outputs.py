"""Where answers go, and in which format."""

import io
import json
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from app.cli.main import app
from app.cli.outputs import choose_sink, choose_writer, output_format, writing_alone
from app.cli.scan_files import size_of
from tests.support.answers import make_answer
from tests.support.dicom_files import as_dicom, changed
from tests.support.required import needs_reports
from tests.support.services import toy_scan

ANSWER = make_answer(["1", "2"], np.zeros((2, 3)))


@pytest.mark.parametrize(("name", "watched"), [("json", True), ("json", False), ("tsv", True)])
def test_json_is_indented_for_a_terminal_alone(
    name: str, watched: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", "dumb")  # It has no colours.
    monkeypatch.setattr(sys.stdout, "isatty", lambda: watched)
    form = output_format("", name, to_folder=False)
    write = choose_writer(form, None)
    path = Path("scan.nii")
    sink = choose_sink([path], None, form, write, to_folder=False, resume=False)
    sink.write(path, ANSWER)
    printed = capsys.readouterr().out
    if name == "json":
        assert json.loads(printed) == ANSWER.model_dump(mode="json")
        indented = printed.startswith('{\n  "request_id"')
        assert indented == watched
    else:
        assert printed == write(path, ANSWER).decode()


@pytest.mark.parametrize("name", ["json", "long"])
@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_what_is_printed_is_what_a_file_would_hold(
    name: str, encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JSON in Latin-1 is none, a table ended in an empty line, and ASCII has no ä."""
    answer, path = make_answer(["ä", "2"], np.zeros((2, 3))), Path("scan.nii")
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding))
    form = output_format("", name, to_folder=False)
    write = choose_writer(form, None)
    choose_sink([path], None, form, write, to_folder=False, resume=False).write(path, answer)
    assert printed.getvalue().rstrip() == write(path, answer).rstrip()
    assert printed.getvalue().count(b"\n") == (1 if name == "json" else len(answer.landmarks) + 1)


def test_an_answer_is_found_though_nobody_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a shell has closed the standard output, by ``>&-``."""
    monkeypatch.setattr(sys, "stdout", None)
    form = output_format("", "json", to_folder=False)
    path, write = Path("scan.nii"), choose_writer(form, None)
    choose_sink([path], None, form, write, to_folder=False, resume=False).write(path, ANSWER)


@pytest.mark.parametrize(
    ("name", "form"),
    [("one.mrk.json", "mrk.json"), ("all.csv", "csv"), ("all.long", "long"), ("a.json", "dcm")],
)
def test_no_folder_is_made_of_the_name_of_a_single_answer(
    name: str, form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / name
    with pytest.raises(SystemExit):
        output_format(str(target), form, to_folder=True)
    assert f"expected -o FOLDER for several scans as {form}, or" in capsys.readouterr().err
    assert output_format(str(target), form, to_folder=False).name == form
    assert output_format(f"{target}/", form, to_folder=True).name == form
    target.mkdir()
    assert output_format(str(target), form, to_folder=True).name == form
    assert output_format(str(tmp_path / "table.csv"), None, to_folder=True).name == "long"


@pytest.mark.parametrize("resume", [False, True])
def test_a_table_that_another_run_writes_is_refused_and_kept(
    models: Path, tmp_path: Path, resume: bool
) -> None:
    """Each wrote the rows that it knew of over those of the other, and ended with 0."""
    scan, table = tmp_path / "scan.nii", tmp_path / "new" / "all.csv"
    scan.write_bytes(toy_scan())
    words = ["detect", str(scan), "-o", str(table), "--models-dir", str(models)]
    words += ["--resume"] * resume
    with writing_alone(table, output_format(str(table), None, to_folder=True)):
        table.write_text("of another\n", encoding="utf-8")
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 1
        assert "but another writes" in result.stderr
        assert table.read_text(encoding="utf-8") == "of another\n"
    table.unlink()
    assert CliRunner().invoke(app, [*words, "-m", "none"]).exit_code == 1
    assert not table.exists()
    assert CliRunner().invoke(app, words).exit_code == 0
    assert table.exists()


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize(
    ("scan", "output", "name"),
    [
        ("one.nii", "one.nii", "json"),
        ("one.csv", "one.csv", "long"),
        ("images/a.dcm", "images", "dcm"),
        ("images/a.dcm", "images/../linked/a.dcm", "dcm"),
        ("images", "images/a.dcm", "dcm"),
        ("images", "images", "dcm"),
    ],
)
def test_an_answer_never_replaces_a_scan(
    scan: str,
    output: str,
    name: str,
    resume: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A report took the place of the image that it is about."""
    for file in ("one.nii", "one.csv"):  # Names of files that are given are free.
        (tmp_path / file).write_bytes(toy_scan())
    (tmp_path / "images").mkdir()
    (tmp_path / "linked").symlink_to("images")
    for file, content in zip(("a.dcm", "images.dcm"), as_dicom(), strict=False):
        (tmp_path / "images" / file).write_bytes(content)
    files, target = [tmp_path / scan], tmp_path / output
    form = output_format(str(target), name, to_folder=False)
    with pytest.raises(SystemExit):
        choose_sink(files, target, form, lambda _, __: b"", to_folder=False, resume=resume)
    assert "-o: expected another file than those that are read, got " in capsys.readouterr().err


def test_an_answer_replaces_one_of_an_earlier_run_beside_the_scan(tmp_path: Path) -> None:
    scan = tmp_path / "one.nii"
    scan.write_bytes(toy_scan())
    (tmp_path / "loop.nii").symlink_to("loop.nii")
    files = [scan, tmp_path / "loop.nii", tmp_path / "gone.nii"]
    form = output_format(str(tmp_path), None, to_folder=True)
    for _ in range(2):
        sink = choose_sink(
            files, tmp_path, form, choose_writer(form, None), to_folder=True, resume=False
        )
        sink.write(scan, ANSWER)
    assert json.loads((tmp_path / "one.json").read_bytes()) == ANSWER.model_dump(mode="json")


@needs_reports
def test_a_report_replaces_that_of_an_earlier_run_among_the_images_but_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second run refused to, as the report was taken for a part of the scan."""
    for number, content in enumerate(as_dicom()):
        (tmp_path / f"{number}.dcm").write_bytes(content)
    images, target = size_of(tmp_path), tmp_path / "report.dcm"
    form = output_format(str(target), None, to_folder=False)
    choose = partial(choose_sink, [tmp_path], target, form, to_folder=False, resume=False)
    for _ in range(2):
        choose(choose_writer(form, None)).write(tmp_path, ANSWER)
        assert size_of(tmp_path) == images
    target.write_bytes(changed(target.read_bytes(), Manufacturer="another"))
    with pytest.raises(SystemExit):
        choose(choose_writer(form, None))
    assert f"another file than those that are read, got {target}" in capsys.readouterr().err
