"""Self-checks: a model that answers otherwise than when its folder was made does not serve."""

import stat
from pathlib import Path

import numpy as np
import pytest
import torch
from onnx import NodeProto
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from app.errors import ModelRefused
from app.model.loader import load_module
from app.model.manifest import Manifest, read_manifest
from app.model.modules import read_script
from app.model.network import Network
from app.model.selfcheck import (
    check_noise,
    check_points,
    load_samples,
    make_noise,
    write_selfcheck,
)
from tests.support.model_folders import (
    TILE,
    make_blob_folder,
    make_model_folder,
    manifest_table,
    scripted,
)
from tests.support.onnx_files import array, graph, node

CPU = torch.device("cpu")
HEATMAP = {"output": "heatmaps", "activation": "sigmoid"}


class Changed(nn.Module):
    """Answers something else than the network it holds."""

    def __init__(self, network: nn.Module, factor: float) -> None:
        super().__init__()
        self.network = network
        self.factor = factor

    def forward(self, tiles: Tensor) -> Tensor:
        answer: Tensor = self.network(tiles)
        return answer * self.factor


class Raises(nn.Module):
    """Raises an error of several lines."""

    def forward(self, tiles: Tensor) -> Tensor:
        raise ValueError(f"no good\n{tiles}")


class OfPairs(nn.Module):
    """Takes two tiles and no other number."""

    def forward(self, tiles: Tensor) -> Tensor:
        return tiles.view(2, 1, *TILE)


def check(folder: Path, module: nn.Module | None = None, **options: torch.dtype) -> None:
    manifest = read_manifest(folder)
    network = Network(manifest, module or load_module(folder, manifest), CPU, **options)
    check_noise(manifest, network, load_samples(folder, manifest))


def check_changed(folder: Path, factor: float) -> None:
    check(folder, Changed(load_module(folder, read_manifest(folder)), factor))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unchanged_model_passes(tmp_path: Path, dtype: torch.dtype) -> None:
    check(make_model_folder(tmp_path), dtype=dtype)


def test_differences_within_tolerance_pass(tmp_path: Path) -> None:
    check_changed(make_model_folder(tmp_path), 1.01)


@pytest.mark.parametrize("factor", [1.03, 0.0, float("nan")])
def test_other_answers_are_refused(tmp_path: Path, factor: float) -> None:
    folder = make_model_folder(tmp_path)
    with pytest.raises(ModelRefused, match=r"toy: selfcheck: expected scores within 0.02 .* got "):
        check_changed(folder, factor)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('activation = "sigmoid"', 'activation = "sigmoid"\noffset_order = "landmark"'),
        ('activation = "sigmoid"', 'activation = "sigmoid"\noffset_unit = "mm"'),
    ],
)
def test_output_read_otherwise_is_refused(tmp_path: Path, old: str, new: str) -> None:
    folder = make_model_folder(tmp_path)
    text = (folder / "model.toml").read_text()
    (folder / "model.toml").write_text(text.replace(old, new))
    with pytest.raises(ModelRefused, match="selfcheck: expected offsets within"):
        check(folder)


def test_number_of_channels_is_checked(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path)
    with (folder / "model.toml").open("a") as file:
        file.write('[[landmarks]]\nname = "one too many"\n')
    with pytest.raises(ModelRefused, match="4 scores and 12 offsets for tiles of"):
        check(folder)


def test_network_that_raises_is_refused_without_a_trace(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path)
    with pytest.raises(ModelRefused) as refusal:
        check(folder, Raises())
    assert str(refusal.value) == (
        "toy: network: expected an answer to a tile of [32, 24, 40], got ValueError: no good"
    )


def test_torchscript_that_raises_is_refused_with_the_reason(tmp_path: Path) -> None:
    """Which comes last: all that was said is that an operation failed in the interpreter."""
    pair = read_script(scripted(OfPairs()))
    with pytest.raises(ModelRefused, match=r", got RuntimeError: shape .* is invalid for input"):
        check(make_model_folder(tmp_path), pair)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scores": torch.zeros(5)}, r"expected scores of 2048 torch.float32, got \[5\]"),
        ({"other": torch.zeros(5)}, "got .*'other'"),
        (
            {"field_shape": torch.tensor([3, 9, 9, 9])},
            r"scores of shape \[3, 9, 9, 9\], got \[3, 32",
        ),
        (
            {"scores_index": torch.full((2048,), -(10**9))},
            "expected scores_index inside 92160 scores",
        ),
    ],
)
def test_expected_file_is_validated(
    tmp_path: Path, change: dict[str, Tensor], message: str
) -> None:
    folder = make_model_folder(tmp_path)
    stored = load_file(folder / "selfcheck.safetensors")
    save_file({**stored, **change}, folder / "selfcheck.safetensors")
    with pytest.raises(ModelRefused, match=message):
        check(folder)


def test_missing_expected_file_is_refused(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path)
    (folder / "selfcheck.safetensors").unlink()
    with pytest.raises(ModelRefused, match=r"selfcheck.expected: expected a file"):
        check(folder)


def test_writing_keeps_comments_and_order(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path, shape={"mean": "shape.safetensors", "tolerance_mm": 1.0})
    written = (folder / "model.toml").read_text()
    hashes = [line for line in written.splitlines() if line.startswith("sha256 = ")]
    assert len(hashes) == 2
    other = "0" * 64
    blank = written.replace(hashes[0], f'sha256 = "{other}"  # keep me').replace(
        hashes[1] + "\n", ""
    )
    (folder / "model.toml").write_text(blank)
    (folder / "selfcheck.safetensors").unlink()
    manifest = write_selfcheck(folder)
    rewritten = (folder / "model.toml").read_text()
    assert rewritten.replace("  # keep me", "") == written
    assert "  # keep me" in rewritten
    assert manifest == read_manifest(folder)
    check(folder)


def test_what_is_written_may_be_read_by_a_service_of_another_user(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path)
    written = (folder / "selfcheck.safetensors", folder / "model.toml")
    assert all(path.stat().st_mode & stat.S_IROTH for path in written)


def test_nothing_is_written_for_a_folder_that_breaks_the_contract(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path, checked=False)
    text = (folder / "model.toml").read_text().replace('name = "2"', 'name = "1"')
    (folder / "model.toml").write_text(text)
    before = sorted(path.name for path in folder.iterdir())
    with pytest.raises(ModelRefused, match="every landmark name once"):
        write_selfcheck(folder)
    assert (folder / "model.toml").read_text() == text
    assert sorted(path.name for path in folder.iterdir()) == before


@pytest.mark.parametrize("name", ["weights.safetensors", "shape.safetensors", "README.md"])
def test_files_that_are_no_selfcheck_are_not_written_over(tmp_path: Path, name: str) -> None:
    """Weights that take weeks to train may be named twice by mistake."""
    folder = make_model_folder(tmp_path, checked=False, selfcheck={"expected": name})
    (folder / "README.md").write_text("my card")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(ModelRefused, match=f"selfcheck.expected: expected .* got '{name}', which"):
        write_selfcheck(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_answer_that_is_no_number_is_refused_as_such_and_not_written(tmp_path: Path) -> None:
    root_of_half = graph([node("Sub", "x half", "z"), node("Sqrt", "z", "y")], array("half", 0.5))
    message = r"expected numbers in its answer .*, got NaN in \d+ of 2048 scores"
    with pytest.raises(ModelRefused, match=message):
        make_blob_folder(tmp_path, root_of_half.SerializeToString(), network=HEATMAP)
    assert not (tmp_path / "toy" / "selfcheck.safetensors").exists()


def test_network_that_draws_random_numbers_is_refused_as_such_and_not_written(
    tmp_path: Path,
) -> None:
    """As one with dropout that was exported for training: each start would have refused it."""
    random = graph([node("RandomUniformLike", "x", "y")])
    with pytest.raises(ModelRefused, match="the same answer to the same noise, got another: it"):
        make_blob_folder(tmp_path, random.SerializeToString(), network=HEATMAP)
    assert not (tmp_path / "toy" / "selfcheck.safetensors").exists()


@pytest.mark.parametrize(
    "nodes",
    [
        [node("ReduceMean", "x", "mean", keepdims=1), node("Sub", "x mean", "y")],
        [node("Reshape", "x shape", "y")],
    ],
    ids=["normalises over the batch, as batch norm in training", "takes one tile, and hides it"],
)
def test_network_that_answers_otherwise_in_a_batch_is_refused_as_such_and_not_written(
    tmp_path: Path, nodes: list[NodeProto]
) -> None:
    """Else what a scan is answered would depend on the scans of other people."""
    onnx = graph(nodes, array("shape", [1, 1, 40, 48, 56], "i8")).SerializeToString()
    with pytest.raises(ModelRefused, match="the same answer to the same noise beside another tile"):
        make_blob_folder(tmp_path, onnx, network=HEATMAP, input={"tile_shape": [40, 48, 56]})
    assert not (tmp_path / "toy" / "selfcheck.safetensors").exists()


def test_whole_network_whose_divisor_is_missing_is_refused_as_such(tmp_path: Path) -> None:
    """As most scans would have been, while the edges of the noise happened to suit it."""
    network = {
        "output": "heatmaps",
        "activation": "none",
        "arguments": {
            "spatial_dims": 3,
            "in_channels": 1,
            "out_channels": 3,
            "channels": [4, 8, 8],
            "strides": [2, 2],
        },
    }
    sees = {"tile_shape": "whole", "divisor": 2}
    with pytest.raises(ModelRefused, match=r"of \[42, 50, 58\].*expected input.divisor .* got 2"):
        make_model_folder(tmp_path, network=network, input=sees)
    assert not (tmp_path / "toy" / "selfcheck.safetensors").exists()
    make_model_folder(tmp_path, "fine", network=network, input=sees | {"divisor": 4})


def test_logarithms_of_no_probability_are_compared(tmp_path: Path) -> None:
    nodes = [node("Sub", "x half", "z"), node("Relu", "z", "p"), node("Log", "p", "y")]
    onnx = graph(nodes, array("half", 0.5)).SerializeToString()
    folder = make_blob_folder(tmp_path, onnx, network=HEATMAP)
    assert load_file(folder / "selfcheck.safetensors")["scores"].isneginf().any()
    check(folder)
    with pytest.raises(ModelRefused, match="expected scores within"):
        check_changed(folder, 1.03)
    with pytest.raises(ModelRefused, match="expected scores within"):
        check_changed(folder, -1.0)


@pytest.mark.parametrize("more", ["[network", 'name = "toy"\nname = "toy"', "[a]\nx = 1\nx = 2"])
def test_manifest_that_is_no_toml_is_refused_and_stays(tmp_path: Path, more: str) -> None:
    folder = make_model_folder(tmp_path)
    text = f"{(folder / 'model.toml').read_text()}\n{more}\n"
    (folder / "model.toml").write_text(text)
    with pytest.raises(ModelRefused, match="is not TOML"):
        write_selfcheck(folder)
    assert (folder / "model.toml").read_text() == text


def test_noise_of_whole_models_is_rounded_up_to_their_step() -> None:
    table = manifest_table()
    table["input"] |= {"tile_shape": "whole", "divisor": 16}
    manifest = Manifest.model_validate(table)
    assert make_noise(manifest).shape == (1, 48, 48, 64)


def test_noise_depends_on_the_seed_alone() -> None:
    table = manifest_table()
    manifest = Manifest.model_validate(table)
    table["selfcheck"]["input"] = "noise:8"
    noise = make_noise(manifest)
    assert noise.shape == (1, 32, 24, 40)
    torch.testing.assert_close(noise[0, 0, 0, :2], torch.tensor([0.62509547, 0.89721350]))
    torch.testing.assert_close(noise, make_noise(manifest))
    assert not torch.equal(noise, make_noise(Manifest.model_validate(table)))


def test_noise_for_zscore_has_mean_0_and_variance_1() -> None:
    table = manifest_table()
    table["input"]["intensity"] = {"method": "zscore"}
    noise = make_noise(Manifest.model_validate(table))
    assert abs(float(noise.mean())) < 0.01
    assert float(noise.var()) == pytest.approx(1.0, abs=0.01)


def phantom_manifest() -> Manifest:
    table = manifest_table()
    table["selfcheck"] = {"input": "phantom:7", "tolerance_mm": 0.5}
    return Manifest.model_validate(table)


TRUTH = np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [np.nan] * 3])


def test_landmarks_within_tolerance_pass() -> None:
    check_points(phantom_manifest(), TRUTH + np.array([0.3, 0.0, -0.3]), TRUTH)


@pytest.mark.parametrize(
    ("row", "point", "message"),
    [
        (0, [1.0, 2.0, 3.6], "landmark '1': expected within 0.5 mm, got 0.6 mm"),
        (1, [np.nan] * 3, "landmark '2': expected present, got absent"),
        (2, [0.0, 0.0, 0.0], "landmark '3': expected absent, got present"),
    ],
)
def test_landmark_found_otherwise_is_refused(row: int, point: list[float], message: str) -> None:
    found = TRUTH.copy()
    found[row] = point
    with pytest.raises(ModelRefused, match=message):
        check_points(phantom_manifest(), found, TRUTH)
