"""``--start``: a new network that answers as the model does whose weights it starts from."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from numpy.testing import assert_allclose
from torch import Tensor

from app.errors import BadParameter, ModelRefused
from app.inference.detector import Detector
from app.inference.load import load_checked
from app.io.slicer import read_landmarks
from app.io.volume import read_volume
from app.model import editing, find_last_convolution
from app.model.loader import load_module
from app.model.manifest import read_manifest
from app.phantom import make_phantom, scan_bytes, write_phantoms
from app.training.fit.network import build_network
from app.training.fit.warm_start import load_weights
from app.training.recipe import Recipe
from app.voting.landmarks import Landmark
from tests.support.model_folders import make_model_folder
from tests.support.training_data import landmarkd, write_points

PHANTOM = Path(__file__).resolve().parents[3] / "models" / "phantom"
LIKE_PHANTOM = Recipe(2.0, 8.0, (48, 48, 48), "tiles", filters=(16, 32, 64))
WORDS = (
    "--spacing", 2, "--radius", 8, "--tile", 48, "--filters", "16,32,64", "--batch", 1,
    "--missing", "absent", "--intensity", "percentile:0.02,99.99", "--device", "cpu",
    "--steps", 1, "--rate", 0, "--validate", "none",
)  # fmt: skip
KNOWN = tuple(landmark.name for landmark in read_manifest(PHANTOM).landmarks)
SHUFFLED = tuple(KNOWN[index] for index in (3, 0, 5, 1, 4, 2))
TILE = (1, 1, 32, 24, 40)


def train_from(start: Path, folder: Path, renamed: dict[str, str]) -> str:
    """Train a step of rate 0 on phantoms whose landmarks are renamed, and stand in that order."""
    write_phantoms(folder, count=1, seed=5003)
    (path,) = (folder / "landmarks").iterdir()
    points = read_landmarks(path)
    new = {name: points[old] for old, name in renamed.items() if old in points}
    path.unlink()
    write_points(folder, "phantom-5003", new)
    where = (folder / "scans", folder / "landmarks", "-o", folder / "mine")
    return landmarkd("train", *where, *WORDS, "--start", start)


def answers(folder: Path) -> dict[str, Landmark]:
    model = load_checked(folder, torch.device("cpu"))
    found = Detector(model).detect(read_volume(scan_bytes(make_phantom(5004)))).landmarks
    return {landmark.name: landmark for landmark in found}


def predict(network: torch.nn.Module) -> Tensor:
    """Give scores and offsets by landmark, (4, landmarks, i, j, k)."""
    torch.manual_seed(5)
    with torch.inference_mode():
        output: Tensor = network.eval()(torch.randn(TILE))[0]
    by_mark: Tensor = output.unflatten(0, (4, -1))
    return by_mark


def test_landmarks_in_another_order_are_found_where_the_model_finds_them(tmp_path: Path) -> None:
    output = train_from(PHANTOM, tmp_path, {name: name for name in SHUFFLED})
    assert "--start" not in output
    before, after = answers(PHANTOM), answers(tmp_path / "mine")
    assert list(after) != list(before) == list(KNOWN)
    assert before.keys() == after.keys()
    assert sum(landmark.status == "detected" for landmark in before.values()) >= 4
    for name, landmark in before.items():
        place = after[name].ras_mm
        assert (place is None) == (landmark.ras_mm is None)
        if place is not None and landmark.ras_mm is not None:
            assert_allclose(place, landmark.ras_mm, atol=0.02)
        assert after[name].mass == pytest.approx(landmark.mass, abs=0.01)


@pytest.mark.parametrize("names", [KNOWN, SHUFFLED])
def test_weights_of_the_same_names_are_the_same_to_the_last_bit(names: Sequence[str]) -> None:
    network = build_network(LIKE_PHANTOM, len(names))
    assert load_weights(network, names, PHANTOM) == ""
    theirs = load_module(PHANTOM, read_manifest(PHANTOM))
    order = [KNOWN.index(name) for name in names]
    for (key, mine), (_, old) in zip(
        network.named_parameters(), theirs.named_parameters(), strict=True
    ):
        assert mine.requires_grad
        if mine.shape[0] == 4 * len(names):
            assert torch.equal(mine.unflatten(0, (4, -1)), old.unflatten(0, (4, -1))[:, order])
        else:
            assert torch.equal(mine, old), key


def test_new_landmarks_start_fresh_and_others_are_taken_over(tmp_path: Path) -> None:
    names = ("chin", KNOWN[4], KNOWN[1])
    network = build_network(LIKE_PHANTOM, len(names))
    head = find_last_convolution(network)
    assert head is not None
    fresh = head.weight.detach().clone().unflatten(0, (4, -1))[:, 0]
    output = load_weights(network, names, PHANTOM)
    gone = ", ".join(name for name in KNOWN if name not in names)
    assert output == (
        f"--start {PHANTOM}: takes over {KNOWN[4]}, {KNOWN[1]}; learns anew chin; leaves out {gone}"
    )
    theirs = predict(load_module(PHANTOM, read_manifest(PHANTOM)))
    mine = predict(network)
    assert_allclose(mine[:, 1:], theirs[:, [4, 1]], atol=1e-5)
    assert torch.equal(head.weight.detach().unflatten(0, (4, -1))[:, 0], fresh)
    output = train_from(PHANTOM, tmp_path, {KNOWN[0]: "chin", **{name: name for name in KNOWN[1:]}})
    assert "learns anew chin; leaves out" in output


def test_a_model_of_other_landmarks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadParameter, match=r"expected a model of the same landmarks.*got one of"):
        train_from(PHANTOM, tmp_path, {name: f"my {name}" for name in KNOWN})
    assert not (tmp_path / "mine" / "weights.safetensors").exists()


def test_a_model_of_another_network_is_refused(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path)
    network = build_network(LIKE_PHANTOM, 3)
    with pytest.raises(BadParameter, match="weights that fit, of a DynUNet, got a UNet"):
        load_weights(network, ["3", "1", "2"], folder)
    (folder / "weights.safetensors").unlink()
    with pytest.raises(ModelRefused, match=r"^toy: network\.weights: expected a file"):
        load_weights(network, ["3", "1", "2"], folder)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("output", "heatmaps"),
        ("activation", "softmax"),
        ("offset_order", "landmark"),
        ("offset_unit", "mm"),
    ],
)
def test_a_model_whose_channels_mean_something_else_is_refused(
    tmp_path: Path, key: str, value: str
) -> None:
    folder = tmp_path / "phantom"
    shutil.copytree(PHANTOM, folder)
    with editing(folder) as document:
        network = document["network"]
        if key == "output":
            del network["offset_order"], network["offset_unit"]
        network[key] = value
    with pytest.raises(BadParameter, match=f"expected a network of {key} .*, got {value}"):
        load_weights(build_network(LIKE_PHANTOM, len(KNOWN)), KNOWN, folder)


def test_a_network_whose_last_layer_has_other_channels_than_its_landmarks_is_refused(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "phantom"
    shutil.copytree(PHANTOM, folder)
    path = folder / "model.toml"
    rest, _, last = path.read_text().rpartition("[[landmarks]]")
    path.write_text(rest + "".join(last.partition("[selfcheck]")[1:]))
    network = build_network(LIKE_PHANTOM, 6)
    with pytest.raises(BadParameter, match="of 20 channels, as 5 landmarks have, got one of 24"):
        load_weights(network, KNOWN, folder)
