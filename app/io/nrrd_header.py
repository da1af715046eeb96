"""first bytes -> Header: what an NRRD file declares, checked before a voxel is read.

Field names and rules are those of https://teem.sourceforge.net/nrrd/format.html. Only fields that
place voxels in space are read; texts, and key/value pairs, may hold anything.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from app.errors import BadGeometry, BadVoxels, BrokenVolume, NotAVolume
from app.geometry import LPS_FROM_RAS, Affine, scaling
from app.io.gzip_stream import FileStream
from app.io.header import (
    JOIN_HINT,
    MM_PER_UNIT,
    UNIT_WARNINGS,
    Header,
    make_affine,
    parse_lengths,
    parse_numbers,
    read_lines,
    shape_of,
)

NRRD_MAGIC: Final = b"NRRD000"

TYPES: Final = {
    name: code
    for code, names in {
        "i1": "signed char, int8, int8_t",
        "u1": "uchar, unsigned char, uint8, uint8_t",
        "i2": "short, short int, signed short, signed short int, int16, int16_t",
        "u2": "ushort, unsigned short, unsigned short int, uint16, uint16_t",
        "i4": "int, signed int, int32, int32_t",
        "u4": "uint, unsigned int, uint32, uint32_t",
        "i8": "longlong, long long, long long int, signed long long, signed long long int, int64, "
        "int64_t",
        "u8": "ulonglong, unsigned long long, unsigned long long int, uint64, uint64_t",
        "f4": "float",
        "f8": "double",
    }.items()
    for name in names.split(", ")
}

ENDIANS: Final = {"little": "<", "big": ">"}

WORLDS: Final[dict[str, Affine]] = {
    "right-anterior-superior": np.eye(4),
    "ras": np.eye(4),
    "left-anterior-superior": np.diag([-1.0, 1.0, 1.0, 1.0]),
    "las": np.diag([-1.0, 1.0, 1.0, 1.0]),
    "left-posterior-superior": LPS_FROM_RAS,
    "lps": LPS_FROM_RAS,
}
"""Maps of the spaces that say where the patient is to RAS."""

UNITS: Final = {
    "mm": "mm",
    "cm": "cm",
    "m": "m",
    **dict.fromkeys(("um", "micron", "\u03bcm", "\u00b5m"), "um"),  # Greek mu, and the micro sign.
}

FRAME_KINDS: Final = frozenset(("list", "time", "none", "???", "domain"))
"""Kinds of an axis outside space along which there are scans; others make vectors or colours."""

ENCODINGS: Final = frozenset(("raw", "gzip", "gz"))

OTHER_ENCODINGS: Final = frozenset(("bzip2", "bz2", "txt", "text", "ascii", "hex"))

DETACHED: Final = re.compile(r"data ?file\s*:(?!=)", re.IGNORECASE)
"""Start of the field that names another file for the voxels; ITK and 3D Slicer end the header with
it, without an empty line."""

MAX_INTERLEAVED: Final = 1 << 16
"""Frames whose voxels alternate: a piece of all of them is in memory at a time."""


class _Axes(NamedTuple):
    """What the fields say about the axes; the lengths of those in space are the shape."""

    shape: tuple[int, int, int]
    frame_shape: tuple[int, ...]
    interleaved: bool
    steps: list[list[float]]


def read_nrrd_header(stream: FileStream) -> Header:
    """Read the header at the start of a file, and make the stream ready to read its voxels.

    Args:
        stream: At its first byte; afterwards at the first voxel.

    Returns:
        The header; its affine is valid.

    Raises:
        NotAVolume: The voxels are in another file, or encoded as nothing here is.
        BrokenVolume: The header is cut short or contradicts itself.
        BadGeometry: Fewer than three axes in space, or no clear place in space.
        BadVoxels: Voxels that are not real numbers.
    """
    fields = _read_fields(stream)
    dtype = _dtype(fields)
    axes = _axes(fields)
    world, unit = _world(fields), _unit(fields)
    if "space origin" not in fields:
        raise BadGeometry("expected an NRRD file with space origin, got one without")
    columns = np.array([*axes.steps, _vector(fields["space origin"], "space origin")])
    if fields["encoding"] != "raw":
        stream.start_inflating()
    return Header(
        shape=axes.shape,
        frame_shape=axes.frame_shape,
        dtype=dtype,
        offset=stream.position,
        affine=make_affine(world @ scaling([MM_PER_UNIT[unit]] * 3), columns),
        warnings=(UNIT_WARNINGS[unit],) if unit in UNIT_WARNINGS else (),
        interleaved=axes.interleaved,
    )


def _read_fields(stream: FileStream) -> dict[str, str]:
    """Read the fields by name, in lower case; not the key/value pairs."""
    lines = read_lines(stream, lambda line: not line or bool(DETACHED.match(line)))
    if lines[-1]:
        raise NotAVolume(
            "expected an NRRD file that holds its voxels, got a header of voxels in another file; "
            f"{JOIN_HINT}"
        )
    fields: dict[str, str] = {}
    for line in lines[1:-1]:
        # What comes first decides, as in teem: keys may hold colons, and a field's text ":=".
        if line.startswith("#") or ":=" in line.partition(": ")[0]:
            continue
        name, separator, value = line.partition(":")
        name = name.strip().lower()
        if not separator or name in fields:
            raise BrokenVolume("expected fields, each once, in an NRRD header, got something else")
        fields[name] = value.strip()
    missing = {"type", "dimension", "sizes", "encoding"} - fields.keys()
    if missing:
        raise BrokenVolume(
            f"expected an NRRD header with {' and '.join(sorted(missing))}, got one without"
        )
    _check_encoding(fields)
    return fields


def _check_encoding(fields: dict[str, str]) -> None:
    """Check that the voxels are raw or gzip, and follow the header at once."""
    encoding = fields["encoding"] = fields["encoding"].lower()
    if encoding not in ENCODINGS:
        got = encoding if encoding in OTHER_ENCODINGS else "another"
        raise NotAVolume(f"expected an NRRD file with the encoding raw or gzip, got {got}")
    for name in ("line skip", "lineskip", "byte skip", "byteskip"):
        if fields.get(name, "0") != "0":
            raise BrokenVolume(f"expected voxels right behind the header, got a {name}")


def _dtype(fields: Mapping[str, str]) -> np.dtype[np.generic]:
    code = TYPES.get(fields["type"].lower())
    if code is None:
        raise BadVoxels("expected integer or real voxels, got another NRRD type")
    order = ENDIANS.get(fields.get("endian", "").lower(), "")
    if not order and code[1] != "1":
        raise BrokenVolume("expected endian: little or big in an NRRD header, got neither")
    return np.dtype(order + code)


def _axes(fields: Mapping[str, str]) -> _Axes:
    """Tell the three axes in space from those along which there are frames."""
    sizes = parse_lengths(fields["sizes"], "sizes")
    # Some writers put spaces behind the commas, or inside the brackets, of a vector.
    words = re.findall(r"\([^()]*\)|\S+", fields.get("space directions", ""))
    if fields["dimension"] != str(len(sizes)):
        raise BrokenVolume("expected as many sizes as the dimension says, got others")
    if "space directions" not in fields:
        raise BadGeometry("expected an NRRD file with space directions, got one without")
    if len(words) != len(sizes):
        raise BrokenVolume(f"expected {len(sizes)} space directions, got {len(words)}")
    spatial = [axis for axis, word in enumerate(words) if word != "none"]
    if len(spatial) != 3 or spatial[2] - spatial[0] != 2:
        raise BadGeometry(
            f"expected three axes in space, side by side, got {len(spatial)} of {len(sizes)}"
        )
    first = spatial[0]
    before, after = sizes[:first], sizes[first + 3 :]
    if math.prod(before) != 1 and math.prod(after) != 1:
        raise BadGeometry("expected frames before or behind the axes in space, got both")
    if math.prod(before) > MAX_INTERLEAVED:
        raise BadGeometry(
            f"expected at most {MAX_INTERLEAVED:,} frames before the axes in space, "
            f"got {math.prod(before):,}"
        )
    _check_kinds(fields, sizes, spatial)
    return _Axes(
        shape=shape_of(sizes[first:] + before),
        frame_shape=(*before, *after),
        interleaved=math.prod(before) != 1,
        steps=[_vector(words[axis], "space directions") for axis in spatial],
    )


def _check_kinds(fields: Mapping[str, str], sizes: Sequence[int], spatial: Sequence[int]) -> None:
    kinds = fields.get("kinds", "").lower().split()
    for axis, kind in enumerate(kinds[: len(sizes)]):
        if axis not in spatial and sizes[axis] > 1 and kind not in FRAME_KINDS:
            raise BadVoxels("expected one number per voxel, got vectors or colours")


def _world(fields: Mapping[str, str]) -> Affine:
    """Return the map of the file's world to RAS, in the file's unit."""
    world = WORLDS.get(fields.get("space", "").lower())
    if world is None:
        raise BadGeometry(
            "expected the space right-anterior-superior, left-anterior-superior or "
            "left-posterior-superior in an NRRD header, got none or another"
        )
    return world


def _unit(fields: Mapping[str, str]) -> str:
    """Return the unit of the file's world: mm if it names none."""
    words = fields.get("space units", "").replace('"', " ").split() or ["mm"]
    units = {UNITS.get(word, "") for word in words}
    if len(units) > 1 or "" in units:
        raise BadGeometry("expected space units of mm, cm, m or um, got others")
    return units.pop()


def _vector(text: str, field: str) -> list[float]:
    """Parse a vector such as ``(1,0,-2.5)``."""
    if text[:1] + text[-1:] != "()":
        raise BrokenVolume(f"expected vectors in {field}, got something else")
    return parse_numbers(text[1:-1].replace(",", " "), 3, field)
