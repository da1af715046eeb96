"""``landmarkd average``: weights between those of two models, exactly, in a folder that serves."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from app.errors import BadParameter
from app.inference.detector import Detector
from app.inference.load import load_checked
from app.io.volume import Volume
from app.model.files import hash_file
from app.model.manifest import read_manifest
from app.model.selfcheck import write_selfcheck
from app.training.average import average_tensors
from tests.support.model_folders import (
    build_network,
    make_model_folder,
    make_program_folder,
    manifest_table,
)
from tests.support.training_data import SMALL, landmarkd, write_specimens

BATCH_NORM: Mapping[str, object] = {
    "spatial_dims": 3, "in_channels": 1, "out_channels": 12, "channels": [4, 8], "strides": [2],
    "norm": "BATCH",
}  # fmt: skip


def make_other(folder: Path, root: Path, seed: int = 8) -> Path:
    """Copy a model folder and give it other weights."""
    other = root / "other"
    shutil.copytree(folder, other)
    text = (other / "model.toml").read_text()
    (other / "model.toml").write_text(text.replace(f'name = "{folder.name}"', 'name = "other"'))
    tensors = load_file(other / "weights.safetensors")
    random = torch.Generator().manual_seed(seed)
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            noise = torch.randn(tensor.shape, generator=random).to(tensor.dtype)
            tensors[name] = tensor + 0.1 * noise
        else:
            tensors[name] = tensor + 5
    save_file(tensors, other / "weights.safetensors")
    write_selfcheck(other)
    return other


@pytest.mark.parametrize("share", [0.7, 0.5, 0.0, 1.0])
def test_weights_are_averaged_exactly_and_the_result_serves(tmp_path: Path, share: float) -> None:
    """In float64, rounded once; counts of batches are the first one's."""
    first = make_model_folder(tmp_path, network={"arguments": BATCH_NORM})
    other = make_other(first, tmp_path)
    landmarkd("average", first, other, "--share", share, "-o", tmp_path / "new")
    files = [folder / "weights.safetensors" for folder in (first, other, tmp_path / "new")]
    mine, theirs, new = map(load_file, files)
    assert new.keys() == mine.keys()
    counts = 0
    for name, tensor in new.items():
        assert tensor.dtype == mine[name].dtype
        if not tensor.is_floating_point():
            assert torch.equal(tensor, mine[name])
            counts += 1
            continue
        mean = share * mine[name].numpy().astype(np.float64)
        mean += (1 - share) * theirs[name].numpy().astype(np.float64)
        np.testing.assert_array_equal(tensor.numpy(), mean.astype(tensor.numpy().dtype))
    assert counts > 0
    model = load_checked(tmp_path / "new", torch.device("cpu"))
    assert model.manifest.name == "new"
    assert model.manifest.network.sha256 == hash_file(files[2])
    voxels = np.random.default_rng(1).normal(size=(30, 26, 34)).astype(np.float32)
    found = Detector(model).detect(Volume(voxels, np.eye(4), 0, "", ())).landmarks
    assert [landmark.name for landmark in found] == ["1", "2", "3"]
    card = (tmp_path / "new" / "README.md").read_text()
    assert f"- {share:g} of toy (SHA-256 {hash_file(files[0])[:12]}) and " in card


def test_half_precision_is_averaged_in_float64() -> None:
    """Of 2048 and 2050, three quarters lie at 2049.5, which float16 rounds to 2050."""
    mine, theirs = (torch.tensor([value], dtype=torch.float16) for value in (2048.0, 2050.0))
    mean = average_tensors({"w": mine}, {"w": theirs}, 0.25)["w"]
    assert mean.dtype == torch.float16
    assert mean.item() == 2050.0


def test_the_self_check_is_that_of_the_new_weights(tmp_path: Path) -> None:
    """With the first one's expectation, it would be refused."""
    first = make_model_folder(tmp_path)
    other = make_other(first, tmp_path)
    landmarkd("average", first, other, "-o", tmp_path / "new")
    new = (tmp_path / "new" / "selfcheck.safetensors").read_bytes()
    assert new != (first / "selfcheck.safetensors").read_bytes()
    load_checked(tmp_path / "new", torch.device("cpu"))


def test_regions_of_other_weights_are_not_taken_over(tmp_path: Path) -> None:
    first = make_model_folder(tmp_path)
    path = first / "model.toml"
    path.write_text(path.read_text().replace('name = "2"', 'name = "2"\nregion95_mm = 0.5'))
    other = make_other(first, tmp_path)
    landmarkd("average", first, other, "-o", tmp_path / "new")
    assert {landmark.region95_mm for landmark in read_manifest(first).landmarks} == {None, 0.5}
    assert {landmark.region95_mm for landmark in read_manifest(tmp_path / "new").landmarks} == {
        None
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"voting": {"radius_mm": 3.0}}, r"alike in voting.radius_mm: .* has 2.0, .* 3.0"),
        ({"input": {"spacing_mm": [1.0, 1.0, 1.0]}}, r"alike in input.spacing_mm"),
        ({"network": {"arguments": BATCH_NORM}}, r"alike in network.arguments"),
        ({"network": {"activation": "softmax"}}, r"alike in network.activation"),
    ],
)
def test_incompatible_models_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    first = make_model_folder(tmp_path)
    other = make_model_folder(tmp_path, "other", checked=False, **changes)
    with pytest.raises(BadParameter, match=message):
        landmarkd("average", first, other, "-o", tmp_path / "new")
    assert not (tmp_path / "new").exists()
    assert not list(tmp_path.glob(".*"))


def test_other_landmarks_or_another_order_are_refused(tmp_path: Path) -> None:
    first = make_model_folder(tmp_path)
    other = make_other(first, tmp_path)
    text = (other / "model.toml").read_text()
    swapped = text.replace('name = "1"', 'name = "x"').replace('name = "2"', 'name = "1"')
    (other / "model.toml").write_text(swapped.replace('name = "x"', 'name = "2"'))
    with pytest.raises(BadParameter, match=r"same landmarks in the same order: .* has 1, 2, 3; "):
        landmarkd("average", first, other, "-o", tmp_path / "new")


def test_programs_and_existing_folders_are_refused(tmp_path: Path) -> None:
    first = make_model_folder(tmp_path, "first")
    program = make_program_folder(tmp_path, "program", script=True)
    with pytest.raises(BadParameter, match="is a program"):
        landmarkd("average", program, program, "-o", tmp_path / "new")
    with pytest.raises(BadParameter, match="expected a folder that is not there yet"):
        landmarkd("average", first, first, "-o", program)


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        ({"b": torch.zeros(2)}, "only one has a"),
        ({"a": torch.zeros(3)}, r"expected a of one shape and type, got \[2\] .*\[3\]"),
        ({"a": torch.zeros(2).half()}, r"expected a of one shape and type, got .*float16"),
    ],
)
def test_other_tensors_are_refused(theirs: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(BadParameter, match=message):
        average_tensors({"a": torch.zeros(2)}, theirs, 0.5)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Train two models of two networks."""
    root = write_specimens(tmp_path_factory.mktemp("pairs"), "one", "two")
    files, small = (root / "scans", root / "landmarks"), (*SMALL, "--validate", "none")
    first, again = root / "first", root / "again"
    for folder, seed in ((first, 1), (again, 2)):
        landmarkd(
            "train", *files, "-o", folder, *small, "--tile", 16, "--spacing", 1.5, "--seed", seed
        )
        landmarkd("refine", folder, *files, *small, "--spacing", 1.0, "--seed", seed)
    return first, again


@pytest.mark.parametrize(
    ("networks", "changed"),
    [("all", (True, True)), ("first", (True, False)), ("second", (False, True))],
)
def test_only_the_chosen_networks_are_averaged(
    pairs: tuple[Path, Path], tmp_path: Path, networks: str, changed: tuple[bool, bool]
) -> None:
    new = tmp_path / "new"
    landmarkd("average", *pairs, "--share", 0.7, "--networks", networks, "-o", new)
    for inner, is_new in zip(("", "refine"), changed, strict=True):
        mine, theirs, mean = (
            load_file(folder / inner / "weights.safetensors") for folder in (*pairs, new)
        )
        expected = average_tensors(mine, theirs, 0.7) if is_new else mine
        assert all(torch.equal(mean[name], expected[name]) for name in mean)
        assert any(not torch.equal(mine[name], theirs[name]) for name in mine)
    model = load_checked(new, torch.device("cpu"))
    assert model.refine is not None
    card = (new / "README.md").read_text()
    assert card.count("\n- ") == sum(changed)
    assert ("0.7 of first/refine (" in card) == changed[1]


def test_second_networks_that_only_one_has_or_of_another_pose_are_refused(
    pairs: tuple[Path, Path], tmp_path: Path
) -> None:
    first, again = pairs
    alone = tmp_path / "alone"
    shutil.copytree(first, alone, ignore=shutil.ignore_patterns("refine"))
    text = (alone / "model.toml").read_text().replace('name = "first"', 'name = "alone"')
    (alone / "model.toml").write_text(text.partition("[refine]")[0])
    for networks in ("all", "second"):
        with pytest.raises(BadParameter, match=r"alone has none; --networks first"):
            landmarkd("average", again, alone, "--networks", networks, "-o", tmp_path / "new")
    shape = again / "refine" / "shape.safetensors"
    before = load_file(shape)
    save_file({"mean": before["mean"].flip(1)}, shape)
    with pytest.raises(BadParameter, match=r"see their subject in one pose.* mm apart"):
        landmarkd("average", first, again, "-o", tmp_path / "new")
    save_file(before, shape)


def test_networks_of_the_test_have_counts_of_batches() -> None:
    """Else nothing would be said of integers."""
    table = manifest_table()
    table["network"]["arguments"] = BATCH_NORM
    kinds = {tensor.dtype for tensor in build_network(table).state_dict().values()}
    assert torch.int64 in kinds
