"""Field -> Votes on CUDA: the kernel."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from app.errors import NetworkFailed
from app.model.outputs import Field
from app.voting.reference import Placement
from app.voting.votes import WHOLE_GRID, Votes, filter_votes, sort_votes
from tests.support import oracle
from tests.support.synthetic import (
    ACTIVATIONS,
    Activation,
    filter_votes_by_torch,
    random_field,
)

pytest.importorskip("triton")

from app.voting.cuda import votes as cuda_votes

SHAPE = (3, 5, 9)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
ONE_ULP = 1.2e-7
"""Two ways to compute an exponential in float64 may round to neighbouring float32 numbers."""
THREE_ULPS = 3.6e-7
"""A weight is that number times three others, in the order in which its field is walked."""


def on(device: torch.device, field: Field) -> Field:
    """Move a field, strides and all."""
    return replace(field, scores=field.scores.to(device), offsets=field.offsets.to(device))


def filter_votes_by_kernel(
    field: Field, threshold: float, placement: Placement = WHOLE_GRID
) -> Votes:
    """Do what ``filter_votes`` does where the kernel serves."""
    return sort_votes(Votes(*cuda_votes.launch_filter(field, threshold, placement)()))


def assert_same(votes: Votes, expected: Votes) -> None:
    """Compare votes row by row: everything in every bit, but for what an exponential rounds to."""
    for name in ("landmark", "source", "position"):
        ours, theirs = getattr(votes, name), getattr(expected, name)
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours.cpu(), theirs.cpu()), name
    for name, tolerance in (("probability", ONE_ULP), ("weight", THREE_ULPS)):
        ours, theirs = getattr(votes, name), getattr(expected, name)
        torch.testing.assert_close(ours.cpu(), theirs.cpu(), rtol=tolerance, atol=0)


def as_it_is(values: Tensor) -> Tensor:
    return values


def channels_last(values: Tensor) -> Tensor:
    return values.movedim(-4, -1).contiguous().movedim(-1, -4)


def cut_out_of_more(values: Tensor) -> Tensor:
    """View a part of an array that is larger on every axis."""
    wide = torch.nn.functional.pad(values, (3, 2, 1, 2, 2, 1))
    return wide[..., 2:-1, 1:-2, 3:-2]


def first_axis_fastest(values: Tensor) -> Tensor:
    return values.transpose(-1, -3).contiguous().transpose(-1, -3)


def landmark_major(values: Tensor) -> Tensor:
    """Let the three offsets of a landmark lie together, as the network's second order has it."""
    return values.movedim(0, 1).contiguous().movedim(1, 0) if values.ndim == 5 else values


def backgrounds_apart(values: Tensor) -> Tensor:
    """View every second channel."""
    return values.repeat_interleave(2, dim=-4)[..., ::2, :, :, :]


def one_number(values: Tensor) -> Tensor:
    """View one number as all offsets, as the fields of heatmaps do."""
    return values.flatten()[0].expand(values.shape) if values.ndim == 5 else values


LAYOUTS = (
    as_it_is,
    channels_last,
    cut_out_of_more,
    first_axis_fastest,
    landmark_major,
    backgrounds_apart,
    one_number,
)


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        *((layout, torch.float32) for layout in LAYOUTS),
        *((layout, dtype) for layout in LAYOUTS[:2] for dtype in DTYPES[1:]),
    ],
)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_votes_are_those_of_plain_torch_in_their_order(
    activation: Activation,
    layout: Callable[[Tensor], Tensor],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    field = random_field(SHAPE, 3, activation)
    field = replace(
        field, scores=layout(field.scores.to(dtype)), offsets=layout(field.offsets.to(dtype))
    )
    votes = filter_votes_by_kernel(on(device, field), 0.3)
    assert len(votes) > 50
    assert_same(votes, filter_votes_by_torch(field, 0.3))


@pytest.mark.parametrize("threshold", [0.05, 0.5, 0.9])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_votes_are_the_oracles(
    activation: Activation, threshold: float, device: torch.device
) -> None:
    field = random_field(SHAPE, 4, activation)
    votes = filter_votes_by_kernel(on(device, field), threshold)
    probabilities = oracle.probabilities_of(
        field.scores.double().numpy(), field.activation, background=field.background
    )
    expected = oracle.collect(probabilities, field.offsets.double().numpy(), threshold)
    assert len(votes) > 0
    np.testing.assert_array_equal(votes.landmark.cpu().numpy(), expected.landmark)
    np.testing.assert_array_equal(votes.source.cpu().numpy(), expected.source)
    np.testing.assert_allclose(votes.position.cpu().numpy(), expected.position, rtol=0, atol=2e-5)
    np.testing.assert_allclose(votes.probability.cpu().numpy(), expected.probability, rtol=2e-6)


@pytest.mark.parametrize("layout", [as_it_is, channels_last, first_axis_fastest])
def test_tiles_weigh_and_scale_their_votes(
    layout: Callable[[Tensor], Tensor], device: torch.device
) -> None:
    """Stride 2, an origin, offsets in other units, and importances along each axis."""
    field = replace(random_field(SHAPE, 3), offset_scale=(2.0, -1.0, 0.3))
    field = replace(field, scores=layout(field.scores), offsets=layout(field.offsets))
    profiles = [torch.rand(size, generator=torch.Generator().manual_seed(size)) for size in SHAPE]
    i, j, k = profiles
    expected = filter_votes_by_torch(field, 0.3, Placement((4, 8, 3), 2, (i, j, k)))
    i, j, k = (profile.to(device) for profile in profiles)
    placement = Placement((4, 8, 3), 2, (i, j, k))
    votes = filter_votes_by_kernel(on(device, field), 0.3, placement)
    assert_same(votes, expected)


def test_background_of_probabilities_votes_for_nothing(device: torch.device) -> None:
    """P1: probabilities, the first of which is the background's."""
    field = random_field(SHAPE, 4, "none")
    field = replace(field, offsets=field.offsets[:, 1:], background=True)
    field.scores[0] = torch.nan
    votes = filter_votes_by_kernel(on(device, field), 0.3)
    assert_same(votes, filter_votes_by_torch(field, 0.3))


@pytest.mark.parametrize("layout", [as_it_is, channels_last])
@pytest.mark.parametrize("activation", ["sigmoid", "softmax"])
def test_many_landmarks_are_compared_in_several_steps(
    activation: Activation, layout: Callable[[Tensor], Tensor], device: torch.device
) -> None:
    field = random_field((2, 3, 5), 70, activation)
    field = replace(field, scores=layout(field.scores), offsets=layout(field.offsets))
    votes = filter_votes_by_kernel(on(device, field), 0.02)
    assert len(set(votes.landmark.tolist())) > 60
    assert_same(votes, filter_votes_by_torch(field, 0.02))


def test_field_of_many_blocks_keeps_its_order(device: torch.device) -> None:
    field = random_field((9, 11, 23), 2, "sigmoid")
    votes = filter_votes_by_kernel(on(device, field), 0.5)
    assert_same(votes, filter_votes_by_torch(field, 0.5))


def test_buffers_that_are_too_small_are_made_larger(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything survives, and nothing is cut off."""
    monkeypatch.setattr(cuda_votes, "CAPACITY", 2)
    field = random_field(SHAPE, 3, "none")
    votes = filter_votes_by_kernel(on(device, field), 0.0)
    assert len(votes) == field.scores.numel()
    assert_same(votes, filter_votes_by_torch(field, 0.0))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_no_survivors_are_no_votes(activation: Activation, device: torch.device) -> None:
    field = random_field(SHAPE, 3, activation)
    field.scores[int(field.background) :] -= 30.0
    votes = filter_votes_by_kernel(on(device, field), 0.3)
    assert len(votes) == 0
    assert votes.position.shape == (0, 3)


@pytest.mark.parametrize("layout", [as_it_is, channels_last])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_nan_score_fails_the_request(
    activation: Activation, layout: Callable[[Tensor], Tensor], device: torch.device
) -> None:
    """Even where nothing else would pass."""
    field = random_field(SHAPE, 3, activation)
    field.scores[int(field.background) :] -= 30.0
    field.scores[2, 1, 4, 6] = torch.nan
    field = replace(field, scores=layout(field.scores))
    with pytest.raises(NetworkFailed, match="NaN"):
        filter_votes_by_kernel(on(device, field), 0.3)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize(("channel", "value"), [(0, torch.nan), (1, torch.inf)])
def test_softmax_of_what_is_no_number_fails_the_request(
    channel: int, value: float, device: torch.device
) -> None:
    field = random_field(SHAPE, 3)
    field.scores[channel, 2, 0, 8] = value
    with pytest.raises(NetworkFailed):
        filter_votes_by_kernel(on(device, field), 0.99)


def test_votes_without_a_finite_position_are_dropped(device: torch.device) -> None:
    field = random_field(SHAPE, 3, "none")
    field.offsets[1, 2, 2, 4, 5] = torch.nan
    field.offsets[0, 1, 0, 3, 8] = torch.inf
    votes = filter_votes_by_kernel(on(device, field), 0.0)
    assert len(votes) == field.scores.numel() - 2
    assert_same(votes, filter_votes_by_torch(field, 0.0))


@st.composite
def fields(draw: st.DrawFn) -> Field:
    """Draw a field of any shape but cubes, its axes in any order in memory."""
    shape = draw(st.tuples(st.integers(1, 3), st.integers(4, 6), st.integers(7, 11)))
    axes = draw(st.permutations(range(4)))
    activation = draw(st.sampled_from(ACTIVATIONS))
    field = random_field(shape, draw(st.integers(1, 5)), activation, draw(st.integers(0, 2**16)))
    back = np.argsort(axes).tolist()
    offsets = field.offsets.permute(0, *(1 + axis for axis in axes)).contiguous()
    return replace(
        field,
        scores=field.scores.permute(axes).contiguous().permute(back),
        offsets=offsets.permute(0, *(1 + axis for axis in back)),
    )


@given(field=fields(), threshold=st.sampled_from([0.0, 0.1, 0.5, 0.97]))
@settings(max_examples=12)
def test_any_shape_and_memory_order_gives_the_same_votes(
    device: torch.device, field: Field, threshold: float
) -> None:
    votes = filter_votes_by_kernel(on(device, field), threshold)
    assert_same(votes, filter_votes_by_torch(field, threshold))


@given(seed=st.integers(0, 2**16), threshold=st.floats(0.01, 0.99))
@settings(max_examples=8)
def test_vote_passes_exactly_if_its_float32_probability_does(
    device: torch.device, seed: int, threshold: float
) -> None:
    """Scores that lie on the threshold, give or take the rounding of float32."""
    field = random_field((2, 4, 5), 2, "sigmoid", seed)
    logit = np.log(threshold / (1 - threshold))
    field.scores.copy_(torch.tensor(logit) + (field.scores * 4).round() * 1e-7)
    expected = torch.sigmoid(field.scores.double()).float() >= threshold
    assert len(filter_votes_by_kernel(on(device, field), threshold)) == int(expected.sum())


def test_elements_past_two_to_the_31_are_found(tmp_path: Path, device: torch.device) -> None:
    """Channels and offsets gigabytes apart, in a file that holds almost nothing."""
    apart, across = 2**30 + 64, 2**31 + 320
    shape, size = (2, 3, 5), 3 * (2**30 + 64) + 2**32
    name = str(tmp_path / "sparse")
    line = torch.from_file(name, shared=True, size=size, dtype=torch.float16)
    if device.type == "cuda":
        line = torch.empty(size, dtype=torch.float16, device=device)
    scores = line.as_strided((4, *shape), (apart, 15, 5, 1))
    offsets = line[64:].as_strided((3, 3, *shape), (across, 1024, 15, 5, 1))
    small = random_field(shape, 3)
    scores.copy_(small.scores)
    offsets.copy_(small.offsets)
    assert scores.stride(0) * 3 > 2**31
    votes = filter_votes_by_kernel(Field(scores, offsets, "softmax", background=True), 0.1)
    expected = Field(small.scores.half(), small.offsets.half(), "softmax", background=True)
    assert_same(votes, filter_votes_by_torch(expected, 0.1))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="expected a CUDA device, got none")
def test_cuda_fields_go_through_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    field = on(torch.device("cuda"), random_field(SHAPE, 3))
    expected = filter_votes_by_torch(field, 0.3)
    assert_same(filter_votes(field, 0.3), expected)
    monkeypatch.setattr("app.voting.votes.has_triton", lambda _device: False)
    assert_same(filter_votes(field, 0.3), expected)
