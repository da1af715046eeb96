"""Measurements between landmarks, against figures worked out by hand and by many random draws."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from app.measurements import (
    INTERVAL95_SIGMAS,
    REGION95_SIGMAS,
    MeasurementSpec,
    measure_landmarks,
)

POINTS: dict[str, Any] = {
    "o": np.zeros(3),
    "x": np.array([2.0, 0.0, 0.0]),
    "y": np.array([0.0, 4.0, 0.0]),
    "z": np.array([0.0, 0.0, 5.0]),
    "yz": np.array([7.0, 3.0, 3.0]),
    "lost": None,
}
REGIONS = {"o": 0.5, "x": 1.0, "y": 1.5, "z": 2.0, "yz": 0.7}


def spec(kind: str, points: Sequence[str], **more: Any) -> MeasurementSpec:
    return MeasurementSpec.model_validate(
        {"name": "it", "kind": kind, "points": tuple(points), **more}
    )


@pytest.mark.parametrize(
    ("one", "expected", "unit"),
    [
        (spec("distance", ["x", "z"]), np.sqrt(29), "mm"),
        (spec("angle", ["o", "x", "o", "y"]), 90.0, "deg"),
        (spec("angle", ["o", "y", "y", "o"]), 180.0, "deg"),
        (spec("angle", ["o", "y", "o", "yz"], plane="sagittal"), 45.0, "deg"),
        (spec("angle", ["o", "yz", "o", "y"], plane="sagittal"), -45.0, "deg"),
        (spec("plane_angle", ["o", "x", "y", "o", "y", "z"]), 90.0, "deg"),
        (spec("plane_angle", ["o", "x", "y", "y", "x", "o"]), 0.0, "deg"),
        (spec("line_distance", ["z", "x", "o"]), 5.0, "mm"),
        (spec("projection", ["o", "yz", "o", "y"]), 3.0, "mm"),
        (spec("projection", ["o", "yz", "y", "o"]), -3.0, "mm"),
        (spec("ratio", ["o", "y", "o", "x"]), 2.0, ""),
    ],
)
def test_values_are_those_of_geometry(one: MeasurementSpec, expected: float, unit: str) -> None:
    (measured,) = measure_landmarks([one], POINTS, REGIONS)
    assert measured.value == pytest.approx(expected, abs=1e-9)
    assert one.unit == unit


@pytest.mark.parametrize(
    "one",
    [
        spec("distance", ["x", "z"]),
        spec("angle", ["o", "x", "z", "yz"]),
        spec("angle", ["o", "y", "z", "yz"], plane="sagittal"),
        spec("plane_angle", ["o", "x", "y", "x", "y", "z"]),
        spec("line_distance", ["z", "x", "yz"]),
        spec("projection", ["x", "yz", "o", "y"], interval_scale=1.0),
        spec("ratio", ["o", "yz", "o", "z"]),
    ],
)
def test_an_interval_holds_95_percent_of_what_errors_of_the_points_make_of_a_value(
    one: MeasurementSpec,
) -> None:
    small = {name: 0.05 * radius for name, radius in REGIONS.items()}
    (measured,) = measure_landmarks([one], POINTS, small)
    assert measured.value is not None
    assert measured.half_width is not None
    random = np.random.default_rng(4)
    errors = []
    for _ in range(1500):
        moved = {
            name: POINTS[name] + radius / REGION95_SIGMAS * random.standard_normal(3)
            for name, radius in small.items()
        }
        (other,) = measure_landmarks([one], moved, {})
        assert other.value is not None
        errors.append(abs(other.value - measured.value))
    assert 0.93 <= np.mean(np.array(errors) <= measured.half_width) <= 0.97


def test_a_missing_point_is_named_and_leaves_no_value() -> None:
    (measured,) = measure_landmarks([spec("distance", ["x", "lost"])], POINTS, REGIONS)
    assert (measured.value, measured.half_width) == (None, None)
    assert measured.reason == "not found: lost"


def test_a_point_without_a_region_leaves_no_interval() -> None:
    (measured,) = measure_landmarks([spec("distance", ["x", "z"])], POINTS, {"x": 1.0})
    assert measured.value is not None
    assert measured.half_width is None
    assert measured.reason == "without a 95 % region: z"


@pytest.mark.parametrize("kind", ["angle", "projection", "ratio"])
def test_a_line_of_no_length_has_no_measurement(kind: str) -> None:
    (measured,) = measure_landmarks([spec(kind, ["x", "y", "o", "o"])], POINTS, REGIONS)
    assert measured.value is None
    assert "coincide" in measured.reason


def test_scale_of_the_manifest_widens_the_interval() -> None:
    narrow, wide = measure_landmarks(
        [spec("distance", ["x", "z"]), spec("distance", ["x", "z"], interval_scale=1.5)],
        POINTS,
        REGIONS,
    )
    assert narrow.half_width is not None
    assert wide.half_width == pytest.approx(1.5 * narrow.half_width)


@pytest.mark.parametrize(
    "one",
    [
        spec("distance", ["x", "z"]),
        spec("angle", ["o", "x", "z", "yz"]),
        spec("plane_angle", ["o", "x", "y", "x", "y", "z"]),
        spec("line_distance", ["z", "x", "yz"]),
        spec("projection", ["x", "yz", "o", "y"]),
        spec("ratio", ["o", "yz", "o", "z"]),
    ],
)
def test_an_interval_is_as_wide_beside_its_value_however_small_the_subject_is(
    one: MeasurementSpec,
) -> None:
    """Of points a micrometre apart, that of a ratio was four times as wide."""
    wide: list[float] = []
    for scale in (1.0, 1e-3, 1e-4, 1e-5):
        points = {name: point * scale for name, point in POINTS.items() if point is not None}
        regions = {name: 0.1 * radius * scale for name, radius in REGIONS.items()}
        (found,) = measure_landmarks([one], points, regions)
        assert found.half_width is not None
        wide.append(found.half_width / (scale if one.unit == "mm" else 1.0))
    assert wide == [pytest.approx(wide[0], rel=1e-6)] * len(wide)


@pytest.mark.parametrize(
    ("one", "value", "squares"),
    [
        # Squared derivatives by the coordinates across; of an angle, by those of 40 mm.
        (spec("angle", ["a", "b", "c", "d"]), 0.0, 8 * np.degrees(1 / 40) ** 2),
        (spec("angle", ["a", "b", "d", "c"]), 180.0, 8 * np.degrees(1 / 40) ** 2),
        (spec("line_distance", ["e", "a", "b"]), 0.0, 2 * (1 + 0.25 + 0.25)),
        # Each corner, across the plane, turns one triangle against the other.
        (spec("plane_angle", ["a", "b", "c", "a", "f", "c"]), 0.0, 4 * np.degrees(1 / 40) ** 2),
    ],
)
def test_an_interval_has_a_width_where_lines_are_exactly_parallel(
    one: MeasurementSpec, value: float, squares: float
) -> None:
    """Whole numbers of millimetres, as points picked by hand may have."""
    points = {
        "a": np.zeros(3), "b": np.array([40.0, 0, 0]), "c": np.array([0.0, 20, 0]),
        "d": np.array([40.0, 20, 0]), "e": np.array([20.0, 0, 0]),
        "f": np.array([-40.0, 20, 0]),
    }  # fmt: skip
    (found,) = measure_landmarks([one], points, dict.fromkeys(points, 1.0))
    assert found.value == value
    sigma = np.sqrt(squares) / REGION95_SIGMAS
    assert found.half_width == pytest.approx(INTERVAL95_SIGMAS * sigma, rel=1e-3)


@pytest.mark.no_cover
@pytest.mark.parametrize("aside", [0.0, 1.5])
@pytest.mark.parametrize(
    "one",
    [
        spec("angle", ["a", "b", "c", "d"]),
        spec("angle", ["a", "b", "d", "c"]),
        spec("line_distance", ["d", "a", "c"]),
        spec("plane_angle", ["a", "b", "c", "a", "d", "c"]),
        spec("distance", ["d", "b"]),
        spec("distance", ["d", "b"], plane="coronal"),
        spec("ratio", ["d", "b", "a", "c"]),
    ],
)
def test_an_interval_holds_the_true_value_where_lines_are_parallel_and_points_on_them(
    one: MeasurementSpec, aside: float
) -> None:
    """Or where points coincide."""
    places = {"angle": (40, 20), "line_distance": (0, 12), "plane_angle": (30, 5)}
    x, y = places.get(one.kind, (40, 0))
    points = {
        "a": np.zeros(3), "b": np.array([40.0, 0, 0]), "c": np.array([0.0, 20, 0]),
        "d": np.array([x, y, aside]),
    }  # fmt: skip
    regions = dict.fromkeys(points, 1.0)
    (true,) = measure_landmarks([one], points, regions)
    assert true.value is not None
    random, held = np.random.default_rng(4), []
    for _ in range(400):
        moved = {
            name: point + random.standard_normal(3) / REGION95_SIGMAS
            for name, point in points.items()
        }
        (found,) = measure_landmarks([one], moved, regions)
        assert found.value is not None
        assert found.half_width is not None
        held.append(abs(found.value - true.value) <= found.half_width + 1e-9)
    assert 0.92 <= np.mean(held) <= 0.995


@pytest.mark.parametrize(
    ("one", "bounds"),
    [
        (spec("distance", ["a", "b"]), (0.0, None)),
        (spec("distance", ["a", "b"], plane="axial"), (0.0, None)),
        (spec("ratio", ["a", "b", "a", "c"]), (0.0, None)),
        (spec("line_distance", ["b", "a", "c"]), (0.0, None)),
        (spec("angle", ["a", "c", "a", "d"]), (0.0, None)),
        (spec("angle", ["a", "c", "d", "a"]), (None, 180.0)),
        (spec("angle", ["a", "c", "a", "d"], plane="axial"), (None, None)),
        (spec("plane_angle", ["a", "b", "c", "a", "b", "d"]), (0.0, None)),
        (spec("plane_angle", ["a", "b", "c", "a", "b", "e"]), (0.0, 90.0)),
        (spec("projection", ["a", "b", "a", "b"]), (None, None)),
    ],
)
def test_an_interval_ends_where_values_do(
    one: MeasurementSpec, bounds: tuple[float | None, float | None]
) -> None:
    """A distance of 1 mm had the interval -1.8 to 3.8 mm, and an angle 0 to 352 degrees."""
    points = {
        "a": np.zeros(3), "b": np.array([1.0, 0, 0]), "c": np.array([0, 5.0, 0]),
        "d": np.array([0.1, 5.0, 0.2]), "e": np.array([0, 0.3, 2.0]),
    }  # fmt: skip
    (found,) = measure_landmarks([one], points, dict.fromkeys(points, 2.8))
    assert found.value is not None
    assert found.half_width is not None
    plain = found.value - found.half_width, found.value + found.half_width
    cut = tuple(own if end is None else end for end, own in zip(bounds, plain, strict=True))
    assert found.interval95 == cut
    assert (cut != plain) == (bounds != (None, None))


def test_a_value_between_doubtful_points_says_so() -> None:
    """It gave the same reason as one of a model that is not calibrated."""
    one = MeasurementSpec(name="x", kind="distance", points=("x", "y"))
    regions = dict.fromkeys(POINTS)
    (doubted,) = measure_landmarks([one], POINTS, regions, {"y", "z"})
    (sure,) = measure_landmarks([one], POINTS, regions, {"z"})
    assert (doubted.value, doubted.half_width) == (sure.value, None)
    assert doubted.reason == "low confidence: y"
    assert sure.reason == "without a 95 % region: x, y"
