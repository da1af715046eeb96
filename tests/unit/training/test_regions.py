"""Conformal 95 % regions."""

import math
from dataclasses import replace

import numpy as np
import pytest

from app.inference import Uncertainty
from app.measurements import MeasurementSpec
from app.model import LandmarkSpec
from app.training.calibrate.regions import (
    calibrate_intervals,
    calibrate_regions,
    conformal_region,
    detected_errors,
    in_units_of_growth,
    leave_one_out,
    region_margin,
    share_within,
    usual_uncertainty,
)
from app.training.data.folds import Folds
from app.training.evaluate.measured import compare_measurements
from tests.support.outcomes import outcome

CONSTANT = Uncertainty(None, None)
"""Of regions that do not grow."""


def specs(*names: str) -> list[LandmarkSpec]:
    """Name landmarks of no group."""
    return [LandmarkSpec(name=name) for name in names]


def test_the_region_is_the_split_conformal_one() -> None:
    """Of 99 errors the 95th; of 19 the largest; of fewer nothing can be said."""
    errors = np.random.default_rng(1).permutation(np.arange(1.0, 100.0))
    region = conformal_region(errors, "landmark")
    assert region is not None
    assert (region.radius_mm, region.errors, region.coverage) == (95.0, 99, 0.95)
    largest = conformal_region(errors[:19], "landmark")
    assert largest is not None
    assert (largest.radius_mm, largest.coverage) == (errors[:19].max(), 0.95)
    assert conformal_region(errors[:18], "landmark") is None


def test_further_errors_stay_within_as_often_as_the_coverage() -> None:
    """A thousand calibrations of 60 errors each, on errors of any distribution."""
    random = np.random.default_rng(2)
    covered = []
    for draw in random.gamma(2.0, 0.2, (1000, 61)):
        region = conformal_region(draw[:60], "landmark")
        covered.append(region is not None and draw[60] <= region.radius_mm)
    assert 0.93 <= np.mean(covered) <= 0.98


def test_regions_hold_as_near_to_the_border_as_nearly_all_they_were_calibrated_on() -> None:
    """Not nearer; but further away than the network votes from, a border cuts nothing off."""
    outcomes = [outcome(0.1, inside_mm=float(i)) for i in range(101)]
    doubted = [outcome(0.1, inside_mm=0.0, status="low_confidence")] * 50
    nobody_knows = [replace(doubted[0], status="detected", error_mm=math.nan, known=False)] * 50
    assert region_margin([*outcomes, *doubted, *nobody_knows], 7.5) == 5.0
    assert region_margin(outcomes, 3.0) == 3.0
    assert region_margin(outcomes, math.inf) == 0.0


def test_a_landmark_with_enough_errors_has_a_region_of_its_own() -> None:
    easy = [outcome(0.01 * i, landmark="easy", scan=f"s{i}") for i in range(1, 20)]
    hard = [outcome(3.0, landmark="hard"), outcome(9.0, landmark="hard", status="low_confidence")]
    regions = calibrate_regions([*easy, *hard], specs("easy", "hard", "unseen"))
    assert regions is not None
    assert (regions["easy"].radius_mm, regions["easy"].of) == (0.19, "landmark")
    assert (regions["hard"].radius_mm, regions["hard"].errors) == (3.0, 20)
    assert regions["hard"].of == "all"
    assert regions["unseen"] == regions["hard"]


def test_landmarks_of_a_group_share_their_region_however_many_errors_each_has() -> None:
    errors = [
        outcome((1 + offset) * 0.01 * i, landmark=name, scan=f"s{i}")
        for offset, name in enumerate(("L1", "L2", "rib"))
        for i in range(1, 21)
    ]
    alike = (LandmarkSpec(name="L1", group="centre"), LandmarkSpec(name="L2", group="centre"))
    few = LandmarkSpec(name="L3", group="corner")
    regions = calibrate_regions(errors, [*alike, LandmarkSpec(name="rib"), few])
    assert regions is not None
    centre = regions["L1"]
    assert (centre.of, centre.errors) == ("group", 40)
    assert regions["L2"] == centre
    assert centre.radius_mm == pytest.approx(0.38)  # the 39th of both landmarks' errors
    assert regions["rib"].of == "landmark"
    assert regions["rib"].radius_mm == pytest.approx(0.6)
    assert (regions["L3"].of, regions["L3"].errors) == ("all", 60)
    assert share_within([one for one in errors if one.scan == "s20"], regions) == pytest.approx(
        2 / 3
    )


def test_intervals_of_all_measurements_share_a_factor() -> None:
    """By which those that follow from the regions hold 95 % of the errors."""
    measurements = [
        MeasurementSpec(name="a-b", kind="distance", points=("a", "b")),
        MeasurementSpec(name="a-c", kind="distance", points=("a", "c"), interval_scale=7.0),
    ]
    errors = []
    for i in range(1, 21):
        errors.append(outcome(0.1 * i, scan=f"s{i}"))
        for name, true in (("b", 21.0), ("c", 31.0)):
            far = np.array([true, 2.0, 3.0])
            exact = outcome(0.0, landmark=name, scan=f"s{i}")
            errors.append(replace(exact, true_mm=far, found_mm=far))
    regions = calibrate_regions(errors, specs("a", "b", "c"))
    assert regions is not None
    answered = [replace(one, region95_mm=regions[one.landmark].radius_mm) for one in errors]
    factor = calibrate_intervals(measurements, errors, regions, CONSTANT)
    scaled = [spec.model_copy(update={"interval_scale": factor}) for spec in measurements]
    beyond = [one.error / (one.half_width or 0) for one in compare_measurements(scaled, answered)]
    assert np.sort(beyond)[-2] == pytest.approx(1.0)  # the 39th of 40, by definition
    assert (
        calibrate_intervals(measurements, errors[:27], regions, CONSTANT) is None
    )  # of nine scans


@pytest.mark.no_cover
@pytest.mark.parametrize("by_shape", [True, False])
def test_regions_that_grow_hold_for_subjects_that_are_unlike_others(*, by_shape: bool) -> None:
    """Of 300 specimens, ten unlike all others; constant regions hold under half of theirs."""
    random = np.random.default_rng(4)
    errors = []
    for scan in range(300):
        unlike = 4.0 if scan >= 290 else 1.0
        for landmark in "abcdefgh":
            error_mm = abs(random.normal(0.0, 0.1 * unlike))
            off_mm = abs(random.normal(0.0, 0.3 * unlike))
            shape_mm, spread_mm = (off_mm, None) if by_shape else (None, off_mm)
            errors.append(
                outcome(
                    error_mm,
                    landmark=landmark,
                    scan=f"s{scan}",
                    from_shape_mm=shape_mm,
                    spread_mm=spread_mm,
                )
            )
    usual = usual_uncertainty(errors)
    assert usual[0 if by_shape else 1] == pytest.approx(0.3, abs=0.05)
    assert usual[1 if by_shape else 0] is None
    for some, at_least, below in (
        (in_units_of_growth(errors, usual), 0.9, 1.01), (errors, 0.3, 0.5)
    ):  # fmt: skip
        shares = leave_one_out(some, specs(*"abcdefgh"))
        assert np.mean(list(shares.values())) == pytest.approx(0.95, abs=0.02)
        assert at_least <= np.mean([shares[f"s{scan}"] for scan in range(290, 300)]) < below


def test_intervals_follow_from_regions_that_grow() -> None:
    """A distance whose points' regions are all twice as large needs half the factor."""
    spec = MeasurementSpec(name="a-b", kind="distance", points=("a", "b"))
    errors = []
    for i in range(1, 40):
        errors.append(outcome(0.1 * i, scan=f"s{i}", from_shape_mm=2.0))
        far = np.array([21.0, 2.0, 3.0])
        exact = outcome(0.0, landmark="b", scan=f"s{i}", from_shape_mm=2.0)
        errors.append(replace(exact, true_mm=far, found_mm=far))
    regions = calibrate_regions(errors, specs("a", "b"))
    assert regions is not None
    constant = calibrate_intervals([spec], errors, regions, CONSTANT)
    assert constant is not None
    assert calibrate_intervals([spec], errors, regions, Uncertainty(1.0, None)) == pytest.approx(
        constant / 2
    )
    assert calibrate_intervals([spec], errors, regions, Uncertainty(3.0, None)) == pytest.approx(
        constant
    )


def test_regions_are_calibrated_with_the_scale_that_is_written() -> None:
    """In a subject of some mm, a thousandth of one matters; in a cell, less."""
    for mm, written in ((0.1236, 0.124), (0.0016, 0.0016), (1.236e-4, 1.24e-4), (0.0, 0.001)):
        some = [outcome(0.1, from_shape_mm=mm, spread_mm=mm)]
        assert usual_uncertainty(some) == Uncertainty(written, written)


def test_what_is_not_known_of_a_scan_lets_no_region_grow() -> None:
    assert usual_uncertainty([outcome(0.1), outcome(0.2, scan="b")]) == CONSTANT
    usual = Uncertainty(0.5, 0.5)
    assert in_units_of_growth([outcome(0.1)], usual)[0].error_mm == 0.1
    unsure = outcome(0.1, status="low_confidence", from_shape_mm=9.0, spread_mm=9.0)
    some = [outcome(0.1, from_shape_mm=1.0, spread_mm=2.0), unsure]
    assert [one.error_mm for one in in_units_of_growth(some, usual)] == [0.0125, 0.0125]
    assert [one.error_mm for one in in_units_of_growth(some, CONSTANT)] == [0.1, 0.1]


def test_only_detected_landmarks_with_a_known_truth_count() -> None:
    """What is not sure has no region."""
    some = [outcome(0.1), outcome(9.0, status="low_confidence"), outcome(), outcome(0.4, scan="b")]
    assert detected_errors(some).tolist() == [0.1, 0.4]
    assert calibrate_regions(some, specs("a")) is None
    assert leave_one_out(some, specs("a")) == {}


def test_each_scan_is_compared_with_the_regions_of_the_others() -> None:
    errors = [outcome(0.1 * i, scan="near", landmark=str(i)) for i in range(20)]
    errors += [outcome(0.15 * i, scan="far", landmark=str(i)) for i in range(20)]
    shares = leave_one_out(errors, specs(*map(str, range(20))))
    assert shares == {"near": 1.0, "far": pytest.approx(13 / 20)}


def test_no_scan_of_a_subject_judges_another_one_of_it() -> None:
    errors = [outcome(0.4 * i, scan="a_left", landmark=str(i)) for i in range(20)]
    errors += [outcome(0.4 * i, scan="a_right", landmark=str(i)) for i in range(20)]
    errors += [outcome(0.1 * i, scan="b", landmark=str(i)) for i in range(20)]
    shares = leave_one_out(errors, specs(*map(str, range(20))))
    assert shares == {"a_left": 0.25, "a_right": 0.25, "b": 1.0}


def test_no_scan_of_a_subject_that_only_folds_know_judges_another_one_of_it() -> None:
    errors = [outcome(0.4 * i, scan="a-1", landmark=str(i)) for i in range(20)]
    errors += [outcome(0.4 * i, scan="a-2", landmark=str(i)) for i in range(20)]
    errors += [outcome(0.1 * i, scan="b", landmark=str(i)) for i in range(20)]
    folds = Folds(1, (), {"a-1": "a", "a-2": "a", "b": "b"}, {})
    shares = leave_one_out(errors, specs(*map(str, range(20))), folds)
    assert shares == {"a-1": 0.25, "a-2": 0.25, "b": 1.0}
