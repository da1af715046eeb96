"""first bytes -> Header: what a MetaImage file (.mha) declares, checked before a voxel is read.

Fields are read as ITK's MetaImageIO reads them: the world is LPS, and ``TransformMatrix`` lists the
direction of one axis after the other. ``AnatomicalOrientation`` repeats these, and is not read.
"""

from collections.abc import Mapping
from typing import Final

import numpy as np

from app.errors import BadGeometry, BadVoxels, BrokenVolume, NotAVolume
from app.geometry import LPS_FROM_RAS, Affine
from app.io.gzip_stream import FileStream
from app.io.header import (
    JOIN_HINT,
    Header,
    make_affine,
    parse_lengths,
    parse_numbers,
    read_lines,
    shape_of,
)

METAIMAGE_MAGIC: Final = (b"ObjectType", b"NDims", b"Comment =")
"""MetaIO writes a comment, where there is one, before all else."""

TYPES: Final = {
    "MET_CHAR": "i1",
    "MET_UCHAR": "u1",
    "MET_SHORT": "i2",
    "MET_USHORT": "u2",
    "MET_INT": "i4",
    "MET_UINT": "u4",
    "MET_LONG": "i4",  # four bytes in MetaIO, whatever the machine
    "MET_ULONG": "u4",
    "MET_LONG_LONG": "i8",
    "MET_ULONG_LONG": "u8",
    "MET_FLOAT": "f4",
    "MET_DOUBLE": "f8",
}

MATRICES: Final = ("TransformMatrix", "Orientation", "Rotation")
OFFSETS: Final = ("Offset", "Position", "Origin")
ORDERS: Final = ("BinaryDataByteOrderMSB", "ElementByteOrderMSB")
"""Names of one field each; MetaIO knows them all."""

DATA: Final = "ElementDataFile"


def read_metaimage_header(stream: FileStream) -> Header:
    """Read the header at the start of a file, and make the stream ready to read its voxels.

    Args:
        stream: At its first byte; afterwards at the first voxel.

    Returns:
        The header; its affine is valid.

    Raises:
        NotAVolume: The voxels are in another file, or written as text.
        BrokenVolume: The header is cut short or contradicts itself.
        BadGeometry: Fewer than three axes, or no clear place in space.
        BadVoxels: Voxels that are not real numbers.
    """
    fields = _read_fields(stream)
    lengths = parse_lengths(_one_of(fields, "DimSize"), "DimSize")
    if _one_of(fields, "NDims") != str(len(lengths)):
        raise BrokenVolume("expected as many lengths in DimSize as NDims says, got others")
    shape = shape_of(lengths)
    dtype = _dtype(fields)
    affine = _affine(fields, len(lengths))
    if _is_true(fields.get("CompressedData", "False")):
        stream.start_inflating()
    return Header(
        shape=shape,
        frame_shape=tuple(lengths[3:]),
        dtype=dtype,
        offset=stream.position,
        affine=affine,
    )


def _read_fields(stream: FileStream) -> dict[str, str]:
    fields: dict[str, str] = {}
    for line in read_lines(stream, lambda line: line.partition("=")[0].strip() == DATA):
        name, separator, value = line.partition("=")
        name = name.strip()
        if not separator or name in fields:
            raise BrokenVolume("expected fields, each once, in a MetaImage header, got others")
        fields[name] = value.strip()
    if fields[DATA].upper() != "LOCAL":
        raise NotAVolume(
            "expected a MetaImage file that holds its voxels (ElementDataFile = LOCAL), got a "
            f"header of voxels in another file; {JOIN_HINT}"
        )
    if fields.get("ObjectType", "Image") != "Image":
        raise NotAVolume("expected a MetaImage file, got a MetaIO object of another type")
    if not _is_true(fields.get("BinaryData", "True")):
        raise NotAVolume("expected a MetaImage file with binary voxels, got them as text")
    if fields.get("HeaderSize", "0") not in ("0", "-1"):
        raise BrokenVolume("expected voxels right behind the header, got a HeaderSize")
    return fields


def _one_of(fields: Mapping[str, str], *names: str) -> str:
    """Return the value of a field that goes by one of some names."""
    values = {fields[name] for name in names if name in fields}
    if len(values) != 1:
        error = BadGeometry if names[0] in (*MATRICES, *OFFSETS, "ElementSpacing") else BrokenVolume
        raise error(f"expected one {names[0]} in a MetaImage header, got {len(values)}")
    return values.pop()


def _is_true(value: str) -> bool:
    """Read a boolean as MetaIO does, by its first letter."""
    return value[:1] in ("T", "t", "1")


def _dtype(fields: Mapping[str, str]) -> np.dtype[np.generic]:
    code = TYPES.get(_one_of(fields, "ElementType"))
    if code is None or fields.get("ElementNumberOfChannels", "1") != "1":
        raise BadVoxels("expected one integer or real number per voxel, got others")
    big = any(_is_true(fields.get(name, "False")) for name in ORDERS)
    return np.dtype((">" if big else "<") + code)


def _affine(fields: Mapping[str, str], axes: int) -> Affine:
    """Read the affine in mm, RAS; further axes must not take part in it."""
    numbers = parse_numbers(_one_of(fields, *MATRICES), axes * axes, MATRICES[0])
    directions = np.reshape(numbers, (axes, axes))  # A row per axis of the array.
    spacing = parse_numbers(_one_of(fields, "ElementSpacing"), axes, "ElementSpacing")
    offset = parse_numbers(_one_of(fields, *OFFSETS), axes, OFFSETS[0])
    if fields.get("DistanceUnits", "mm") not in ("mm", "?"):
        raise BadGeometry("expected DistanceUnits = mm, got others")
    if directions[:3, 3:].any() or directions[3:, :3].any():
        raise BadGeometry(
            "expected frames that lie in one place, got a TransformMatrix across them"
        )
    if min(spacing[:3]) <= 0:
        raise BadGeometry("expected a positive ElementSpacing, got one that is not")
    steps = [directions[axis, :3] * spacing[axis] for axis in range(3)]
    return make_affine(LPS_FROM_RAS, np.stack([*steps, offset[:3]]))
