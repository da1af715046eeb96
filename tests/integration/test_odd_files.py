"""Real files, many of them unusual, each with its expected outcome."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_allclose

from app.errors import (
    BadGeometry,
    BadParameter,
    BrokenVolume,
    LandmarkdError,
    NotAVolume,
)
from app.io.volume import Selection, read_volume
from tests.support.nifti_files import LARGE_ENOUGH, assert_fit_for_use, by_nibabel

NO_UNIT = "the file does not name its unit of length; millimetres were assumed"


@dataclass(frozen=True)
class Upload:
    """What is expected of one real file."""

    shape: tuple[int, int, int] = (0, 0, 0)
    dtype: str = ""
    frames: int = 1
    warnings: tuple[str, ...] = ()
    refused: type[LandmarkdError] | None = None


UPLOADS = {
    "5D_small.nii": Upload(
        (1, 2, 3), "float32", 3, warnings=("the scan is a single slice (1 x 2 x 3 voxels)",)
    ),
    "5D_zeros.nii.gz": Upload(
        (256, 256, 170), "uint8", 3, warnings=("all voxels have the same value",)
    ),
    "EPI_PE_AP_3.nii": Upload((72, 72, 5), "int16", 2),
    "S0_10slices.nii.gz": Upload((128, 128, 10), "uint16", warnings=(NO_UNIT,)),
    "analyze.hdr": Upload(refused=NotAVolume),
    "anatomical.nii": Upload((33, 41, 25), "int16"),
    "aniso_vox.nii.gz": Upload((58, 58, 24), "int16", warnings=(NO_UNIT,)),
    "avg152T1_LR_nifti2.nii.gz": Upload((91, 109, 91), "float32"),
    "big.nii.gz": Upload((64, 64, 21), "float32"),
    "example4d.nii.gz": Upload((128, 96, 24), "int16", 2),
    "example_ct_sm.nii.gz": Upload((122, 101, 30), "int16", warnings=(NO_UNIT,)),
    "example_nifti2.nii.gz": Upload((32, 20, 12), "int16", 2),
    "functional.nii": Upload((17, 21, 3), "float32", 20),
    "little.nii.gz": Upload((64, 64, 21), "float32"),
    "reoriented_anat_moved.nii": Upload((21, 26, 22), "float32"),
    "resampled_anat_moved.nii": Upload(
        (17, 21, 3),
        "float32",
        warnings=(
            "153 of 1,071 voxels are not finite; the smallest finite value was used for them",
        ),
    ),
    "row_major.dconn.nii": Upload(refused=NotAVolume),
    "someones_anatomy.nii.gz": Upload((57, 67, 56), "float32"),
    "standard.nii.gz": Upload((4, 5, 7), "uint8", warnings=(NO_UNIT,)),
    "with_extension.nii.gz": Upload((161, 191, 151), "uint8"),
}
SOUND = [name for name, upload in UPLOADS.items() if upload.refused is None]


def test_every_upload_is_listed(data_dir: Path) -> None:
    found = {path.name for path in (data_dir / "uploads").iterdir()} - {"README.md"}
    assert found == set(UPLOADS)


@pytest.mark.parametrize("name", SOUND)
def test_valid_upload_is_read_as_by_nibabel(data_dir: Path, name: str) -> None:
    content, upload = (data_dir / "uploads" / name).read_bytes(), UPLOADS[name]
    last = upload.frames - 1
    volume = read_volume(content, LARGE_ENOUGH, selection=Selection(frame=last or None))
    voxels, affine = by_nibabel(content)
    frames = voxels.reshape((*upload.shape, upload.frames), order="F")
    assert volume.voxels.shape == upload.shape
    assert volume.voxels.dtype == upload.dtype
    assert volume.warnings == upload.warnings
    holes = ~np.isfinite(frames[..., last])
    expected = np.where(holes, np.nanmin(frames[..., last]), frames[..., last])
    assert_allclose(volume.voxels, expected, rtol=1e-6)
    assert_allclose(volume.affine, affine, atol=1e-5)
    assert_fit_for_use(volume)


@pytest.mark.parametrize("name", [name for name in SOUND if UPLOADS[name].frames > 1])
def test_upload_of_several_frames_says_how_to_choose_one(data_dir: Path, name: str) -> None:
    content, frames = (data_dir / "uploads" / name).read_bytes(), UPLOADS[name].frames
    with pytest.raises(BadGeometry, match=f"got {frames} frames .*choose a frame, from 0"):
        read_volume(content)
    with pytest.raises(BadParameter, match=f"expected frame from 0 to {frames - 1}, got {frames}"):
        read_volume(content, selection=Selection(frame=frames))


@pytest.mark.parametrize("name", [name for name in UPLOADS if name not in SOUND])
def test_upload_that_is_no_volume_is_refused(data_dir: Path, name: str) -> None:
    content = (data_dir / "uploads" / name).read_bytes()
    refused = UPLOADS[name].refused
    assert refused is not None
    with pytest.raises(refused, match=r"^expected .*, got "):
        read_volume(content)


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5, 0.9, 0.999])
def test_truncated_upload_is_refused(data_dir: Path, share: float) -> None:
    content = (data_dir / "uploads" / "avg152T1_LR_nifti2.nii.gz").read_bytes()
    with pytest.raises(BrokenVolume, match="truncated"):
        read_volume(content[: int(share * len(content))])
