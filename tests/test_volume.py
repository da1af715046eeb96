"""Volume: real uploads, voxel types, scaling, holes, frames, limits, bombs, random damage."""

import gzip
import hashlib
import math
import re
import tracemalloc
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from app.errors import (
    BadGeometry,
    BadParameter,
    BadVoxels,
    BrokenVolume,
    LandmarkdError,
    NotAVolume,
    TooLarge,
)
from app.volume import HEAD_BYTES, TRAILING_BYTES, Volume, VolumeLimits, check_header, read_volume
from tests.nifti_files import SHAPE, ByteOrder, by_nibabel, counting, nifti

INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
REALS = ("float32", "float64")
NO_UNIT = "the file does not name its unit of length; millimetres were assumed"


@dataclass(frozen=True)
class Upload:
    """What is expected of one real file."""

    shape: tuple[int, int, int] = (0, 0, 0)
    dtype: str = ""
    frames: int = 1
    masked: int = 0
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
        masked=153,
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
LARGE_ENOUGH = VolumeLimits(inflated_bytes=1 << 26, voxels=1 << 24, axis=512)


def assert_fit_for_use(volume: Volume) -> None:
    """Check what every later stage relies on."""
    voxels = volume.voxels
    assert voxels.ndim == 3
    assert voxels.dtype.isnative
    assert voxels.flags.writeable
    assert np.isfinite(voxels).all()
    assert np.isfinite(volume.affine).all()
    assert torch.from_numpy(voxels).float().isfinite().all()


def test_every_upload_is_a_case(data_dir: Path) -> None:
    found = {path.name for path in (data_dir / "uploads").iterdir()} - {"README.md"}
    assert found == set(UPLOADS)


@pytest.mark.parametrize("name", SOUND)
def test_sound_upload_reads_as_nibabel_reads_it(data_dir: Path, name: str) -> None:
    content, upload = (data_dir / "uploads" / name).read_bytes(), UPLOADS[name]
    last = upload.frames - 1
    volume = read_volume(content, LARGE_ENOUGH, frame=last or None)
    voxels, affine = by_nibabel(content)
    frames = voxels.reshape((*upload.shape, upload.frames), order="F")
    assert volume.voxels.shape == upload.shape
    assert volume.voxels.dtype == upload.dtype
    assert volume.masked == upload.masked
    assert volume.warnings == upload.warnings
    holes = ~np.isfinite(frames[..., last])
    expected = np.where(holes, np.nanmin(frames[..., last]), frames[..., last])
    assert_allclose(volume.voxels, expected, rtol=1e-6)
    assert_allclose(volume.affine, affine, atol=1e-5)
    assert_fit_for_use(volume)


@pytest.mark.parametrize("name", [name for name in SOUND if UPLOADS[name].frames > 1])
def test_upload_of_several_frames_says_how_to_choose_one(data_dir: Path, name: str) -> None:
    content, frames = (data_dir / "uploads" / name).read_bytes(), UPLOADS[name].frames
    with pytest.raises(BadGeometry, match=f"got {frames} frames .*choose one with frame="):
        read_volume(content)
    with pytest.raises(BadParameter, match=f"expected frame from 0 to {frames - 1}, got {frames}"):
        read_volume(content, frame=frames)


@pytest.mark.parametrize("name", [name for name in UPLOADS if name not in SOUND])
def test_upload_that_is_no_volume_is_refused(data_dir: Path, name: str) -> None:
    content = (data_dir / "uploads" / name).read_bytes()
    refused = UPLOADS[name].refused
    assert refused is not None
    with pytest.raises(refused, match=r"^expected .*, got "):
        read_volume(content)


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("dtype", INTEGERS + REALS)
def test_every_type_is_read_as_stored_in_native_order(
    dtype: str, version: Literal[1, 2], order: ByteOrder, zipped: bool
) -> None:
    array = counting(dtype=dtype)
    content = nifti(array, version, order, zipped)
    volume = read_volume(content)
    assert volume.voxels.dtype == np.dtype(dtype)
    assert_array_equal(volume.voxels, array)
    assert_allclose(volume.affine, by_nibabel(content)[1])
    assert volume.warnings == ()
    assert_fit_for_use(volume)


@pytest.mark.parametrize("dtype", INTEGERS + REALS)
@pytest.mark.parametrize("order", ["<", ">"])
def test_slope_and_intercept_give_the_values_nibabel_gives(dtype: str, order: ByteOrder) -> None:
    content = nifti(counting(dtype=dtype), order=order, scl_slope=0.25, scl_inter=-7.5)
    volume = read_volume(content)
    assert_allclose(volume.voxels, by_nibabel(content)[0], rtol=1e-6)
    assert_fit_for_use(volume)


@pytest.mark.parametrize(
    ("dtype", "scaled"),
    [("uint8", "float32"), ("int16", "float32"), ("float32", "float32"), ("int32", "float64")],
)
def test_scaled_values_are_float32_where_that_holds_the_stored_ones(
    dtype: str, scaled: str
) -> None:
    volume = read_volume(nifti(counting(dtype=dtype), scl_slope=3.0, scl_inter=1.0))
    assert volume.voxels.dtype == scaled


def test_intercept_that_cancels_large_integers_loses_no_precision() -> None:
    stored = np.arange(140, dtype=np.int32).reshape(SHAPE) + 2**30
    volume = read_volume(nifti(stored, scl_slope=1.0, scl_inter=-(2.0**30)))
    assert_array_equal(volume.voxels, np.arange(140).reshape(SHAPE))


@pytest.mark.parametrize("slope", [0.0, math.nan, 1.0])
def test_slope_that_scales_nothing_leaves_the_stored_type(slope: float) -> None:
    volume = read_volume(nifti(counting(), scl_slope=slope, scl_inter=0.0))
    assert volume.voxels.dtype == np.int16
    assert_array_equal(volume.voxels, counting())


@pytest.mark.parametrize("hole", [math.nan, math.inf, -math.inf, 1e300])
@pytest.mark.parametrize("order", ["<", ">"])
def test_holes_are_counted_and_filled_with_the_smallest_value(
    hole: float, order: ByteOrder
) -> None:
    array = counting(dtype="float64") - 12.5
    array[2, 1:3, 0] = hole
    volume = read_volume(nifti(array, order=order))
    array[2, 1:3, 0] = -12.5
    assert volume.masked == 2
    assert volume.warnings == (
        "2 of 140 voxels are not finite; the smallest finite value was used for them",
    )
    assert_array_equal(volume.voxels, array)
    assert_fit_for_use(volume)


def test_values_that_overflow_by_scaling_count_as_holes() -> None:
    volume = read_volume(nifti(counting(dtype="float32"), scl_slope=1e38, scl_inter=0.0))
    assert volume.masked == np.count_nonzero(counting() >= 4)
    assert_fit_for_use(volume)


@pytest.mark.parametrize("hole", [math.nan, math.inf])
def test_nothing_finite_is_refused(hole: float) -> None:
    with pytest.raises(BadVoxels, match="expected finite voxels, got 140 that are not"):
        read_volume(nifti(np.full(SHAPE, hole, dtype=np.float32)))


@pytest.mark.parametrize("hole", [3.0, math.nan])
def test_constant_volume_is_read_with_a_warning(hole: float) -> None:
    array = np.full(SHAPE, 3.0, dtype=np.float32)
    array[0, 0, 1] = hole
    assert read_volume(nifti(array)).warnings[-1] == "all voxels have the same value"


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("frame", range(6))
def test_frames_are_counted_with_the_fourth_axis_fastest(frame: int, zipped: bool) -> None:
    array = np.arange(np.prod(SHAPE) * 6).reshape((*SHAPE, 3, 1, 2)).astype(np.int32)
    content = nifti(array, zipped=zipped)
    volume = read_volume(content, frame=frame)
    assert_array_equal(volume.voxels, array[..., frame % 3, 0, frame // 3])
    assert volume.digest == read_volume(content, frame=0).digest


@pytest.mark.parametrize("extra", [(), (1,), (1, 1), (1, 1, 1, 1)])
def test_trailing_axes_of_one_are_dropped(extra: tuple[int, ...]) -> None:
    content = nifti(counting((*SHAPE, *extra)))
    assert_array_equal(read_volume(content).voxels, counting())
    assert_array_equal(read_volume(content, frame=0).voxels, counting())


@pytest.mark.parametrize("frame", [-1, 1])
def test_frame_that_a_3d_volume_lacks_is_refused(frame: int) -> None:
    with pytest.raises(BadParameter, match=f"expected frame from 0 to 0, got {frame}"):
        read_volume(nifti(), frame=frame)


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        (VolumeLimits(axis=6), r"at most 6 voxels along an axis \(limit axis\), got 7"),
        (VolumeLimits(voxels=139), r"at most 139 voxels \(limit voxels\), got 140"),
        (VolumeLimits(inflated_bytes=631), r"at most 631 .*\(limit inflated_bytes\), got 632"),
    ],
)
@pytest.mark.parametrize("zipped", [False, True])
def test_limits_are_told_from_the_header_alone(
    limits: VolumeLimits, said: str, zipped: bool
) -> None:
    head = nifti()[:352]
    with pytest.raises(TooLarge, match=said):
        read_volume(gzip.compress(head) if zipped else head, limits)


def test_volume_at_its_limits_is_read() -> None:
    limits = VolumeLimits(inflated_bytes=632, voxels=140, axis=7)
    assert read_volume(nifti(zipped=True), limits).voxels.shape == SHAPE


def test_absurd_sizes_are_refused_by_default() -> None:
    with pytest.raises(TooLarge, match="limit axis"):
        read_volume(nifti(version=2, dim=[3, 2**40, 2**40, 2**40, 1, 1, 1, 1]))


@pytest.mark.parametrize("row", [[0, 0, 1, 20_000], [0, 0, 1, math.pi * 1e30], [0, 0, 900, 9000]])
def test_scan_that_reaches_out_of_the_building_is_refused(row: list[float]) -> None:
    with pytest.raises(BadGeometry, match="is its unit of length right"):
        read_volume(nifti(srow_z=row))


@pytest.mark.parametrize("kept", [0, 100, 347, 348, 352, 353, 500, 631])
@pytest.mark.parametrize("zipped", [False, True])
def test_truncated_file_is_refused(kept: int, zipped: bool) -> None:
    content = nifti()[:kept]
    refused = NotAVolume if kept < 348 else BrokenVolume
    with pytest.raises(refused, match=r"^expected .*, got "):
        read_volume(gzip.compress(content) if zipped else content)


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5, 0.9, 0.999])
def test_truncated_upload_is_refused(data_dir: Path, share: float) -> None:
    content = (data_dir / "uploads" / "avg152T1_LR_nifti2.nii.gz").read_bytes()
    with pytest.raises(BrokenVolume, match="truncated"):
        read_volume(content[: int(share * len(content))])


def test_gzip_checksum_is_verified_after_the_last_voxel() -> None:
    content = bytearray(nifti(zipped=True))
    content[-8] ^= 1
    with pytest.raises(BrokenVolume, match="corrupt"):
        read_volume(bytes(content))


def test_file_in_several_gzip_members_is_read() -> None:
    plain = nifti()
    members = b"".join(gzip.compress(plain[i : i + 100]) for i in range(0, len(plain), 100))
    assert_array_equal(read_volume(members).voxels, counting())


@pytest.mark.parametrize("zipped", [False, True])
def test_padding_is_read_with_a_warning_and_more_than_that_refused(zipped: bool) -> None:
    def padded(size: int) -> bytes:
        content = nifti() + bytes(size)
        return gzip.compress(content) if zipped else content

    volume = read_volume(padded(TRAILING_BYTES))
    assert volume.warnings == ("65,536 bytes after the voxels were ignored",)
    assert_array_equal(volume.voxels, counting())
    with pytest.raises(BrokenVolume, match=r"expected 632 bytes.* got more"):
        read_volume(padded(TRAILING_BYTES + 1))


@pytest.mark.parametrize(
    "bomb",
    [
        gzip.compress(nifti() + bytes(1 << 28), 9),
        gzip.compress(nifti(dim=[3, 700, 700, 700, 1, 1, 1, 1]), 9),
        nifti(dim=[3, 700, 700, 700, 1, 1, 1, 1]),
        gzip.compress(nifti(vox_offset=1 << 30), 9),
    ],
    ids=["zeros after the voxels", "claim in gzip", "claim in a plain file", "far voxels"],
)
def test_bomb_takes_next_to_no_memory(bomb: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(BrokenVolume):
            read_volume(bomb)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("order", ["<", ">"])
def test_reading_holds_the_voxels_once(order: ByteOrder, zipped: bool) -> None:
    array = counting((160, 128, 192))
    content = nifti(array, order=order, zipped=zipped)
    tracemalloc.start()
    try:
        read_volume(content)
        assert tracemalloc.get_traced_memory()[1] < array.nbytes + (4 << 20)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("dtype", INTEGERS + REALS)
@pytest.mark.parametrize("order", ["<", ">"])
def test_torch_takes_the_voxels_without_a_copy(dtype: str, order: ByteOrder) -> None:
    voxels = read_volume(nifti(counting(dtype=dtype), order=order)).voxels
    tensor = torch.from_numpy(voxels)
    voxels[1, 2, 3] = 77
    assert tensor[1, 2, 3].item() == 77
    assert_array_equal(tensor.float().numpy(), voxels.astype("float32"))


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
@pytest.mark.parametrize("zipped", [False, True])
def test_any_buffer_is_read_and_not_kept(
    kind: type[bytes | bytearray | memoryview], zipped: bool
) -> None:
    content = bytearray(nifti(zipped=zipped))
    volume = read_volume(kind(content))
    content[:] = bytes(len(content))
    assert_array_equal(volume.voxels, counting())


def test_digest_is_that_of_the_uncompressed_file() -> None:
    plain = nifti() + b"padding"
    digest = hashlib.sha256(plain).hexdigest()
    assert read_volume(plain).digest == digest
    assert read_volume(gzip.compress(plain)).digest == digest


def test_first_bytes_of_a_body_are_enough_to_check_its_header() -> None:
    array = np.random.default_rng(3).integers(0, 30_000, (60, 50, 40, 2)).astype("int16")
    head = nifti(array, zipped=True)[:HEAD_BYTES]
    header = check_header(head, frame=1)
    assert header.shape == (60, 50, 40)
    assert header.file_bytes == len(nifti(array))
    with pytest.raises(BadGeometry, match="got 2 frames"):
        check_header(head)
    with pytest.raises(TooLarge, match="limit axis"):
        check_header(head, VolumeLimits(axis=59), frame=1)


@pytest.mark.parametrize(
    "fields",
    [{}, {"datatype": 32}, {"xyzt_units": 0}, {"sform_code": 0}, {"dim": [2, 7, 20] + [1] * 5}],
)
def test_neither_warnings_nor_errors_quote_the_patient(fields: dict[str, Any]) -> None:
    names = {"descrip": b"DOE^JOHN", "db_name": b"DOE^JOHN", "intent_name": b"DOE^JOHN"}
    content = nifti(np.ones(SHAPE, "int16"), **{**names, **fields}) + b"DOE^JOHN"
    try:
        said = " ".join(read_volume(content).warnings)
    except LandmarkdError as error:
        said = str(error)
    assert said
    assert "DOE" not in said


SOURCES = (
    nifti(),
    nifti(counting(dtype="float32"), version=2, order=">", scl_slope=2.0, qform_code=1),
    nifti(counting((*SHAPE, 2), "float64"), scl_slope=0.5, xyzt_units=3),
)


@st.composite
def damaged_files(draw: st.DrawFn) -> bytes:
    """Overwrite bytes of a sound file before and after compressing it, cut it, append to it."""

    def overwrite(content: bytes) -> bytes:
        changed = bytearray(content)
        for at, value in draw(st.lists(st.tuples(st.integers(0, 700), st.integers(0, 255)))):
            changed[at % len(changed)] = value
        return bytes(changed)

    content = overwrite(draw(st.sampled_from(SOURCES)))
    if draw(st.booleans()):
        content = overwrite(gzip.compress(content))
    return content[: draw(st.integers(0, 2000))] + draw(st.binary(max_size=20))


@settings(max_examples=400, deadline=None)
@given(content=damaged_files(), frame=st.none() | st.integers(-1, 2))
def test_random_damage_gives_a_sound_volume_or_a_named_error(
    content: bytes, frame: int | None
) -> None:
    try:
        volume = read_volume(content, LARGE_ENOUGH, frame)
    except LandmarkdError as error:
        said = str(error)
    else:
        assert_fit_for_use(volume)
        said = "expected nothing else, got it"
    assert re.match("expected .*, got ", said)


@settings(max_examples=100, deadline=None)
@given(content=st.binary(max_size=800), zipped=st.booleans())
def test_random_bytes_give_a_named_error(content: bytes, zipped: bool) -> None:
    with pytest.raises(LandmarkdError, match=r"^expected .*, got "):
        read_volume(gzip.compress(content) if zipped else content)
