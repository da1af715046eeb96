"""first bytes -> Header: what a NIfTI-1 or NIfTI-2 file declares, checked before a voxel is read.

Field names and formulas are those of nifti1.h; the layouts of both versions come from nibabel.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, cast

import numpy as np
from nibabel import nifti1, nifti2

from app.errors import BadGeometry, BadVoxels, BrokenVolume, NotAVolume
from app.geometry import Affine, Points, scaling, spacing_of, transform
from app.io.gzip_stream import FileStream

LEAST_SPACING_MM: Final = 1e-5
"""10 nm: finer than nano-CT."""

MOST_SPACING_MM: Final = 1e3
"""1 m: coarser than any scanner."""

FLATNESS: Final = 1e-3
"""Volume of a voxel over the product of its edges; below this its axes lie in one plane."""

QUATERNION_EXCESS: Final = 1e-3
"""A squared length of b c d this far above 1 is the writer's rounding, and is normalised away."""

DISAGREEMENT: Final = 0.5
"""Voxels between sform and qform at a corner; rounding of a float32 quaternion can reach 0.2."""

MM_PER_UNIT: Final = {0: 1.0, 1: 1e3, 2: 1.0, 3: 1e-3}
"""By the length code of xyzt_units: unknown, metre, millimetre, micron."""

UNIT_WARNINGS: Final = {
    0: "the file does not name its unit of length; millimetres were assumed",
    1: "the file measures in metres; they were converted to millimetres",
    3: "the file measures in microns; they were converted to millimetres",
}

CIFTI_INTENTS: Final = range(3000, 3100)
"""Intent codes of CIFTI-2: matrices over surfaces and parcels in a NIfTI-2 wrapping."""

EOL_CHECKS: Final = (b"\r\n\x1a\n", bytes(4))
"""What a NIfTI-2 header holds after its magic, or holds when the writer left it out."""

SIGNATURES: Final = (
    (344, b"ni1\0", "the header of a .hdr/.img pair; send a single .nii file"),
    (4, b"ni2\0", "the header of a .hdr/.img pair; send a single .nii file"),
    (128, b"DICM", "a DICOM file; convert the series to NIfTI first"),
    (0, b"\x1f\x8b", "a gzip file inside a gzip file; compress it once"),
    (0, b"PK\x03\x04", "a ZIP archive"),
    (257, b"ustar", "a tar archive"),
    (0, b"BZh", "a bzip2 file; plain and gzip files are read"),
    (0, b"\xfd7zXZ", "an xz file; plain and gzip files are read"),
    (0, b"\x28\xb5\x2f\xfd", "a Zstandard file; plain and gzip files are read"),
    (0, b"\x89PNG", "a PNG image"),
    (0, b"\xff\xd8\xff", "a JPEG image"),
    (0, b"NRRD", "an NRRD file"),
    (0, b"ObjectType", "a MetaImage file"),
    (0, b"\x89HDF", "an HDF5 or MINC file"),
    (0, b"\0\0\0\1", "a FreeSurfer MGH volume"),
    (0, b"version https://git-lfs", "a Git LFS pointer instead of the file"),
    (0, b"\x5c\x01\0\0", "an Analyze header, which does not say where its voxels lie"),
    (0, b"\0\0\x01\x5c", "an Analyze header, which does not say where its voxels lie"),
)
"""Offset, bytes and name of what else people send; the first match counts."""


@dataclass(frozen=True, slots=True)
class Header:
    """What a file declares about its voxels.

    Attributes:
        shape: Voxels along i, j and k.
        frame_shape: Lengths of the axes after those; empty if there are none.
        dtype: Stored voxels, in their byte order.
        offset: Byte of the uncompressed file at which the voxels start.
        slope: A value is stored voxel * slope + intercept.
        intercept: Likewise.
        affine: Voxel index -> mm, RAS.
        warnings: What a careful reader should know, in sentences without patient data.
    """

    shape: tuple[int, int, int]
    frame_shape: tuple[int, ...]
    dtype: np.dtype[np.generic]
    offset: int
    slope: float
    intercept: float
    affine: Affine
    warnings: tuple[str, ...]

    @property
    def frames(self) -> int:
        """How many 3D volumes the file holds."""
        return math.prod(self.frame_shape)

    @property
    def frame_bytes(self) -> int:
        """Bytes of one stored 3D volume."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def file_bytes(self) -> int:
        """Bytes of the uncompressed file up to the end of its last voxel."""
        return self.offset + self.frames * self.frame_bytes


def read_header(stream: FileStream) -> Header:
    """Read the header at the start of a file.

    Args:
        stream: At its first byte; afterwards at the first byte after the header.

    Returns:
        The header; it has a clear reading in 3D space.

    Raises:
        NotAVolume: The bytes are something else.
        BrokenVolume: The header is cut short or contradicts itself.
        BadGeometry: Fewer than three axes, or no sound affine or unit.
        BadVoxels: Voxels of a kind that is not read, or a meaningless intercept.
    """
    fields = _read_fields(stream)
    dims = [int(length) for length in fields["dim"][1 : int(fields["dim"][0]) + 1]]
    if len(dims) < 3 or min(dims) < 1:
        raise BadGeometry(f"expected 3 axes or more, none empty, got {by_axis(dims)}")
    shape = (dims[0], dims[1], dims[2])
    dtype = _dtype(fields)
    slope, intercept = _scaling(fields)
    affine, warnings = _affine(fields, shape)
    if min(shape) == 1:
        warnings.append(f"the scan is a single slice ({by_axis(shape)} voxels)")
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


def by_axis(lengths: Sequence[int]) -> str:
    """Write the lengths of axes, for example ``64 x 64 x 21``."""
    return " x ".join(str(length) for length in lengths)


def corners(shape: tuple[int, int, int]) -> Points:
    """List the indices of the eight corner voxels."""
    return np.array(list(itertools.product(*((0.0, n - 1.0) for n in shape))))


def _read_fields(stream: FileStream) -> np.void:
    layout = nifti1.header_dtype
    head = stream.read(layout.itemsize)
    if head[4:8] == b"n+2\0":
        layout = nifti2.header_dtype
        head += stream.read(layout.itemsize - len(head))
        if len(head) < layout.itemsize:
            raise BrokenVolume(f"expected a header of {layout.itemsize} bytes, got {len(head)}")
        if head[8:12] not in EOL_CHECKS:
            raise BrokenVolume("expected the bytes as written, got line ends changed in transfer")
    elif head[344:348] != b"n+1\0":
        raise NotAVolume(f"expected a NIfTI file (.nii or .nii.gz), got {_name(head)}")
    fields = _in_byte_order(head, layout)
    if fields["intent_code"] in CIFTI_INTENTS:
        raise NotAVolume("expected a NIfTI volume, got a CIFTI matrix")
    return fields


def _in_byte_order(head: bytes, layout: np.dtype[np.void]) -> np.void:
    """Find the byte order in which the number of axes makes sense, as nifti1.h advises."""
    orders: Final = ("<", ">")
    for order in orders:
        fields: np.void = np.frombuffer(head, layout.newbyteorder(order), count=1)[0]
        if 1 <= fields["dim"][0] <= 7:
            return fields
    raise BadGeometry("expected 3 to 7 axes, got a number outside 1 to 7 in either byte order")


def _name(head: bytes) -> str:
    """Name what came instead of a volume, without quoting it."""
    for start, signature, name in SIGNATURES:
        if head[start : start + len(signature)] == signature:
            return name
    if len(head) < nifti1.header_dtype.itemsize:
        return f"{len(head)} bytes, less than a header" if head else "nothing"
    return "bytes of another kind"


def _dtype(fields: np.void) -> np.dtype[np.generic]:
    code = int(fields["datatype"])
    codes = nifti1.data_type_codes
    if code not in codes.value_set():
        raise BadVoxels(f"expected integer or real voxels, got the unknown datatype {code}")
    dtype = cast("np.dtype[np.generic]", codes.dtype[code])
    # nibabel maps float128 to void where this machine has no such type.
    if dtype.kind not in "iuf":
        raise BadVoxels(f"expected integer or real voxels, got {codes.label[code]}")
    return dtype if fields.dtype["datatype"].isnative else dtype.newbyteorder("S")


def _scaling(fields: np.void) -> tuple[float, float]:
    """Read slope and intercept; a slope of 0 or NaN says that voxels are stored as they are."""
    slope, intercept = float(fields["scl_slope"]), float(fields["scl_inter"])
    if slope == 0.0 or not math.isfinite(slope):
        return 1.0, 0.0
    if not math.isfinite(intercept):
        raise BadVoxels(f"expected a finite intercept (scl_inter), got {intercept}")
    return slope, intercept


def _offset(fields: np.void) -> int:
    """Read where the voxels start; some writers leave out the 4 bytes between header and voxels."""
    offset, least = float(fields["vox_offset"]), fields.dtype.itemsize
    if offset < least or not offset.is_integer():
        raise BrokenVolume(f"expected voxels from byte {least} on (vox_offset), got {offset:g}")
    return int(offset)


@np.errstate(all="ignore")  # What overflows fails the checks.
def _affine(fields: np.void, shape: tuple[int, int, int]) -> tuple[Affine, list[str]]:
    """Read the affine in mm: the sform if it is set, else the qform."""
    unit = int(fields["xyzt_units"]) & 7
    if unit not in MM_PER_UNIT:
        raise BadGeometry(f"expected lengths in mm, metre or micron, got the unit code {unit}")
    warnings = [UNIT_WARNINGS[unit]] if unit in UNIT_WARNINGS else []
    to_mm = scaling([MM_PER_UNIT[unit]] * 3)
    forms = {"sform": _sform, "qform": _qform}
    affines = [to_mm @ read(fields) for form, read in forms.items() if fields[f"{form}_code"] > 0]
    if not affines:
        raise BadGeometry("expected an affine, got a file whose sform_code and qform_code are 0")
    _check_affine(affines[0])
    # Written so that a NaN, from a qform that cannot be read, counts as disagreement.
    if not _apart(affines[0], affines[-1], corners(shape)) <= DISAGREEMENT:
        warnings.append("the qform disagrees with the sform, which was used")
    return affines[0], warnings


def _check_affine(affine: Affine) -> None:
    if not np.isfinite(affine).all():
        raise BadGeometry(
            "expected a finite affine, from a unit quaternion and positive spacing if it is a "
            "qform, got one that is not"
        )
    spacing = spacing_of(affine)
    if not LEAST_SPACING_MM <= spacing.min() <= spacing.max() <= MOST_SPACING_MM:
        raise BadGeometry(
            f"expected a spacing from {LEAST_SPACING_MM:g} to {MOST_SPACING_MM:g} mm, "
            f"got {' x '.join(f'{length:g}' for length in spacing)} mm"
        )
    flatness = abs(np.linalg.det(affine[:3, :3] / spacing))
    if flatness < FLATNESS:
        raise BadGeometry(f"expected three independent axes, got a determinant of {flatness:.1g}")


def _apart(used: Affine, other: Affine, points: Points) -> float:
    """Measure how far two affines differ at the worst corner, in the smallest spacing."""
    distances = np.linalg.norm(transform(used, points) - transform(other, points), axis=1)
    return float(distances.max() / spacing_of(used).min())


def _sform(fields: np.void) -> Affine:
    rows = [fields["srow_x"], fields["srow_y"], fields["srow_z"], (0, 0, 0, 1)]
    return np.array(rows, dtype=np.float64)


def _qform(fields: np.void) -> Affine:
    """Turn quaternion, spacing and offset into an affine (nifti1.h, method 2); NaN if unsound."""
    b, c, d = (float(fields[f"quatern_{letter}"]) for letter in "bcd")
    squared = b * b + c * c + d * d
    if not squared <= 1.0 + QUATERNION_EXCESS:
        return np.full((4, 4), np.nan)
    length = max(1.0, math.sqrt(squared))
    b, c, d = b / length, c / length, d / length
    a = math.sqrt(max(0.0, 1.0 - b * b - c * c - d * d))
    affine = np.eye(4)
    affine[:3, :3] = [
        [a * a + b * b - c * c - d * d, 2 * (b * c - a * d), 2 * (b * d + a * c)],
        [2 * (b * c + a * d), a * a + c * c - b * b - d * d, 2 * (c * d - a * b)],
        [2 * (b * d - a * c), 2 * (c * d + a * b), a * a + d * d - b * b - c * c],
    ]
    handedness = -1.0 if fields["pixdim"][0] < 0 else 1.0
    spacing = np.array(fields["pixdim"][1:4], dtype=np.float64)
    spacing[spacing < 0] = np.nan
    affine[:3, :3] *= spacing * [1.0, 1.0, handedness]
    affine[:3, 3] = [float(fields[f"qoffset_{axis}"]) for axis in "xyz"]
    return affine
