"""Field -> Votes on a CPU: the compiled loops against the reference in torch."""

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from app.errors import NetworkFailed
from app.model.outputs import Field
from app.voting.reference import Placement
from app.voting.votes import Votes, filter_rows, filter_votes, list_rows
from tests.support.synthetic import (
    ACTIVATIONS,
    Activation,
    filter_votes_by_torch,
    random_field,
)

RAMP = torch.linspace(0.1, 1.0, 24)
PROFILES = (RAMP[:9], RAMP[:11], RAMP[:13])


LAYOUTS = (
    "channels first",
    "channels last",
    "beside offsets",
    "i fastest",
    "every second voxel",
    "offsets of one number",
)


def with_layout(field: Field, layout: str, dtype: torch.dtype) -> Field:
    """Change the memory layout of a field; all axes keep their meaning."""
    scores, offsets = field.scores.to(dtype), field.offsets.to(dtype)
    if layout == "channels last":
        scores = scores.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2)
        offsets = offsets.permute(2, 3, 4, 1, 0).contiguous().permute(4, 3, 0, 1, 2)
    elif layout == "beside offsets":  # As a convolution gives both, its channels last.
        channels = len(scores)
        answers = torch.cat([scores, offsets.transpose(0, 1).flatten(0, 1)])
        answers = answers.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2)
        scores = answers[:channels]
        offsets = answers[channels:].unflatten(0, (-1, 3)).transpose(0, 1)
    elif layout == "i fastest":
        scores = scores.permute(0, 3, 2, 1).contiguous().permute(0, 3, 2, 1)
        offsets = offsets.transpose(0, 1).contiguous().transpose(0, 1)
    elif layout == "offsets of one number":
        offsets = offsets.flatten()[0].expand(offsets.shape)
    elif layout == "every second voxel":
        wide = torch.full((*scores.shape[:3], 2 * scores.shape[3]), torch.nan, dtype=dtype)
        wide[..., ::2] = scores
        scores = wide[..., ::2]
    return Field(scores, offsets, field.activation, field.background)


def with_background(field: Field) -> Field:
    """Put a background channel before those of the landmarks."""
    scores = torch.cat([1 - field.scores.amax(0, keepdim=True), field.scores])
    return Field(scores, field.offsets, field.activation, background=True)


def filtered(filter_field: Callable[..., Votes], field: Field, threshold: float) -> Votes:
    """Filter a field of stride 2 somewhere in a grid, where it counts more or less."""
    return filter_field(field, threshold, Placement((3, -1, 40), 2, PROFILES))


def assert_same(votes: Votes, expected: Votes) -> None:
    """Rows and positions are the same in every bit; exponentials to the last bit of float32."""
    assert torch.equal(votes.landmark, expected.landmark)
    assert torch.equal(votes.source, expected.source)
    assert torch.equal(votes.position, expected.position)
    torch.testing.assert_close(votes.probability, expected.probability, rtol=1.2e-7, atol=0)
    torch.testing.assert_close(votes.weight, expected.weight, rtol=2.4e-7, atol=0)


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        *product(LAYOUTS, (torch.float32, torch.bfloat16, torch.float16)),
        ("channels first", torch.float64),  # Of no network, but of users' arrays.
    ],
)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_votes_are_those_of_the_reference(
    activation: Activation, layout: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one thread and in four, for thresholds on both sides of a half."""
    field = with_layout(random_field((9, 11, 13), 4, activation), layout, dtype)
    for threshold in (0.1, 0.5, 0.8):
        expected = filtered(filter_votes_by_torch, field, threshold)
        assert len(expected) > 0
        assert_same(filtered(filter_votes, field, threshold), expected)
        with monkeypatch.context() as patch:
            patch.setattr("app.voting.cpu.votes.SCORES_PER_THREAD", 1)
            patch.setattr("app.voting.cpu.votes.BLOCK", 1)
            patch.setattr(torch, "get_num_threads", lambda: 4)
            assert_same(filtered(filter_votes, field, threshold), expected)


@given(
    seed=st.integers(0, 2**16),
    shape=st.tuples(st.integers(1, 5), st.integers(1, 6), st.integers(1, 40)),
    landmarks=st.integers(1, 6),
    threshold=st.sampled_from([1e-9, 0.05, 0.5, 0.999, 1.0]),
    activation=st.sampled_from(ACTIVATIONS),
)
@settings(max_examples=100)
def test_any_shape_and_threshold_gives_the_votes_of_the_reference(
    seed: int, shape: tuple[int, int, int], landmarks: int, threshold: float, activation: Activation
) -> None:
    """Rows shorter and longer than a word of flags, one voxel, one landmark."""
    field = random_field(shape, landmarks, activation, seed)
    assert_same(filter_votes(field, threshold), filter_votes_by_torch(field, threshold))


def test_votes_without_a_finite_position_leave_no_gap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are dropped in every part."""
    monkeypatch.setattr("app.voting.cpu.votes.SCORES_PER_THREAD", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    field = random_field((9, 11, 13), 3, "sigmoid")
    random = np.random.default_rng(5)
    lost = torch.from_numpy(random.random(field.offsets.shape[1:]) < 0.5)
    field.offsets[1][lost] = torch.inf
    votes = filter_votes(field, 0.4)
    assert_same(votes, filter_votes_by_torch(field, 0.4))
    assert len(votes) > 50
    assert votes.position.isfinite().all()


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        *product(
            ("channels first", "beside offsets", "every second voxel"),
            (torch.float32, torch.bfloat16),
        ),
        ("channels first", torch.float64),
    ],
)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_rows_at_once_are_those_of_the_votes(
    activation: Activation, layout: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether memory for them is allocated once or many times, in one thread and in four."""
    field = with_layout(random_field((9, 11, 13), 4, activation), layout, dtype)
    field.offsets[1, 2, 3:5] = torch.nan
    for threshold in (0.01, 0.5, 1.0):
        expected = list_rows(filter_votes(field, threshold), (8, 11, 9))
        assert torch.equal(filter_rows(field, threshold, (8, 11, 9)), expected)
        with monkeypatch.context() as patch:
            patch.setattr("app.voting.cpu.votes.BLOCK", 1)
            assert torch.equal(filter_rows(field, threshold, (8, 11, 9)), expected)
            patch.setattr("app.voting.cpu.votes.SCORES_PER_THREAD", 1)
            patch.setattr(torch, "get_num_threads", lambda: 4)
            assert torch.equal(filter_rows(field, threshold, (8, 11, 9)), expected)


@pytest.mark.parametrize("layout", ["channels first", "channels last"])
def test_a_score_of_minus_infinity_is_a_probability_of_0(layout: str) -> None:
    """As networks give it that mask channels: of landmarks, of the background, or of both."""
    field = with_layout(random_field((9, 11, 13), 4, "softmax"), layout, torch.float32)
    masked = torch.rand(field.scores.shape, generator=torch.Generator().manual_seed(3)) < 0.3
    masked[-1] = False  # The softmax of nothing but minus infinity is no number.
    field.scores[masked] = -torch.inf
    votes = filter_votes(field, 0.3)
    assert_same(votes, filter_votes_by_torch(field, 0.3))
    assert len(votes) > 1000


@pytest.mark.parametrize("scores", [[0.0, torch.inf, 1.0], [-torch.inf] * 3])
def test_softmax_scores_that_give_no_probabilities_are_refused(scores: list[float]) -> None:
    field = random_field((9, 11, 13), 2, "softmax")
    field.scores[:, 4, 5, 6] = torch.tensor(scores)
    for filter_field in (filter_votes, filter_votes_by_torch):
        with pytest.raises(NetworkFailed, match="NaN"):
            filter_field(field, 0.3)


@pytest.mark.parametrize("layout", ["channels first", "channels last"])
def test_probabilities_that_are_no_numbers_matter_to_landmarks_alone(layout: str) -> None:
    """A background that is none decides nothing; a landmark's fails both ways to list votes."""
    field = with_layout(
        with_background(random_field((9, 11, 13), 4, "none")), layout, torch.float32
    )
    field.scores[0, 4, 5, 6] = torch.nan
    assert_same(filter_votes(field, 0.3), filter_votes_by_torch(field, 0.3))
    field.scores[3, 8, 10, 12] = torch.nan
    with pytest.raises(NetworkFailed, match="NaN"):
        filter_votes(field, 0.3)
    with pytest.raises(NetworkFailed, match="NaN"):
        filter_rows(field, 0.3, (9, 11, 13))
