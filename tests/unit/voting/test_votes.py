"""Field -> Votes."""

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from app.errors import BadParameter, NetworkFailed
from app.model.outputs import Field, OffsetLayer
from app.model.sections import InputSpec
from app.preprocessing.tiling import load_profiles, plan_tiles, tile_weights
from app.voting import reference
from app.voting.reference import Placement
from app.voting.votes import Votes, concat_votes, filter_rows, filter_votes
from tests.support import oracle
from tests.support.synthetic import (
    ACTIVATIONS,
    Activation,
    filter_votes_by_torch,
    random_field,
)

SHAPE = (9, 11, 13)


def expected_votes(field: Field, threshold: float) -> oracle.OracleVotes:
    """Filter a field by the oracle."""
    probabilities = oracle.probabilities_of(
        field.scores.double().numpy(), field.activation, background=field.background
    )
    return oracle.collect(probabilities, field.offsets.double().numpy(), threshold)


def assert_same_votes(votes: Votes, expected: oracle.OracleVotes) -> None:
    """Compare votes row by row."""
    np.testing.assert_array_equal(votes.landmark.numpy(), expected.landmark)
    np.testing.assert_array_equal(votes.source.numpy(), expected.source)
    np.testing.assert_allclose(votes.position.numpy(), expected.position, rtol=0, atol=2e-5)
    np.testing.assert_allclose(votes.probability.numpy(), expected.probability, rtol=2e-6)


def known_case() -> tuple[np.ndarray, np.ndarray]:
    """Make P1's arrays, channels last: probabilities with background, axis-major offsets."""
    random = np.random.default_rng(1)
    scores = random.standard_normal((70, 70, 70, 4)).astype(np.float32)
    probabilities = np.exp(scores) / np.exp(scores).sum(axis=-1, keepdims=True)
    return probabilities, 8 * random.standard_normal((70, 70, 70, 9)).astype(np.float32)


def test_a_value_far_above_its_peak_has_the_weight_of_its_importance() -> None:
    scores = torch.full((1, 2, 2, 2), 10.0)
    field = Field(scores, torch.zeros(3, 1, 2, 2, 2), "none", background=False, peak=1.0)
    importance = (torch.full((2,), 0.3), torch.ones(2), torch.ones(2))
    votes = filter_votes(field, 0.5, Placement(importance=importance))
    torch.testing.assert_close(votes.weight / votes.probability, torch.full((8,), 0.3))


def test_known_case_p1_gives_the_oracles_rows_and_heatmaps() -> None:
    """P1: channels last, axis-major, a sample smaller than the array."""
    probabilities, offsets = known_case()
    field = Field(
        scores=torch.from_numpy(probabilities).permute(3, 0, 1, 2),
        offsets=torch.from_numpy(offsets).view(70, 70, 70, 3, 3).permute(3, 4, 0, 1, 2),
        activation="none",
        background=True,
    )
    rows = filter_rows(field, 0.5, (50, 60, 70)).numpy()

    # Written out once more, channel by channel, as the problem states it.
    expected = []
    for landmark in range(3):
        i, j, k = np.nonzero(probabilities[..., landmark + 1] >= np.float32(0.5))
        position = np.stack([i, j, k], 1) + np.stack(
            [offsets[i, j, k, landmark + 3 * axis] for axis in range(3)], 1
        )
        kept = ((position >= 0) & (position < (50, 60, 70))).all(1)
        probability = probabilities[i, j, k, landmark + 1]
        table = np.column_stack([np.full(len(i), landmark), probability, position])
        expected.append(np.column_stack([(i * 70 + j) * 70 + k, table])[kept])
    by_voxel = np.concatenate(expected)
    by_voxel = by_voxel[np.lexsort((by_voxel[:, 1], by_voxel[:, 0]))]
    assert len(rows) > 10_000
    np.testing.assert_allclose(rows, by_voxel[:, 1:], rtol=0, atol=1e-5)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("threshold", [0.05, 0.3, 0.5, 0.9])
def test_votes_are_the_oracles(activation: Activation, threshold: float) -> None:
    """Every activation, thresholds below and above a half."""
    field = random_field(SHAPE, 4, activation)
    votes = filter_votes(field, threshold)
    assert len(votes) > 0
    assert_same_votes(votes, expected_votes(field, threshold))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_fields_lose_nothing_but_their_own_rounding(
    activation: Activation, dtype: torch.dtype
) -> None:
    """The probability of a rounded score is compared in float32, never in its own type."""
    field = random_field(SHAPE, 4, activation)
    rounded = Field(field.scores.to(dtype), field.offsets.to(dtype), activation, field.background)
    exact = Field(rounded.scores.float(), rounded.offsets.float(), activation, field.background)
    for threshold in (0.2, 0.3, 0.7):
        votes, expected = filter_votes(rounded, threshold), filter_votes(exact, threshold)
        assert torch.equal(votes.landmark, expected.landmark)
        assert torch.equal(votes.position, expected.position)
        assert torch.equal(votes.probability, expected.probability)
        assert votes.position.dtype == votes.weight.dtype == torch.float32


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_offsets_that_are_still_to_be_computed_are_those_of_the_layer(
    activation: Activation, dtype: torch.dtype
) -> None:
    """Features may lie in any order in memory."""
    random = torch.Generator().manual_seed(3)
    whole = random_field(SHAPE, 4, activation)
    features = torch.randn(*SHAPE, 7, generator=random).to(dtype).permute(3, 0, 1, 2)
    weight = torch.randn(3, 4, 7, generator=random)
    bias = torch.randn(3, 4, generator=random)
    offsets = torch.einsum("alf,fijk->alijk", weight, features.float())
    whole = replace(whole, offsets=offsets + bias[..., None, None, None], offset_scale=(1, 0.5, 2))
    whole = replace(whole, scores=whole.scores.to(dtype))
    expected = filter_votes(replace(whole, scores=whole.scores.float()), 0.3)
    empty = torch.full((1,), torch.nan, dtype=dtype).expand_as(whole.offsets)
    for laid_out in (features, features.contiguous()):
        layer = OffsetLayer(laid_out, weight, bias)
        votes = filter_votes(replace(whole, offsets=empty, layer=layer), 0.3)
        assert len(votes) > 100
        assert torch.equal(votes.landmark, expected.landmark)
        torch.testing.assert_close(votes.columns, expected.columns, rtol=0, atol=2e-5)
        plain = Votes(*reference.filter_columns(replace(whole, layer=layer), 0.3, Placement()))
        torch.testing.assert_close(votes.columns, plain.columns, rtol=0, atol=2e-5)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_memory_layout_changes_no_bit(activation: Activation) -> None:
    """Channels-last views and landmark-major offsets give the same votes."""
    field = random_field(SHAPE, 4, activation)
    expected = filter_votes(field, 0.3)
    last = Field(
        field.scores.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2),
        field.offsets.transpose(0, 1).contiguous().transpose(0, 1),
        activation,
        field.background,
    )
    votes = filter_votes(last, 0.3)
    assert torch.equal(votes.landmark, expected.landmark)
    assert torch.equal(votes.columns, expected.columns)


@given(seed=st.integers(0, 2**16), threshold=st.floats(0.01, 0.99))
@settings(max_examples=25)
def test_a_vote_passes_exactly_if_its_float32_probability_does(seed: int, threshold: float) -> None:
    """The test on scores lets no vote slip through that the probability would have kept."""
    field = random_field((3, 4, 5), 2, "sigmoid", seed)
    # Scores that lie on the threshold, give or take the rounding of float32.
    logit = np.log(threshold / (1 - threshold))
    field.scores.copy_(torch.tensor(logit) + (field.scores * 4).round() * 1e-7)
    exact = torch.sigmoid(field.scores.double())

    def passing(error: float) -> int:
        return int(((exact + error).float() >= threshold).sum())

    assert len(filter_votes_by_torch(field, threshold)) == passing(0.0)
    # The compiled exponential is off by up to 2e-10, which may round to the next float32.
    assert passing(-2e-10) <= len(filter_votes(field, threshold)) <= passing(2e-10)


def test_offsets_are_scaled_to_grid_voxels_and_sources_are_centres_of_field_voxels() -> None:
    """Stride 2 at origin (4, 8, 2): field voxel u has its centre at o + 2 u + 0.5."""
    scores = torch.full((1, 2, 3, 4), -9.0)
    scores[0, 1, 2, 3] = 9.0
    field = Field(scores, torch.ones(3, 1, 2, 3, 4), "sigmoid", False, (2.0, -1.0, 0.5))
    votes = filter_votes(field, 0.5, Placement((4, 8, 2), stride=2))
    assert votes.source.tolist() == [[6.5, 12.5, 8.5]]
    assert votes.position.tolist() == [[8.5, 11.5, 9.0]]


@pytest.mark.parametrize("stride", [1, 2])
def test_votes_of_overlapping_tiles_weigh_as_much_as_those_of_the_whole(stride: int) -> None:
    """Importances sum to one, so every vote's weights in all tiles sum to its probability."""
    whole = random_field((20, 13, 17), 3, "sigmoid")
    spec = InputSpec.model_validate(
        {
            "orientation": "RAS",
            "spacing_mm": (1, 1, 1),
            "tile_shape": (8 * stride, 10 * stride, 8 * stride),
            "tile_overlap": 0.4,
            "intensity": {"method": "none"},
        }
    )
    plan = plan_tiles([n * stride for n in (20, 13, 17)], spec, stride)
    parts = []
    for tile in range(len(plan)):
        u, v, w = (int(o) // stride for o in plan.origins[tile])
        box = (..., slice(u, u + 8), slice(v, v + 10), slice(w, w + 8))
        part = Field(whole.scores[box], whole.offsets[box], "sigmoid", background=False)
        profiles = tile_weights(plan, tile, load_profiles(plan, torch.device("cpu")))
        placement = Placement((u * stride, v * stride, w * stride), stride, profiles)
        parts.append(filter_votes(part, 0.3, placement))
    tiled, untiled = concat_votes(parts), filter_votes(whole, 0.3, Placement(stride=stride))
    assert len(plan) > 8

    def weights(votes: Votes) -> np.ndarray:
        cells = ((votes.source + 0.5) / stride - 0.5).round().long()
        volume = np.zeros((3, 20, 13, 17))
        i, j, k = cells.numpy().T
        np.add.at(volume, (votes.landmark.numpy(), i, j, k), votes.weight.double().numpy())
        return volume

    np.testing.assert_allclose(weights(tiled), weights(untiled), atol=1e-6)
    assert {tuple(p) for p in tiled.position.tolist()} == {
        tuple(p) for p in untiled.position.tolist()
    }


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_nan_score_fails_the_request(activation: Activation) -> None:
    """Even where nothing else would pass."""
    field = random_field(SHAPE, 4, activation)
    field.scores[int(field.background) :] -= 30.0
    assert len(filter_votes(field, 0.3)) == 0
    field.scores[2, 5, 3, 1] = torch.nan
    with pytest.raises(NetworkFailed, match="NaN"):
        filter_votes(field, 0.3)


def test_a_nan_background_fails_the_request() -> None:
    """The background decides about every landmark of its voxel."""
    field = random_field(SHAPE, 4, "softmax")
    field.scores[0, 8, 0, 12] = torch.nan
    with pytest.raises(NetworkFailed):
        filter_votes(field, 0.99)


def test_votes_without_a_finite_position_are_dropped() -> None:
    """NaN and infinite offsets drop their vote, and no other."""
    field = random_field(SHAPE, 4, "none")
    field.offsets[1, 2, 3, 4, 5] = torch.nan
    field.offsets[0, 1, 6, 7, 8] = torch.inf
    votes = filter_votes(field, 0.0)
    assert len(votes) == field.scores.numel() - 2
    assert bool(votes.position.isfinite().all())


def test_softmax_without_a_background_is_refused() -> None:
    """There would be no class for voxels that vote for nothing."""
    field = random_field(SHAPE, 4, "sigmoid")
    with pytest.raises(ValueError, match="background"):
        Field(field.scores, field.offsets, "softmax", background=False)


def test_fields_of_more_than_two_to_the_31_elements_are_read_right() -> None:
    """A field of 300 x 302 x 304 voxels and 27 landmarks, by strides of zero: no memory."""
    shape, landmarks = (300, 302, 304), 27
    scores = torch.full((1, 1, 1, 304), -9.0)
    scores[..., 300] = 9.0
    offsets = torch.arange(27.0).view(1, 27, 1, 1, 1).expand(3, landmarks, *shape)
    line = torch.full((1, 300, 1, 304), -9.0)
    line[0, 299, 0, 303] = 9.0
    field = Field(line.expand(landmarks, *shape), offsets, "sigmoid", background=False)
    assert field.offsets.numel() > 2**31
    votes = filter_votes(field, 0.5)
    assert len(votes) == 302 * landmarks
    assert votes.source[-1].tolist() == [299.0, 301.0, 303.0]
    assert votes.position[-1].tolist() == [325.0, 327.0, 329.0]


def test_no_votes_are_votes() -> None:
    """Nothing passes, nothing is joined, nothing is listed: all of that is empty, not an error."""
    field = random_field(SHAPE, 4, "sigmoid")
    none = filter_votes(field, 1.0)
    assert len(none) == len(concat_votes([])) == len(concat_votes([none, none])) == 0
    assert filter_rows(field, 1.0, SHAPE).shape == (0, 5)
    assert len(none.select(torch.zeros(0, dtype=torch.bool))) == 0


def test_rows_end_where_the_sample_ends() -> None:
    """0 is inside, the sample's shape is outside."""
    field = random_field((2, 3, 4), 1, "none")
    field.offsets.zero_()
    rows = filter_rows(field, 0.0, (2, 2, 3))
    assert rows[:, 2:].tolist() == [[i, j, k] for i in range(2) for j in range(2) for k in range(3)]


@pytest.mark.parametrize("shape", [(9, 11), (9, 11, 13, 1), (9, 11, 0), (9, 11, -13)])
def test_sample_that_is_no_part_of_an_array_is_refused(shape: tuple[int, ...]) -> None:
    """Without a third length, what lay behind the two in memory decided which rows were listed."""
    with pytest.raises(BadParameter, match="sample_shape: expected three whole numbers from 1"):
        filter_rows(random_field(SHAPE, 1, "sigmoid"), 0.5, shape)


@pytest.mark.parametrize("threshold", [math.nan, -0.1, 50.0])
def test_threshold_that_is_no_probability_is_refused(threshold: float) -> None:
    field = random_field(SHAPE, 1, "sigmoid")
    for call in (filter_votes, partial(filter_rows, sample_shape=SHAPE)):
        with pytest.raises(BadParameter, match=f"from 0 to 1, got {threshold}"):
            call(field, threshold)
