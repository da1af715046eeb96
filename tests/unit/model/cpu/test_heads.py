"""Offsets of which only those that vote are computed are those of the whole last layer."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from app.errors import NetworkFailed
from app.model.cpu import find_head
from app.model.manifest import Manifest
from app.model.network import Network
from app.model.outputs import Field
from app.voting import Votes, filter_votes
from tests.support.model_folders import TILE, manifest_table

CPU = torch.device("cpu")
LANDMARKS = 3


def network_of(*layers: nn.Module, dtype: torch.dtype = torch.float32, **table: object) -> Network:
    torch.manual_seed(5)
    manifest: dict[str, Any] = manifest_table(landmarks=LANDMARKS)
    manifest["network"] |= {"output_stride": 2, **table}
    stem = nn.Conv3d(1, 8, 3, stride=2, padding=1)
    module = nn.Sequential(stem, nn.LeakyReLU(), *layers)
    return Network(Manifest.model_validate(manifest), module, CPU, dtype)


def last_layer(channels: int = 4 * LANDMARKS, **arguments: Any) -> nn.Conv3d:
    return nn.Conv3d(8, channels, 1, **arguments)


def tiles() -> list[Tensor]:
    return list(torch.rand(2, 1, *TILE, generator=torch.Generator().manual_seed(7)))


def votes_of(field: Field) -> Votes:
    votes = filter_votes(field, 0.2)
    assert len(votes) > 1000
    return votes


@pytest.mark.parametrize("order", ["axis", "landmark"])
@pytest.mark.parametrize("activation", ["sigmoid", "softmax"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_votes_are_those_of_all_offsets(
    order: str, activation: str, bias: bool, dtype: torch.dtype
) -> None:
    channels = 4 * LANDMARKS + (activation == "softmax")
    network = network_of(
        last_layer(channels, bias=bias), dtype=dtype, activation=activation, offset_order=order
    )
    for field, whole in zip(
        network.predict_tiles(tiles()), network.predict(torch.stack(tiles())), strict=True
    ):
        assert field.layer is not None
        assert whole.layer is None
        assert torch.equal(field.scores, whole.scores)
        found, expected = votes_of(field), votes_of(whole)
        assert torch.equal(found.landmark, expected.landmark)
        assert torch.equal(found.probability, expected.probability)
        # Of bfloat16 the whole output is rounded, and of this nothing but what it is made of.
        rounding = 1e-5 if dtype == torch.float32 else 0.02
        torch.testing.assert_close(found.position, expected.position, rtol=0, atol=rounding)


def test_offsets_take_no_memory() -> None:
    for field in network_of(last_layer()).predict_tiles(tiles()):
        assert field.offsets.shape == (3, LANDMARKS, *field.scores.shape[1:])
        assert field.offsets.untyped_storage().nbytes() == 4


def test_votes_of_a_tile_do_not_depend_on_its_batch() -> None:
    network = network_of(last_layer())
    together = network.predict_tiles(tiles())
    for tile, field in zip(tiles(), together, strict=True):
        (alone,) = network.predict_tiles([tile])
        assert torch.equal(votes_of(alone).columns, votes_of(field).columns)


def test_a_pass_that_gives_way_to_another_is_not_changed_by_it() -> None:
    network, between = network_of(last_layer()), list[Field]()
    first, second = tiles()
    expected = [votes_of(network.predict_tiles([tile])[0]).columns for tile in (first, second)]
    (field,) = network.predict_tiles(
        [first], lambda: between.extend(network.predict_tiles([second]))
    )
    assert len(between) == 2, "once before each convolution"
    for each, columns in ((field, expected[0]), *((one, expected[1]) for one in between)):
        assert torch.equal(votes_of(each).columns, columns)


class Double(nn.Module):
    """Answers twice what it is given."""

    def forward(self, output: Tensor) -> Tensor:
        return 2 * output


class Listed(nn.Module):
    """Answers a list, as networks with deep supervision do."""

    def forward(self, output: Tensor) -> list[Tensor]:
        return [output]


class InPlace(nn.LeakyReLU):
    """Overwrites what it is given."""

    def __init__(self) -> None:
        super().__init__(inplace=True)


@pytest.mark.parametrize("after", [Double, nn.Tanh, InPlace])
def test_what_follows_the_layer_is_computed(after: Callable[[], nn.Module]) -> None:
    network = network_of(last_layer(), after())
    expected = network.predict(torch.stack(tiles()))
    for _ in range(2):
        for field, whole in zip(network.predict_tiles(tiles()), expected, strict=True):
            assert field.layer is None
            assert torch.equal(field.scores, whole.scores)
            assert torch.equal(field.offsets, whole.offsets)


def test_a_list_of_one_output_is_taken_as_that_output() -> None:
    network = network_of(last_layer(), Listed())
    assert all(field.layer is not None for field in network.predict_tiles(tiles()))


def test_an_output_of_another_shape_is_still_refused() -> None:
    network = network_of(last_layer(), nn.AvgPool3d(2))
    with pytest.raises(NetworkFailed, match="expected an output of shape"):
        network.predict_tiles(tiles())


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv3d(8, 12, 3, padding=1),
        nn.Conv3d(8, 12, 1, padding=1),
        nn.Conv3d(8, 12, 1, stride=2),
        nn.Conv3d(8, 12, 1, groups=4),
        nn.Conv3d(8, 15, 1),
        nn.Conv3d(8, 12, 1, padding="same"),
        nn.ReLU(),
    ],
    ids=str,
)
def test_other_layers_are_left_whole(layer: nn.Module) -> None:
    assert find_head(layer, 12, 3) is None
