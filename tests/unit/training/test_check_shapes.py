"""What may be wrong with training data, but need not be, is a warning that says why."""

import gzip
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from numpy.testing import assert_allclose

from app.geometry import scaling
from app.shapes.robust_shape import fit_to
from app.training.data.check_data import check_data
from app.training.data.issues import Issue, issue_table, shorten
from tests.support.training_data import (
    NAMES,
    make_affine,
    middle_of,
    points_of,
    write_data,
    write_points,
    write_scan,
)
from tests.unit.training.test_check_data import Corruption, check, moved, scan_twice


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_data(tmp_path / "data")


def lone_landmarks(data: Path) -> None:
    write_points(data, "s9", points_of(9))


def other_file(data: Path) -> None:
    (data / "scans" / "s9.tif").write_bytes(b"II")


def swapped(data: Path) -> None:
    points = points_of(2)
    points["lambda"], points["base"] = points["base"], points["lambda"]
    write_points(data, "s2", points)


def sides_exchanged(data: Path) -> None:
    points = points_of(2)
    points["tip left"], points["tip right"] = points["tip right"], points["tip left"]
    write_points(data, "s2", points)


def misplaced(data: Path) -> None:
    points = points_of(2)
    points["lambda"] = points["lambda"] + (0, 4.0, 0)
    write_points(data, "s2", points)


def misspelt(data: Path) -> None:
    points = points_of(2)
    points["nasoin"] = points.pop("nasion")
    write_points(data, "s2", points)


def in_one_file(data: Path) -> None:
    points = points_of(2)
    write_points(data, "s2", points | {"chin": points["base"] + (1, 1, 1)})


def left_handed(data: Path) -> None:
    affine = make_affine(2)
    affine[:3] = affine[:3] @ np.array(
        [[-1, 0, 0, 27], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]], dtype=np.float64
    )
    write_scan(data / "scans" / "s2.nii.gz", 2, affine)


def thick_slices(data: Path) -> None:
    affine = make_affine(2) @ scaling([1, 1, 4])
    affine[:3, 3] += middle_of(make_affine(2)) - middle_of(affine)
    write_scan(data / "scans" / "s2.nii.gz", 2, affine)


def no_unit(data: Path) -> None:
    write_scan(data / "scans" / "s2.nii.gz", 2, make_affine(2), unit="unknown")


def two_frames(data: Path) -> None:
    path = data / "scans" / "s2.nii.gz"
    image = nib.Nifti1Image.from_bytes(gzip.decompress(path.read_bytes()))
    shifted = make_affine(2)
    shifted[:3, 3] += (3, 0, 4)
    image.set_qform(shifted, 1)
    image.to_filename(path)


def other_size(data: Path) -> None:
    middle = middle_of(make_affine(2))
    points = {label: middle + 0.1 * (point - middle) for label, point in points_of(2).items()}
    write_points(data, "s2", points)


@pytest.mark.parametrize(
    ("corrupt", "what"),
    [
        (lone_landmarks, "no scan has this name"),
        (other_file, "not used"),
        (swapped, "landmarks lambda and base look swapped"),
        (sides_exchanged, "landmarks tip left and tip right look swapped"),
        (misplaced, "predict them: lambda (3."),
        (misspelt, "'nasoin' may be a misspelt 'nasion', which 5 files have"),
        (in_one_file, "landmark 'chin' is in 1 of 6 files"),
        (left_handed, "left-handed, those of the others are not"),
        (thick_slices, "times as long as wide, those of the others are not"),
        (two_frames, "may show the scan by the qform, up to 5 mm away"),
        (other_size, "times as far apart as in the other scans"),
    ],
)
def test_doubt_is_a_warning_that_stops_a_training_only_if_strict(
    data: Path, corrupt: Corruption, what: str
) -> None:
    corrupt(data)
    checked = check(data)
    assert [issue for issue in checked.issues if issue.severity == "error"] == []
    warnings = [issue for issue in checked.issues if issue.severity == "warning"]
    assert len(warnings) == 1, warnings
    assert what in warnings[0].message
    assert checked.may_train(strict=False)
    assert not checked.may_train(strict=True)


def test_unknown_unit_is_a_note_where_points_in_mm_lie_inside(data: Path) -> None:
    no_unit(data)
    (issue,) = check(data).issues
    assert issue.severity == "note"
    assert "does not name its unit of length" in issue.message


def test_points_rotated_within_a_scan_around_the_origin_are_found_by_the_other_poses(
    tmp_path: Path,
) -> None:
    """Where LPS taken for RAS leaves all points inside."""
    data = tmp_path
    (data / "scans").mkdir()
    (data / "landmarks").mkdir()
    for seed in range(6):
        affine = np.eye(4)
        affine[:3, 3] = (-13.5, -16.5, -14.5)
        write_scan(data / "scans" / f"s{seed}.nii.gz", seed, affine)
        middle = middle_of(make_affine(seed))
        turn = (-1, -1, 1) if seed == 2 else (1, 1, 1)
        points = {label: (point - middle) * turn for label, point in points_of(seed).items()}
        write_points(data, f"s{seed}", points)
    (issue,) = check(data).issues
    assert (issue.severity, issue.where) == ("warning", "s2")
    assert "LPS and RAS may be mixed up" in issue.message


def test_all_issues_of_all_files_are_reported_at_once(data: Path) -> None:
    for corrupt in (swapped, scan_twice, lone_landmarks):
        corrupt(data)
    moved(data, "s3", lambda point: point * (-1, -1, 1))
    moved(data, "s4", lambda point: point * (-1, -1, 1))
    truncated = (data / "scans" / "s5.nii.gz").read_bytes()[:100]
    (data / "scans" / "s5.nii.gz").write_bytes(truncated)
    found = {issue.where for issue in check(data).issues}
    assert found >= {"s3", "s4", "s5.nii.gz", "again, s2", "s9.mrk.json"}


def test_scans_and_landmarks_may_share_a_folder(data: Path) -> None:
    for path in (data / "landmarks").iterdir():
        path.rename(data / "scans" / path.name)
    assert check_data(data / "scans", data / "scans").issues == ()


def test_landmarks_without_a_constellation_are_not_checked_by_shape(tmp_path: Path) -> None:
    data = write_data(tmp_path / "data", count=8)
    rng = np.random.default_rng(3)
    for seed in range(8):
        middle = middle_of(make_affine(seed))
        points = {label: middle + rng.uniform(-7, 7, 3) for label in NAMES}
        write_points(data, f"s{seed}", points)
    checked = check(data)
    assert checked.robust_shape is not None
    assert not checked.robust_shape.consistent
    assert checked.issues == ()


def test_robust_shape_is_not_moved_by_a_wrong_file(data: Path) -> None:
    before = check(data).robust_shape
    swapped(data)
    after = check(data).robust_shape
    assert before is not None
    assert after is not None
    both = np.stack([before.points, after.points])
    (fit,) = fit_to(both[1:], both[0])[0].apply(both[1:])
    assert_allclose(fit, both[0], atol=0.5)


def test_one_message_about_many_files_is_one_row() -> None:
    same = [Issue("note", f"s{seed}", "is so") for seed in range(9)]
    table = issue_table([*same, Issue("error", "x", "is wrong [here]")])
    assert table.row_count == 2
    assert shorten([issue.where for issue in same]) == "s0, s1, s2 and 6 more"
    assert shorten(["Caf\udce9", "b"]) == r"Caf\xe9, b"
