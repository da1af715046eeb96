"""The command, as a person types it."""

import json
import re
import socket
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import nibabel as nib
import numpy as np
import pytest
import torch
from typer.testing import CliRunner, Result

from app.cli import main
from app.cli.main import app
from app.inference import load_checked
from app.io.slicer import read_landmarks
from app.model import LoadedModel
from app.settings import PREFIX
from tests.support.dicom_files import PATIENT, PLACE, as_dicom, zipped
from tests.support.model_folders import make_model_folder, make_program_folder
from tests.support.required import needs_reports
from tests.support.scan_files import as_metaimage, as_nrrd
from tests.support.services import MODEL, ServiceProcess, toy_scan
from tests.support.structured_reports import read_report

LANDMARKS = 3


@pytest.fixture
def scans(tmp_path: Path) -> Path:
    folder = tmp_path / "scans"
    folder.mkdir()
    (folder / "one.nii").write_bytes(toy_scan())
    (folder / "two.nii").write_bytes(toy_scan((24, 26, 18)))
    return folder


def run(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def test_detect_prints_the_answer_for_one_scan(models: Path, scans: Path) -> None:
    result = run("detect", scans / "one.nii", "--models-dir", models)
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert answer["model"]["name"] == MODEL
    assert len(answer["landmarks"]) == LANDMARKS


def test_detect_writes_a_folder_for_a_folder(models: Path, scans: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = run("detect", scans, "-o", out, "--format", "mrk.json", "--models-dir", models)
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in out.iterdir()) == ["one.mrk.json", "two.mrk.json"]
    assert len(read_landmarks(out / "one.mrk.json")) <= LANDMARKS


@pytest.mark.parametrize(("given", "ending"), [("folder", ""), ("scan", "/")])
def test_detect_writes_one_scan_to_a_folder_that_is_meant_as_one(
    models: Path, scans: Path, tmp_path: Path, given: str, ending: str
) -> None:
    (scans / "two.nii").unlink()
    scan = scans if given == "folder" else scans / "one.nii"
    result = run("detect", scan, "-o", f"{tmp_path / 'found'}{ending}", "--models-dir", models)
    assert result.exit_code == 0, result.output
    assert [path.name for path in (tmp_path / "found").iterdir()] == ["one.json"]


def test_detect_prints_the_answer_for_a_folder_of_one_scan(models: Path, scans: Path) -> None:
    (scans / "two.nii").unlink()
    result = run("detect", scans, "--models-dir", models)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["model"]["name"] == MODEL


def test_detect_writes_the_format_of_the_suffix(models: Path, scans: Path, tmp_path: Path) -> None:
    out = tmp_path / "x.tsv"
    result = run("detect", scans / "one.nii", "-o", out, "--models-dir", models)
    assert result.exit_code == 0, result.output
    assert out.read_text().startswith("label\tl\tp\ts\tdefined")


def test_detect_takes_a_folder_of_dicom_files_for_one_scan(models: Path, tmp_path: Path) -> None:
    folder = tmp_path / "export.2"
    below = folder / "IMAGES"
    below.mkdir(parents=True)
    (folder / "DICOMDIR.txt").write_text("an index of another kind")
    voxels = np.random.default_rng(7).normal(100.0, 20.0, (20, 18, 24)).astype(np.int16)
    for number, file in enumerate(as_dicom(voxels)[::-1]):
        (below / f"I{number}").write_bytes(file)
    result = run("detect", folder, "--models-dir", models)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["volume"]["shape"] == [20, 18, 24]
    result = run("detect", folder, "-o", f"{tmp_path / 'out'}/", "--models-dir", models)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["export.2.json"]
    (below / "scout").write_bytes(as_dicom(voxels[:, :, :1], SeriesInstanceUID="1.2")[0])
    result = run("detect", folder, "--models-dir", models)
    assert result.exit_code == 1
    assert "choose a series, from 0" in result.stderr
    result = run("detect", folder, "--models-dir", models, "--series", 1)
    assert json.loads(result.stdout)["volume"]["shape"] == [20, 18, 1]


@needs_reports
def test_detect_writes_a_report_that_says_whose_the_images_are(
    models: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "series"
    folder.mkdir()
    voxels = np.random.default_rng(7).normal(100.0, 20.0, (20, 18, 24)).astype(np.int16)
    for number, file in enumerate(as_dicom(voxels, PatientID="77")):
        (folder / f"{number}.dcm").write_bytes(file)
    for target in ("found.dcm", "out/"):
        result = run("detect", folder, "-o", f"{tmp_path}/{target}", "--models-dir", models,
                     "--format", "dcm")  # fmt: skip
        assert result.exit_code == 0, result.output
    for path in (tmp_path / "found.dcm", tmp_path / "out" / "series.dcm"):
        dataset, groups = read_report(path.read_bytes())
        assert len(groups) == LANDMARKS
        assert (dataset.PatientName, dataset.PatientID) == (PATIENT, "77")
    result = run("detect", folder, "--models-dir", models, "--format", "dcm")
    assert result.exit_code == 1
    assert "expected -o FILE.dcm for dcm" in result.stderr


@needs_reports
def test_detect_writes_a_report_and_no_name_elsewhere(
    models: Path, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    voxels = np.random.default_rng(7).normal(100.0, 20.0, (20, 18, 24)).astype(np.int16)
    scan, target = tmp_path / "scan.zip", tmp_path / "found.dcm"
    scan.write_bytes(zipped(as_dicom(voxels, PatientName="DOE JOHN")))  # Without the ^ that parts.
    result = run("detect", scan, "-o", target, "--models-dir", models)
    assert result.exit_code == 0, result.output
    assert read_report(target.read_bytes())[0].PatientName == "DOE JOHN"
    assert [str(each.message) for each in recwarn if "DOE" in str(each.message)] == []
    assert "DOE" not in result.output


@needs_reports
def test_detect_writes_no_report_on_what_is_not_dicom(models: Path, scans: Path) -> None:
    target = scans.parent / "one.dcm"
    result = run("detect", scans / "one.nii", "-o", target, "--models-dir", models)
    assert result.exit_code == 1
    assert "expected a scan that came as DICOM" in result.stderr
    assert not target.exists()


def test_detect_finds_scans_of_every_format_in_a_folder(models: Path, tmp_path: Path) -> None:
    folder = tmp_path / "scans"
    folder.mkdir()
    voxels = np.random.default_rng(7).normal(100.0, 20.0, (20, 18, 24)).astype(np.int16)
    (folder / "one.nrrd").write_bytes(as_nrrd(voxels, PLACE))
    (folder / "two.mha").write_bytes(as_metaimage(voxels, PLACE))
    (folder / "three.zip").write_bytes(zipped(as_dicom(voxels)))
    result = run("detect", folder, "-o", tmp_path / "out", "--models-dir", models)
    assert result.exit_code == 0, result.output
    found = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert found == ["one.json", "three.json", "two.json"]


def test_detect_lists_failures_and_continues(models: Path, scans: Path, tmp_path: Path) -> None:
    (scans / "[b]broken.nii").write_bytes(b"no scan at all")
    result = run("detect", scans, "-o", tmp_path / "out", "--models-dir", models)
    assert result.exit_code == 1
    assert "[b]broken.nii: expected a NIfTI, NRRD" in result.stderr
    assert len(list((tmp_path / "out").iterdir())) == 2


def test_detect_needs_a_folder_for_several_scans(models: Path, scans: Path) -> None:
    result = run("detect", scans, "--models-dir", models)
    assert result.exit_code == 1
    assert "expected -o FOLDER" in result.stderr


def test_detect_gives_the_same_landmarks_through_a_service(models: Path, scans: Path) -> None:
    here = json.loads(run("detect", scans / "one.nii", "--models-dir", models).stdout)
    service = ServiceProcess(models)
    try:
        result = run("detect", scans / "one.nii", "--url", service.url)
    finally:
        service.kill()
    assert result.exit_code == 0, result.output
    there = json.loads(result.stdout)
    for one, other in zip(here["landmarks"], there["landmarks"], strict=True):
        assert one["status"] == other["status"]
        assert one["ras_mm"] == pytest.approx(other["ras_mm"], abs=1e-3)


def test_detect_reports_an_unreachable_service(scans: Path) -> None:
    result = run("detect", scans / "one.nii", "--url", "http://127.0.0.1:1")
    assert result.exit_code == 1
    assert "expected a service at" in result.stderr


@pytest.mark.parametrize(
    ("setting", "value", "words"),
    [
        ("MAX_VOXELS", "100", "at most 100 voxels"),
        ("MAX_AXIS", "10", "at most 10 voxels along an axis"),
        ("MAX_INFLATED_BYTES", "1MiB", "at most 1,048,576 bytes"),
        ("DEFAULT_MODEL", "absent", "expected a model folder, got 'absent'"),
        ("DEVICE", "cuda:99", "cuda:99"),
        ("PORT", "99999", "LANDMARKD_PORT: expected"),
    ],
)
def test_detect_obeys_the_settings_of_the_service(
    setting: str,
    value: str,
    words: str,
    models: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scan = tmp_path / "large.nii"
    scan.write_bytes(toy_scan((72, 70, 64)))
    monkeypatch.setenv(PREFIX + setting, value)
    result = run("detect", scan, "--models-dir", models)
    assert result.exit_code == 1
    assert words in f"{result.stderr}{result.exception}"


def test_detect_uses_the_default_model_of_the_settings(
    tmp_path: Path, scans: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = tmp_path / "models"
    models.mkdir()
    for name in ("first", "second"):
        make_model_folder(models, name)
    monkeypatch.setenv(f"{PREFIX}MODELS_DIR", str(models))
    assert "found: first, second" in str(run("detect", scans / "one.nii").exception)
    monkeypatch.setenv(f"{PREFIX}DEFAULT_MODEL", "second")
    result = run("detect", scans / "one.nii")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["model"]["name"] == "second"


def test_detect_uses_threads_and_precision_of_the_settings(
    models: Path, scans: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[tuple[int, str]] = []

    def load(
        folder: Path, device: torch.device, precision: str, *, allow_torchscript: bool
    ) -> LoadedModel:
        assert not allow_torchscript
        loaded.append((torch.get_num_threads(), precision))
        return load_checked(folder, device)

    threads = torch.get_num_threads()
    monkeypatch.setattr("app.cli.local.load_checked", load)
    monkeypatch.setenv(f"{PREFIX}THREADS", str(threads + 1))
    monkeypatch.setenv(f"{PREFIX}PRECISION", "bfloat16")
    try:
        result = run("detect", scans / "one.nii", "--models-dir", models)
    finally:
        torch.set_num_threads(threads)
    assert result.exit_code == 0, result.output
    assert loaded == [(threads + 1, "bfloat16")]


def test_version_is_printed_by_the_module_too() -> None:
    process = subprocess.run(
        [sys.executable, "-m", "app.cli", "--version"], capture_output=True, text=True, check=True
    )
    assert process.stdout == f"landmarkd {version('landmarkd')}\n"
    assert run("--version").stdout == process.stdout


def test_check_accepts_a_valid_folder_and_names_errors(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path)
    assert run("check", folder).exit_code == 0
    text = (folder / "model.toml").read_text()
    (folder / "model.toml").write_text(re.sub('sha256 = ".', 'sha256 = "x', text, count=1))
    result = run("check", folder)
    assert result.exit_code == 1
    assert "sha256" in str(result.exception)


def test_torchscript_is_checked_and_listed_only_if_the_setting_allows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_program_folder(tmp_path, script=True)
    refused = [run("check", folder), run("check", folder, "--write")]
    assert all("LANDMARKD_ALLOW_TORCHSCRIPT" in str(one.exception) for one in refused)
    assert run("models", "--models-dir", tmp_path).exit_code == 1
    monkeypatch.setenv("LANDMARKD_ALLOW_TORCHSCRIPT", "true")
    for words in (
        ("check", folder),
        ("check", folder, "--write"),
        ("models", "--models-dir", tmp_path),
    ):
        assert run(*words).exit_code == 0


def test_check_can_write_hashes_and_self_check(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path, checked=False)
    assert run("check", folder).exit_code == 1
    assert run("check", folder, "--write").exit_code == 0
    assert run("check", folder).exit_code == 0


def test_check_refuses_scans_that_it_would_not_use(tmp_path: Path) -> None:
    result = run("check", make_model_folder(tmp_path), "--scans", tmp_path / "scan.nii")
    assert result.exit_code == 1
    assert "--scans: expected --write beside it" in str(result.exception)


def test_models_lists_valid_and_refused_folders(tmp_path: Path) -> None:
    make_model_folder(tmp_path, "sound")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "model.toml").touch()
    manifest = tmp_path / "sound" / "model.toml"
    manifest.write_text(manifest.read_text().replace("noise in, noise out", "[b]no[/b] markup"))
    result = run("models", "--models-dir", tmp_path)
    assert result.exit_code == 1
    assert "sound" in result.stdout
    assert "broken" in result.stdout
    assert "[b]no[/b]" in result.stdout


def test_help_names_the_setting_of_each_option() -> None:
    assert "LANDMARKD_DEFAULT_MODEL" in run("detect", "--help").stdout


def test_phantom_writes_a_scan_and_its_truth(tmp_path: Path) -> None:
    result = run("phantom", tmp_path / "p.nii.gz", "--seed", 5)
    assert result.exit_code == 0, result.output
    image = nib.Nifti1Image.from_filename(tmp_path / "p.nii.gz")
    points = read_landmarks(tmp_path / "p.mrk.json")
    index = nib.affines.apply_affine(np.linalg.inv(image.affine), np.stack(list(points.values())))
    assert (index >= 0).all()
    assert (index <= np.array(image.shape) - 1).all()


@pytest.mark.parametrize("name", ["p.txt", "p.nii"])
def test_phantom_needs_the_name_of_a_scan(name: str, tmp_path: Path) -> None:
    result = run("phantom", tmp_path / name)
    assert result.exit_code == 1
    assert "expected a name ending in .nii.gz" in str(result.exception)


def test_taken_port_is_a_clear_message(models: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process = subprocess.run(
            [sys.executable, "-m", "app.cli", "serve", "--port", str(port)],
            env={"LANDMARKD_MODELS_DIR": str(models)},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert process.returncode == 1
    assert f"127.0.0.1:{port} cannot be used" in process.stderr
    assert "choose another with --host or --port" in process.stderr
    assert "Traceback" not in process.stderr


def test_demo_calls_an_address_of_ipv6_in_brackets(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = SimpleNamespace(getsockname=lambda: ("::1", 8000, 0, 0))
    called: list[str] = []
    monkeypatch.setattr(main, "_listen", lambda _: listener)
    monkeypatch.setattr("gc.disable", lambda: None)
    monkeypatch.setattr("app.cli.demo.start_demo", lambda url, _: called.append(url))
    monkeypatch.setattr("app.server.serve", lambda *_: 0)
    assert run("serve", "--demo", "--host", "::1").exit_code == 0
    assert called == ["http://[::1]:8000"]


def test_setting_out_of_bounds_is_a_clear_message(models: Path) -> None:
    process = subprocess.run(
        [sys.executable, "-m", "app.cli", "serve", "--port", "99999"],
        env={"LANDMARKD_MODELS_DIR": str(models)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert process.returncode == 1
    assert "port" in process.stderr
    assert "Traceback" not in process.stderr


def test_command_without_pytorch_says_what_is_missing() -> None:
    """As where only the client is installed."""
    program = "import sys; sys.modules['torch'] = None; from app.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "models"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("Cannot start: this command needs torch, which is not installed")
