"""Precision: a promise of the model and a property of the device, whatever the clock says."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from app.errors import ModelRefused
from app.inference.detector import Detector
from app.inference.load import load_checked, self_check
from app.model.loader import load_module
from app.model.manifest import Manifest, read_manifest
from app.model.registry import Precision, PrecisionSetting, choose_precision
from app.model.selfcheck import write_selfcheck
from tests.support.device_loops import scan
from tests.support.model_folders import TILE, make_model_folder, make_program_folder
from tests.unit.model.test_selfcheck import Changed

CPU = torch.device("cpu")


class Rounded(Changed):
    """Answers a network's answer in float32, and another one in any lower precision."""

    def forward(self, tiles: Tensor) -> Tensor:
        answer: Tensor = self.network(tiles)
        return answer if answer.dtype == torch.float32 else answer * self.factor


def verify_in(folder: Path, text: str) -> Path:
    """Write into a folder in which precisions its model was verified."""
    manifest = folder / "model.toml"
    manifest.write_text(f"{manifest.read_text()}\n[precision]\n{text}\n")
    return folder


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every device compute bfloat16 natively, and nothing else below float32."""
    monkeypatch.setattr("app.model.registry.fast_precisions", lambda _device: ("bfloat16",))


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize(
    ("verified", "setting", "expected"),
    [
        ("", "auto", "float32"),
        ("bfloat16 = 0.01", "auto", "bfloat16"),
        ("float16 = 0.01", "auto", "float32"),
        ("float16 = 0.01\nbfloat16 = 0.02", "auto", "bfloat16"),
        ("bfloat16 = 0.01", "float32", "float32"),
        ("", "bfloat16", "bfloat16"),
    ],
)
def test_auto_takes_what_the_model_was_verified_in_and_the_device_computes(
    tmp_path: Path, verified: str, setting: PrecisionSetting, expected: Precision
) -> None:
    manifest = read_manifest(verify_in(make_model_folder(tmp_path), verified))
    assert choose_precision(manifest, CPU, setting) == expected


@pytest.mark.no_cover
@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("setting", ["auto", "bfloat16"])
def test_onnx_file_computes_in_what_it_says(tmp_path: Path, setting: PrecisionSetting) -> None:
    manifest = read_manifest(verify_in(make_program_folder(tmp_path), "bfloat16 = 0.01"))
    assert choose_precision(manifest, CPU, setting) == "float32"


def test_auto_is_float32_where_the_device_computes_nothing_lower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.model.registry.fast_precisions", lambda _device: ())
    manifest = read_manifest(verify_in(make_model_folder(tmp_path), "bfloat16 = 0.01"))
    assert choose_precision(manifest, CPU, "auto") == "float32"


@pytest.mark.usefixtures("native")
def test_a_model_computes_in_what_it_was_verified_in(tmp_path: Path) -> None:
    model = load_checked(make_model_folder(tmp_path), CPU, "auto")
    assert model.network.precision == "float32"
    verify_in(tmp_path / "toy", "bfloat16 = 0.01")
    assert load_checked(tmp_path / "toy", CPU, "auto").network.precision == "bfloat16"


def test_shift_that_is_no_distance_is_refused(tmp_path: Path) -> None:
    folder = verify_in(make_model_folder(tmp_path), "bfloat16 = -0.1")
    with pytest.raises(ModelRefused, match=r"precision\.bfloat16: .* greater than or equal to 0"):
        read_manifest(folder)


def test_precision_in_which_the_self_check_fails_refuses_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_model_folder(tmp_path)

    def load_rounded(folder: Path, manifest: Manifest, **_options: bool) -> Rounded:
        return Rounded(load_module(folder, manifest), 1.05)

    monkeypatch.setattr("app.model.registry.load_module", load_rounded)
    assert load_checked(folder, CPU).network.precision == "float32"
    message = r"toy: precision: .* in bfloat16 on cpu; got: toy: selfcheck: expected"
    with pytest.raises(ModelRefused, match=message):
        load_checked(folder, CPU, "bfloat16")


def test_model_set_to_bfloat16_finds_its_landmarks_and_passes_its_check_again(
    tmp_path: Path,
) -> None:
    folder = make_model_folder(tmp_path, voting={"threshold": 0.45})
    exact = load_checked(folder, CPU)
    lower = load_checked(folder, CPU, "bfloat16")
    assert lower.network.precision == "bfloat16"
    assert lower.digest == exact.digest
    self_check(lower)
    one, other = (Detector(model).detect(scan(1)) for model in (exact, lower))
    assert len(one.landmarks) == len(other.landmarks) == 3


@pytest.mark.usefixtures("native")
def test_second_network_computes_in_the_precision_of_the_model(tmp_path: Path) -> None:
    shape = {"mean": "shape.safetensors", "tolerance_mm": 2.0}
    folder = make_model_folder(tmp_path, "coarse", shape=shape)
    make_model_folder(folder, "fine", shape=shape, input={"tile_shape": list(TILE)})
    with (folder / "model.toml").open("a") as file:
        file.write('\n[refine]\nfolder = "fine"\n')
    write_selfcheck(folder)
    verify_in(folder, "bfloat16 = 0.01")
    model = load_checked(folder, CPU, "auto")
    assert model.refine is not None
    assert model.refine.network.precision == model.network.precision == "bfloat16"
