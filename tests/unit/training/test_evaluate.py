"""``landmarkd evaluate``: the phantom model on phantoms it never saw."""

import csv
import gzip
import re
import shutil
from dataclasses import replace
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from typer.testing import CliRunner, Result

from app.cli.main import app
from app.errors import StartupError
from app.measurements import MeasurementSpec
from app.phantom import write_phantoms
from app.training.cli.arguments import load_model, make_console
from app.training.data.issues import Issue, issue_table
from app.training.data.specimens import SpecimenFiles
from app.training.evaluate.digits import format_number
from app.training.evaluate.measured import Deviation, measurement_rows
from app.training.evaluate.outcomes import summarise_errors
from app.training.evaluate.plots import plot_confidence, plot_errors, plot_in_scan, plot_success
from app.training.evaluate.report import ReportHeader, model_header, write_report
from app.training.evaluate.tables import (
    HEADINGS,
    IDENTIFIED,
    WITHIN,
    format_metrics,
    print_tables,
    write_tables,
)
from tests.support.full_disk import limited_files
from tests.support.model_folders import make_model_folder
from tests.support.outcomes import outcome
from tests.unit.model.test_precision import verify_in
from tests.unit.training.test_synthetic_crops import slope

MODEL = Path(__file__).resolve().parents[3] / "models" / "phantom"
MARKS = 6


@pytest.fixture(scope="module")
def phantoms(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("phantoms")
    write_phantoms(folder, count=2, seed=5003)
    return folder


def evaluate(data: Path, *words: object) -> Result:
    where = ["--scans", data / "scans", "--landmarks", data / "landmarks", "--device", "cpu"]
    return CliRunner().invoke(app, ["evaluate", *map(str, [MODEL, *where, *words])])


@pytest.fixture(scope="module")
def report(phantoms: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Evaluate both phantoms, and a scan that is none."""
    data = tmp_path_factory.mktemp("data")
    shutil.copytree(phantoms, data, dirs_exist_ok=True)
    (data / "scans" / "broken.nii").write_bytes(b"no scan at all")
    shutil.copy(
        data / "landmarks" / "phantom-5003.mrk.json", data / "landmarks" / "broken.mrk.json"
    )
    strange = data / "landmarks" / "phantom-5003.mrk.json"
    strange.write_text(strange.read_text().replace('"ring"', '"wedding ring"'))
    result = evaluate(data, "-o", data / "report")
    (data / "stdout").write_text(result.stdout)
    (data / "stderr").write_text(result.stderr)
    assert result.exit_code == 1, result.output
    return data


def test_device_is_that_of_the_settings_unless_the_command_names_one(
    phantoms: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What trains and measures took the first GPU, whatever the settings said."""
    monkeypatch.setenv("LANDMARKD_DEVICE", "cuda:99,cpu")
    data = ["--scans", str(phantoms / "scans"), "--landmarks", str(phantoms / "landmarks")]
    for given, name in ([], "cuda:99"), (["--device", "cuda:98"], "cuda:98"):
        result = CliRunner().invoke(app, ["evaluate", str(MODEL), *data, *given])
        assert isinstance(result.exception, StartupError)
        assert f"expected a CUDA device {name}" in str(result.exception)


def read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(("setting", "expected"), [("", "bfloat16"), ("float32", "float32")])
def test_a_model_is_measured_in_the_precision_that_it_is_served_in(
    setting: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was measured in float32, so that no table told of the errors of what was served."""
    folder = verify_in(make_model_folder(tmp_path), "bfloat16 = 0.01")
    monkeypatch.setattr("app.model.registry.fast_precisions", lambda _device: ("bfloat16",))
    monkeypatch.setenv("LANDMARKD_PRECISION", setting)
    model = load_model(folder, "cpu")
    assert model.network.precision == expected
    assert model_header(model).text.endswith(f", measured in {expected} on cpu.")
    manifest = model.manifest.model_copy(update={"description": ""})
    assert model_header(replace(model, manifest=manifest)).text.startswith("Digest ")


def test_a_disk_that_is_full_leaves_tables_and_page_as_they_were(tmp_path: Path) -> None:
    """Half a page took the place of the one before; a limit on files stands for a full disk."""
    outcomes = [outcome(scan=f"{number}", error_mm=float(number)) for number in range(99)]

    gone = [SpecimenFiles(one.scan, Path("gone"), Path("gone")) for one in outcomes]
    page = tmp_path / "report.html"
    write_report(outcomes, ReportHeader("toy", "before"), gone, page)
    write_tables(outcomes, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert before.keys() == {"report.html", "errors.csv", "summary.csv"}
    with limited_files(2_000):
        with pytest.raises(OSError, match="File too large"):
            write_report(outcomes, ReportHeader("toy", "after"), gone, page)
        with pytest.raises(OSError, match="File too large"):
            write_tables(outcomes[:50], tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_every_landmark_of_every_scan_is_a_line(report: Path) -> None:
    rows = read(report / "report" / "errors.csv")
    assert len(rows) == 2 * MARKS
    for row in rows:
        places = np.array([row[f"{which}_{axis}"] for which in ("true", "found") for axis in "xyz"])
        if row["error_mm"]:
            true, found = places.astype(float).reshape(2, 3)
            assert float(row["error_mm"]) == pytest.approx(np.linalg.norm(found - true), abs=2e-4)
            assert float(row["error_mm"]) < 2
        elif not row["present"]:
            assert not any(places[:3])


def test_a_folder_that_cannot_be_made_is_told_before_anything_is_measured(
    phantoms: Path, tmp_path: Path
) -> None:
    (tmp_path / "report").touch()
    result = evaluate(phantoms, "-o", tmp_path / "report")
    assert isinstance(result.exception, FileExistsError)
    assert not result.stdout


def test_the_summary_agrees_with_the_lines(report: Path) -> None:
    rows = read(report / "report" / "errors.csv")
    summary = read(report / "report" / "summary.csv")
    assert [row["of"] for row in summary] == ["all", *["landmark"] * MARKS, *["scan"] * 2]
    errors = [float(row["error_mm"]) for row in rows if row["error_mm"]]
    assert float(summary[0]["mean_mm"]) == pytest.approx(np.mean(errors), abs=1e-3)
    assert set(HEADINGS) < set(summary[0])
    present = sum(row["present"] == "True" for row in rows)
    assert int(summary[0]["present"]) == present
    assert int(summary[0]["unknown"]) == len(rows) - present > 0
    assert int(summary[0]["absent"]) == 0


def test_what_a_file_does_not_list_is_unknown_unless_missing_means_absent(
    report: Path, tmp_path: Path
) -> None:
    """The ring of one phantom has another name, which is no reason to call its ring invented."""
    output = (report / "stdout").read_text()
    page = (report / "report" / "report.html").read_text()
    unknown = int(read(report / "report" / "summary.csv")[0]["unknown"])
    for text in (" ".join(output.split()), page):
        assert f"Landmarks without a position in their files: {unknown}." in text
    (ring,) = (
        row
        for row in read(report / "report" / "errors.csv")
        if (row["scan"], row["landmark"]) == ("phantom-5003", "ring")
    )
    assert (ring["present"], ring["status"]) == ("", "detected")
    words = ("--only", "phantom-5003", "--missing", "absent", "-o", tmp_path)
    result = evaluate(report, *words)
    assert "a position in their files" not in result.stdout
    (row,) = (row for row in read(tmp_path / "summary.csv") if row["name"] == "ring")
    assert (row["absent"], row["invented"], row["unknown"]) == ("1", "1", "0")


def test_the_page_is_self_contained(report: Path) -> None:
    page = (report / "report" / "report.html").read_text()
    sources = re.findall(r'src="([^"]{0,30})', page)
    assert len(sources) == 3 + 6
    assert all(source.startswith("data:image/svg+xml;base64,") for source in sources)
    assert "http" not in page
    assert "<h1>phantom 1.1.0</h1>" in page


def test_the_tables_are_printed(report: Path) -> None:
    text = (report / "stdout").read_text()
    for word in ("mean", "p95", "≤0.25", "dumbbell", "phantom-5004", "out_of_field"):
        assert word in text.replace("\n", "")


def test_a_scan_that_cannot_be_read_is_named_at_the_end(report: Path) -> None:
    last = (report / "stderr").read_text().strip().splitlines()[-1]
    assert last.startswith("broken: expected a NIfTI, NRRD")


def test_a_landmark_file_that_cannot_be_read_is_named(phantoms: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(phantoms, data)
    (data / "landmarks" / "phantom-5003.mrk.json").write_text("{}")
    result = evaluate(data)
    assert result.exit_code == 1
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("phantom-5003: phantom-5003.mrk.json cannot be read")


def test_landmarks_in_another_frame_count_for_nothing(phantoms: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(phantoms, data)
    relabelled = data / "landmarks" / "phantom-5003.mrk.json"
    relabelled.write_text(relabelled.read_text().replace('"LPS"', '"RAS"'))
    result = evaluate(data, "-o", tmp_path)
    assert result.exit_code == 1
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("phantom-5003: expected the landmarks of phantom-5003.mrk.json inside")
    assert "outside: they look like LPS written as RAS" in last
    assert {row["scan"] for row in read(tmp_path / "errors.csv")} == {"phantom-5004"}


def test_landmarks_that_the_model_does_not_know_are_named(report: Path) -> None:
    assert (
        "does not know these landmarks of the files: wedding ring"
        in (report / "stderr").read_text()
    )


def test_a_file_of_other_names_is_a_failure_and_no_empty_table(
    phantoms: Path, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    shutil.copytree(phantoms, data)
    for file in (data / "landmarks").iterdir():  # As 3D Slicer puts the name of its list first.
        file.write_text(file.read_text().replace('"label": "', '"label": "F-'))
    result = evaluate(data)
    assert result.exit_code == 1
    last = result.stderr.strip().splitlines()[-1]
    assert last.endswith("expected landmarks of the model in phantom-5004.mrk.json, got none")


def test_warnings_that_quote_a_model_command_no_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its description could clear the screen."""
    warnings = ("The model is for: \x1b[2Jskulls\u202e", "noisy")
    print_tables([outcome(0.1, scan="one", warnings=warnings)], make_console())
    *_, first, second = capsys.readouterr().out.splitlines()
    assert first == r"one: The model is for: \x1b[2Jskulls\u202e"
    assert second == "one: noisy"


def test_files_that_quote_command_no_terminal(
    phantoms: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Names of landmarks and of scans come with a data set, and could clear the screen."""
    data = tmp_path / "data"
    shutil.copytree(phantoms, data)
    for kind in ("scans", "landmarks"):
        file = next((data / kind).glob("phantom-5003*"))
        file.rename(file.with_name(file.name.replace("phantom", "\x1b[2J")))
    (data / "scans" / "\x1b[2J-5003.nii.gz").write_bytes(b"no scan at all")
    result = evaluate(data)
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith(r"\x1b[2J-5003: expected a NIfTI")
    some = [outcome(0.1, landmark="\x1b[2Jtip", scan="\x1b[2Jone")]
    print_tables(some, make_console())
    make_console().print(issue_table([Issue("error", "\x1b[2Jtip", "not in \x1b[2Jone")]))
    said = capsys.readouterr().out
    assert "\x1b" not in result.output + said
    assert said.count(r"\x1b[2Jtip") == said.count(r"\x1b[2Jone") == 2


def test_errors_in_scans_of_cells_are_not_zero(tmp_path: Path) -> None:
    """Half a micrometre was 0.000 mm in all tables, as if the model were exact."""
    some = [outcome(mm, region95_mm=6e-4) for mm in (4e-4, 5e-4)]
    assert format_metrics(some)["mean_mm"] == "0.000450"
    assert summarise_errors(some).startswith("mean 0.000450 mm, median 0.000450, p95 0.000495")
    write_tables(some, tmp_path)
    row = read(tmp_path / "errors.csv")[1]
    assert (row["error_mm"], row["region95_mm"]) == ("0.0005000", "0.0006000")
    assert (row["true_x"], row["found_x"]) == ("1.000000", "1.000500")
    spec = MeasurementSpec(name="length", kind="distance", points=("a", "b"))
    (line,) = measurement_rows([Deviation(spec, 2e-3, 2.5e-3, 7e-4)])
    assert line[3:6] == ["0.00050", "0.00050", "0.00070"]
    assert format_number(float("inf")) == "inf"
    assert float(format_number(1.4e-17)) == 0.0  # rounding, as of the deviation of equal errors


def test_brackets_in_names_are_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    """Neither is swallowed, nor does one that looks like an end tag end the command."""
    names = ("tip [left]", "tip [/right]")
    some = [outcome(0.1, landmark=name, scan=f"{name} 1") for name in names]
    print_tables(some, make_console())
    make_console().print(issue_table([Issue("error", *names)]))
    said = capsys.readouterr().out
    for name in names:
        assert said.count(name) == 3


def test_scans_whose_answers_warn_or_doubt_are_named(phantoms: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(phantoms, data)
    (scan, _) = sorted((data / "scans").iterdir())
    image = nib.Nifti1Image.from_bytes(gzip.decompress(scan.read_bytes()))
    image.header.set_xyzt_units("unknown")
    scan.write_bytes(gzip.compress(image.to_bytes()))
    result = evaluate(data, "-o", tmp_path)
    (line,) = (line for line in result.stdout.splitlines() if "unit of length" in line)
    assert line.startswith("phantom-5003: ")
    assert line in (tmp_path / "report.html").read_text()
    for row in read(tmp_path / "errors.csv"):
        assert (f"{row['scan']}: {row['warnings']}" == line) == (row["scan"] == "phantom-5003")


def test_doubtful_landmarks_of_a_scan_are_counted() -> None:
    some = [outcome(0.2, status="low_confidence"), outcome(0.2), outcome(status="not_found")]
    cells = format_metrics(some)
    assert (cells["missed"], cells["doubtful"]) == ("2", "1")


def test_printed_shares_are_those_of_the_files(capsys: pytest.CaptureFixture[str]) -> None:
    """Two of three are 66.7 %, and not 66."""
    some = [outcome(mm, scan=f"s{index}") for index, mm in enumerate((0.1, 0.2, 0.9))]
    print_tables(some, make_console())
    shares = format_metrics(some)
    shown = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("all 0"))
    assert [shares[key] for key in WITHIN[:3]] == ["66.7", "66.7", "100.0"]
    assert shown.split()[5:8] == ["66.7", "66.7", "100.0"]


def test_only_the_named_scans_are_used(phantoms: Path) -> None:
    result = evaluate(phantoms, "--only", "phantom-5004")
    assert result.exit_code == 0, result.output
    assert "5004" in result.stdout
    assert "5003" not in result.stdout


@pytest.mark.parametrize(
    ("words", "reason"), [(["--only", "nobody"], "nobody"), (["--scans", "nowhere"], "a folder")]
)
def test_scans_that_are_not_there_are_named(phantoms: Path, words: list[str], reason: str) -> None:
    result = evaluate(phantoms, *words)
    assert result.exit_code == 2
    assert reason in result.stderr


def test_plots_accept_scans_without_errors_and_points_at_the_border() -> None:
    missed = [outcome(status="not_found"), outcome(present=False)]
    for plot in (plot_errors, plot_success, plot_confidence):
        assert plot(missed).startswith("<?xml")
    volume = slope((5, 9, 7))
    assert "<image" in plot_in_scan(outcome(30.0), volume)


def test_the_plot_of_confidences_shows_none_of_unknown_presence_as_absent() -> None:
    some = [outcome(0.3), outcome(present=False)]
    unknown = [outcome(present=False, known=False)] * 2
    assert "absent (1)" in plot_confidence([*some, *unknown])
    assert "absent" not in plot_confidence([outcome(0.3), *unknown])


def test_shares_of_present_landmarks_of_which_none_was_placed_are_zero() -> None:
    """Empty cells would drop out of an average over the rows of ``summary.csv``."""
    shares = [*WITHIN, IDENTIFIED]
    missed = format_metrics([outcome(status="not_found")] * 2)
    assert [missed[name] for name in shares] == ["0.0"] * len(shares)
    assert missed["mean_mm"] == ""
    absent = format_metrics([outcome(present=False)])
    assert [absent[name] for name in shares] == [""] * len(shares)


def test_a_landmark_named_with_dollars_is_no_formula() -> None:
    assert plot_errors([outcome(0.3, landmark="$x^$")]).startswith("<?xml")
