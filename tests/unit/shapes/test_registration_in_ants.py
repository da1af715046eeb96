"""Transforms, read and applied by ANTs itself; these tests run where ``antspyx`` is installed.

Installed into a copy of the service's environment, it puts older versions of numpy and scipy there.
"""

import shlex
from pathlib import Path
from typing import Any, Protocol

import nibabel as nib
import numpy as np
import pytest
from numpy.testing import assert_allclose
from scipy.spatial.transform import Rotation

from app.geometry import LPS_FROM_RAS, transform
from app.io import read_landmarks
from app.phantom import make_phantom, write_phantom
from app.shapes import register
from app.shapes.registration import TRANSFORM_SUFFIXES, Kind
from tests.support.documents import DOCS, read

pytestmark = pytest.mark.filterwarnings("default")  # ANTs' and pandas' own are not ours
ants: Any = pytest.importorskip("ants", reason="needs antspyx")
pandas: Any = pytest.importorskip("pandas")

KINDS: tuple[Kind, ...] = ("rigid", "similarity", "affine")
FIXED, MOVING = "NU_J", "NOD_SHILTJ"
NEAR_MM = 1e-4
"""ANTs computes with single precision here, of coordinates up to a hundred."""


class Image(Protocol):
    """Of ANTs."""

    def numpy(self) -> np.ndarray: ...


def likeness(one: Image, other: Image) -> float:
    """Correlate the voxels of two images on one grid."""
    return float(np.corrcoef(one.numpy().ravel(), other.numpy().ravel())[0, 1])


def map_points(points: np.ndarray, path: Path, *, back: bool = False) -> np.ndarray:
    """Have ANTs map points, in mm, LPS."""
    table = pandas.DataFrame(points, columns=list("xyz"))
    mapped = ants.apply_transforms_to_points(3, table, [str(path)], whichtoinvert=[back])
    return np.asarray(mapped[list("xyz")])


@pytest.mark.parametrize("suffix", TRANSFORM_SUFFIXES)
@pytest.mark.parametrize("kind", KINDS)
def test_ants_overlays_two_skulls_and_maps_their_points_as_we_do(
    data_dir: Path, tmp_path: Path, kind: Kind, suffix: str
) -> None:
    skulls = data_dir / "mouse-skull"
    fixed, moving = (
        read_landmarks(skulls / "landmarks" / f"{name}.mrk.json") for name in (FIXED, MOVING)
    )
    fit = register(moving, fixed, kind)
    path = tmp_path / f"moving_to_fixed{suffix}"
    fit.write(path)
    ras = np.array(list(fixed.values()))
    here = transform(LPS_FROM_RAS, ras)
    there = transform(LPS_FROM_RAS, transform(fit.fixed_to_moving, ras))
    alone = ants.read_transform(str(path))
    assert_allclose([alone.apply_to_point(list(point)) for point in here], there, atol=NEAR_MM)
    assert_allclose(map_points(here, path), there, atol=NEAR_MM)
    if suffix == ".mat":
        assert_allclose(map_points(there, path, back=True), here, atol=NEAR_MM)
    target, source = (
        ants.image_read(str(skulls / "scans" / f"{name}.nii.gz")) for name in (FIXED, MOVING)
    )
    moved = ants.apply_transforms(target, source, [str(path)])
    assert likeness(target, moved) > 0.65
    assert likeness(target, ants.resample_image_to_target(source, target)) < 0.2


def test_command_of_the_page_moves_an_oblique_scan_onto_the_fixed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ANTsPy has no programs, but their functions, which take the same words."""
    monkeypatch.chdir(tmp_path)
    phantom = make_phantom(6)
    write_phantom(phantom, Path("before.nii.gz"))
    before = nib.Nifti1Image.from_filename("before.nii.gz")
    motion = np.eye(4)
    motion[:3, :3] = Rotation.from_rotvec([0.2, -0.3, 0.4]).as_matrix()
    motion[:3, 3] = 5.0, -4.0, 6.0
    after = nib.Nifti1Image(np.asanyarray(before.dataobj), motion @ before.affine)
    after.to_filename("after.nii.gz")
    known = np.isfinite(phantom.points).all(axis=1)
    here = dict(zip(np.array(phantom.names)[known], phantom.points[known], strict=True))
    there = {name: transform(motion, point) for name, point in here.items()}
    register(moving=there, fixed=here).write(Path("after_to_before.tfm"))
    (line,) = (
        part
        for part in read(DOCS / "python.md").split("`")
        if part.startswith("antsApplyTransforms ")
    )
    program = ants.internal.get_lib_fn("antsApplyTransforms")
    assert program(shlex.split(line)[1:]) == 0
    fixed, moving, moved = (
        ants.image_read(f"{name}.nii.gz") for name in ("before", "after", "moved")
    )
    assert likeness(fixed, moved) > 0.99
    assert likeness(fixed, ants.resample_image_to_target(moving, fixed)) < 0.5
    back = shlex.split(line.replace("after_to_before.tfm", "[after_to_before.tfm,1]"))
    assert program(back[1:]) == 0
    assert likeness(fixed, ants.image_read("moved.nii.gz")) < 0.5
