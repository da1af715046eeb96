"""Volume: voxel types, scaling, holes, frames, limits, digests."""

import gzip
import math
import tracemalloc
from typing import Literal

import numpy as np
import pytest
import torch
from blake3 import blake3
from numpy.testing import assert_allclose, assert_array_equal

from app.errors import (
    BadGeometry,
    BadParameter,
    BadVoxels,
    BrokenVolume,
    TooLarge,
)
from app.io.volume import HEAD_BYTES, Selection, VolumeLimits, check_header, read_volume
from tests.support.nifti_files import (
    SHAPE,
    ByteOrder,
    assert_fit_for_use,
    by_nibabel,
    counting,
    nifti,
)

INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
REALS = ("float32", "float64")


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
def test_slope_and_intercept_are_applied_as_by_nibabel(dtype: str, order: ByteOrder) -> None:
    content = nifti(counting(dtype=dtype), order=order, scl_slope=0.25, scl_inter=-7.5)
    volume = read_volume(content)
    assert_allclose(volume.voxels, by_nibabel(content)[0], rtol=1e-6)
    assert_fit_for_use(volume)


@pytest.mark.parametrize(
    ("dtype", "scaled"),
    [("uint8", "float32"), ("int16", "float32"), ("float32", "float32"), ("int32", "float64")],
)
def test_scaled_values_are_float32_if_it_represents_the_stored_type(
    dtype: str, scaled: str
) -> None:
    volume = read_volume(nifti(counting(dtype=dtype), scl_slope=3.0, scl_inter=1.0))
    assert volume.voxels.dtype == scaled


def test_intercept_that_cancels_large_integers_loses_no_precision() -> None:
    stored = np.arange(140, dtype=np.int32).reshape(SHAPE) + 2**30
    volume = read_volume(nifti(stored, scl_slope=1.0, scl_inter=-(2.0**30)))
    assert_array_equal(volume.voxels, np.arange(140).reshape(SHAPE))


@pytest.mark.parametrize("slope", [0.0, math.nan, 1.0])
def test_slope_of_one_keeps_the_stored_type(slope: float) -> None:
    volume = read_volume(nifti(counting(), scl_slope=slope, scl_inter=0.0))
    assert volume.voxels.dtype == np.int16
    assert_array_equal(volume.voxels, counting())


@pytest.mark.parametrize("hole", [math.nan, math.inf, -math.inf, 1e300])
@pytest.mark.parametrize("order", ["<", ">"])
def test_masked_voxels_are_counted_and_filled_with_the_smallest_value(
    hole: float, order: ByteOrder
) -> None:
    array = counting(dtype="float64") - 12.5
    array[2, 1:3, 0] = hole
    volume = read_volume(nifti(array, order=order))
    array[2, 1:3, 0] = -12.5
    assert volume.warnings == (
        "2 of 140 voxels are not finite; the smallest finite value was used for them",
    )
    assert_array_equal(volume.voxels, array)
    assert_fit_for_use(volume)


def test_values_that_overflow_by_scaling_are_masked() -> None:
    volume = read_volume(nifti(counting(dtype="float32"), scl_slope=1e38, scl_inter=0.0))
    count = np.count_nonzero(counting() >= 4)
    assert volume.warnings == (
        f"{count} of 140 voxels are not finite; the smallest finite value was used for them",
    )
    assert_fit_for_use(volume)


@pytest.mark.parametrize("hole", [math.nan, math.inf])
def test_volume_without_finite_voxels_is_refused(hole: float) -> None:
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
    volume = read_volume(content, selection=Selection(frame=frame))
    assert_array_equal(volume.voxels, array[..., frame % 3, 0, frame // 3])
    assert volume.digest == read_volume(content, selection=Selection(frame=0)).digest


@pytest.mark.parametrize("extra", [(), (1,), (1, 1), (1, 1, 1, 1)])
def test_trailing_axes_of_one_are_dropped(extra: tuple[int, ...]) -> None:
    content = nifti(counting((*SHAPE, *extra)))
    assert_array_equal(read_volume(content).voxels, counting())
    assert_array_equal(read_volume(content, selection=Selection(frame=0)).voxels, counting())


@pytest.mark.parametrize("frame", [-1, 1])
def test_frame_that_a_3d_volume_lacks_is_refused(frame: int) -> None:
    with pytest.raises(BadParameter, match=f"expected frame from 0 to 0, got {frame}"):
        read_volume(nifti(), selection=Selection(frame=frame))


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        (VolumeLimits(axis=6), "at most 6 voxels along an axis, got 7; .*LANDMARKD_MAX_AXIS"),
        (VolumeLimits(voxels=139), "at most 139 voxels, got 140; .*LANDMARKD_MAX_VOXELS"),
        (
            VolumeLimits(inflated_bytes=631),
            "at most 631 .*, got 632; .*LANDMARKD_MAX_INFLATED_BYTES",
        ),
    ],
)
@pytest.mark.parametrize("zipped", [False, True])
def test_limits_are_checked_by_the_header_alone(
    limits: VolumeLimits, said: str, zipped: bool
) -> None:
    head = nifti()[:352]
    with pytest.raises(TooLarge, match=said):
        read_volume(gzip.compress(head) if zipped else head, limits)


def test_volume_at_its_limits_is_read() -> None:
    limits = VolumeLimits(inflated_bytes=632, voxels=140, axis=7)
    assert read_volume(nifti(zipped=True), limits).voxels.shape == SHAPE


def test_absurd_sizes_are_refused_by_default() -> None:
    with pytest.raises(TooLarge, match="LANDMARKD_MAX_AXIS"):
        read_volume(nifti(version=2, dim=[3, 2**40, 2**40, 2**40, 1, 1, 1, 1]))


@pytest.mark.parametrize("row", [[0, 0, 1, 20_000], [0, 0, 1, math.pi * 1e30], [0, 0, 900, 9000]])
def test_scan_too_far_from_the_origin_is_refused(row: list[float]) -> None:
    with pytest.raises(BadGeometry, match="is its unit of length right"):
        read_volume(nifti(srow_z=row))


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("order", ["<", ">"])
def test_reading_allocates_the_voxels_once(order: ByteOrder, zipped: bool) -> None:
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
    digest = blake3(plain).hexdigest()
    assert read_volume(plain).digest == digest
    assert read_volume(gzip.compress(plain)).digest == digest


def test_first_bytes_of_a_body_are_enough_to_check_its_header() -> None:
    array = np.random.default_rng(3).integers(0, 30_000, (60, 50, 40, 2)).astype("int16")
    head = nifti(array, zipped=True)[:HEAD_BYTES]
    header = check_header(head, selection=Selection(frame=1))
    assert header.shape == (60, 50, 40)
    assert header.file_bytes == len(nifti(array))
    with pytest.raises(BadGeometry, match="got 2 frames"):
        check_header(head)
    with pytest.raises(TooLarge, match="LANDMARKD_MAX_AXIS"):
        check_header(head, VolumeLimits(axis=59), selection=Selection(frame=1))


def test_a_header_behind_more_empty_gzip_members_than_are_looked_at_is_refused() -> None:
    """To look for it takes longer than the event loop has, however much of the file is there."""
    empty = gzip.compress(b"")
    body = empty * (HEAD_BYTES // len(empty) + 1) + nifti(zipped=True)
    for content in (body, body[:HEAD_BYTES]):
        with pytest.raises(BrokenVolume, match="truncated"):
            check_header(content)


@pytest.mark.parametrize("size", [1, 2, 9])
def test_a_file_of_tiny_gzip_members_is_checked_by_its_first_bytes_as_any(size: int) -> None:
    plain = nifti(version=2)
    body = b"".join(gzip.compress(plain[at : at + size]) for at in range(0, len(plain), size))
    # Padding, of which a file may have this much.
    body += b"".join(gzip.compress(b"0") for _ in range(HEAD_BYTES // 20))
    assert len(body) > HEAD_BYTES
    assert check_header(body[:HEAD_BYTES]).shape == SHAPE
    assert_array_equal(read_volume(body).voxels, counting())
