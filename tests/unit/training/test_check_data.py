"""Each error in training data, made in real files, is found and named."""

import json
from collections.abc import Callable
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from app.geometry import distance_beyond, transform
from app.io.slicer import markups_json, read_landmarks
from app.training.data.check_data import CheckedData, check_data
from app.training.data.check_frames import read_in_frame
from app.training.data.specimens import SpecimenFiles
from tests.support.training_data import (
    NAMES,
    SHAPE,
    TYPICAL,
    make_affine,
    middle_of,
    points_of,
    write_data,
    write_points,
    write_scan,
)

Corruption = Callable[[Path], None]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_data(tmp_path / "data")


def check(data: Path) -> CheckedData:
    return check_data(data / "scans", data / "landmarks")


def moved(data: Path, name: str, move: Callable[[np.ndarray], np.ndarray]) -> None:
    """Write the points of a scan as a table of another frame would have them."""
    points = read_landmarks(data / "landmarks" / f"{name}.mrk.json")
    (data / "landmarks" / f"{name}.mrk.json").unlink()
    rows = [f"{label},{','.join(map(str, move(point)))}" for label, point in points.items()]
    (data / "landmarks" / f"{name}.csv").write_text("\n".join(["name,x,y,z", *rows]))


def test_good_data_have_no_issues(data: Path) -> None:
    checked = check(data)
    assert checked.issues == ()
    assert checked.names == NAMES
    assert checked.may_train(strict=True)
    assert checked.summary() == "6 scans with 6 landmarks: 0 errors, 0 warnings"


@pytest.mark.parametrize("size", [1e-4, 1e-5])
def test_subjects_of_a_few_micrometres_have_no_issues(data: Path, size: float) -> None:
    """With voxels of 100 nm or 10 nm, whose landmarks lie less than a micrometre apart."""
    shrink = np.diag([size, size, size, 1.0])
    for seed in range(6):
        write_scan(data / "scans" / f"s{seed}.nii.gz", seed, shrink @ make_affine(seed))
        write_points(data, f"s{seed}", {name: size * at for name, at in points_of(seed).items()})
    assert check(data).issues == ()


def test_row_of_a_table_that_ends_before_its_label_is_named(data: Path) -> None:
    """It was a traceback."""
    (data / "landmarks" / "s2.mrk.json").unlink()
    (data / "landmarks" / "s2.csv").write_text("l,p,s,label\n-42,70,25\n")
    messages = [issue.message for issue in check(data).issues if issue.where == "s2"]
    assert "landmark '': expected a name of 1 to 128 letters, none of them a control" in messages[0]


def truncate(data: Path) -> None:
    content = (data / "scans" / "s2.nii.gz").read_bytes()
    (data / "scans" / "s2.nii.gz").write_bytes(content[: len(content) // 2])


def no_scan(data: Path) -> None:
    (data / "scans" / "s2.nii.gz").write_bytes(b"something else")


def constant(data: Path) -> None:
    image = nib.Nifti1Image(np.full(SHAPE, 7, np.int16), make_affine(2))
    image.to_filename(data / "scans" / "s2.nii.gz")


def singular(data: Path) -> None:
    image = nib.Nifti1Image(np.zeros(SHAPE, np.int16), None)
    affine = make_affine(2)
    affine[:3, 1] = affine[:3, 0]
    image.header["sform_code"] = 1
    image.header["srow_x"], image.header["srow_y"], image.header["srow_z"] = affine[:3]
    image.to_filename(data / "scans" / "s2.nii.gz")


def bad_json(data: Path) -> None:
    (data / "landmarks" / "s2.mrk.json").write_text('{"markups": [')


def other_json(data: Path) -> None:
    (data / "landmarks" / "s2.mrk.json").write_text('{"points": []}')


def no_points(data: Path) -> None:
    markup = {"coordinateSystem": "LPS", "controlPoints": []}
    (data / "landmarks" / "s2.mrk.json").write_text(json.dumps({"markups": [markup]}))


def other_columns(data: Path) -> None:
    (data / "landmarks" / "s2.mrk.json").unlink()
    (data / "landmarks" / "s2.csv").write_text("Name,X,Y,Z\nnasion,1,2,3\n")


def no_landmark_file(data: Path) -> None:
    (data / "landmarks" / "s2.mrk.json").rename(data / "landmarks" / "S 2.mrk.json")


def two_landmark_files(data: Path) -> None:
    (data / "landmarks" / "s2.csv").write_text("name,x,y,z\nnasion,1,2,3\n")


def flipped(data: Path) -> None:
    moved(data, "s2", lambda point: point * (-1, -1, 1))


def moved_markups(data: Path, move: Callable[[np.ndarray], np.ndarray]) -> None:
    """Write other numbers, of the points in mm, LPS, into a file that declares LPS."""
    path = data / "landmarks" / "s2.mrk.json"
    text = json.loads(path.read_text())
    for point in text["markups"][0]["controlPoints"]:
        point["position"] = move(np.array(point["position"])).tolist()
    path.write_text(json.dumps(text))


def flipped_markups(data: Path) -> None:
    moved_markups(data, lambda point: point * (-1, -1, 1))


def index_of(point: np.ndarray) -> np.ndarray:
    return transform(np.linalg.inv(make_affine(2)), point)


def indices(data: Path) -> None:
    moved(data, "s2", index_of)


def indices_in_markups(data: Path) -> None:
    moved_markups(data, lambda point: index_of(point * (-1, -1, 1)))


def one_based_indices_in_markups(data: Path) -> None:
    # Of the last voxels, too, which counted from 0 lie outside.
    affine = make_affine(2)
    points = points_of(2) | {"base": transform(affine, np.array(SHAPE) - 1.0)}
    write_points(data, "s2", points)
    moved_markups(data, lambda point: index_of(point * (-1, -1, 1)) + 1)


def metres(data: Path) -> None:
    moved(data, "s2", lambda point: point / 1000)


def one_outside(data: Path) -> None:
    points = points_of(2)
    points["base"] = points["base"] + (500.0, 0, 0)
    write_points(data, "s2", points)


def other_case(data: Path) -> None:
    points = points_of(2)
    write_points(data, "s2", {label.replace(" ", "_").title(): p for label, p in points.items()})


def renamed(data: Path, name: str, prefix: str) -> None:
    points = points_of(int(name[1:]))
    write_points(data, name, {f"{prefix}{label}": point for label, point in points.items()})


def prefixed(data: Path) -> None:
    renamed(data, "s2", "LM_")


def prefix_left_out(data: Path) -> None:
    for name in ("s0", "s1", "s3", "s4", "s5"):
        renamed(data, name, "F-")


def at_the_origin(data: Path) -> None:
    affine = make_affine(2)
    affine[:3, 3] -= middle_of(affine)
    write_scan(data / "scans" / "s2.nii.gz", 2, affine)
    shift = middle_of(make_affine(2))
    points = {label: point - shift for label, point in points_of(2).items()}
    write_points(data, "s2", points | {"nasion": np.zeros(3), "base": np.zeros(3)})


def scan_twice(data: Path) -> None:
    image = nib.Nifti1Image.from_filename(data / "scans" / "s2.nii.gz")
    image.header["descrip"] = b"saved again"
    image.to_filename(data / "scans" / "again.nii")
    write_points(data, "again", points_of(2))


def points_twice(data: Path) -> None:
    write_scan(data / "scans" / "other.nii.gz", 17, make_affine(2))
    write_points(data, "other", points_of(2))


@pytest.mark.parametrize(
    ("corrupt", "where", "what"),
    [
        (truncate, "s2.nii.gz", "expected a whole gzip stream"),
        (no_scan, "s2.nii.gz", "expected a NIfTI, NRRD"),
        (constant, "s2", "all voxels have the same value"),
        (singular, "s2.nii.gz", "expected three independent axes"),
        (bad_json, "s2.mrk.json", "cannot be read"),
        (other_json, "s2.mrk.json", "cannot be read: nothing by the name of 'markups'"),
        (no_points, "s2.mrk.json", "expected landmarks, got none"),
        (other_columns, "s2.csv", "name,x,y,z, got Name,X,Y,Z"),
        (no_landmark_file, "s2.nii.gz", "found none; is it S 2.mrk.json?"),
        (two_landmark_files, "s2", "several files have this name"),
        (flipped, "s2", "they look like LPS written as RAS"),
        (flipped_markups, "s2", "they look like RAS written as LPS"),
        (indices, "s2", "they look like voxel indices (i, j, k)"),
        (indices_in_markups, "s2", "they look like voxel indices (i, j, k)"),
        (one_based_indices_in_markups, "s2", "they look like voxel indices counted from 1"),
        (metres, "s2", "they look like metres"),
        (one_outside, "s2", "1 of 6 points outside the scan: by up to"),
        (other_case, "s2", "'Tip_Left' is another spelling of 'tip left', which 5 files have"),
        (prefixed, "s2", "names differ from those of the others by the prefix 'LM_'"),
        (prefix_left_out, "s2", "names lack the prefix 'F-' that those of the others have"),
        (at_the_origin, "s2", "nasion, base share one position, (0, 0, 0) mm"),
        (scan_twice, "again, s2", "one scan under several names"),
        (points_twice, "other, s2", "different scans hold the same coordinates"),
    ],
)
def test_fault_that_stops_a_training_is_named(
    data: Path, corrupt: Corruption, where: str, what: str
) -> None:
    corrupt(data)
    checked = check(data)
    errors = [issue for issue in checked.issues if issue.severity == "error"]
    assert any(what in error.message and error.where == where for error in errors), errors
    assert not any("none of its" in issue.message for issue in checked.issues)  # It is said once.
    assert not checked.may_train(strict=False)


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("end", [slice(15), slice(13, None)])
@pytest.mark.parametrize("sign", [1, -1])
def test_landmarks_in_mm_of_a_part_of_a_scan_are_not_taken_for_indices(
    tmp_path: Path, axis: int, end: slice, sign: int
) -> None:
    """Though they would all lie inside as such: voxels are small, and the origin is at a corner."""
    affine = np.diag([0.4 * sign, 0.4 * sign, 0.4, 1.0])
    image = nib.Nifti1Image(np.random.default_rng(5).normal(100, 20, SHAPE), affine)
    part = [slice(None)] * 3
    part[axis] = end
    image.slicer[tuple(part)].to_filename(tmp_path / "part.nii")
    points = 0.5 * TYPICAL + transform(affine, (np.array(SHAPE) - 1) / 2)
    (tmp_path / "part.mrk.json").write_text(markups_json(NAMES, points))
    files = SpecimenFiles("part", tmp_path / "part.nii", tmp_path / "part.mrk.json")
    volume, truth = read_in_frame(files)
    beyond = distance_beyond(np.array(list(truth.values())), volume.affine, volume.voxels.shape)
    assert 0 < (beyond > 0).sum() < len(NAMES)
    (issue,) = (one for one in check_data(tmp_path, tmp_path).issues if "points" in one.message)
    assert "do both files belong to one scan?" in issue.message


def test_a_prefix_of_each_file_is_one_error_of_each(tmp_path: Path) -> None:
    data = write_data(tmp_path / "data", count=3)
    renamed(data, "s1", "LM_")
    renamed(data, "s2", "F-")
    issues = [issue for issue in check(data).issues if issue.severity != "note"]
    assert [(issue.severity, issue.where) for issue in issues] == [("error", "s1"), ("error", "s2")]


@pytest.mark.parametrize("other", ["11 12 13 14 15 16", "a1 a2 a3 a4 7 8", "a1 ax ay az av aw"])
def test_a_file_of_other_names_is_one_warning(tmp_path: Path, other: str) -> None:
    """Teeth 11 and 12 have no prefix before 1 and 2; one that not all names have is none either."""
    data = write_data(tmp_path / "data", count=4)
    for seed in range(4):
        names = other.split() if seed == 3 else list("123456")
        write_points(data, f"s{seed}", dict(zip(names, points_of(seed).values(), strict=True)))
    (issue,) = (issue for issue in check(data).issues if issue.severity != "note")
    assert (issue.severity, issue.where) == ("warning", "s3")
    assert issue.message.startswith("none of its 6 landmark names is in another file")
