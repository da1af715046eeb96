"""Phantoms: a seed names one scan, and its landmarks lie exactly where its structures do."""

import gzip
import json
import time
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from app.errors import BadParameter
from app.geometry import spacing_of, transform
from app.io.slicer import read_landmarks
from app.phantom import (
    MIN_DISTANCE_MM,
    MIN_MARGIN_MM,
    Phantom,
    make_phantom,
    scan_bytes,
    write_phantom,
    write_phantoms,
)
from tests.support.full_disk import limited_files

SEEDS = range(40)
SECONDS = 1.5

CENTROID_MM = 0.5
"""How far noise and texture may pull the centroid of a structure's voxels from its middle."""

INNER_MM = 11.5
"""All structures lie within this distance of their landmark, and no other one's begins there."""


@pytest.fixture(scope="module")
def phantoms() -> list[Phantom]:
    return [make_phantom(seed) for seed in SEEDS]


def test_the_same_seed_gives_the_same_phantom() -> None:
    once, again = make_phantom(3), make_phantom(3)
    assert gzip.decompress(scan_bytes(once)) == gzip.decompress(scan_bytes(again))
    assert once.points.tobytes() == again.points.tobytes()


def test_another_seed_gives_another_phantom() -> None:
    assert make_phantom(3).volume.digest != make_phantom(4).volume.digest


def test_a_phantom_takes_little_time() -> None:
    start = time.process_time()
    make_phantom(5)
    assert time.process_time() - start < SECONDS


def test_some_landmarks_are_absent_and_most_are_present(phantoms: list[Phantom]) -> None:
    present = np.array([np.isfinite(phantom.points).all(axis=1) for phantom in phantoms])
    assert 0.75 < present.mean() < 0.95
    assert not present.all(axis=0).any()


def test_shapes_are_never_cubic_and_spacings_differ(phantoms: list[Phantom]) -> None:
    for phantom in phantoms:
        shape, spacing = phantom.volume.voxels.shape, spacing_of(phantom.volume.affine)
        assert len(set(shape)) == 3
        assert all(60 <= size <= 110 for size in shape)
        assert ((spacing > 0.79) & (spacing < 2.01)).all()
        assert np.ptp(spacing) > 0.0


def test_poses_are_oblique_and_of_both_handednesses(phantoms: list[Phantom]) -> None:
    axes = [p.volume.affine[:3, :3] / spacing_of(p.volume.affine) for p in phantoms]
    assert np.median([np.abs(a).max(axis=0).min() for a in axes]) < 0.9
    assert {bool(np.linalg.det(a) > 0) for a in axes} == {True, False}


def test_points_lie_inside_the_volume_and_apart(phantoms: list[Phantom]) -> None:
    for phantom in phantoms:
        points = phantom.points[np.isfinite(phantom.points).all(axis=1)]
        index = transform(np.linalg.inv(phantom.volume.affine), points)
        border = MIN_MARGIN_MM / spacing_of(phantom.volume.affine) - 0.501
        assert (index >= border).all()
        assert (index <= np.array(phantom.volume.voxels.shape) - 1 - border).all()
        apart = np.linalg.norm(points[:, None] - points, axis=-1) + 1e9 * np.eye(len(points))
        assert apart.min() > MIN_DISTANCE_MM - 0.01


def test_the_centroid_of_every_structure_is_its_landmark(phantoms: list[Phantom]) -> None:
    misses = np.concatenate([_centroid_misses(phantom) for phantom in phantoms])
    assert len(misses) > 150
    assert max(misses) < CENTROID_MM


def test_the_scan_survives_its_file(tmp_path: Path) -> None:
    phantom = make_phantom(11)
    write_phantom(phantom, tmp_path / "scan.nii.gz")
    image = nib.Nifti1Image.from_filename(tmp_path / "scan.nii.gz")
    assert np.array_equal(np.asarray(image.dataobj), phantom.volume.voxels)
    assert np.array_equal(image.affine, phantom.volume.affine)
    assert image.get_data_dtype() == np.int16


def test_the_landmark_file_holds_the_truth_and_leaves_absent_ones_undefined(tmp_path: Path) -> None:
    phantom = make_phantom(8)
    truth = write_phantom(phantom, tmp_path / "scan.nii.gz")
    assert truth.name == "scan.mrk.json"
    read = read_landmarks(truth)
    controls = json.loads(truth.read_text(encoding="utf-8"))["markups"][0]["controlPoints"]
    assert [control["label"] for control in controls] == list(phantom.names)
    assert any(control["positionStatus"] == "undefined" for control in controls)
    for name, point, control in zip(phantom.names, phantom.points, controls, strict=True):
        if np.isfinite(point).all():
            assert read[name] == pytest.approx(point, abs=1e-9)
        else:
            assert name not in read
            assert "position" not in control


def test_a_scan_for_which_there_is_no_room_leaves_no_part_of_it(tmp_path: Path) -> None:
    with limited_files(1 << 16), pytest.raises(OSError, match=r"scan\.nii\.gz"):
        write_phantom(make_phantom(8), tmp_path / "scan.nii.gz")
    assert not list(tmp_path.iterdir())


def test_a_path_of_another_ending_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadParameter, match=r"ending in \.nii\.gz, got scan\.nii$"):
        write_phantom(make_phantom(8), tmp_path / "scan.nii")


def test_folders_of_phantoms_pair_scans_with_landmarks(tmp_path: Path) -> None:
    write_phantoms(tmp_path, count=2, seed=20)
    assert sorted(p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*.*")) == [
        "landmarks/phantom-20.mrk.json",
        "landmarks/phantom-21.mrk.json",
        "scans/phantom-20.nii.gz",
        "scans/phantom-21.nii.gz",
    ]


def _centroid_misses(phantom: Phantom) -> list[float]:
    """Measure how far the contrast's centroid near each landmark is from it, in mm."""
    voxels, affine = phantom.volume.voxels.astype(np.float64), phantom.volume.affine
    background = np.median(voxels)
    misses = []
    for point in phantom.points[np.isfinite(phantom.points).all(axis=1)]:
        reach = np.ceil(INNER_MM / spacing_of(affine)).astype(int)
        middle = np.round(transform(np.linalg.inv(affine), point)).astype(int)
        axes = [np.arange(m - r, m + r + 1) for m, r in zip(middle, reach, strict=True)]
        index = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, 3)
        index = index[((index >= 0) & (index < voxels.shape)).all(axis=1)]
        place = transform(affine, index.astype(np.float64)) - point
        near = np.linalg.norm(place, axis=1) < INNER_MM
        contrast = np.abs(voxels[tuple(index.T)] - background)
        # Half of the strongest contrast tells structure from texture.
        inside = near & (contrast > 0.5 * np.percentile(contrast[near], 99))
        centroid = np.average(place[inside], axis=0, weights=contrast[inside])
        misses.append(float(np.linalg.norm(centroid)))
    return misses
