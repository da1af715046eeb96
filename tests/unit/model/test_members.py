"""Members and mirror images: what several answers for one tile say together."""

from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_model
from torch import Tensor, nn

from app.errors import ModelRefused, NetworkFailed
from app.model.loader import load_module
from app.model.manifest import Manifest, read_manifest
from app.model.network import Network
from app.model.outputs import make_output
from app.model.selfcheck import write_selfcheck
from tests.support.model_folders import build_network, make_model_folder, manifest_table

CPU = torch.device("cpu")
EDGES = (10, 14, 8)
POINTS = torch.tensor([[2.0, 3.5, 1.0], [7.25, 4.0, 6.0], [5.0, 11.0, 3.5]])
PARTNERS = [1, 0, 2]
EXTRAS = torch.tensor([[0.5, 0.1], [0.6, 0.2], [0.7, 0.3]])
SPACING = [1.0, 1.5, 2.0]
AXES = [some for n in range(1, 4) for some in combinations(range(3), n)]
KINDS: dict[str, Mapping[str, Any]] = {
    "votes": {"activation": "sigmoid"},
    "votes in mm, by landmark": {"offset_unit": "mm", "offset_order": "landmark"},
    "votes with a background": {"activation": "softmax"},
    "heatmaps": {"output": "heatmaps", "activation": "none"},
    "heatmaps with a background": {"output": "heatmaps", "activation": "softmax"},
    "voxels": {"output": "coordinates", "activation": None},
    "mm": {"output": "coordinates", "activation": None, "coordinate_unit": "mm"},
    "fractions": {
        "output": "coordinates",
        "activation": "none",
        "coordinate_unit": "fraction",
        "coordinate_extras": ["presence", "log_variance"],
    },
}


class Constant(nn.Module):
    """Answers the same for every tile."""

    def __init__(self, answer: Tensor) -> None:
        super().__init__()
        self.answer = answer

    def forward(self, tiles: Tensor) -> Tensor:
        return self.answer.expand(len(tiles), *self.answer.shape[1:])


class Brightest(nn.Module):
    """Answers heatmaps of three landmarks: the tile, the tile to the left, and zeros."""

    def forward(self, tiles: Tensor) -> Tensor:
        return torch.cat([tiles, tiles.roll(1, dims=4), torch.zeros_like(tiles)], dim=1)


class ScalesInPlace(Brightest):
    """Answers so for three times the tile, which it writes over the tile."""

    def forward(self, tiles: Tensor) -> Tensor:
        return super().forward(tiles.mul_(3))


def manifest_of(orientation: str = "SAR", **network: object) -> Manifest:
    """Describe three landmarks, the first two of which are partners; k is left to right."""
    table: dict[str, Any] = manifest_table()
    table["network"] |= network
    table["input"]["orientation"] = orientation
    table["landmarks"][0]["mirror"], table["landmarks"][1]["mirror"] = "2", "1"
    if network.get("output") == "coordinates":
        del table["voting"]["radius_mm"]
    return Manifest.model_validate(table)


def answer_of(manifest: Manifest, points: Tensor, order: Sequence[int] = (0, 1, 2)) -> Tensor:
    """Answer as a perfect network would for landmarks at these voxels, in this order."""
    network, spacing = manifest.network, torch.tensor(SPACING)
    voxels = torch.stack(torch.meshgrid(*map(torch.arange, EDGES), indexing="ij"), dim=-1)
    away = points[:, None, None, None] - voxels  # (landmarks i j k 3)
    scores: Tensor = 2 - (away * spacing).norm(dim=-1)
    if network.activation == "softmax":
        scores = torch.cat([voxels.sum(-1)[None] * 0.0, scores])
    if network.output == "heatmaps":
        return scores[None]
    if network.output == "votes":
        offsets = away * spacing if network.offset_unit == "mm" else away
        first = (4, 0) if network.offset_order == "axis" else (0, 4)
        return torch.cat([scores, offsets.permute(*first, 1, 2, 3).flatten(0, 1)])[None]
    units = {"voxel": points, "mm": points * spacing}
    given: Tensor = units.get(network.coordinate_unit, (points + 0.5) / torch.tensor(EDGES))
    extras = EXTRAS[list(order), : len(network.coordinate_extras)]
    return torch.cat([given, extras], dim=1)[None]


@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize("kind", KINDS)
def test_answer_for_a_mirror_image_tells_of_the_tile(kind: str, axes: tuple[int, ...]) -> None:
    """Names change sides where left and right do, which here is the axis k."""
    manifest = manifest_of(**KINDS[kind])
    mirrored = POINTS.clone()
    for axis in axes:
        mirrored[:, axis] = EDGES[axis] - 1 - mirrored[:, axis]
    order = PARTNERS if 2 in axes else [0, 1, 2]
    answer = answer_of(manifest, mirrored[order], order)
    output = make_output(manifest).unmirror(answer, axes, EDGES)
    torch.testing.assert_close(output, answer_of(manifest, POINTS))


@pytest.mark.parametrize("kind", KINDS)
def test_mean_of_one_answer_twice_is_that_answer(kind: str) -> None:
    manifest = manifest_of(**KINDS[kind])
    answer = answer_of(manifest, POINTS)
    mean = make_output(manifest).mean(iter([answer, answer]))
    torch.testing.assert_close(mean, answer, rtol=1e-5, atol=1e-5)


def test_offsets_count_by_the_probability_of_their_votes() -> None:
    """A member that sees nothing has no say in where a landmark is."""
    manifest = manifest_of()
    sure, unsure = answer_of(manifest, POINTS), answer_of(manifest, POINTS + 4.0)
    sure[:, :3], unsure[:, :3] = 10.0, -10.0
    mean = make_output(manifest).mean([sure, unsure])
    torch.testing.assert_close(mean[:, 3:], sure[:, 3:], rtol=0, atol=1e-3)
    torch.testing.assert_close(mean[:, :3], torch.zeros_like(mean[:, :3]))


def test_members_that_disagree_widen_the_variance_of_a_coordinate() -> None:
    extras: dict[str, Any] = {
        "coordinate_extras": ["log_variance"],
        "output": "coordinates",
        "activation": None,
    }
    answers = [torch.cat([POINTS + shift, torch.zeros(3, 1)], 1)[None] for shift in (-3.0, 3.0)]
    mean = make_output(manifest_of(**extras)).mean(answers)
    torch.testing.assert_close(mean[0, :, :3], POINTS)
    torch.testing.assert_close(mean[0, :, 3].exp(), torch.full((3,), 1.0 + 9.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_network_averages_all_members_and_mirror_images(dtype: torch.dtype) -> None:
    manifest = manifest_of(output="heatmaps", activation="none", mirror=["i", "k"])
    constant = Constant(torch.ones(1, 3, *EDGES))
    network = Network(manifest, nn.ModuleList([Brightest(), constant]), CPU, dtype)
    assert network.passes == 2 * 4
    tile = torch.rand(1, *EDGES)
    (field,) = network.predict(tile[None])
    seen = tile.to(dtype).float()[0]
    to_left, to_right = seen.roll(1, dims=2), seen.roll(-1, dims=2)
    # Of four images two exchange the sides: the second heatmap is then the first, of the second.
    first = (seen + to_right) / 2
    second = (to_left + seen) / 2
    expected = torch.stack([first, second, torch.zeros_like(seen)]) / 2 + 0.5
    torch.testing.assert_close(field.scores, expected, rtol=1e-5, atol=1e-5)


def test_every_member_must_answer_what_the_manifest_promises() -> None:
    manifest = manifest_of(output="heatmaps", activation="none")
    wrong = Constant(torch.ones(1, 2, *EDGES))
    network = Network(manifest, nn.ModuleList([Brightest(), wrong]), CPU)
    with pytest.raises(NetworkFailed, match="3 heatmaps"):
        network.predict(torch.rand(1, 1, *EDGES))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Make a folder of two members, of different seeds."""
    folder = make_model_folder(
        tmp_path, checked=False, network={"members": ["second.safetensors"], "mirror": ["j"]}
    )
    save_model(build_network(manifest_table(), seed=4), str(folder / "second.safetensors"))
    write_selfcheck(folder)
    return folder


def test_members_are_files_of_the_folder(folder: Path) -> None:
    module = load_module(folder, read_manifest(folder))
    assert isinstance(module, nn.ModuleList)
    tile = torch.rand(1, 1, 16, 16, 16)
    for member, seed in zip(module, (3, 4), strict=True):
        with torch.inference_mode():
            torch.testing.assert_close(
                member(tile), build_network(manifest_table(), seed=seed)(tile)
            )


def test_hash_covers_all_members(folder: Path) -> None:
    save_model(build_network(manifest_table(), seed=5), str(folder / "second.safetensors"))
    with pytest.raises(ModelRefused, match=r"network\.sha256: .*second\.safetensors has"):
        load_module(folder, read_manifest(folder))


def test_member_of_another_size_is_named(folder: Path) -> None:
    table = manifest_table()
    table["network"]["arguments"]["channels"] = [4, 16]
    save_model(build_network(table), str(folder / "second.safetensors"))
    with pytest.raises(ModelRefused, match=r"network\.weights: second\.safetensors: .*expected"):
        write_selfcheck(folder)


@pytest.mark.parametrize(
    ("network", "message"),
    [
        ({"members": ["weights.safetensors"]}, "every one of members once"),
        ({"members": ["../second.safetensors"]}, "leaves it"),
        ({"mirror": ["i", "i"]}, "every axis of mirror once"),
        ({"mirror": ["x"]}, "mirror"),
    ],
)
def test_manifest_refuses_members_and_axes_that_make_no_sense(
    tmp_path: Path, network: dict[str, object], message: str
) -> None:
    with pytest.raises(ModelRefused, match=message):
        make_model_folder(tmp_path, network=network)


def test_manifest_refuses_members_that_are_no_list(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match=r"network\.members: expected a list of files"):
        make_model_folder(tmp_path, network={"members": [7]})


def test_left_and_right_are_found_in_any_orientation() -> None:
    for orientation, axis in (("RAS", 0), ("SLP", 1), ("IAR", 2)):
        assert manifest_of(orientation).left_right == axis
    assert np.array_equal(manifest_of().partners, PARTNERS)


def test_what_a_member_writes_to_its_input_is_not_seen_by_the_others() -> None:
    """TorchScript may scale its input in place."""
    manifest = manifest_of(output="heatmaps", activation="none", mirror=["i"])
    network = Network(manifest, nn.ModuleList([ScalesInPlace(), Brightest()]), CPU)
    tiles = torch.rand(1, 1, *EDGES)
    (field,) = network.predict(tiles)
    expected = (Brightest()(3 * tiles) + Brightest()(tiles)) / 2
    torch.testing.assert_close(field.scores, expected[0])
