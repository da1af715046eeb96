"""One scan written in every format that is read, by writers that are independent of the readers."""

import gzip
import io
import zlib
from typing import Any

import nibabel as nib
import nrrd
import numpy as np
from nibabel.freesurfer.mghformat import header_dtype

from app.geometry import LPS_FROM_RAS
from tests.support.nifti_files import AFFINE, counting

MET_TYPES = {
    "int8": "MET_CHAR", "uint8": "MET_UCHAR", "int16": "MET_SHORT", "uint16": "MET_USHORT",
    "int32": "MET_INT", "uint32": "MET_UINT", "int64": "MET_LONG_LONG",
    "uint64": "MET_ULONG_LONG", "float32": "MET_FLOAT", "float64": "MET_DOUBLE",
}  # fmt: skip

WORLDS = {
    "left-posterior-superior": LPS_FROM_RAS,
    "right-anterior-superior": np.eye(4),
    "left-anterior-superior": np.diag([-1.0, 1.0, 1.0, 1.0]),
}
"""The spaces of NRRD files, and what maps mm in RAS to mm in them."""

EMPTY_BLOCKS = bytes.fromhex("0208208000")
"""Four blocks of deflate that hold nothing, of 10 bits each, by the codes that RFC 1951 fixes."""


def as_nifti(array: np.ndarray, affine: np.ndarray) -> bytes:
    """Write a NIfTI-2 file, whose affine is float64."""
    content: bytes = nib.Nifti2Image(array, affine).to_bytes()
    return content


def as_nrrd(
    array: np.ndarray | None = None,
    affine: np.ndarray = AFFINE,
    *,
    space: str = "left-posterior-superior",
    encoding: str = "raw",
    **fields: Any,
) -> bytes:
    """Write an NRRD file with pynrrd.

    Args:
        array: The voxels, (i j k); a small int16 volume if None.
        affine: Voxel index -> mm, RAS.
        space: The world of the file.
        encoding: ``raw`` or ``gzip``.
        fields: Header fields to set otherwise; None leaves one out.
    """
    array = counting() if array is None else array
    world = WORLDS[space] @ affine
    header = {
        "space": space,
        "space directions": world[:3, :3].T,
        "space origin": world[:3, 3],
        "encoding": encoding,
    }
    header = {name: value for name, value in (header | fields).items() if value is not None}
    target = io.BytesIO()
    nrrd.write(target, array, header)
    return target.getvalue()


def as_metaimage(
    array: np.ndarray | None = None,
    affine: np.ndarray = AFFINE,
    *,
    zipped: bool = False,
    **fields: Any,
) -> bytes:
    """Write a MetaImage file as MetaIO does.

    Args:
        array: The voxels, (i j k), or (i j k frame); a small int16 volume if None.
        affine: Voxel index -> mm, RAS.
        zipped: Whether the voxels are compressed.
        fields: Header fields to set otherwise; None leaves one out.
    """
    array = counting() if array is None else array
    axes = array.ndim
    world = LPS_FROM_RAS @ affine
    spacing, directions, offset = np.ones(axes), np.eye(axes), np.zeros(axes)
    spacing[:3] = np.linalg.norm(world[:3, :3], axis=0)
    directions[:3, :3] = (world[:3, :3] / spacing[:3]).T
    offset[:3] = world[:3, 3]
    voxels = array.tobytes(order="F")
    stored = zlib.compress(voxels) if zipped else voxels
    header: dict[str, Any] = {
        "ObjectType": "Image",
        "NDims": axes,
        "BinaryData": True,
        "BinaryDataByteOrderMSB": array.dtype.byteorder == ">",
        "CompressedData": zipped,
        "CompressedDataSize": len(stored) if zipped else None,
        "TransformMatrix": " ".join(repr(float(x)) for x in directions.flat),
        "Offset": " ".join(repr(float(x)) for x in offset),
        "CenterOfRotation": " ".join(["0"] * axes),
        "AnatomicalOrientation": "RAI",
        "ElementSpacing": " ".join(repr(float(x)) for x in spacing),
        "DimSize": " ".join(map(str, array.shape)),
        "ElementType": MET_TYPES[array.dtype.name],
    }
    header = {name: value for name, value in (header | fields).items() if value is not None}
    text = "".join(f"{name} = {value}\n" for name, value in header.items())
    data = "" if "ElementDataFile" in fields else "ElementDataFile = LOCAL\n"
    return (text + data).encode() + stored


def as_mgh(
    array: np.ndarray | None = None,
    affine: np.ndarray = AFFINE,
    *,
    zipped: bool = False,
    behind: bytes = b"",
    **fields: Any,
) -> bytes:
    """Write a FreeSurfer file, whose numbers are float32, with nibabel.

    Args:
        array: The voxels, (i j k), or (i j k frame); a small int16 volume if None.
        affine: Voxel index -> mm, RAS.
        zipped: Whether to compress it with gzip, as a .mgz file.
        behind: What follows on the numbers behind the voxels, such as the history.
        fields: Header fields to overwrite afterwards, whatever that breaks.
    """
    content = bytearray(nib.MGHImage(counting() if array is None else array, affine).to_bytes())
    record = np.frombuffer(content, header_dtype, count=1)
    for name, value in fields.items():
        record[name][0] = value
    whole = bytes(content) + behind
    return gzip.compress(whole, 6) if zipped else whole
