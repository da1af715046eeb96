"""What is checked at each call of a function of ``app`` while tests run."""

from collections.abc import Callable
from functools import partial
from typing import Any, ParamSpec, TypeVar

import jaxtyping
import numpy as np
import pytest
from beartype.roar import BeartypeCallHintViolation
from jaxtyping import Float64

from app.compute.threads import run_split
from app.geometry import PointSet, axis_codes, transform
from app.io.volume import VolumeLimits
from app.shapes.similarity import Similarity
from tests import checked

AFFINE = np.eye(4)
POINTS = np.zeros((5, 3))
Pairs = Float64[np.ndarray, "pairs 3"]
P = ParamSpec("P")
R = TypeVar("R")


def decorate(function: Callable[P, R]) -> Callable[P, R]:
    decorated: Callable[P, R] = jaxtyping.jaxtyped(function, typechecker=checked)
    return decorated


@decorate
def named(answer: object) -> list[str]:
    return answer  # type: ignore[return-value]


@decorate
def centred(points: PointSet, answer: object) -> PointSet:
    del points
    return answer  # type: ignore[return-value]


@decorate
def paired(points: Pairs, answer: object) -> Pairs:
    del points
    return answer  # type: ignore[return-value]


@decorate
def averaged(answers: list[PointSet]) -> float:
    return float(np.mean(answers))


@pytest.mark.parametrize(
    "call",
    [
        partial(transform, AFFINE[:3], POINTS),
        partial(transform, AFFINE, POINTS[:, :2]),
        partial(transform, AFFINE, POINTS.astype(np.float32)),
        partial(axis_codes, AFFINE[:3]),
        partial(Similarity, np.ones(2), np.zeros((2, 3, 3)), np.zeros((3, 3))),
        partial(centred, POINTS, POINTS.tolist()),
        partial(paired, POINTS, POINTS[1:]),
        partial(averaged, [POINTS.T]),
    ],
)
def test_arrays_of_other_shapes_and_types_are_refused(call: Callable[[], Any]) -> None:
    with pytest.raises(BeartypeCallHintViolation):
        call()


@pytest.mark.parametrize(
    ("function", "given"),
    [
        (run_split, (max, 10, "2")),
        (run_split, (3, 1, 1)),
        (VolumeLimits, ("large",)),
        (named, ([1],)),
    ],
)
def test_other_types_are_refused_where_there_are_no_arrays(
    function: Callable[..., object], given: tuple[object, ...]
) -> None:
    with pytest.raises(BeartypeCallHintViolation):
        function(*given)


def test_what_fits_is_let_through() -> None:
    assert transform(AFFINE, POINTS).shape == (5, 3)
    assert centred(POINTS, POINTS[1:]).shape == (4, 3)
    assert paired(POINTS, POINTS) is POINTS
    assert named(["a"]) == ["a"]
    assert VolumeLimits(axis=5).axis == 5
