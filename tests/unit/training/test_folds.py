"""Which scans are held out together."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from app.errors import BadParameter, StartupError
from app.training.data.check_data import check_data
from app.training.data.folds import (
    Folds,
    content_digests,
    make_folds,
    read_folds,
    save_folds,
    untrained_landmarks,
)
from app.training.data.summary import SpecimenSummary
from tests.support.training_data import make_affine, middle_of, points_of, write_data, write_points

Specimens = tuple[SpecimenSummary, ...]
NAMES = [f"s{number}" for number in range(11)]


@pytest.fixture(scope="module")
def specimens(tmp_path_factory: pytest.TempPathFactory) -> tuple[SpecimenSummary, ...]:
    data = write_data(tmp_path_factory.mktemp("data"), count=11)
    return check_data(data / "scans", data / "landmarks").specimens


def named(specimens: Specimens, *names: str) -> list[SpecimenSummary]:
    """Give specimens other names."""
    return [
        replace(specimen, files=specimen.files._replace(name=name))
        for specimen, name in zip(specimens, names, strict=False)
    ]


def test_every_scan_is_held_out_once_in_folds_of_nearly_one_size(
    specimens: Specimens,
) -> None:
    folds = make_folds(specimens, 4, seed=1)
    assert sorted(name for fold in folds.members for name in fold) == sorted(NAMES)
    assert sorted(len(fold) for fold in folds.members) == [2, 3, 3, 3]
    assert set(folds.by_scan()) == set(NAMES)


def test_folds_depend_on_names_and_seed_alone(specimens: Specimens) -> None:
    folds = make_folds(specimens, 4, seed=1)
    assert make_folds(specimens[::-1], 4, seed=1).members == folds.members
    assert make_folds(specimens, 4, seed=2).members != folds.members


@pytest.mark.parametrize("count", [0, 1, 12])
def test_as_many_folds_as_scans_at_most_and_two_at_least(specimens: Specimens, count: int) -> None:
    with pytest.raises(BadParameter, match=rf"--folds: expected 2 to 11.*11 subjects, got {count}"):
        make_folds(specimens, count, seed=1)
    assert len(make_folds(specimens, 11, seed=1).members) == 11


def test_scans_of_one_subject_make_no_folds(specimens: Specimens) -> None:
    """What was said: expected 2 to 1."""
    with pytest.raises(BadParameter, match="--folds: expected scans of 2 subjects or more, got 1"):
        make_folds(specimens[:1], 2, seed=1)


def test_landmarks_of_a_cell_that_were_moved_by_a_voxel_are_others(specimens: Specimens) -> None:
    """Rounded to micrometres, all that lie in a cell were one position: 0, 0, 0."""

    def moved(by: float, size: float) -> bool:
        affine = specimens[0].affine.copy()
        affine[:3] *= size
        point = np.full(3, size / 2)
        before = replace(specimens[0], affine=affine, points={"nucleus": point})
        after = replace(before, points={"nucleus": point + by})
        return content_digests([before]) != content_digests([after])

    assert moved(by=2e-4, size=2e-4)
    assert not moved(by=1e-8, size=2e-4)
    assert moved(by=2e-3, size=1.0)
    assert not moved(by=1e-6, size=1.0)


def test_both_sides_of_a_subject_are_held_out_together(
    specimens: Specimens,
) -> None:
    some = named(specimens, "a_left", "a_right", "b-L", "b-R", "c", "d_l", "e.Right")
    for seed in range(5):
        fold = make_folds(some, 3, seed).by_scan()
        assert fold["a_left"] == fold["a_right"]
        assert fold["b-L"] == fold["b-R"]
    with pytest.raises(BadParameter, match="expected 2 to 5, as there are 5 subjects in 7 scans"):
        make_folds(some, 6, seed=1)


def test_a_pattern_identifies_the_scans_of_one_subject(
    specimens: Specimens,
) -> None:
    some = named(specimens, "m1 day 1", "m1 day 8", "m2 day 1", "m2 day 8")
    for pattern in (r"^m\d", r"(m\d) day", r"(m1)|^m2"):
        folds = make_folds(some, 2, 1, pattern)
        assert sorted(folds.members) == [("m1 day 1", "m1 day 8"), ("m2 day 1", "m2 day 8")]
    with pytest.raises(BadParameter, match="--subject: expected rat in the name of every scan"):
        make_folds(some, 2, 1, "rat")
    with pytest.raises(BadParameter, match=r"--subject: expected a regular expression, got \("):
        make_folds(some, 2, 1, "(")


def test_train_only_scans_are_in_no_fold(
    specimens: Specimens,
) -> None:
    """But a fold hides those that show a subject of its own."""
    some = named(specimens, "a_left", "b", "c", "d", "a_right", "e")
    folds = make_folds(some, 2, seed=1, train_only=("a_right", "e"))
    assert sorted(folds.by_scan()) == sorted(folds.held_out_subjects()) == ["a_left", "b", "c", "d"]
    assert set(folds.digests) == {"a_left", "b", "c", "d", "a_right", "e"}
    for number, members in enumerate(folds.members, start=1):
        more = {"a_right"} if "a_left" in members else set()
        assert folds.excluded(number) == {*members, *more}
    with pytest.raises(BadParameter, match="expected 2 to 4, as there are 4 subjects, got 5"):
        make_folds(some, 5, seed=1, train_only=("a_right", "e"))
    with pytest.raises(BadParameter, match="--train-only: expected names of scans, found none na"):
        make_folds(some, 2, seed=1, train_only=("nobody",))


def test_folds_are_saved_and_other_folds_refused(specimens: Specimens, tmp_path: Path) -> None:
    folds = make_folds(specimens, 4, seed=1)
    assert read_folds(tmp_path) is None
    save_folds(tmp_path, folds)
    save_folds(tmp_path, make_folds(specimens, 4, seed=1))
    assert read_folds(tmp_path) == folds
    with pytest.raises(StartupError, match=r"4 of seed 1\) than were asked for \(3 of seed 1\)"):
        save_folds(tmp_path, make_folds(specimens, 3, seed=1))


def test_landmarks_that_were_corrected_since_are_noticed(
    specimens: Specimens, tmp_path: Path
) -> None:
    """Old answers would be pooled with new ones."""
    save_folds(tmp_path, make_folds(specimens, 4, seed=1))
    points = dict(specimens[3].points)
    points["bregma"] = points["bregma"] + 0.5
    mended = [*specimens[:3], replace(specimens[3], points=points), *specimens[4:10]]
    with pytest.raises(StartupError, match=r"\(gone: s9; changed: s2\); to start again, delete"):
        save_folds(tmp_path, make_folds(mended, 4, seed=1))


def test_a_landmark_of_one_fold_alone_is_named(tmp_path: Path) -> None:
    data = write_data(tmp_path, count=4)
    write_points(data, "s2", points_of(2) | {"chin": middle_of(make_affine(2))})
    specimens = check_data(data / "scans", data / "landmarks").specimens
    assert untrained_landmarks(make_folds(specimens, 2, seed=1), specimens) == ["chin"]
    always = make_folds(specimens, 2, seed=1, train_only=("s2",))
    assert untrained_landmarks(always, specimens) == []
    write_points(data, "s0", points_of(0) | {"chin": middle_of(make_affine(0))})
    specimens = check_data(data / "scans", data / "landmarks").specimens
    for pattern, alone in (("s.", []), ("s(?=[02])|s.", ["chin"])):
        related = make_folds(specimens, 2, seed=1, pattern=pattern, train_only=("s2",))
        assert untrained_landmarks(related, specimens) == alone


def test_folds_are_numbered_from_one(tmp_path: Path) -> None:
    folds = Folds(1, (("a",), ("b", "c")), {}, {})
    assert folds.by_scan() == {"a": "1", "b": "2", "c": "2"}
    assert folds.folder(tmp_path, 2) == tmp_path / "folds" / "fold-2"
