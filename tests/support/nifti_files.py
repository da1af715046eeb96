"""NIfTI files in memory, valid or broken on purpose."""

import gzip
from typing import Any, Literal

import nibabel as nib
import numpy as np
import torch
from nibabel import nifti1, nifti2

from app.io.volume import Volume, VolumeLimits

ByteOrder = Literal["<", ">"]

AFFINE = np.array(
    [
        [-1.5, 0.1, 0.0, 20.0],
        [0.2, 1.25, -0.3, -30.0],
        [0.0, 0.4, 2.0, 10.0],
        [0.0, 0.0, 0.0, 1.0],
    ]
)
"""Oblique and slightly sheared; columns of three lengths."""

SHAPE = (7, 5, 4)

LARGE_ENOUGH = VolumeLimits(inflated_bytes=1 << 26, voxels=1 << 24, axis=512)

NO_ROTATION = {"quatern_b": 0, "quatern_c": 0, "quatern_d": 0}
"""nibabel writes AFFINE's rotation, but no qform_code; a test that sets the code sets its own."""


def counting(shape: tuple[int, ...] = SHAPE, dtype: str = "int16") -> np.ndarray:
    """Make an array that counts its voxels, modulo 100 to fit into every type."""
    return (np.arange(np.prod(shape)) % 100).reshape(shape).astype(dtype)


def nifti(
    array: np.ndarray | None = None,
    version: Literal[1, 2] = 1,
    order: ByteOrder = "<",
    zipped: bool = False,
    **fields: Any,
) -> bytes:
    """Write a single-file NIfTI with the sform AFFINE in mm.

    Args:
        array: The voxels, stored as they are; a small int16 volume if None.
        version: 1 or 2.
        order: Of the bytes of header and voxels.
        zipped: Whether to compress it with gzip.
        fields: Header fields to overwrite afterwards, whatever that breaks.

    Returns:
        The file.
    """
    array = counting() if array is None else array
    kind: Any = nib.Nifti1Image if version == 1 else nib.Nifti2Image
    layout = nifti1.header_dtype if version == 1 else nifti2.header_dtype
    header = kind.header_class(endianness=order)
    header.set_data_dtype(array.dtype)
    image = kind(array, AFFINE, header)
    image.header.set_xyzt_units("mm")
    content = bytearray(image.to_bytes())
    record = np.frombuffer(content, layout.newbyteorder(order), count=1)
    for name, value in {**NO_ROTATION, **fields}.items():
        record[name][0] = value
    return gzip.compress(content, 6) if zipped else bytes(content)


def by_nibabel(content: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Read voxels and affine with nibabel, for comparison."""
    plain = gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
    kind = nib.Nifti2Image if plain[4:8] == b"n+2\0" else nib.Nifti1Image
    image = kind.from_bytes(plain)
    return np.asarray(image.dataobj), image.affine


def assert_fit_for_use(volume: Volume) -> None:
    """Check what every later stage relies on."""
    voxels = volume.voxels
    assert voxels.ndim == 3
    assert voxels.dtype.isnative
    assert voxels.flags.writeable
    assert np.isfinite(voxels).all()
    assert np.isfinite(volume.affine).all()
    assert torch.from_numpy(voxels).float().isfinite().all()
