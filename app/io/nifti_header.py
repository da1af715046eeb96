"""first bytes -> Header: what a NIfTI-1 or NIfTI-2 file declares, checked before a voxel is read.

Field names and formulas are those of nifti1.h; nibabel parses the fields of both versions.
"""

import math
from typing import Final

import numpy as np
from nibabel.affines import from_matvec
from nibabel.nifti1 import Nifti1Header
from nibabel.nifti2 import Nifti2Header
from nibabel.quaternions import quat2mat

from app.errors import BadGeometry, BadVoxels, BrokenVolume, NotAVolume
from app.geometry import Affine, Points, corners, scaling, spacing_of, transform
from app.io.gzip_stream import FileStream
from app.io.header import JOIN_HINT, MM_PER_UNIT, UNIT_WARNINGS, Header, check_spacing, shape_of

QUATERNION_TOLERANCE: Final = 1e-3
"""Excess of the squared length of b c d over 1 that counts as rounding, and is normalised."""

MAX_FORM_DISTANCE: Final = 0.5
"""Between sform and qform at a corner, in the smallest spacing; rounding of float32 quaternions can
reach 0.2."""

UNITS: Final = {0: "", 1: "m", 2: "mm", 3: "um"}
"""Units of length by the code of xyzt_units; 0 is unknown."""

CIFTI_INTENTS: Final = range(3000, 3100)
"""Intent codes of CIFTI-2: matrices over surfaces and parcels in a NIfTI-2 file."""

EOL_CHECKS: Final = (b"\r\n\x1a\n", bytes(4))
"""Bytes after the magic of a NIfTI-2 header; some writers leave them zero."""

SIGNATURES: Final = (
    (344, b"ni1\0", f"the header of a .hdr/.img pair; {JOIN_HINT}"),
    (4, b"ni2\0", f"the header of a .hdr/.img pair; {JOIN_HINT}"),
    (128, b"DICM", "a DICOM file, but zipped as gzip or without a header; send a ZIP archive"),
    (0, b"\x1f\x8b", "a gzip file inside a gzip file; compress it once"),
    (0, b"PK\x03\x04", "a ZIP archive inside a gzip file; compress it once"),
    (257, b"ustar", "a tar archive"),
    (0, b"BZh", "a bzip2 file; plain and gzip files are read"),
    (0, b"\xfd7zXZ", "an xz file; plain and gzip files are read"),
    (0, b"\x28\xb5\x2f\xfd", "a Zstandard file; plain and gzip files are read"),
    (0, b"\x89PNG", "a PNG image"),
    (0, b"\xff\xd8\xff", "a JPEG image"),
    (0, b"\x89HDF", "an HDF5 or MINC file"),
    (0, b"version https://git-lfs", "a Git LFS pointer instead of the file"),
    (0, b"\x5c\x01\0\0", "an Analyze header, which does not say where its voxels lie"),
    (0, b"\0\0\x01\x5c", "an Analyze header, which does not say where its voxels lie"),
)
"""Offset, bytes and name of other kinds of file that are uploaded; the first match counts."""


def read_nifti_header(stream: FileStream) -> Header:
    """Read the header at the start of a file.

    Args:
        stream: At its first byte; afterwards at the first byte after the header.

    Returns:
        The header; its affine and unit are valid.

    Raises:
        NotAVolume: The bytes are something else.
        BrokenVolume: The header is cut short or contradicts itself.
        BadGeometry: Fewer than three axes, or no valid affine or unit.
        BadVoxels: Voxels that are not real numbers, or an intercept that is not finite.
    """
    fields = _read_fields(stream)
    dims = [int(length) for length in fields["dim"][1 : int(fields["dim"][0]) + 1]]
    shape = shape_of(dims)
    dtype = _dtype(fields)
    slope, intercept = _scaling(fields)
    affine, warnings = _affine(fields, shape)
    return Header(
        shape=shape,
        frame_shape=tuple(dims[3:]),
        dtype=dtype,
        offset=_offset(fields),
        slope=slope,
        intercept=intercept,
        affine=affine,
        warnings=tuple(warnings),
    )


def _read_fields(stream: FileStream) -> Nifti1Header:
    kind: type[Nifti1Header] = Nifti1Header
    head = stream.read(Nifti1Header.sizeof_hdr)
    if head[4:8] == b"n+2\0":
        kind = Nifti2Header
        head += stream.read(kind.sizeof_hdr - len(head))
        if len(head) < kind.sizeof_hdr:
            raise BrokenVolume(f"expected a header of {kind.sizeof_hdr} bytes, got {len(head)}")
        if head[8:12] not in EOL_CHECKS:
            raise BrokenVolume("expected the bytes as written, got line ends changed in transfer")
    elif head[344:348] != b"n+1\0":
        raise NotAVolume(
            f"expected a NIfTI, NRRD, MetaImage, MGH or DICOM file, got {_describe_file(head)}"
        )
    fields = _parse(head, kind)
    if int(fields["intent_code"]) in CIFTI_INTENTS:
        raise NotAVolume("expected a NIfTI volume, got a CIFTI matrix")
    return fields


def _parse(head: bytes, kind: type[Nifti1Header]) -> Nifti1Header:
    """Parse a header in the byte order in which the number of axes is valid, as by nifti1.h."""
    for order in "<>":
        fields = kind(head, order, check=False)
        if 1 <= fields["dim"][0] <= 7:
            return fields
    raise BadGeometry("expected 3 to 7 axes, got a number outside 1 to 7 in either byte order")


def _describe_file(head: bytes) -> str:
    """Describe a file that is no volume, without quoting it."""
    for start, signature, name in SIGNATURES:
        if head[start : start + len(signature)] == signature:
            return name
    if len(head) < Nifti1Header.sizeof_hdr:
        return f"{len(head)} bytes, less than a header" if head else "nothing"
    return "bytes of another kind"


def _dtype(fields: Nifti1Header) -> np.dtype[np.generic]:
    try:
        dtype: np.dtype[np.generic] = fields.get_data_dtype()
    except KeyError:
        code = fields["datatype"]
        raise BadVoxels(
            f"expected integer or real voxels, got the unknown datatype {code}"
        ) from None
    # nibabel maps float128 to void on machines without such a type.
    if dtype.kind not in "iuf":
        label = fields.get_value_label("datatype")
        raise BadVoxels(f"expected integer or real voxels, got {label}")
    return dtype


def _scaling(fields: Nifti1Header) -> tuple[float, float]:
    """Read slope and intercept; a slope of 0 or NaN means that voxels are stored unscaled."""
    slope, intercept = float(fields["scl_slope"]), float(fields["scl_inter"])
    if slope == 0.0 or not math.isfinite(slope):
        return 1.0, 0.0
    if not math.isfinite(intercept):
        raise BadVoxels(f"expected a finite intercept (scl_inter), got {intercept}")
    return slope, intercept


def _offset(fields: Nifti1Header) -> int:
    """Read where the voxels start; some writers leave out the 4 bytes between header and voxels."""
    offset, size = float(fields["vox_offset"]), fields.sizeof_hdr
    if offset < size or not offset.is_integer():
        raise BrokenVolume(f"expected voxels from byte {size} on (vox_offset), got {offset:g}")
    return int(offset)


@np.errstate(all="ignore")  # Overflows fail the checks.
def _affine(fields: Nifti1Header, shape: tuple[int, int, int]) -> tuple[Affine, list[str]]:
    """Read the affine in mm: the sform if it is set, else the qform."""
    code = int(fields["xyzt_units"]) & 7
    if code not in UNITS:
        raise BadGeometry(f"expected lengths in mm, metre or micron, got the unit code {code}")
    unit = UNITS[code]
    warnings = [UNIT_WARNINGS[unit]] if unit in UNIT_WARNINGS else []
    to_mm = scaling([MM_PER_UNIT[unit]] * 3)
    forms = {"sform": fields.get_sform(), "qform": _qform(fields)}
    affines = [to_mm @ form for name, form in forms.items() if fields[f"{name}_code"] > 0]
    if not affines:
        raise BadGeometry("expected an affine, got a file whose sform_code and qform_code are 0")
    if not np.isfinite(affines[0]).all():
        raise BadGeometry(
            "expected a finite affine, from a unit quaternion and positive spacing if it is a "
            "qform, got one that is not"
        )
    check_spacing(affines[0])
    return affines[0], warnings + _compare_forms(affines[0], affines[-1], corners(shape))


def _compare_forms(used: Affine, qform: Affine, points: Points) -> list[str]:
    """Warn of a qform that takes voxel indices elsewhere than the affine that is used."""
    distances = np.linalg.norm(transform(used, points) - transform(qform, points), axis=1)
    far_mm = distances.max()
    # A NaN, from an invalid qform, counts as disagreement.
    if far_mm <= MAX_FORM_DISTANCE * spacing_of(used).min():
        return []
    where = f"up to {far_mm:.3g} mm away" if np.isfinite(far_mm) else "which is not valid"
    return [
        "the qform disagrees with the sform, which was used; 3D Slicer and ITK may show the scan "
        f"by the qform, {where}"
    ]


def _qform(fields: Nifti1Header) -> Affine:
    """Read the affine from quaternion, spacing and offset (nifti1.h, method 2); NaN if invalid."""
    # nibabel's get_qform tolerates less rounding, and rounds rotations close to 180 degrees.
    b, c, d = (float(fields[f"quatern_{letter}"]) for letter in "bcd")
    squared = b * b + c * c + d * d
    if not squared <= 1.0 + QUATERNION_TOLERANCE:
        return np.full((4, 4), np.nan)
    rotation = quat2mat((math.sqrt(max(0.0, 1.0 - squared)), b, c, d))
    handedness = -1.0 if fields["pixdim"][0] < 0 else 1.0
    spacing = np.array(fields["pixdim"][1:4], dtype=np.float64)
    spacing[spacing < 0] = np.nan
    offset = [float(fields[f"qoffset_{axis}"]) for axis in "xyz"]
    return np.asarray(from_matvec(rotation * spacing * [1.0, 1.0, handedness], offset))
