"""Who is left out together, what was answered, and how much it varies: by hand."""

import io
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from app.errors import BadParameter, StartupError
from app.training.calibrate.regions import proven_of
from app.training.data.check_data import check_data
from app.training.data.folds import Folds, begin_folds, make_folds, read_folds, unlearnt
from app.training.data.summary import Facts
from app.training.evaluate.crossvalidation import Pooled, conclude, describe
from app.training.evaluate.model_card import write_section
from app.training.evaluate.outcome_files import read_outcomes, write_outcomes
from app.training.evaluate.spread import measure_spread, say_spread
from tests.support.outcomes import outcome
from tests.support.training_data import make_affine, middle_of, points_of, write_data, write_points

NAMES = [f"s{number}" for number in range(11)]


@pytest.fixture(scope="module")
def specimens(tmp_path_factory: pytest.TempPathFactory) -> tuple[Facts, ...]:
    data = write_data(tmp_path_factory.mktemp("data"), count=11)
    return check_data(data / "scans", data / "landmarks").specimens


def named(specimens: tuple[Facts, ...], *names: str) -> list[Facts]:
    """Give specimens other names."""
    return [replace(facts, name=name) for facts, name in zip(specimens, names, strict=False)]


def test_everybody_is_left_out_once_in_folds_of_about_one_size(
    specimens: tuple[Facts, ...],
) -> None:
    folds = make_folds(specimens, 4, seed=1)
    assert sorted(name for fold in folds.members for name in fold) == sorted(NAMES)
    assert sorted(len(fold) for fold in folds.members) == [2, 3, 3, 3]
    assert set(folds.of_scans()) == set(NAMES)


def test_folds_depend_on_names_and_seed_alone(specimens: tuple[Facts, ...]) -> None:
    folds = make_folds(specimens, 4, seed=1)
    assert make_folds(specimens[::-1], 4, seed=1).members == folds.members
    assert make_folds(specimens, 4, seed=2).members != folds.members


@pytest.mark.parametrize("count", [0, 1, 12])
def test_as_many_folds_as_scans_at_most_and_two_at_least(
    specimens: tuple[Facts, ...], count: int
) -> None:
    with pytest.raises(BadParameter, match=rf"--folds: expected 2 to 11.*11 subjects, got {count}"):
        make_folds(specimens, count, seed=1)
    assert len(make_folds(specimens, 11, seed=1).members) == 11


def test_both_sides_of_a_subject_are_left_out_together(specimens: tuple[Facts, ...]) -> None:
    some = named(specimens, "a_left", "a_right", "b-L", "b-R", "c", "d_l", "e.Right")
    for seed in range(5):
        fold = make_folds(some, 3, seed).of_scans()
        assert fold["a_left"] == fold["a_right"]
        assert fold["b-L"] == fold["b-R"]
    with pytest.raises(BadParameter, match="expected 2 to 5, as there are 5 subjects in 7 scans"):
        make_folds(some, 6, seed=1)


def test_a_pattern_says_which_scans_are_of_one_subject(specimens: tuple[Facts, ...]) -> None:
    some = named(specimens, "m1 day 1", "m1 day 8", "m2 day 1", "m2 day 8")
    for pattern in (r"^m\d", r"(m\d) day", r"(m1)|^m2"):
        folds = make_folds(some, 2, 1, pattern)
        assert sorted(folds.members) == [("m1 day 1", "m1 day 8"), ("m2 day 1", "m2 day 8")]
    with pytest.raises(BadParameter, match="--subject: expected rat in the name of every scan"):
        make_folds(some, 2, 1, "rat")
    with pytest.raises(BadParameter, match=r"--subject: expected a regular expression, got \("):
        make_folds(some, 2, 1, "(")


def test_scans_that_are_only_learned_from_are_in_no_fold(specimens: tuple[Facts, ...]) -> None:
    """But a fold hides those that show a subject of its own."""
    some = named(specimens, "a_left", "b", "c", "d", "a_right", "e")
    folds = make_folds(some, 2, seed=1, train_only=("a_right", "e"))
    assert sorted(folds.of_scans()) == sorted(folds.of_subjects()) == ["a_left", "b", "c", "d"]
    assert set(folds.digests) == {"a_left", "b", "c", "d", "a_right", "e"}
    for number, members in enumerate(folds.members, start=1):
        more = {"a_right"} if "a_left" in members else set()
        assert folds.without(number) == {*members, *more}
    with pytest.raises(BadParameter, match="expected 2 to 4, as there are 4 subjects, got 5"):
        make_folds(some, 5, seed=1, train_only=("a_right", "e"))
    with pytest.raises(BadParameter, match="--train-only: expected names of scans, found none na"):
        make_folds(some, 2, seed=1, train_only=("nobody",))


def test_folds_are_kept_and_others_refused(specimens: tuple[Facts, ...], tmp_path: Path) -> None:
    folds = make_folds(specimens, 4, seed=1)
    assert read_folds(tmp_path) is None
    begin_folds(tmp_path, folds)
    begin_folds(tmp_path, make_folds(specimens, 4, seed=1))
    assert read_folds(tmp_path) == folds
    with pytest.raises(StartupError, match=r"4 of seed 1\) than were asked for \(3 of seed 1\)"):
        begin_folds(tmp_path, make_folds(specimens, 3, seed=1))


def test_landmarks_that_were_mended_since_are_noticed(
    specimens: tuple[Facts, ...], tmp_path: Path
) -> None:
    """Old answers would be pooled with new ones."""
    begin_folds(tmp_path, make_folds(specimens, 4, seed=1))
    points = dict(specimens[3].points)
    points["bregma"] = points["bregma"] + 0.5
    mended = [*specimens[:3], replace(specimens[3], points=points), *specimens[4:10]]
    with pytest.raises(StartupError, match=r"\(gone: s9; changed: s2\); to begin anew, delete"):
        begin_folds(tmp_path, make_folds(mended, 4, seed=1))


def test_a_landmark_of_one_fold_alone_is_named(tmp_path: Path) -> None:
    data = write_data(tmp_path, count=4)
    write_points(data, "s2", points_of(2) | {"chin": middle_of(make_affine(2))})
    specimens = check_data(data / "scans", data / "landmarks").specimens
    assert unlearnt(make_folds(specimens, 2, seed=1), specimens) == ["chin"]
    always = make_folds(specimens, 2, seed=1, train_only=("s2",))
    assert unlearnt(always, specimens) == []
    write_points(data, "s0", points_of(0) | {"chin": middle_of(make_affine(0))})
    specimens = check_data(data / "scans", data / "landmarks").specimens
    for pattern, alone in (("s.", []), ("s(?=[02])|s.", ["chin"])):
        related = make_folds(specimens, 2, seed=1, pattern=pattern, train_only=("s2",))
        assert unlearnt(related, specimens) == alone


def test_answers_are_read_as_they_were_written(tmp_path: Path) -> None:
    some = (outcome(0.1 + 0.2), outcome(present=False, known=False), outcome(region95_mm=0.3))
    assert read_outcomes(tmp_path) is None
    write_outcomes(tmp_path, some, ["two: too large"])
    measured = read_outcomes(tmp_path)
    assert measured is not None
    assert measured.failures == ("two: too large",)
    assert repr(measured.outcomes) == repr(some)
    assert measured.outcomes[0].error_mm == 0.1 + 0.2
    assert math.isinf(measured.outcomes[1].beyond_mm)


def test_spread_is_over_specimens_and_folds() -> None:
    """Two scans of one specimen count as one, and a landmark that was not placed not at all."""
    errors = {"a": (0.1, 0.3), "b": (0.4, 0.6), "c_l": (0.8, 0.8), "c_r": (1.2,)}
    some = [outcome(mm, scan=scan) for scan, mms in errors.items() for mm in mms]
    some += [outcome(status="not_found", scan="d")]
    folds = {"a": "1", "b": "1", "c_l": "2", "c_r": "2", "d": "2"}
    subjects = {name: name[0] for name in folds}
    spread = measure_spread(some, subjects, folds)
    assert spread is not None
    means = np.array([0.2, 0.5, 2.8 / 3])
    assert (spread.specimens, spread.folds) == (3, 2)
    assert spread.mean_mm == pytest.approx(means.mean())
    assert spread.specimens_mm == pytest.approx(means.std(ddof=1))
    assert spread.folds_mm == pytest.approx(np.std([0.35, 2.8 / 3], ddof=1))
    # One draw in 27 is the smallest specimen three times.
    assert (spread.low_mm, spread.high_mm) == pytest.approx((0.2, 2.8 / 3))
    assert "3 specimens' mean errors: 0.544 mm, 95 % interval 0.200 to 0.933" in say_spread(spread)


def test_the_interval_holds_the_mean_about_as_often_as_it_says() -> None:
    """A little less often, as that of a bootstrap over few specimens does: 30 here."""
    random = np.random.default_rng(5)
    names = {str(number): str(number) for number in range(30)}
    held = 0
    for _ in range(100):
        some = [
            outcome(mm, scan=name)
            for mm, name in zip(random.gamma(4, 0.05, 30), names, strict=True)
        ]
        spread = measure_spread(some, names, names)
        assert spread is not None
        held += spread.low_mm <= 0.2 <= spread.high_mm
    assert 0.88 <= held / 100 <= 0.98


def test_too_few_specimens_have_no_spread() -> None:
    spread = measure_spread([outcome(0.1)], {"one": "one"}, {"one": "1"})
    assert spread is None
    assert "too few" in say_spread(spread)


def test_what_is_proven_of_regions_of_folds_is_less_than_what_is_seen() -> None:
    """Barber et al. 2021, theorem 4: 90 % if every specimen is a fold of its own."""
    assert proven_of(24, 24) == pytest.approx(0.9)
    assert proven_of(24, 5) == pytest.approx(0.9 - (1 - 5 / 24) / 6)
    assert proven_of(1000, 2) == pytest.approx(0.9 - 1 / 501)


def test_a_section_of_a_card_is_replaced_and_the_rest_stays(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    write_section(folder, "a", "first \\1 text")
    card = folder / "README.md"
    assert card.read_text().startswith("# mine\n\n<!-- landmarkd: a -->\nfirst \\1 text\n")
    card.write_text(f"{card.read_text()}\nby hand\n")
    write_section(folder, "b", "other")
    write_section(folder, "a", "second")
    text = card.read_text()
    assert "first" not in text
    assert text.index("second") < text.index("by hand") < text.index("other")


def test_what_was_not_answered_or_not_known_is_told_everywhere(tmp_path: Path) -> None:
    folds = Folds(1, (("a",), ("b", "c")), {name: name for name in "abc"}, dict.fromkeys("abc", ""))
    some = [outcome(0.25, scan="a"), outcome(0.75, scan="b")]
    some.append(outcome(scan="b", landmark="b", present=False, known=False))
    pooled = Pooled(tmp_path / "mine", folds, tuple(some), ("c: too large",), second=True)
    pairs = [(name, tmp_path / "gone.nii", tmp_path / "gone.csv") for name in "abc"]
    text = io.StringIO()
    conclude(pooled, pairs, Console(file=text, width=300))
    describe(pooled)
    page = (tmp_path / "mine" / "folds" / "refine" / "report.html").read_text()
    card = (tmp_path / "mine" / "README.md").read_text()
    for words in (text.getvalue(), page, card):
        assert "c: too large" in words
        assert "Landmarks without a place in their files: 1." in words
        assert "0.500 mm" in words
    assert "of 2 pairs of networks" in card
    assert "| fold 2 | 0.750 |" in card


def test_folds_are_numbered_from_one(tmp_path: Path) -> None:
    folds = Folds(1, (("a",), ("b", "c")), {}, {})
    assert folds.of_scans() == {"a": "1", "b": "2", "c": "2"}
    assert folds.folder(tmp_path, 2) == tmp_path / "folds" / "fold-2"
