"""The pixels of a DICOM file -> arrays, one image at a time, decompressed if need be.

JPEG in all its kinds is decoded by pydicom's plugins, where the extra ``dicom`` is installed. How
large an image is says its own header, too, which is compared before anything decodes it.
"""

import struct
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from app.errors import BadVoxels, BrokenVolume
from app.io.dicom.codestream import bare_codestream, corrupt_image, declared_size
from app.io.dicom.elements import ITEM, SEQUENCE_END
from app.io.dicom.image import Image, PixelType
from app.io.gzip_stream import FileStream

if TYPE_CHECKING:
    from pydicom.pixels.decoders.base import Decoder

RLE: Final = "1.2.840.10008.1.2.5"

RLE_HEADER: Final = struct.Struct("<16I")

PASSED_OVER: Final = ("pyjpegls", "gdcm")
"""Plugins that others bring: a kilobyte of damaged JPEG-LS may take the first seconds; of damaged
lossless JPEG and JPEG-LS, one image in 250 ends the process in the second, GDCM 3.2."""

JPEG_EXTENDED: Final = "1.2.840.10008.1.2.4.51"
OF_8_BITS: Final = ("pillow",)
"""A plugin that decodes no more of it, whatever pydicom says is available."""

SLACK_BYTES: Final = 64 << 10
"""Of a compressed image over twice what it takes plain: tables, and comments."""


def read_frames(stream: FileStream, image: Image) -> Iterator[np.ndarray]:
    """Read the images of a file, in the order in which they are stored.

    Args:
        stream: At the file's first byte; afterwards behind its last image.
        image: What the file says about itself.

    Yields:
        The pixels of each image, (rows, columns), native byte order, without bits that do not
        count, in memory that the next image may use.

    Raises:
        BrokenVolume: The file is truncated or corrupt.
        BadVoxels: Nothing here decodes its pixels.
    """
    stream.skip(image.offset)
    pixels, frames = image.planes[0].pixels, len(image.planes)
    if image.length is not None:
        buffer = np.empty((pixels.rows, pixels.columns), pixels.dtype)
        for _ in range(frames):
            stream.fill(buffer.reshape(-1).view(np.uint8).data)
            yield _significant(buffer, pixels)
    else:
        for data in _split_frames(stream, frames, 2 * pixels.frame_bytes + SLACK_BYTES):
            yield _significant(_decode(data, pixels, stream.check_cancelled), pixels)


def _significant(array: np.ndarray, pixels: PixelType) -> np.ndarray:
    """Clear the bits above those that count, which held overlays once, or repeat the sign."""
    native = array.astype(array.dtype.newbyteorder("="), copy=False)
    unused = 8 * native.itemsize - pixels.bits
    return native << unused >> unused if unused else native


def _split_frames(stream: FileStream, frames: int, max_bytes: int) -> Iterator[bytes]:
    """Split encapsulated pixels (PS3.5, A.4) into the bytes of each image."""
    starts = _read_offsets(stream, frames)
    data, count, position = bytearray(), 0, 0
    while (size := _read_item(stream)) is not None:
        if position and (starts is None or position in starts):
            yield bytes(data)
            data, count = bytearray(), count + 1
        if len(data) + size > max_bytes or count == frames:
            raise BrokenVolume(
                f"expected {frames} compressed images of no more than they hold, got more"
            )
        data += stream.read(size)
        position += 8 + size
    if count != frames - 1 or not data:
        raise BrokenVolume(f"expected {frames} compressed images, got {count + bool(data)}")
    yield bytes(data)


def _read_offsets(stream: FileStream, frames: int) -> frozenset[int] | None:
    """Read where the images start, counted from the first one; None: at every fragment."""
    size = _read_item(stream) or 0
    if size > 4 * frames:
        raise BrokenVolume(f"expected offsets of {frames} compressed images, got {size} bytes")
    table = stream.read(size)
    if frames == 1:
        return frozenset()
    return frozenset(np.frombuffer(table, "<u4").tolist()) if size == 4 * frames else None


def _read_item(stream: FileStream) -> int | None:
    """Read the start of an item; return its size, or None where there are no more."""
    head = stream.read(8)
    if len(head) < 8:
        raise BrokenVolume("expected whole compressed images, got truncated ones")
    group, element, size = struct.unpack("<HHI", head)
    tag = group << 16 | element
    if tag not in (ITEM, SEQUENCE_END):
        raise BrokenVolume("expected compressed images in items, got something else")
    return size if tag == ITEM else None


def _decode(data: bytes, pixels: PixelType, check_cancelled: Callable[[], None]) -> np.ndarray:
    if pixels.syntax == RLE:
        return _decode_rle(data, pixels, check_cancelled)
    try:
        from pydicom.pixels.decoders.base import get_decoder  # noqa: PLC0415 - an extra
    except ModuleNotFoundError:
        raise BadVoxels(
            "expected DICOM pixels that are plain or RLE, got compressed ones, which need the "
            "extra dicom: pip install 'landmarkd[dicom]'"
        ) from None
    try:
        decoder = get_decoder(pixels.syntax)
    except NotImplementedError:
        raise BadVoxels("expected a transfer syntax of images, got an unknown one") from None
    is_deep = pixels.syntax == JPEG_EXTENDED and pixels.bits > 8
    unfit = (*PASSED_OVER, *OF_8_BITS) if is_deep else PASSED_OVER
    plugins = [name for name in decoder.available_plugins if name not in unfit]
    if not plugins:
        missing = decoder.missing_dependencies
        needs = "; or ".join(each for each in missing if not each.startswith(unfit))
        if "pylibjpeg-libjpeg" in needs:
            needs = "that needs the extra jpeg: pip install 'landmarkd[jpeg]'"
        raise BadVoxels(
            f"expected a transfer syntax that can be decoded here, got {decoder.UID.name}: {needs}"
        )
    data = bare_codestream(data)
    rows, columns = declared_size(data)
    if (rows, columns) != (pixels.rows, pixels.columns):
        raise BrokenVolume(
            f"expected a compressed image of {pixels.columns} x {pixels.rows} pixels, as its file "
            f"says, got {columns} x {rows}"
        )
    return _decode_by_plugin(decoder, plugins[0], data, pixels)


def _decode_by_plugin(
    decoder: "Decoder", plugin: str, data: bytes, pixels: PixelType
) -> np.ndarray:
    from pydicom.encaps import encapsulate  # noqa: PLC0415

    options: dict[str, Any] = {
        "rows": pixels.rows,
        "columns": pixels.columns,
        "samples_per_pixel": 1,
        "number_of_frames": 1,
        "bits_allocated": 8 * pixels.dtype.itemsize,
        "bits_stored": pixels.bits,
        "pixel_representation": int(pixels.dtype.kind == "i"),
        "photometric_interpretation": "MONOCHROME2",
        "pixel_keyword": "PixelData",
        "decoding_plugin": plugin,
    }
    try:
        array, _ = decoder.as_array(encapsulate([data]), index=0, raw=True, **options)
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - every plugin has errors of its own
        raise corrupt_image() from None
    if (
        array.shape != (pixels.rows, pixels.columns)
        or array.dtype.itemsize != pixels.dtype.itemsize
    ):
        raise corrupt_image()
    return np.asarray(array).view(pixels.dtype)


def _decode_rle(data: bytes, pixels: PixelType, check_cancelled: Callable[[], None]) -> np.ndarray:
    """Decode RLE (PS3.5, annex G): a segment of packed bits for each byte of a pixel."""
    size = pixels.dtype.itemsize
    if len(data) < RLE_HEADER.size:
        raise corrupt_image()
    segments, *offsets = RLE_HEADER.unpack_from(data)
    if segments != size:
        raise corrupt_image()
    ends = [*offsets[1:segments], len(data)]
    planes = np.empty((size, pixels.rows * pixels.columns), np.uint8)
    for plane, start, end in zip(planes, offsets, ends, strict=False):
        _unpack_bits(data[start:end], plane, check_cancelled)
    # The first segment has the highest byte.
    array = np.ascontiguousarray(planes[::-1].T).view(pixels.dtype.newbyteorder("<"))
    return array.reshape(pixels.rows, pixels.columns)


def _unpack_bits(packed: bytes, target: np.ndarray, check_cancelled: Callable[[], None]) -> None:
    """Fill an array of bytes with those that are packed."""
    at = filled = 0
    view = target.data
    while filled < len(view):
        check_cancelled()  # A run may be as short as a byte, and an image has millions.
        if at + 1 >= len(packed):
            raise corrupt_image()
        control = packed[at]
        left = len(view) - filled
        if control < 128:
            part = packed[at + 1 : at + 2 + min(control, left - 1)]
            at += 2 + control
        else:
            # 257 - control copies; 128 means nothing.
            part = packed[at + 1 : at + 2] * (min(257 - control, left) if control > 128 else 0)
            at += 2 if control > 128 else 1
        view[filled : filled + len(part)] = part
        filled += len(part)
