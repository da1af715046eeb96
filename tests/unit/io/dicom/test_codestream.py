"""Codestreams: images whose own headers declare more work than their pixels."""

import io
import struct
from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image
from pydicom.uid import JPEGBaseline8Bit

from app.errors import BrokenVolume
from app.io.dicom.codestream import declared_size
from app.io.volume import read_volume
from tests.support.dicom_files import as_dicom, compressed

CODING, TILE = b"\xff\x52", b"\xff\x90"
SCAN = b"\xff\xda"


def coded(image: bytes, *, layers: int, precinct: bytes | None = None) -> bytes:
    """Replace what a JPEG 2000 image says of layers and, with exponents, of precincts."""
    at = image.index(CODING)
    (length,) = struct.unpack_from(">H", image, at + 2)
    coding = bytearray(image[at + 4 : at + 2 + length])
    struct.pack_into(">H", coding, 2, layers)
    if precinct is not None:
        coding[0] |= 1
        coding[10:] = precinct * (coding[5] + 1)
    segment = CODING + struct.pack(">H", len(coding) + 2) + coding
    return image[:at] + segment + image[at + 2 + length :]


def in_front_of_the_tile(image: bytes, segment: bytes) -> bytes:
    at = image.index(TILE)
    return image[:at] + segment + image[at:]


def within_the_last_tile(image: bytes, segment: bytes) -> bytes:
    at = image.rindex(TILE)
    (length,) = struct.unpack_from(">I", image, at + 6)
    part = image[at : at + 6] + struct.pack(">I", length + len(segment)) + image[at + 10 : at + 12]
    return image[:at] + part + segment + image[at + 12 :]


def with_field(image: bytes, at: int, form: str, value: int) -> bytes:
    changed = bytearray(image)
    struct.pack_into(form, changed, at, value)
    return bytes(changed)


def coding_of(image: bytes) -> bytes:
    at = image.index(CODING)
    return image[at : at + 2 + int.from_bytes(image[at + 2 : at + 4], "big")]


def jpeg(shape: tuple[int, int], *, progressive: bool = False, colours: int = 1) -> bytes:
    target = io.BytesIO()
    pixels = np.zeros((*shape, colours)[: 2 + (colours > 1)], np.uint8)
    Image.fromarray(pixels).save(target, "JPEG", progressive=progressive)
    return target.getvalue()


@pytest.mark.parametrize("sides", [(33, 34), (512, 300), (1, 7)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tile_size": (64, 64)},
        {"codeblock_size": (32, 32), "precinct_size": (128, 128)},
        {"quality_mode": "rates", "quality_layers": list(range(40, 2, -2))},
    ],
)
def test_images_as_encoders_make_them_are_read(
    sides: tuple[int, int], options: dict[str, object]
) -> None:
    target = io.BytesIO()
    pixels = np.random.default_rng(1).integers(0, 4000, sides).astype(np.uint16)
    Image.fromarray(pixels).save(target, "JPEG2000", no_jp2=True, **options)
    image = target.getvalue()
    assert declared_size(image) == sides
    # The last tile need not say where it ends, nor the image that it does.
    assert declared_size(with_field(image, image.rindex(TILE) + 6, ">I", 0)[:-2]) == sides
    assert declared_size(jpeg(sides)) == sides


@pytest.mark.parametrize(
    ("change", "said"),
    [
        # A precinct of two pixels each would take half a kilobyte for each two.
        (lambda image: coded(image, layers=1, precinct=b"\x21"), "blocks in 1 layers"),
        (lambda image: coded(image, layers=1, precinct=b"\0"), "a corrupt one"),
        (lambda image: coded(image, layers=1, precinct=b""), "a corrupt one"),
        (lambda image: coded(image, layers=65535), "blocks in 65,535 layers"),
        # What tiles, or the second of two, say otherwise.
        (lambda image: within_the_last_tile(image, coding_of(image)), "a corrupt one"),
        (lambda image: in_front_of_the_tile(image, coding_of(image)), "a corrupt one"),
        # A decoder looks for the next marker that it knows, whatever length an unknown one has.
        (lambda image: in_front_of_the_tile(image, b"\xff\x30\0\x0e" + bytes(12)), "a corrupt"),
        (lambda image: in_front_of_the_tile(image, b"\x12\x64\0\x0e" + bytes(12)), "a corrupt"),
        (lambda image: with_field(image, 24, ">I", 0), "a corrupt one"),  # Width of a tile.
        (lambda image: with_field(image, 40, ">H", 3), "a corrupt one"),  # Components.
    ],
)
def test_jpeg_2000_of_more_work_than_its_pixels_is_refused_undecoded(
    change: Callable[[bytes], bytes], said: str
) -> None:
    target = io.BytesIO()
    pixels = np.zeros((340, 330), np.uint16)
    Image.fromarray(pixels).save(target, "JPEG2000", no_jp2=True, tile_size=(330, 170))
    with pytest.raises(BrokenVolume, match=f"^expected .*{said}"):
        declared_size(change(target.getvalue()))


def hidden(progressive: bytes, marker: bytes = b"\xff\xd0") -> bytes:
    """Put a marker in front that has no length, and another size where its length would end.

    A decoder passes over the marker alone.
    """
    size = b"\xff\xc0" + struct.pack(">HBHHB", 11, 8, 33, 34, 1) + b"\1\x11\0" + jpeg((33, 34))[2:]
    image = progressive[:2] + marker + progressive[2:]
    (length,) = struct.unpack_from(">H", image, 4)
    return image.ljust(4 + length, b"\0") + size


@pytest.mark.parametrize(
    ("image", "said"),
    [
        (jpeg((33, 34), progressive=True), "another kind"),
        (jpeg((33, 34), colours=3), "another kind"),
        (hidden(jpeg((33, 34), progressive=True)), "a corrupt one"),
        (hidden(jpeg((33, 34), progressive=True), b"\xff\1"), "a corrupt one"),
        (hidden(jpeg((33, 34), progressive=True), b"\x12\xfe"), "a corrupt one"),
        (jpeg((33, 34)).replace(SCAN, b"\xff\xfe\0\2" * (1 << 14) + SCAN), "a corrupt one"),
    ],
    ids=["progressive", "colours", "hidden", "reserved", "no marker", "segments"],
)
def test_jpeg_of_more_work_than_its_pixels_is_refused_undecoded(image: bytes, said: str) -> None:
    """A progressive one of 91 KB, packed, held 800,000 scans: an hour of a thread's time."""
    with pytest.raises(BrokenVolume, match=f"^expected .*{said}"):
        declared_size(image)


def test_jpeg_of_one_scan_is_read_though_bytes_fill_it() -> None:
    image = jpeg((33, 34))
    pixels = np.zeros((34, 33, 1), np.uint8)
    filled = image[:2] + b"\xff\xff" + image[2:]
    file = compressed(as_dicom(pixels)[0], JPEGBaseline8Bit, lambda _: filled)
    assert not read_volume(file).voxels.any()
