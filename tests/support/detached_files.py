"""Scans whose header and voxels are two files."""

from pathlib import Path
from typing import Any

import nibabel as nib
import nrrd
import numpy as np

from app.geometry import LPS_FROM_RAS
from tests.support.nifti_files import AFFINE, counting
from tests.support.scan_files import as_metaimage

ARRAY = counting()


def write_mhd(
    path: Path,
    name: str = "s.raw",
    array: np.ndarray = ARRAY,
    affine: np.ndarray = AFFINE,
    *,
    zipped: bool = False,
) -> bytes:
    """Write a MetaImage header of voxels in a file of a name; return these."""
    header, _, voxels = as_metaimage(array, affine, zipped=zipped).partition(b"LOCAL\n")
    path.write_bytes(header + f"{name}\n".encode())
    return voxels


def write_nhdr(
    path: Path, encoding: str = "raw", array: np.ndarray = ARRAY, affine: np.ndarray = AFFINE
) -> None:
    """Have pynrrd write both files."""
    world = LPS_FROM_RAS @ affine
    header = {
        "space": "left-posterior-superior",
        "space directions": world[:3, :3].T,
        "space origin": world[:3, 3],
        "encoding": encoding,
    }
    nrrd.write(str(path), array, header, detached_header=True)


def write_hdr(
    path: Path,
    array: np.ndarray = ARRAY,
    affine: np.ndarray = AFFINE,
    *,
    order: str = "<",
    offset: int = 0,
    version: int = 1,
) -> None:
    """Have nibabel write both files."""
    kind: Any = nib.Nifti1Pair if version == 1 else nib.Nifti2Pair
    header = kind.header_class(endianness=order)
    header.set_data_offset(offset)
    image = kind(array, affine, header)
    image.header.set_xyzt_units("mm")
    image.to_filename(path)
