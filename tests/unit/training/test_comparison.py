"""The next version of a model is found better if it is, and not because of what was corrected."""

from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest

from app.training.evaluate.comparison import case_losses, compare_losses, counted
from app.training.evaluate.outcomes import Outcome
from tests.support.outcomes import outcome

RADIUS_MM = 10.0
VOXEL_MM = 1.5
SIGMA_MM = 0.75
"""Of errors along each axis: most are less than 2.1 mm, as far as a calibrated region reaches."""

GROSS = 0.1
"""Share of the points at which a version is wrong by six times as much."""

CASES = 1000
LANDMARKS = "abcd"


def answers(
    positions: np.ndarray, old: np.ndarray, moved: np.ndarray, truth: np.ndarray
) -> Iterator[Outcome]:
    """List what a version has answered, with the truth as the kept cases have it."""
    for (case, index), is_moved in np.ndenumerate(moved):
        true, found = (truth if is_moved else old)[case, index], positions[case, index]
        yield Outcome(
            str(case), LANDMARKS[index], True, "detected", true, found,
            float(np.linalg.norm(found - true)), 0.0, 0.9, 0.9, 0.9, None,
        )  # fmt: skip


@cache
def measured(passed_mm: float, alike: float, size: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Measure the losses of two versions on many kept cases.

    Args:
        passed_mm: A person moves what the version in place puts wrong by more.
        alike: Correlation of both versions' errors.
        size: Of the errors of the next version, in those of the version in place.
    """
    random = np.random.default_rng(1)
    shape = CASES, len(LANDMARKS), 3
    hard = np.exp(0.4 * random.standard_normal((CASES, 1, 1)))

    def draw() -> np.ndarray:
        gross = np.where(random.random((*shape[:2], 1)) < GROSS, 6.0, 1.0)
        return SIGMA_MM * hard * gross * random.standard_normal(shape)

    shared = draw()
    old, new = (alike**0.5 * shared + (1 - alike) ** 0.5 * draw() for _ in range(2))
    moved = np.linalg.norm(old, axis=-1) > passed_mm
    before, after = (list(answers(at, old, moved, np.zeros(shape))) for at in (old, size * new))
    kept = {str(case): None for case in range(CASES)}
    one, other = (case_losses(some, RADIUS_MM) for some in counted(before, after, kept, VOXEL_MM))
    return one, other


def share_found_better(losses: tuple[np.ndarray, np.ndarray], cases: int) -> float:
    """Say of how many trials with so many cases the next version comes out better."""
    trials = [np.split(each, CASES // cases) for each in losses]
    found = [compare_losses(a, b, ("1", "2")) for a, b in zip(*trials, strict=True)]
    return float(np.mean([one.is_better for one in found]))


@pytest.mark.no_cover
@pytest.mark.parametrize("cases", [5, 40])
@pytest.mark.parametrize(
    ("passed_mm", "alike"),
    [(0.0, 0.0), (2.1, 0.0), (0.0, 0.9), (0.75, 0.9), (2.1, 0.9), (np.inf, 0.9)],
)
def test_equally_exact_version_is_hardly_ever_found_better(
    passed_mm: float, alike: float, cases: int
) -> None:
    """Whether all points are placed anew, those beyond some error are, or none is."""
    by_chance = 0.025 + 3 * (0.025 * 0.975 * cases / CASES) ** 0.5
    assert share_found_better(measured(passed_mm, alike), cases) <= by_chance


def test_gain_that_is_measured_is_not_larger_than_the_true_one() -> None:
    before, after = measured(0.0, 0.9)
    true = (before - after).mean()
    for passed_mm in (0.75, 2.1, np.inf):
        before, after = measured(passed_mm, 0.9)
        assert (before - after).mean() < true


@pytest.mark.parametrize("passed_mm", [0.0, 2.1])
def test_better_version_is_found_better(passed_mm: float) -> None:
    """One whose errors are half as large; five cases seldom show that, forty do."""
    losses = measured(passed_mm, 0.9, 0.5)
    assert share_found_better(losses, 5) >= 0.05
    assert share_found_better(losses, 40) >= 0.9


def test_loss_is_bounded_and_averaged_by_case_and_leaves_out_what_is_unknown() -> None:
    def of(one: Outcome) -> float:
        return float(case_losses([one], 4.0)[0])

    assert of(outcome(1.5)) == 1.5
    assert of(outcome(9.0)) == 4.0
    assert of(outcome(status="not_found")) == 4.0
    assert of(outcome(present=False)) == 4.0
    assert of(outcome(present=False, status="not_found")) == 0.0
    some = [
        outcome(1.0, scan="one-frame0"),
        outcome(3.0, scan="one-frame1"),
        outcome(present=False, known=False, scan="one-frame1"),
        outcome(0.5, scan="two"),
    ]
    np.testing.assert_allclose(case_losses(some, 4.0), [2.0, 0.5])


def test_in_kept_cases_small_moves_and_absent_landmarks_do_not_count() -> None:
    lost = outcome(status="not_found")
    olds = [outcome(2.0), outcome(2.0), outcome(2.0), lost, lost, outcome(present=False)]
    news = [outcome(1.0), outcome(0.1), lost, outcome(0.3), lost, outcome(present=False)]
    before, after = counted(olds, news, {"one": None}, VOXEL_MM)
    assert [before, after] == [olds[:5], [olds[0], *news[1:4], lost]]
    assert counted(olds, news, {"two": None}, VOXEL_MM) == (olds, news)


def test_points_that_an_earlier_version_answered_favour_no_version_that_imitates_it() -> None:
    """It was 1 mm off, unnoticed; the next version has learned that, the one in place has not."""
    random = np.random.default_rng(2)
    shape = CASES, len(LANDMARKS), 3
    truth, off = np.zeros(shape), np.array([1.0, 0.0, 0.0])
    first = truth + off + 0.1 * random.standard_normal(shape)
    in_place = 0.5 * random.standard_normal(shape)
    imitation = truth + off + 0.45 * random.standard_normal(shape)
    moved = random.random(shape[:2]) < 0.3
    before, after = (list(answers(at, first, moved, truth)) for at in (in_place, imitation))
    placed = {
        str(case): {name for name, one in zip(LANDMARKS, row, strict=True) if one}
        for case, row in enumerate(moved)
    }
    for kept, better in ((placed, -1), (dict.fromkeys(placed), 1)):
        pair = counted(before, after, kept, 0.5)
        one, other = (case_losses(some, RADIUS_MM) for some in pair)
        assert np.sign((one - other).mean()) == better
    assert len(counted(before, after, placed, 0.5)[0]) == moved.sum()


def test_without_a_point_that_counts_no_version_is_better() -> None:
    none = case_losses(counted([outcome(1.0)], [outcome(0.1)], {"one": set()}, 0.5)[0], RADIUS_MM)
    assert not compare_losses(none, none, ("1", "2")).is_better


def test_worse_version_is_called_worse_by_how_much_it_is() -> None:
    """It was called better by -1.900 mm."""
    before, after = np.array([1.0, 1.2, 1.1, 0.9]), np.array([2.9, 3.0, 3.1, 2.8])
    better, worse = (
        compare_losses(*losses, ("1", "2")).describe().partition("mm: ")[2]
        for losses in ((after, before), (before, after))
    )
    assert better == "better by 1.900 mm, 95 % interval 1.770 to 2.030 mm"
    assert worse == better.replace("better", "worse")
