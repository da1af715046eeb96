"""Presence thresholds from masses of votes."""

import numpy as np
import pytest

from app.training.calibrate.thresholds import calibrate_thresholds
from app.training.evaluate.outcomes import Outcome
from tests.support.outcomes import outcome


def masses(present: list[float], absent: list[float], landmark: str = "a") -> list[Outcome]:
    """Make outcomes of these masses."""
    return [outcome(0.1, mass=mass, landmark=landmark) for mass in present] + [
        outcome(mass=mass, landmark=landmark, present=False, status="not_found") for mass in absent
    ]


def test_a_threshold_is_the_geometric_mean_of_present_and_absent_masses() -> None:
    chosen = calibrate_thresholds(masses([0.9] * 30, [0.1] * 30), ["a", "b"], 2.0)
    assert chosen is not None
    assert chosen.values == pytest.approx((0.3, 0.3))
    assert chosen.own == 1


def test_landmarks_of_unknown_presence_say_nothing_of_absence() -> None:
    unsure = [outcome(mass=0.9, present=False, known=False) for _ in range(30)]
    chosen = calibrate_thresholds([*masses([0.9] * 30, [0.1] * 30), *unsure], ["a"], 2.0)
    assert chosen is not None
    assert chosen.values == pytest.approx((0.3,))


def test_absence_without_mass_does_not_pull_the_threshold_to_zero() -> None:
    chosen = calibrate_thresholds(masses([0.8] * 30, [0.0] * 30), ["a"], 2.0)
    assert chosen is not None
    assert chosen.values == pytest.approx((0.2,))


def test_one_mass_in_fifty_may_lie_on_the_wrong_side() -> None:
    present, absent = [0.01, *[0.9] * 99], [0.89, *[0.1] * 99]
    chosen = calibrate_thresholds(masses(present, absent), ["a"], 2.0)
    assert chosen is not None
    assert chosen.values == pytest.approx((0.3,))


def test_answers_far_from_the_truth_say_nothing_of_presence() -> None:
    wrong = [outcome(5.0, mass=0.001) for _ in range(30)]
    chosen = calibrate_thresholds([*masses([0.9] * 30, [0.1] * 30), *wrong], ["a"], 2.0)
    assert chosen is not None
    assert chosen.values == pytest.approx((0.3,))


def test_a_landmark_with_few_masses_shares_the_threshold_of_all() -> None:
    some = masses([0.9] * 100, [0.1] * 100) + masses([0.4] * 3, [0.1] * 18, "rare")
    chosen = calibrate_thresholds(some, ["a", "rare"], 2.0)
    assert chosen is not None
    assert chosen.own == 1
    assert chosen.values[1] == pytest.approx(
        (0.1 * np.percentile([0.9] * 100 + [0.4] * 3, 2)) ** 0.5
    )
    assert calibrate_thresholds(masses([0.9] * 18, [0.1] * 30), ["a"], 2.0) is None
