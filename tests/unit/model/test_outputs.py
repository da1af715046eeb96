"""What networks answer becomes Fields, whatever kind of output it is."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from app.model.manifest import Manifest
from app.model.outputs import Field, make_output
from app.voting.votes import filter_votes
from tests.support.model_folders import manifest_table

EDGES = (8, 12, 20)


def manifest_of(output: str, landmarks: int = 3, **network: object) -> Manifest:
    table: dict[str, Any] = manifest_table(landmarks=landmarks)
    if output == "coordinates":
        table["voting"] = {"threshold": 0.3}
        table["network"].pop("activation")
    table["network"] |= {"output": output, **network}
    table["input"]["tile_shape"] = "whole"
    return Manifest.model_validate(table)


def field_of(answer: Tensor, manifest: Manifest) -> Field:
    output = make_output(manifest)
    assert output.shape(EDGES) == list(answer.shape)
    return output.field(answer, EDGES)


def coordinates(answer: list[list[float]], **network: object) -> Field:
    return field_of(torch.tensor(answer), manifest_of("coordinates", len(answer), **network))


def test_heatmaps_of_any_activation_vote_for_their_own_voxels() -> None:
    for activation, channels in (("none", 3), ("sigmoid", 3), ("softmax", 4)):
        answer = torch.rand(channels, *EDGES)
        field = field_of(answer, manifest_of("heatmaps", activation=activation))
        assert field.scores.data_ptr() == answer.data_ptr()
        votes = filter_votes(field, 0.4)
        assert len(votes) > 20
        assert torch.equal(votes.position, votes.source)


def test_offsets_of_heatmaps_are_one_number_in_memory() -> None:
    field = field_of(torch.rand(3, *EDGES), manifest_of("heatmaps", activation="none"))
    assert field.offsets.shape == (3, 3, *EDGES)
    assert field.offsets.untyped_storage().nbytes() == 4


def test_threshold_of_a_heatmap_is_a_share_of_its_peak() -> None:
    answer = torch.zeros(3, *EDGES)
    answer[1, 4, 5, 6], answer[2, 1, 2, 3] = 100.0, 49.0
    answer[0, 7, 0, 0] = torch.inf
    manifest = manifest_of("heatmaps", activation="none", heatmap_peak=200.0)
    votes = filter_votes(field_of(answer, manifest), 0.25)
    assert votes.landmark.tolist() == [1, 0]
    assert votes.source.tolist() == [[4, 5, 6], [7, 0, 0]]
    # A value that is no probability is cut, so that sums stay what integers hold.
    assert votes.probability.tolist() == votes.weight.tolist() == [0.5, 2.0]


@pytest.mark.no_cover
def test_spatial_softmax_sums_to_one_over_the_scan() -> None:
    answer = 3 * torch.randn(3, *EDGES)
    manifest = manifest_of("heatmaps", activation="spatial_softmax", heatmap_peak=0.01)
    field = field_of(answer, manifest)
    torch.testing.assert_close(field.scores.sum((1, 2, 3)), torch.ones(3))
    expected = torch.softmax(answer.flatten(1), 1).view_as(answer)
    torch.testing.assert_close(field.scores, expected)


def test_each_coordinate_is_one_vote() -> None:
    votes = filter_votes(coordinates([[1.5, 2.0, 3.0], [-4.0, 0.0, 9.5]]), 0.3)
    assert votes.landmark.tolist() == [0, 1]
    assert votes.position.tolist() == [[1.5, 2.0, 3.0], [-4.0, 0.0, 9.5]]
    assert votes.weight.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("unit", "expected"),
    [("voxel", [0.5, 1.0, 0.25]), ("mm", [0.5, 1 / 1.5, 0.125]), ("fraction", [3.5, 11.5, 4.5])],
)
def test_unit_of_coordinates_is_turned_into_voxels(unit: str, expected: list[float]) -> None:
    votes = filter_votes(coordinates([[0.5, 1.0, 0.25]], coordinate_unit=unit), 0.3)
    torch.testing.assert_close(votes.position, torch.tensor([expected]))


def test_log_variance_becomes_votes_of_that_variance() -> None:
    variance = 2.0
    field = coordinates(
        [[1.0, 2.0, 3.0, math.log(variance)]],
        coordinate_unit="mm",
        coordinate_extras=["log_variance"],
    )
    position = filter_votes(field, 0.3).position.double().numpy()
    per_mm = 1 / np.array([1.0, 1.5, 2.0])
    np.testing.assert_allclose(position.mean(axis=0), [1, 2, 3] * per_mm, atol=1e-6)
    covariance = np.cov(position.T, bias=True)
    np.testing.assert_allclose(covariance, variance * np.diag(per_mm**2), atol=1e-5)


def test_boundless_variance_leaves_the_votes_finite() -> None:
    field = coordinates([[1.0, 2.0, 3.0, 1e4]], coordinate_extras=["log_variance"])
    assert len(filter_votes(field, 0.3)) == 6


@pytest.mark.parametrize(("activation", "value"), [("sigmoid", 0.0), ("none", 0.5)])
def test_presence_is_the_weight_of_a_coordinate(activation: str, value: float) -> None:
    field = coordinates(
        [[1.0, 2.0, 3.0, 0.0, value], [1.0, 2.0, 3.0, 0.0, -9.0]],
        coordinate_extras=["log_variance", "presence"],
        activation=activation,
    )
    votes = filter_votes(field, 0.3)
    assert votes.landmark.tolist() == [0] * 6
    assert votes.weight.tolist() == [0.5] * 6


def test_halves_are_computed_with_as_float32() -> None:
    manifest = manifest_of("coordinates", 1)
    field = make_output(manifest).field(torch.tensor([[1.0, 2.0, 3.0]]).bfloat16(), EDGES)
    assert field.offsets.dtype == field.scores.dtype == torch.float32
