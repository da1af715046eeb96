"""Bytes of a JPEG or JPEG 2000 image -> the size that they declare, if little work is declared.

Decoders believe an image's own header. In a hundred bytes it may declare a block for each pixel,
which takes gigabytes, or thousands of scans over all pixels, which take hours that no deadline
ends. Grey DICOM images have one component in one scan, and blocks of a thousand pixels or more, so
anything else is refused before it is decoded.
"""

import math
import struct
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

from app.errors import BrokenVolume

JPEG_START: Final = b"\xff\xd8"
JPEG_SCAN: Final = 0xDA
JPEG_FRAMES: Final = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC} | {0xF7}
"""Markers of the segment that says how large an image is, and of which kind: JPEG's, and JPEG-LS's.
"""

ONE_SCAN: Final = frozenset((0xC0, 0xC1, 0xC3, 0xF7))
"""Baseline, extended and lossless JPEG, and JPEG-LS: what DICOM has. Others are progressive."""

BARE: Final = frozenset(range(0xD0, 0xDA))
"""Markers without a length. What is below the frames' is no marker in a JPEG file."""

JP2_START: Final = b"\0\0\0\x0cjP  "
MAX_BOXES: Final = 64
"""Of a JP2 file before its codestream; four or so."""

JPEG2000_START: Final = b"\xff\x4f\xff\x51"
CODING, TILE_PART, DATA, END = 0x52, 0x90, 0x93, 0xD9
JPEG2000_SEGMENTS: Final = frozenset(
    (0x50, CODING, 0x55, 0x57, 0x58, 0x59, *range(0x5C, 0x62), 0x63, 0x64, TILE_PART)
)
"""Markers that may lie before the data of a tile; behind unknown ones decoders search for others.
Not COC, which says for one of several components what COD says for all."""

MAX_SEGMENTS: Final = 1 << 14
"""Of an image; each takes a microsecond."""

BLOCK_PIXELS: Final = 64
"""Of a code-block on average, at least: encoders make them of 1,024 or 4,096. OpenJPEG takes half a
kilobyte for each."""

LAYERS: Final = 16
"""Of quality, of an image whose blocks are as small as that; of larger ones it may have more."""

SLACK_BLOCKS: Final = 4096
"""As many blocks any image may have, however small it is."""


def bare_codestream(data: bytes) -> bytes:
    """Return the codestream of an image that is a whole JP2 file; others as they are.

    DICOM has it without that (PS3.5, 8.2.4), but some writers do not.

    Raises:
        BrokenVolume: There is none in the file.
    """
    if not data.startswith(JP2_START):
        return data
    at = 0
    with suppress(struct.error):
        for _ in range(MAX_BOXES):
            length, kind = struct.unpack_from(">I4s", data, at)
            if kind == b"jp2c":
                return data[at + (16 if length == 1 else 8) :]
            at += length
    raise corrupt_image()


def declared_size(data: bytes) -> tuple[int, int]:
    """Return rows and columns of an image by its own header.

    Raises:
        BrokenVolume: It is corrupt, not of one grey component, or takes more work than its pixels.
    """
    size = None
    try:
        if data.startswith(JPEG2000_START):
            size = _jpeg2000_size(data)
        elif data.startswith(JPEG_START):
            size = _jpeg_size(data)
    except (struct.error, IndexError):
        pass
    if size is None:
        raise corrupt_image()
    return size


def corrupt_image() -> BrokenVolume:
    """Make the error of an image that cannot be decoded."""
    return BrokenVolume("expected an image compressed as its file says, got a corrupt one")


def _jpeg_size(data: bytes) -> tuple[int, int] | None:
    size = None
    for marker, at in _jpeg_segments(data):
        if marker in JPEG_FRAMES:
            rows, columns, components = struct.unpack_from(">HHB", data, at + 5)
            if marker not in ONE_SCAN or components != 1:
                raise BrokenVolume(
                    "expected a JPEG image of one component in one scan, as DICOM has them, got "
                    "another kind"
                )
            size = rows, columns
    return size


def _jpeg_segments(data: bytes) -> Iterator[tuple[int, int]]:
    """Yield the marker and the place of each segment up to the first scan."""
    at = len(JPEG_START)
    for _ in range(MAX_SEGMENTS):
        start, marker, length = struct.unpack_from(">BBH", data, at)
        if start != 0xFF or marker < min(JPEG_FRAMES) or marker in BARE:
            raise corrupt_image()
        yield marker, at
        if marker == JPEG_SCAN:
            return
        at += 2 + length if marker != 0xFF else 1  # Or a byte that fills.
    raise corrupt_image()


def _jpeg2000_size(data: bytes) -> tuple[int, int] | None:
    length, _, *grid = struct.unpack_from(">HH8I", data, len(JPEG2000_START))
    (components,) = struct.unpack_from(">H", data, 40)
    right, lower, left, upper, *tile = grid[:6]
    size = lower - upper, right - left
    coding = _coding(data, len(JPEG2000_START) + length)
    if components != 1 or min(*size, *tile) < 1:
        return None
    layers, blocks = _count_blocks(size, (tile[1], tile[0]), coding)
    most = SLACK_BLOCKS + math.prod(size) // BLOCK_PIXELS
    if blocks > most or layers * blocks > LAYERS * most:
        raise BrokenVolume(
            f"expected a JPEG 2000 image of at most {most:,} blocks in {LAYERS} layers, got "
            f"{blocks:,} blocks in {layers:,} layers"
        )
    return size


def _coding(data: bytes, at: int) -> bytes:
    """Return what the only COD segment says, which is that of all tiles, from a segment on."""
    coding, behind = b"", 0
    for _ in range(MAX_SEGMENTS):
        if at >= len(data) - 1 or data[at : at + 2] == bytes((0xFF, END)):
            return coding
        start, marker, length = struct.unpack_from(">BBH", data, at)
        if marker == TILE_PART:
            # The last tile part need not say where it ends.
            behind = at + struct.unpack_from(">I", data, at + 6)[0]
            behind = behind if behind > at else len(data)
        if start == 0xFF and marker == DATA and behind > at:
            at = behind
            continue
        is_again = marker == CODING and coding
        if start != 0xFF or marker not in JPEG2000_SEGMENTS or is_again:
            break
        if marker == CODING:
            coding = data[at + 4 : at + 2 + length]
        at += 2 + length
    raise corrupt_image()


def _count_blocks(size: tuple[int, int], tile: tuple[int, int], coding: bytes) -> tuple[int, int]:
    """Return the number of layers, and about that of code-blocks (ISO 15444-1, A.6.1 and B.7).

    Sizes, of the image and a tile, are rows and columns.
    """
    style, _, layers, _, levels, *exponents = struct.unpack_from(">BBHB3B", coding)
    exponents.reverse()  # Height, width.
    precincts = coding[10:] if style & 1 else b"\xff" * (levels + 1)
    blocks = 0
    for level in range(levels + 1):
        halved = min(level, 1)  # Three bands of half the size but on the lowest level.
        of_level = 3 if level else 1
        for axis, precinct in enumerate((precincts[level] >> 4, precincts[level] & 15)):
            side = min(exponents[axis] + 2, precinct - halved)
            if side < 0:
                raise corrupt_image()
            length = min(size[axis], tile[axis]) >> (levels - level + halved)
            of_level *= 1 + (length >> side)
        blocks += of_level
    tiles = math.prod(-(-size[axis] // tile[axis]) for axis in range(2))
    return layers, tiles * blocks
