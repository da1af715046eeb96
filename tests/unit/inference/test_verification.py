"""Precisions below float32 are verified in millimetres, on scans, and written into the folder."""

from collections.abc import Iterable
from pathlib import Path
from shutil import copytree

import pytest
import torch
from typer.testing import CliRunner

from app.cli.main import app
from app.inference import Detector, load_checked
from app.inference.verification import verify_precisions
from app.io import Volume, read_volume
from app.model.editing import editing
from app.model.manifest import read_manifest
from app.model.sections import LowerPrecision
from app.model.selfcheck import write_precisions, write_selfcheck
from app.phantom import make_phantom, write_phantom
from tests.support.device_loops import scan
from tests.support.model_folders import make_model_folder

CPU = torch.device("cpu")
PHANTOM = Path(__file__).resolve().parents[3] / "models" / "phantom"


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let any processor pass for one that computes in bfloat16."""
    names = ("bfloat16",)
    monkeypatch.setattr("app.inference.verification.fast_precisions", lambda _device: names)


@pytest.fixture
def phantom(tmp_path: Path) -> Path:
    """The phantom's model, checked by noise: a phantom is slow in a precision that is emulated."""
    folder = Path(copytree(PHANTOM, tmp_path / "phantom"))
    with editing(folder) as document:
        document["selfcheck"] = {"input": "noise:7", "expected": "selfcheck.safetensors"}
    write_selfcheck(folder)
    return folder


@pytest.fixture
def phantom_scan(tmp_path: Path) -> str:
    phantom = make_phantom(9040)  # It takes two tiles, most others eight.
    write_phantom(phantom, tmp_path / "phantom.nii.gz")
    return str(tmp_path / "phantom.nii.gz")


def scans() -> Iterable[Volume]:
    return (scan(seed) for seed in (1, 2))


@pytest.mark.usefixtures("native")
def test_small_shifts_are_measured_in_mm(phantom: Path, phantom_scan: str) -> None:
    volumes = [read_volume(Path(phantom_scan).read_bytes())]
    found = {one.precision: one for one in verify_precisions(phantom, lambda: volumes, CPU)}
    assert found["bfloat16"].shift_mm is not None
    assert 0 < found["bfloat16"].shift_mm < 0.1
    assert found["float16"].shift_mm is None
    assert found["float16"].reason == "cpu does not compute in it natively"


@pytest.mark.usefixtures("native")
def test_a_large_shift_is_no_verified_precision(
    phantom: Path, phantom_scan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.inference.verification.MAX_SHIFT", 1e-9)
    volumes = [read_volume(Path(phantom_scan).read_bytes())]
    bfloat16 = verify_precisions(phantom, lambda: volumes, CPU)[0]
    assert bfloat16.shift_mm is None
    assert "expected landmarks within" in bfloat16.reason


def test_scans_that_show_nothing_verify_nothing(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path, voting={"threshold": 0.999999})
    assert verify_precisions(folder, scans, CPU) == ()


def test_landmarks_in_doubt_verify_nothing(phantom: Path, phantom_scan: str) -> None:
    """How far these shift is not measured."""
    with editing(phantom) as document:
        for landmark in document["landmarks"]:
            landmark["presence_threshold"] = 2.0
    volume = read_volume(Path(phantom_scan).read_bytes())
    landmarks = Detector(load_checked(phantom, CPU)).detect(volume).landmarks
    assert "low_confidence" in {one.status for one in landmarks}
    assert verify_precisions(phantom, lambda: [volume], CPU) == ()


def test_the_section_is_replaced_and_all_else_stays(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path, checked=False)
    file = folder / "model.toml"
    text = file.read_text().replace('name = "toy"', 'name = "toy" # [precision]')
    file.write_text(text)
    expected: tuple[tuple[dict[LowerPrecision, float], str], ...] = (
        ({"bfloat16": 0.00123}, "\n[precision]\nbfloat16 = 0.0013\n"),
        ({"float16": 0.0}, "\n[precision]\nfloat16 = 0.0\n"),
        ({}, "\n"),  # The blank line before the section stays.
    )
    for shifts_mm, section in expected:
        write_precisions(folder, shifts_mm)
        assert file.read_text() == text + section


@pytest.mark.usefixtures("native")
def test_check_writes_what_was_verified(phantom: Path, phantom_scan: str) -> None:
    words = ["check", str(phantom), "--write", "--device", "cpu", "--scans", phantom_scan]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert "bfloat16: landmarks shift by" in result.stderr
    verified = read_manifest(phantom).precision.verified
    assert verified.keys() == {"bfloat16"}
    assert all(0 < shift_mm < 0.1 for shift_mm in verified.values())
