"""Landmark files in a frame of their own -> the frame of their scan."""

from pathlib import Path

import numpy as np
import pytest
from scipy.spatial.transform import Rotation

from app.io.slicer import markups_json, read_landmarks
from app.phantom import make_phantom, scan_bytes
from app.training.tools.find_poses import fit_rigid, main

PHANTOM = Path(__file__).parents[3] / "models" / "phantom"


def test_a_rigid_fit_ignores_points_that_were_found_elsewhere() -> None:
    """A third of the points far off; no scale, no reflection."""
    random = np.random.default_rng(3)
    source = random.uniform(-10, 10, (45, 3))
    rotation = Rotation.random(random_state=random).as_matrix()
    target = source @ rotation.T + (4.0, -7.0, 90.0)
    found = target + 0.05 * random.standard_normal(target.shape)
    found[::3] += random.uniform(2, 9, (15, 3))
    fit = fit_rigid(source, found, 0.5)
    np.testing.assert_allclose(fit.rotation, rotation, atol=0.01)
    assert fit.scale == 1.0
    assert np.linalg.norm(fit.apply(source) - target, axis=1).max() < 0.1


def test_moved_landmark_files_are_moved_back(tmp_path: Path) -> None:
    """With the shipped model, on a generated scan: far better than any motion one might guess."""
    phantom = make_phantom(4711)
    turn = Rotation.from_rotvec([0.4, -0.9, 1.3]).as_matrix()
    scans, landmarks, output = tmp_path / "scans", tmp_path / "landmarks", tmp_path / "moved"
    scans.mkdir()
    landmarks.mkdir()
    (scans / "one.nii.gz").write_bytes(scan_bytes(phantom))
    points = phantom.points @ turn.T + (30.0, -20.0, 10.0)
    (landmarks / "one.mrk.json").write_text(markups_json(phantom.names, points))
    command = [str(scans), str(landmarks), "--model", str(PHANTOM), "-o", str(output)]
    main([*command, "--poses", "3", "--device", "cpu"])
    found = read_landmarks(output / "one.mrk.json")
    errors = [
        np.linalg.norm(found[name] - point)
        for name, point in zip(phantom.names, phantom.points, strict=True)
        if np.isfinite(point).all()
    ]
    assert len(found) == len(errors) >= 4
    assert max(errors) < 0.5


def test_landmarks_that_the_model_does_not_know_are_refused(tmp_path: Path) -> None:
    """Named in the message."""
    phantom = make_phantom(4711)
    (tmp_path / "one.nii.gz").write_bytes(scan_bytes(phantom))
    truth = tmp_path / "truth"
    truth.mkdir()
    (truth / "one.mrk.json").write_text(markups_json(["elbow"], np.zeros((1, 3))))
    with pytest.raises(SystemExit, match="elbow"):
        main([str(tmp_path), str(truth), "--model", str(PHANTOM), "-o", str(tmp_path / "out")])


def test_scans_that_the_model_does_not_find_are_named_at_the_end(tmp_path: Path) -> None:
    """The others are moved all the same."""
    phantom = make_phantom(4711)
    for name, content in (("a", b"no scan"), ("b", scan_bytes(phantom))):
        (tmp_path / f"{name}.nii.gz").write_bytes(content)
        points = markups_json(phantom.names, phantom.points)
        (tmp_path / f"{name}.mrk.json").write_text(points)
    few = phantom.points.copy()
    few[3:] = np.nan
    (tmp_path / "c.nii.gz").write_bytes(scan_bytes(phantom))
    (tmp_path / "c.mrk.json").write_text(markups_json(phantom.names, few))
    folders = [str(tmp_path), str(tmp_path), "--model", str(PHANTOM), "-o", str(tmp_path / "out")]
    with pytest.raises(SystemExit, match=r"^a: .*\nc: expected .* finds at least four landmarks"):
        main([*folders, "--poses", "1", "--device", "cpu"])
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["b.mrk.json"]
    (tmp_path / "c.mrk.json").unlink()
    with pytest.raises(SystemExit, match=r"expected a landmark file for c\.nii\.gz"):
        main([*folders, "--device", "cpu"])


def test_landmark_file_or_model_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """Each was a traceback."""
    (tmp_path / "one.nii.gz").write_bytes(scan_bytes(make_phantom(4711)))
    (tmp_path / "one.csv").write_text("name,x,y\na,1,2\n")
    command = [str(tmp_path), str(tmp_path), "-o", str(tmp_path / "out"), "--model"]
    with pytest.raises(SystemExit, match=r"one\.csv cannot be read: expected columns"):
        main([*command, str(PHANTOM)])
    (tmp_path / "one.csv").write_text("name,x,y,z\na,1,2,3\n")
    with pytest.raises(SystemExit, match=r"model\.toml"):
        main([*command, str(tmp_path)])
