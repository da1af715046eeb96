"""Which specimens are held out for validation."""

from dataclasses import replace
from pathlib import Path

import pytest

from app.training.data.check_data import check_data
from app.training.data.split import choose_held_out, split, subject_of
from tests.support.training_data import make_affine, middle_of, points_of, write_data, write_points


def test_split_is_always_the_same_and_holds_out_a_fifth(tmp_path: Path) -> None:
    data = write_data(tmp_path / "data", count=11)
    specimens = check_data(data / "scans", data / "landmarks").specimens
    chosen = choose_held_out(specimens)
    assert chosen == choose_held_out(specimens[::-1])
    assert len(chosen) == 2
    # A scan more changes at most one of them.
    assert len({*chosen} - {*choose_held_out(specimens[:-1])}) <= 1
    assert choose_held_out(specimens[:1]) == ()
    assert len(choose_held_out(specimens[:2])) == 1


@pytest.mark.parametrize(
    ("names", "pattern"),
    [
        ("head_{}_left head_{}_right", None),
        ("{}-frame0 {}-frame12", None),
        ("{}_left-frame0 {}_right-frame0", None),
        ("{}a {}b", r"^\d+"),
    ],
)
def test_scans_of_one_subject_are_held_out_together(
    tmp_path: Path, names: str, pattern: str | None
) -> None:
    data = write_data(tmp_path / "data", count=1)
    (one,) = check_data(data / "scans", data / "landmarks").specimens
    pairs = [names.format(number, number).split() for number in range(10)]
    files = [one.files._replace(name=name) for pair in pairs for name in pair]
    specimens = [replace(one, files=each) for each in files]
    held_out = {one.name for one in split(specimens, None, subject=pattern).held_out}
    assert len(held_out) == 4
    assert all(len(held_out & set(pair)) in {0, 2} for pair in pairs)


@pytest.mark.parametrize("others", [9, 2, 0])
def test_most_scans_are_trained_on_though_one_subject_has_most(tmp_path: Path, others: int) -> None:
    data = write_data(tmp_path / "data", count=1)
    (one,) = check_data(data / "scans", data / "landmarks").specimens
    sizes = dict.fromkeys("abc", 20) | {f"small{number}": 1 for number in range(others)}
    names = [f"{name}-frame{frame}" for name, size in sizes.items() for frame in range(size)]
    specimens = [replace(one, files=one.files._replace(name=name)) for name in names]
    held_out = choose_held_out(specimens)
    if others:
        assert 1 < len(held_out) <= 5
    else:  # one of the three it has to be
        assert len({name[0] for name in held_out}) == 1
        assert len(held_out) == 20


def test_train_only_scans_are_never_held_out(tmp_path: Path) -> None:
    data = write_data(tmp_path / "data", count=5)
    specimens = check_data(data / "scans", data / "landmarks").specimens
    (first,) = choose_held_out(specimens)
    (other,) = split(specimens, None, train_only=(first,)).held_out
    assert other.name != first
    every_scan = [specimen.name for specimen in specimens]
    assert split(specimens, None, train_only=every_scan).held_out == ()


def test_a_scan_that_alone_has_a_landmark_is_trained_on(tmp_path: Path) -> None:
    data = write_data(tmp_path / "data", count=2)
    (before,) = choose_held_out(check_data(data / "scans", data / "landmarks").specimens)
    seed = int(before[1:])
    write_points(data, before, points_of(seed) | {"chin": middle_of(make_affine(seed))})
    assert choose_held_out(check_data(data / "scans", data / "landmarks").specimens) != (before,)


def test_a_group_of_the_expression_is_what_names_a_subject() -> None:
    """The rest is what tells where in a name it stands."""
    assert subject_of("cohort2_mouse7_a", r"(mouse\d+)_") == "mouse7"
    assert subject_of("mouse7_a", r"mouse\d+") == "mouse7"
