"""How much the mean error varies."""

import numpy as np
import pytest

from app.training.evaluate.spread import describe_spread, mean_errors, mean_interval
from tests.support.outcomes import outcome


def test_spread_is_over_subjects_and_folds() -> None:
    """Two scans of one subject count as one, and a landmark that was not placed not at all."""
    errors = {"a": (0.1, 0.3), "b": (0.4, 0.6), "c_l": (0.8, 0.8), "c_r": (1.2,)}
    some = [outcome(mm, scan=scan) for scan, mms in errors.items() for mm in mms]
    some += [outcome(status="not_found", scan="d")]
    folds = {"a": "1", "b": "1", "c_l": "2", "c_r": "2", "d": "2"}
    subjects = {name: name[0] for name in folds}
    means = np.array([0.2, 0.5, 2.8 / 3])
    assert mean_errors(some, subjects) == pytest.approx(means)
    assert mean_errors(some, folds) == pytest.approx(np.array([0.35, 2.8 / 3]))
    half = 4.3027 * means.std(ddof=1) / np.sqrt(3)
    low, high = means.mean() - half, means.mean() + half
    assert mean_interval(means) == pytest.approx((low, high), abs=1e-4)
    assert describe_spread(some, subjects, folds) == (
        f"Mean of 3 subjects' mean errors: 0.544 mm, 95 % interval {low:.3f} to {high:.3f} mm "
        f"(Student's t over subjects); standard deviation {means.std(ddof=1):.3f} mm over "
        f"subjects, {np.std([0.35, 2.8 / 3], ddof=1):.3f} mm over folds."
    )


def test_the_interval_holds_the_mean_about_as_often_as_it_says() -> None:
    """Of few specimens, too: five here."""
    random = np.random.default_rng(5)
    names = {str(number): str(number) for number in range(5)}
    held = 0
    for _ in range(100):
        some = [
            outcome(mm, scan=name) for mm, name in zip(random.gamma(4, 0.05, 5), names, strict=True)
        ]
        low, high = mean_interval(mean_errors(some, names))
        held += low <= 0.2 <= high
    assert 0.9 <= held / 100 <= 0.99


def test_too_few_subjects_have_no_spread() -> None:
    spread = describe_spread([outcome(0.1)], {"one": "one"}, {"one": "1"})
    assert spread.startswith("Too few subjects")
