"""Conformal 95 % regions."""

import numpy as np
import pytest

from app.training.calibrate.regions import (
    calibrate_regions,
    conformal_region,
    detected_errors,
    leave_one_out,
    max_coverage,
    proven_coverage,
)
from tests.support.outcomes import outcome


def test_the_region_is_the_split_conformal_one() -> None:
    """Of 99 errors the 95th; of 19 the largest; of fewer nothing can be said."""
    errors = np.random.default_rng(1).permutation(np.arange(1.0, 100.0))
    region = conformal_region(errors, own=True)
    assert region is not None
    assert (region.radius_mm, region.errors, region.coverage) == (95.0, 99, 0.95)
    largest = conformal_region(errors[:19], own=True)
    assert largest is not None
    assert (largest.radius_mm, largest.coverage) == (errors[:19].max(), 0.95)
    assert conformal_region(errors[:18], own=True) is None
    assert max_coverage(18) == pytest.approx(18 / 19)


def test_further_errors_stay_within_as_often_as_the_coverage() -> None:
    """A thousand calibrations of 60 errors each, on errors of any distribution."""
    random = np.random.default_rng(2)
    covered = []
    for draw in random.gamma(2.0, 0.2, (1000, 61)):
        region = conformal_region(draw[:60], own=True)
        covered.append(region is not None and draw[60] <= region.radius_mm)
    assert 0.93 <= np.mean(covered) <= 0.98


def test_a_landmark_with_enough_errors_has_a_region_of_its_own() -> None:
    easy = [outcome(0.01 * i, landmark="easy", scan=f"s{i}") for i in range(1, 20)]
    hard = [outcome(3.0, landmark="hard"), outcome(9.0, landmark="hard", status="low_confidence")]
    regions = calibrate_regions([*easy, *hard], ["easy", "hard", "unseen"])
    assert regions is not None
    assert (regions["easy"].radius_mm, regions["easy"].own) == (0.19, True)
    assert (regions["hard"].radius_mm, regions["hard"].errors) == (3.0, 20)
    assert not regions["hard"].own
    assert regions["unseen"] == regions["hard"]


def test_only_detected_landmarks_with_a_known_truth_count() -> None:
    """What is not sure has no region."""
    some = [outcome(0.1), outcome(9.0, status="low_confidence"), outcome(), outcome(0.4, scan="b")]
    assert detected_errors(some).tolist() == [0.1, 0.4]
    assert calibrate_regions(some, ["a"]) is None
    assert leave_one_out(some, ["a"]) == {}


def test_each_scan_is_compared_with_the_regions_of_the_others() -> None:
    errors = [outcome(0.1 * i, scan="near", landmark=str(i)) for i in range(20)]
    errors += [outcome(0.15 * i, scan="far", landmark=str(i)) for i in range(20)]
    shares = leave_one_out(errors, [str(i) for i in range(20)])
    assert shares == {"near": 1.0, "far": pytest.approx(13 / 20)}


def test_proven_coverage_of_folds_is_below_the_empirical_one() -> None:
    """Barber et al. 2021, theorem 4: 90 % if every specimen is a fold of its own."""
    assert proven_coverage(24, 24) == pytest.approx(0.9)
    assert proven_coverage(24, 5) == pytest.approx(0.9 - (1 - 5 / 24) / 6)
    assert proven_coverage(1000, 2) == pytest.approx(0.9 - 1 / 501)
