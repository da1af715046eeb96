"""Pixels: compressed transfer syntaxes, real files, and compressed images that are broken."""

import io
import math
import re
import struct
import sys
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pydicom
import pydicom.data
import pytest
from numpy.testing import assert_array_equal
from pydicom.encaps import encapsulate
from pydicom.pixels.decoders.base import get_decoder
from pydicom.uid import JPEG2000Lossless, JPEGExtended12Bit, JPEGLosslessSV1, RLELossless

from app.errors import BadVoxels, BrokenVolume, RequestError
from app.io.volume import read_volume
from tests.support.cancelling import NobodyWaitsError, cancelled_after
from tests.support.dicom_files import (
    as_dicom,
    as_enhanced,
    changed,
    compressed,
    jp2,
    jpeg2000,
    lossless_jpeg,
    packed_bits,
    write,
    zipped,
)
from tests.support.nifti_files import counting

REAL = Path(pydicom.data.__file__).parent / "test_files"
"""Files of scanners and other writers that pydicom brings with it."""

READ = (
    "693_J2KI.dcm", "CT_small.dcm", "MR_small.dcm", "MR_small_RLE.dcm", "MR_small_bigendian.dcm",
    "MR_small_expb.dcm", "MR_small_implicit.dcm", "MR_small_jp2klossless.dcm",
    "MR_small_jpeg_ls_lossless.dcm", "MR_small_padded.dcm", "examples_overlay.dcm",
    "rtdose_1frame.dcm", "rtdose_rle_1frame.dcm",
)  # fmt: skip


@pytest.mark.parametrize("name", READ)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_real_files_have_the_values_that_pydicom_reads(name: str) -> None:
    dataset = pydicom.dcmread(REAL / name)
    slope = float(dataset.get("RescaleSlope", 1))
    expected = dataset.pixel_array * slope + float(dataset.get("RescaleIntercept", 0))
    assert_array_equal(read_volume((REAL / name).read_bytes()).voxels[:, :, 0], expected.T)


@pytest.mark.parametrize("path", sorted(REAL.glob("*.dcm")), ids=lambda path: path.name)
def test_every_real_file_is_read_or_refused_by_name(path: Path) -> None:
    try:
        said = f"expected a scan, got {read_volume(path.read_bytes()).voxels.shape}"
    except RequestError as error:
        said = str(error)
    assert re.match("expected .*, got ", said)


def long_jp2(array: np.ndarray) -> bytes:
    """Compress as ``jp2``; the codestream's box says how long it is in 64 bits, and is not last."""
    head, kind, stream = jp2(array).partition(b"jp2c")
    return head[:-4] + struct.pack(">I4sQ", 1, kind, 16 + len(stream)) + stream + b"\0\0\0\x08xml "


def with_a_code_for_nothing(array: np.ndarray) -> bytes:
    packed = packed_bits(array)
    (second,) = struct.unpack_from("<I", packed, 8)
    return packed[:second] + b"\x80" + packed[second:]


@pytest.mark.parametrize(
    ("syntax", "encode"),
    [
        (JPEG2000Lossless, jpeg2000),
        (JPEG2000Lossless, jp2),
        (JPEG2000Lossless, long_jp2),
        (JPEGLosslessSV1, lossless_jpeg),
        (RLELossless, packed_bits),
        (RLELossless, with_a_code_for_nothing),
    ],
)
def test_compressed_images_have_the_voxels_of_plain_ones(
    syntax: str, encode: Callable[[np.ndarray], bytes]
) -> None:
    array = counting((33, 34, 3), "uint16") * 5
    files = [compressed(file, syntax, encode) for file in as_dicom(array)]
    assert_array_equal(read_volume(zipped(files)).voxels, array)
    frames = compressed(as_enhanced(array), syntax, encode)
    assert_array_equal(read_volume(frames).voxels, array * 2.0 - 5)


FRAMES = counting((33, 34, 3), "uint16") * 5


def of_frames(
    frames: Sequence[np.ndarray], *, fragments: int = 1, has_table: bool = False
) -> bytes:
    """Write a file of three frames whose pixels are of others."""
    dataset = pydicom.dcmread(io.BytesIO(compressed(as_enhanced(FRAMES), RLELossless, packed_bits)))
    packed = [packed_bits(np.ascontiguousarray(frame)) for frame in frames]
    dataset.PixelData = encapsulate(packed, fragments, has_bot=has_table)
    return write(dataset, RLELossless)


@pytest.mark.parametrize(("fragments", "has_table"), [(1, False), (3, True)])
def test_frames_are_told_by_a_table_of_them_or_are_one_fragment_each(
    fragments: int, has_table: bool
) -> None:
    content = of_frames([*FRAMES.T], fragments=fragments, has_table=has_table)
    assert_array_equal(read_volume(content).voxels, FRAMES * 2.0 - 5)


@pytest.mark.parametrize(
    ("frames", "said"), [(FRAMES.T[:2], "got 2"), ([*FRAMES.T, FRAMES.T[0]], "got more")]
)
def test_fewer_or_more_images_than_frames_are_refused(
    frames: Sequence[np.ndarray], said: str
) -> None:
    with pytest.raises(BrokenVolume, match=f"^expected 3 compressed images.*, {said}"):
        read_volume(of_frames(frames))


@pytest.fixture
def without_jpeg(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have pydicom find the plugins that are there without the extra jpeg."""
    for decoder in map(get_decoder, (JPEGLosslessSV1, JPEGExtended12Bit)):
        missing = {"pylibjpeg": ("pylibjpeg>=2.0", "pylibjpeg-libjpeg>=2.1")}
        others = {
            name: one for name, one in vars(decoder)["_available"].items() if name not in missing
        }
        monkeypatch.setattr(decoder, "_available", others)
        monkeypatch.setattr(decoder, "_unavailable", missing)


@pytest.mark.usefixtures("without_jpeg")
def test_missing_decoder_is_named_with_the_extra_that_has_it() -> None:
    file = compressed(as_dicom(counting(dtype="uint16"))[0], JPEGLosslessSV1, lambda _: b"x")
    with pytest.raises(BadVoxels, match=r"got JPEG Lossless.* pip install 'landmarkd\[jpeg\]'$"):
        read_volume(file)


def of_12_bits() -> bytes:
    place = {"ImageOrientationPatient": [1, 0, 0, 0, 1, 0], "ImagePositionPatient": [0, 0, 0]}
    return changed((REAL / "JPGExtended.dcm").read_bytes(), **place, PixelSpacing=[1, 1])


def test_jpeg_of_twelve_bits_is_read() -> None:
    expected = pydicom.dcmread(io.BytesIO(of_12_bits())).pixel_array
    assert expected.max() > 255
    assert_array_equal(read_volume(of_12_bits()).voxels[:, :, 0], expected.T)


@pytest.mark.usefixtures("without_jpeg")
def test_decoder_of_twelve_bits_is_missing_where_those_of_eight_are_installed() -> None:
    with pytest.raises(BadVoxels, match=r"got JPEG Extended .* 'landmarkd\[jpeg\]'$"):
        read_volume(of_12_bits())


def test_missing_pydicom_is_named_with_the_extra_that_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pydicom.pixels.decoders.base", None)
    file = compressed(as_dicom(counting(dtype="uint16"))[0], JPEG2000Lossless, lambda _: b"xx")
    with pytest.raises(BadVoxels, match=r"the extra dicom: pip install 'landmarkd\[dicom\]'"):
        read_volume(file)


def test_unknown_transfer_syntax_is_refused() -> None:
    file = compressed(as_dicom(counting(dtype="uint16"))[0], "1.2.3.4", lambda _: b"x")
    with pytest.raises(BadVoxels, match="got an unknown one"):
        read_volume(file)


@pytest.mark.parametrize(
    ("syntax", "broken", "said"),
    [
        (JPEG2000Lossless, lambda array: jpeg2000(array)[:40], "a corrupt one"),
        (JPEG2000Lossless, lambda _: b"xx", "a corrupt one"),
        (JPEG2000Lossless, lambda array: jp2(array)[:30], "a corrupt one"),
        (JPEG2000Lossless, lambda array: jp2(array)[:12] + bytes(99), "a corrupt one"),
        (JPEG2000Lossless, lambda _: b"\xff\xd8" + b"\xff" * 99, "a corrupt one"),
        (JPEG2000Lossless, lambda _: jpeg2000(np.zeros((40, 41))), "got 41 x 40"),
        (JPEG2000Lossless, lambda _: bytes(1 << 20), "no more than they hold"),
        (JPEGLosslessSV1, lambda array: lossless_jpeg(array)[:40], "a corrupt one"),
        (
            JPEGLosslessSV1,
            lambda array: lossless_jpeg(array).replace(b"\xff\xc4", b"\xff\xfe"),
            "a corrupt one",
        ),
        (JPEGLosslessSV1, lambda _: lossless_jpeg(counting((40, 41))), "got 41 x 40"),
        (RLELossless, lambda array: packed_bits(array)[:-9], "a corrupt one"),
        (RLELossless, lambda array: packed_bits(array)[:63], "a corrupt one"),
        (RLELossless, lambda array: b"\1" + packed_bits(array)[1:], "a corrupt one"),
        (RLELossless, lambda array: packed_bits(array)[:64] + b"\x80" * 999, "a corrupt one"),
    ],
)
def test_broken_compressed_images_are_refused(
    syntax: str, broken: Callable[[np.ndarray], bytes], said: str
) -> None:
    file = compressed(as_dicom(counting((33, 34, 1), "uint16"))[0], syntax, broken)
    with pytest.raises(BrokenVolume, match=f"^expected .*(?:{said})"):
        read_volume(file)


def test_image_of_a_gigabyte_in_a_small_file_takes_no_memory() -> None:
    """A JPEG 2000 header that declares 32,000 x 32,000 pixels, as its file does not."""
    content = bytearray(jpeg2000(np.zeros((40, 41))))
    content[8:16] = (32_000).to_bytes(4, "big") * 2
    file = compressed(
        as_dicom(counting((33, 34, 1), "uint16"))[0], JPEG2000Lossless, lambda _: bytes(content)
    )
    tracemalloc.start()
    try:
        with pytest.raises(BrokenVolume, match="got 32000 x 32000"):
            read_volume(file)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_unpacking_an_image_ends_with_the_next_run_once_nobody_waits() -> None:
    """A run may be of one pixel, or of none: those of 33 KB, packed, took a thread for a minute."""
    array = counting((33, 34, 1), "uint16")
    file = compressed(as_dicom(array)[0], RLELossless, packed_bits)
    steps: list[None] = []
    read_volume(file, check_cancelled=lambda: steps.append(None))
    runs = 2 * math.ceil(array.size / 128)
    with pytest.raises(NobodyWaitsError):
        read_volume(file, check_cancelled=cancelled_after(len(steps) - runs // 2))
    plain: list[None] = []
    read_volume(as_dicom(array)[0], check_cancelled=lambda: plain.append(None))
    assert len(steps) >= len(plain) + runs
