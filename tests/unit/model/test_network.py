"""Networks: their output becomes Fields, or an error that says what was expected."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from app.errors import NetworkFailed
from app.model.manifest import Manifest
from app.model.network import Network
from app.model.outputs import Field
from tests.support.model_folders import TILE, build_network, manifest_table

CPU = torch.device("cpu")
EDGES = torch.Size([16, 12, 20])


class Answer(nn.Module):
    """Answers the same whatever it is asked."""

    def __init__(self, answer: object) -> None:
        super().__init__()
        self.answer = answer

    def forward(self, tiles: Tensor) -> object:
        assert tiles.dtype == torch.float32
        return self.answer


def manifest_of(landmarks: int = 3, **network: object) -> Manifest:
    table: dict[str, Any] = manifest_table(landmarks=landmarks)
    table["network"] |= {"output_stride": 2, **network}
    return Manifest.model_validate(table)


def field_of(answer: Tensor, manifest: Manifest) -> list[Any]:
    return list(Network(manifest, Answer(answer), CPU).predict(torch.rand(len(answer), 1, *TILE)))


class Shifted(nn.Module):
    """Adds to each channel what it has learned, as a tensor of four axes."""

    def __init__(self, network: nn.Module, channels: int) -> None:
        super().__init__()
        self.network = network
        self.shift = nn.Parameter(torch.full((channels, 1, 1, 1), 0.25))

    def forward(self, tiles: Tensor) -> Tensor:
        shifted: Tensor = self.network(tiles) + self.shift
        return shifted


def test_axis_major_output_is_viewed_as_scores_and_offsets() -> None:
    answer = torch.rand(2, 12, *EDGES)
    fields = field_of(answer, manifest_of())
    assert len(fields) == 2
    assert fields[1].scores.shape == (3, *EDGES)
    assert fields[1].offsets.shape == (3, 3, *EDGES)
    torch.testing.assert_close(fields[1].offsets[2, 0], answer[1, 3 + 6])
    assert fields[1].activation == "sigmoid"
    assert not fields[1].background


def test_landmark_major_output_is_viewed_the_same_way() -> None:
    answer = torch.rand(1, 12, *EDGES)
    (field,) = field_of(answer, manifest_of(offset_order="landmark"))
    assert field.offsets.shape == (3, 3, *EDGES)
    torch.testing.assert_close(field.offsets[2, 0], answer[0, 3 + 2])


@pytest.mark.parametrize("order", ["axis", "landmark"])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last_3d])
def test_fields_copy_nothing(order: str, memory_format: torch.memory_format) -> None:
    answer = torch.rand(2, 12, *EDGES).contiguous(memory_format=memory_format)
    for field in field_of(answer, manifest_of(offset_order=order)):
        for view in (field.scores, field.offsets):
            assert view.untyped_storage().data_ptr() == answer.untyped_storage().data_ptr()


def test_softmax_has_the_background_first() -> None:
    answer = torch.rand(1, 13, *EDGES)
    (field,) = field_of(answer, manifest_of(activation="softmax"))
    assert field.scores.shape == (4, *EDGES)
    assert field.background
    torch.testing.assert_close(field.offsets[0, 0], answer[0, 4])


def test_offsets_in_mm_are_scaled_to_voxels() -> None:
    (field,) = field_of(torch.rand(1, 12, *EDGES), manifest_of(offset_unit="mm"))
    assert field.offset_scale == pytest.approx((1.0, 1 / 1.5, 1 / 2.0))
    (field,) = field_of(torch.rand(1, 12, *EDGES), manifest_of())
    assert field.offset_scale == (1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (torch.rand(1, 11, *EDGES), "3 scores and 9 offsets"),
        (torch.rand(1, 12, *TILE), r"for tiles of \[32, 24, 40\] at output_stride 2"),
        (torch.rand(2, 12, *EDGES), r"shape \[1, 12, 16, 12, 20\] .* got \[2, 12, 16, 12, 20\]"),
        (torch.ones(1, 12, *EDGES, dtype=torch.int32), "tensor of floats .* got torch.int32"),
        ([torch.rand(1, 12, *EDGES)] * 2, "expected one tensor .* got list"),
        ({"out": torch.rand(1, 12, *EDGES)}, "expected one tensor .* got dict"),
    ],
)
def test_other_output_is_refused(answer: object, message: str) -> None:
    network = Network(manifest_of(), Answer(answer), CPU)
    with pytest.raises(NetworkFailed, match=message):
        network.predict(torch.rand(1, 1, *TILE))


@pytest.mark.parametrize(
    ("output", "channels", "message"),
    [
        ("votes", 12, "4 scores, the background's first, and 9 offsets for tiles"),
        ("heatmaps", 3, "4 heatmaps, the background's first, for tiles"),
    ],
)
def test_channel_of_the_background_that_lacks_is_named(
    output: str, channels: int, message: str
) -> None:
    network = Network(
        manifest_of(output=output, activation="softmax"),
        Answer(torch.rand(1, channels, *EDGES)),
        CPU,
    )
    with pytest.raises(NetworkFailed, match=message):
        network.predict(torch.rand(1, 1, *TILE))


def test_list_of_one_tensor_is_taken() -> None:
    network = Network(manifest_of(), Answer([torch.rand(1, 12, *EDGES)]), CPU)
    assert len(network.predict(torch.rand(1, 1, *TILE))) == 1


def test_weights_of_any_number_of_axes_are_taken() -> None:
    table = manifest_table()
    manifest, tiles = Manifest.model_validate(table), torch.rand(1, 1, *TILE)
    plain = Network(manifest, build_network(table), CPU).predict(tiles)[0]
    network = Shifted(build_network(table), sum(manifest.channels))
    shifted = Network(manifest, network, CPU).predict(tiles)[0]
    torch.testing.assert_close(shifted.scores, plain.scores + 0.25)


def test_bfloat16_answers_nearly_the_same() -> None:
    table = manifest_table()
    manifest = Manifest.model_validate(table)
    tiles = torch.rand(2, 1, *TILE)
    exact = Network(manifest, build_network(table), CPU).predict(tiles)
    rough = Network(manifest, build_network(table), CPU, torch.bfloat16).predict(tiles)
    for one, other in zip(exact, rough, strict=True):
        difference = (one.scores - other.scores.float()).norm() / one.scores.norm()
        assert 0 < difference < 0.02
        assert not one.scores.requires_grad


def test_tile_answers_the_same_alone_and_in_a_batch() -> None:
    table = manifest_table()
    network = Network(Manifest.model_validate(table), build_network(table), CPU)
    tiles = torch.rand(3, 1, *TILE)
    (alone,) = network.predict(tiles[2:])
    torch.testing.assert_close(network.predict(tiles)[2].scores, alone.scores)


def test_pass_gives_way_before_each_convolution_even_to_another_of_the_same_network() -> None:
    table = manifest_table()
    module = build_network(table)
    network = Network(Manifest.model_validate(table), module, CPU)
    first, second = torch.rand(2, 1, *TILE), torch.rand(1, 1, *TILE)
    (alone,), expected = network.predict(second), network.predict(first)
    between: list[Field] = []
    found = network.predict(first, lambda: between.extend(network.predict(second)))
    assert len(between) == sum(isinstance(one, nn.Conv3d) for one in module.modules()) > 1
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.scores, other.scores)
    assert all(torch.equal(field.scores, alone.scores) for field in between)
