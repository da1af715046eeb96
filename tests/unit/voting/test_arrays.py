"""Arrays: every layout becomes the same field, and what does not fit is named."""

import tracemalloc
from inspect import unwrap
from typing import Any, Literal

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from app.errors import BadArrays, BadParameter, TooLarge
from app.inference.votes_request import VOTE_BYTES
from app.model.outputs import Field
from app.voting.arrays import (
    Array,
    Layout,
    check_affine,
    check_values,
    filter_in_blocks,
    make_field,
)
from app.voting.reference import Placement
from app.voting.votes import Rows, concat_votes, filter_rows, filter_votes
from tests.support.synthetic import random_field
from tests.support.vote_archives import (
    LANDMARKS,
    OBLIQUE,
    SAMPLE,
    SHAPE,
    laid_out,
    make_output,
    p1_rows,
    same_field,
)

ACTIVATIONS = ("none", "sigmoid", "softmax")
PROBS = np.full((*SHAPE, LANDMARKS + 1), 0.5, dtype=np.float32)
OFFSETS = np.zeros((*SHAPE, 3 * LANDMARKS), dtype=np.float32)
MANY = 1 << 20


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("order", ["axis", "landmark"])
@pytest.mark.parametrize("channels", ["first", "last"])
def test_every_layout_becomes_the_same_field_without_a_copy(
    channels: Literal["first", "last"], order: Literal["axis", "landmark"], activation: str
) -> None:
    output = make_output(activation)
    arrays = laid_out(output, channels, order)
    layout = Layout(channels=channels, order=order)
    field = make_field(**arrays, layout=layout)
    assert same_field(field, output)
    for view, name in ((field.offsets, "offsets"), (field.scores, next(iter(arrays)))):
        assert view.untyped_storage().data_ptr() == arrays[name].ctypes.data


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_rows_are_those_of_a_plain_loop_in_its_order(activation: str) -> None:
    output = make_output(activation)
    field = make_field(**laid_out(output, "last", "axis"), layout=None)
    rows = filter_rows(field, 0.3, SAMPLE).numpy()
    expected = p1_rows(output, 0.3, SAMPLE)
    assert len(rows) > 50
    assert np.array_equal(rows[:, [0, 2, 3, 4]], expected[:, [0, 2, 3, 4]])
    assert rows[:, 1] == pytest.approx(expected[:, 1], rel=1e-6)


@pytest.mark.parametrize(
    "odd",
    [
        PROBS.astype(">f4"),
        np.flip(PROBS, axis=1),
        np.asfortranarray(PROBS),
        np.broadcast_to(np.float32(0.5), PROBS.shape),
        np.frombuffer(PROBS.tobytes(), dtype=np.float32).reshape(PROBS.shape),
        torch.from_numpy(PROBS).bfloat16(),
    ],
    ids=["big-endian", "reversed", "fortran", "broadcast", "read-only", "bfloat16"],
)
def test_any_memory_is_read(odd: NDArray[np.generic] | torch.Tensor) -> None:
    field = make_field(probs=odd, offsets=OFFSETS)
    assert torch.equal(field.scores.float(), torch.full((LANDMARKS + 1, *SHAPE), 0.5))


@pytest.mark.parametrize(
    ("arrays", "layout", "words"),
    [
        ({"probs": None}, {}, "'probs' and 'scores': expected one of them, got none"),
        ({"scores": PROBS}, {}, "'probs' and 'scores': expected one of them, got both"),
        ({"offsets": None}, {}, "'offsets': expected an array, got NoneType"),
        ({"probs": PROBS[0]}, {}, r"'probs': expected four axes \(i, j, k, channels\)"),
        ({"probs": PROBS[:0]}, {}, "'probs': expected four axes .* none empty"),
        ({"probs": PROBS.astype(np.int32)}, {}, "'probs': expected float16.* got int32"),
        ({"probs": PROBS.astype(complex)}, {}, "'probs': expected float16.* got complex128"),
        ({"probs": PROBS.astype(object)}, {}, "'probs': expected float16.* got object"),
        ({"offsets": torch.zeros(OFFSETS.shape, dtype=torch.int8)}, {}, "'offsets': .* got int8"),
        ({"offsets": OFFSETS[..., :8]}, {}, "'offsets': expected 3 channels per .*, got 8"),
        ({"offsets": OFFSETS[:4]}, {}, r"'offsets': expected the voxels \[5, 7, 6\] of 'probs'"),
        ({"probs": PROBS[..., :2]}, {}, "'probs': expected 3 or 4 channels .* 9; got 2"),
        ({}, {"background": False}, "'probs': expected 3 channels .* got 4"),
        ({"probs": PROBS[..., 1:]}, {"background": True}, "'probs': expected 4 channels .* got 3"),
        ({}, {"channels": "first"}, "'offsets': expected 3 channels per landmark, got 5"),
        (
            {"probs": None, "scores": PROBS[..., 1:]},
            {"activation": "softmax"},
            "'scores': expected 4 channels, the background",
        ),
    ],
)
def test_array_that_does_not_fit_is_named(
    arrays: dict[str, Any], layout: dict[str, Any], words: str
) -> None:
    given = {"probs": PROBS, "offsets": OFFSETS} | arrays
    with pytest.raises(BadArrays, match=words):
        make_field(**given, layout=Layout(**layout))


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ({"channels": "First"}, "channels: expected one of 'first', 'last'; got 'First'"),
        ({"order": "axes"}, "order: expected one of 'axis', 'landmark'; got 'axes'"),
        ({"activation": "none"}, "activation: expected one of 'sigmoid', .*; got 'none'"),
        ({"background": "false"}, "background: expected one of True, False, None; got 'false'"),
        ({"background": 5}, "background: expected one of True, False, None; got 5"),
    ],
)
def test_layout_of_another_word_is_refused(layout: dict[str, Any], words: str) -> None:
    unchecked = unwrap(Layout.__init__)  # Types are checked at each call while tests run only.
    with pytest.raises(BadParameter, match=words):
        unchecked(object.__new__(Layout), **layout)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("probs", float("nan"), "got NaN"),
        ("probs", 1.5, "'probs': expected probabilities from 0 to 1, got 0.5 to 1.5"),
        ("probs", -0.01, "got -0.01"),
        ("probs", float("inf"), "'probs'"),
        ("scores", float("nan"), "'scores': expected finite float32 numbers, got NaN"),
        ("scores", float("-inf"), "'scores': .* got -inf to 0.5"),
    ],
)
def test_one_bad_value_is_found_wherever_it_is(
    name: str, value: float, words: str, dtype: torch.dtype
) -> None:
    array = torch.from_numpy(PROBS).to(dtype)
    array[3, 2, 4, 1] = value
    probs, scores = (array, None) if name == "probs" else (None, array)
    field = make_field(offsets=OFFSETS, probs=probs, scores=scores)
    with pytest.raises(BadArrays, match=words):
        check_values(field)


def test_values_that_rounding_explains_pass() -> None:
    for value in (1 + 1e-6, -1e-6):
        check_values(make_field(probs=np.full_like(PROBS, value), offsets=OFFSETS * np.nan))
    check_values(make_field(scores=np.full_like(PROBS, -3e38), offsets=OFFSETS))


@pytest.mark.parametrize(
    ("affine", "words"),
    [
        (np.eye(3), r"expected shape \[4, 4\], got \[3, 3\]"),
        (np.eye(4) * 1j, "expected real numbers, got complex128"),
        (np.full((4, 4), np.nan), "got nan"),
        (np.diag([1.0, 1.0, 1e30, 1.0]), "expected numbers up to 10000 mm, got 1e"),
        (np.ones((4, 4)), "expected 0 0 0 1 as last row"),
        (np.diag([1.0, 0.0, 1.0, 1.0]), "expected a spacing .* got 1 x 0 x 1"),
        (np.eye(4)[[0, 0, 2, 3]] + np.diag([0, 0, 1, 0]), "spacing|independent"),
        (OBLIQUE[[0, 0, 1, 3]], "three independent axes, got a determinant"),
    ],
)
def test_bad_affine_is_named(affine: NDArray[np.float64], words: str) -> None:
    with pytest.raises(BadArrays, match=f"array 'affine': .*({words})"):
        check_affine(affine)


@pytest.mark.parametrize("affine", [np.zeros(MANY, np.uint8), torch.zeros(MANY, dtype=torch.uint8)])
def test_large_array_is_no_affine_before_it_is_copied(affine: Array) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(BadArrays, match=rf"expected shape \[4, 4\], got \[{MANY}\]"):
            check_affine(affine)
        assert tracemalloc.get_traced_memory()[1] < MANY
    finally:
        tracemalloc.stop()


def test_good_affine_is_read_in_any_type() -> None:
    assert np.array_equal(check_affine(OBLIQUE), OBLIQUE)
    assert np.array_equal(check_affine(torch.eye(4, dtype=torch.bfloat16)), np.eye(4))
    assert np.array_equal(check_affine(np.eye(4, dtype=np.int8)), np.eye(4))


def some_rows(field: Field, threshold: float, placement: Placement) -> Rows:
    return filter_rows(field, threshold, (4, 7, 5), placement)


@pytest.mark.parametrize("block", [1, 50, 150, 1 << 20])
def test_votes_in_blocks_are_the_votes(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.voting.arrays.BLOCK_SIZE", block)
    field = random_field((5, 7, 6), landmarks=3)
    whole = filter_votes(field, 0.3)
    calls: list[None] = []
    parts = filter_in_blocks(field, 0.3, filter_votes, len(whole), lambda: calls.append(None))
    assert len(parts) == len(calls)
    votes = concat_votes(parts)
    assert torch.equal(votes.landmark, whole.landmark)
    assert torch.equal(votes.columns, whole.columns)
    expected = filter_rows(field, 0.3, (4, 7, 5))
    rows = filter_in_blocks(field, 0.3, some_rows, len(expected), lambda: calls.append(None))
    assert torch.equal(torch.cat(rows), expected)


def test_more_votes_than_allowed_are_refused_before_all_are_collected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("app.voting.arrays.BLOCK_SIZE", 100)
    field = random_field((50, 7, 6), 3)
    calls: list[None] = []
    with pytest.raises(TooLarge, match="expected at most 20 votes at threshold 0"):
        filter_in_blocks(field, 0.0, filter_votes, 20, lambda: calls.append(None))
    assert len(calls) == 1
    with pytest.raises(TooLarge, match="expected at most 20 votes at threshold 0"):
        filter_in_blocks(field, 0.0, some_rows, 20, lambda: calls.append(None))
    assert len(calls) < 10  # of 100 blocks: of its rows, many lie outside the sample


def test_too_many_votes_take_no_more_memory_than_as_many_as_there_may_be() -> None:
    field = random_field((70, 60, 80), 3)
    filter_votes(random_field((7, 6, 8), 3), 0.0)  # What is imported or compiled now is not.
    tracemalloc.start()
    try:
        with pytest.raises(TooLarge, match=f"expected at most {1 << 17:,} votes"):
            filter_in_blocks(field, 0.0, filter_votes, 1 << 17, lambda: None)
        assert tracemalloc.get_traced_memory()[1] < VOTE_BYTES << 17
    finally:
        tracemalloc.stop()
