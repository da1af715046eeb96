"""NIfTI headers: recognition, axes, types, affine and units."""

import gzip
import io
import math
import re
import zipfile
from typing import Any, Literal

import numpy as np
import pytest
from numpy.testing import assert_allclose
from PIL import Image

from app.errors import BadGeometry, BadVoxels, BrokenVolume, NotAVolume
from app.geometry import spacing_of
from app.io.gzip_stream import FileStream
from app.io.header import Header
from app.io.nifti_header import read_nifti_header
from app.io.volume import read_volume
from tests.support.nifti_files import AFFINE, SHAPE, ByteOrder, by_nibabel, counting, nifti

Version = Literal[1, 2]


def header_of(content: bytes) -> Header:
    return read_nifti_header(FileStream(content))


def dims(*lengths: int) -> list[int]:
    return [len(lengths), *lengths, *[1] * (7 - len(lengths))]


def png() -> bytes:
    target = io.BytesIO()
    Image.new("L", (40, 30)).save(target, "png")
    return target.getvalue()


def archive() -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as file:
        file.writestr("scan.nii", nifti())
    return target.getvalue()


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("version", [1, 2])
def test_header_declares_shape_size_and_affine(
    version: Version, order: ByteOrder, zipped: bool
) -> None:
    array = counting((*SHAPE, 1, 3), "float32")
    header = header_of(nifti(array, version, order, zipped))
    assert header.shape == SHAPE
    assert header.frame_shape == (1, 3)
    assert header.frames == 3
    assert header.frame_bytes == array.nbytes // 3
    assert header.file_bytes == len(nifti(array, version, order))
    assert header.dtype == np.dtype("float32").newbyteorder(order)
    assert header.warnings == ()
    assert_allclose(header.affine, AFFINE, rtol=1e-6)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "got nothing"),
        (gzip.compress(b"", mtime=0), "got nothing"),
        (b"\x00" * 100, "got 100 bytes, less than a header"),
        (b"\x00" * 1000, "bytes of another kind"),
        (np.random.default_rng(5).bytes(5000), "bytes of another kind"),
        (b'{"detail": "not found"}' * 40, "bytes of another kind"),
        (b"\x00" * 128 + b"DICM" + b"\x00" * 400, "DICOM"),
        (png(), "PNG"),
        (archive(), "ZIP"),
        (gzip.compress(nifti(zipped=True)), "a gzip file inside a gzip file"),
        (nifti(magic=b"ni1"), r"\.hdr/\.img pair"),
        (nifti(version=2, magic=b"ni2"), r"\.hdr/\.img pair"),
        (nifti(magic=b""), "Analyze"),
        (nifti(order=">", magic=b""), "Analyze"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS"),
        (nifti(version=2, intent_code=3001), "CIFTI"),
    ],
)
def test_other_kinds_of_file_are_named(content: bytes, said: str) -> None:
    with pytest.raises(NotAVolume, match=rf"expected a NIfTI .*, got .*{said}|{said}"):
        header_of(content)


def test_random_bytes_are_not_quoted_in_the_answer() -> None:
    with pytest.raises(NotAVolume) as caught:
        header_of(b"DOE^JOHN 1970-01-01 " * 30)
    assert "DOE" not in str(caught.value)


def test_truncated_nifti2_header_is_broken() -> None:
    with pytest.raises(BrokenVolume, match="header of 540 bytes, got 500"):
        header_of(nifti(version=2)[:500])


def test_nifti2_file_changed_by_a_text_mode_transfer_is_broken() -> None:
    with pytest.raises(BrokenVolume, match="line ends"):
        header_of(nifti(version=2).replace(b"\r\n\x1a\n", b"\n\x1a\n\n"))


def test_nifti2_file_without_the_line_end_check_is_read() -> None:
    assert header_of(nifti(version=2, eol_check=0)).shape == SHAPE


@pytest.mark.parametrize(
    ("dim", "said"),
    [
        (dims(7, 5), "got 7 x 5"),
        (dims(140), "got 140"),
        (dims(7, 0, 4), "got 7 x 0 x 4"),
        (dims(7, -5, 4), "got 7 x -5 x 4"),
        (dims(7, 5, 4, 0), "got 7 x 5 x 4 x 0"),
        ([0, 7, 5, 4, 1, 1, 1, 1], "either byte order"),
        ([9, 7, 5, 4, 1, 1, 1, 1], "either byte order"),
    ],
)
@pytest.mark.parametrize("version", [1, 2])
def test_axes_that_are_not_3d_are_refused(version: Version, dim: list[int], said: str) -> None:
    with pytest.raises(BadGeometry, match=f"axes.*{said}"):
        header_of(nifti(version=version, dim=dim))


def test_single_slice_is_read_with_a_warning() -> None:
    volume = read_volume(nifti(counting((6, 1, 5))))
    assert volume.voxels.shape == (6, 1, 5)
    assert volume.warnings == ("the scan is a single slice (6 x 1 x 5 voxels)",)


@pytest.mark.parametrize(
    ("code", "name"),
    [
        (0, "none"),
        (1, "binary"),
        (32, "complex64"),
        (128, "RGB"),
        (1792, "complex128"),
        (2048, "complex256"),
        (2304, "RGBA"),
        (777, "the unknown datatype 777"),
        (-4, "the unknown datatype -4"),
    ],
)
def test_voxels_that_are_not_real_numbers_are_refused(code: int, name: str) -> None:
    with pytest.raises(BadVoxels, match=f"integer or real voxels, got {name}"):
        header_of(nifti(datatype=code))


@pytest.mark.skipif(
    np.finfo(np.longdouble).nmant == 112, reason="this machine has quadruple precision"
)
def test_quadruple_precision_is_refused_where_the_machine_lacks_it() -> None:
    with pytest.raises(BadVoxels, match="float128"):
        header_of(nifti(datatype=1536))


def test_intercept_that_is_not_finite_is_refused() -> None:
    with pytest.raises(BadVoxels, match="finite intercept"):
        header_of(nifti(scl_slope=2.0, scl_inter=math.nan))


@pytest.mark.parametrize("slope", [0.0, math.nan, math.inf])
def test_slope_of_zero_or_nan_means_no_scaling(slope: float) -> None:
    header = header_of(nifti(scl_slope=slope, scl_inter=math.nan))
    assert (header.slope, header.intercept) == (1.0, 0.0)


@pytest.mark.parametrize("offset", [0, -352, 347, 352.5, math.nan, math.inf])
def test_voxels_cannot_start_inside_the_header(offset: float) -> None:
    with pytest.raises(BrokenVolume, match="vox_offset"):
        header_of(nifti(vox_offset=offset))


def test_voxels_may_follow_the_header_at_once() -> None:
    assert header_of(nifti(vox_offset=348)).offset == 348


def test_qform_is_used_where_there_is_no_sform() -> None:
    content = nifti(
        sform_code=0,
        qform_code=1,
        quatern_b=0.3,
        quatern_c=-0.5,
        quatern_d=0.2,
        qoffset_x=4.0,
        pixdim=[-1, 0.5, 0.75, 2, 1, 1, 1, 1],
    )
    header = header_of(content)
    assert_allclose(header.affine, by_nibabel(content)[1], atol=1e-6)
    assert np.linalg.det(header.affine[:3, :3]) < 0
    assert_allclose(spacing_of(header.affine), [0.5, 0.75, 2.0])


def test_qfac_of_zero_counts_as_one() -> None:
    header = header_of(nifti(sform_code=0, qform_code=1, pixdim=[0, 2, 3, 4, 1, 1, 1, 1]))
    assert_allclose(np.diag(header.affine), [2, 3, 4, 1])


def test_quaternion_over_unit_length_by_rounding_is_normalised() -> None:
    content = nifti(
        sform_code=0,
        qform_code=1,
        quatern_b=0.8,
        quatern_c=0.60002,
        pixdim=[1, 2, 2, 3, 1, 1, 1, 1],
    )
    header = header_of(content)
    assert_allclose(spacing_of(header.affine), [2, 2, 3])
    assert_allclose(header.affine[:3, 2], [0, 0, -3], atol=1e-6)


@pytest.mark.parametrize(
    "fields",
    [
        {"quatern_b": 0.9, "quatern_c": 0.9},
        {"quatern_b": math.nan},
        {"qoffset_x": math.inf},
        {"pixdim": [1, 2, -2, 3, 1, 1, 1, 1]},
        {"pixdim": [1, 2, math.nan, 3, 1, 1, 1, 1]},
    ],
)
def test_invalid_qform_is_refused_alone_and_warned_of_beside_an_sform(
    fields: dict[str, Any],
) -> None:
    with pytest.raises(BadGeometry, match="expected a finite affine"):
        header_of(nifti(sform_code=0, qform_code=1, **fields))
    header = header_of(nifti(sform_code=1, qform_code=1, **fields))
    (warning,) = header.warnings
    assert warning.startswith("the qform disagrees with the sform, which was used; ")
    assert warning.endswith(" by the qform, which is not valid")
    assert_allclose(header.affine, AFFINE, rtol=1e-6)


def test_distance_between_forms_is_that_of_the_corner_farthest_apart() -> None:
    rows: dict[str, Any] = {"srow_x": [2, 0, 0, 0], "srow_y": [0, 3, 0, 0], "srow_z": [0, 0, 4, 0]}
    half_turn: dict[str, Any] = {"quatern_b": 0, "quatern_c": 0, "quatern_d": 1}
    place: dict[str, Any] = {"qoffset_x": 0, "qoffset_y": 0, "qoffset_z": 7}
    pixdim = [1, 2, 3, 4, 1, 1, 1, 1]
    header = header_of(nifti(qform_code=1, pixdim=pixdim, **rows, **half_turn, **place))
    assert_allclose(header.affine, np.diag([2, 3, 4, 1]))
    # Corner (6, 4, 0) of (7, 5, 4) voxels is at (12, 12, 0) mm, or at (-12, -12, 7) mm.
    assert header.warnings == (
        "the qform disagrees with the sform, which was used; 3D Slicer and ITK may show the scan "
        "by the qform, up to 34.7 mm away",
    )


def test_forms_that_agree_give_no_warning() -> None:
    place: dict[str, Any] = {"qoffset_x": 20.0, "qoffset_y": -30.0, "qoffset_z": 10.0}
    rows: dict[str, Any] = {
        "srow_x": [2, 0, 0, 20],
        "srow_y": [0, 3, 0, -30],
        "srow_z": [0, 0, 4.0004, 10],
    }
    pixdim = [1, 2, 3, 4, 1, 1, 1, 1]
    assert header_of(nifti(qform_code=1, pixdim=pixdim, **place, **rows)).warnings == ()


def test_no_affine_is_refused() -> None:
    with pytest.raises(BadGeometry, match="sform_code and qform_code are 0"):
        header_of(nifti(sform_code=0, qform_code=0))


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ({"srow_x": [0, 0, 0, 5]}, "expected three independent axes"),
        ({"srow_x": [1, 0, 1, 0], "srow_y": [0, 1, 1, 0], "srow_z": [0, 0, 0, 0]}, "independent"),
        ({"srow_x": [1, 0, 0, 0], "srow_y": [0, 1, 0, 0], "srow_z": [0, 0, 0, 0]}, "1 x 1 x 0 mm"),
        ({"srow_x": [math.nan, 0, 0, 0]}, "finite affine"),
        ({"srow_y": [0, 1, 0, -math.inf]}, "finite affine"),
        ({"srow_x": [3e38, 3e38, 3e38, 3e38]}, "expected a spacing"),
        ({"srow_x": [2000, 0, 0, 0]}, "expected a spacing"),
    ],
)
def test_degenerate_affine_is_refused(rows: dict[str, Any], said: str) -> None:
    with pytest.raises(BadGeometry, match=re.escape(said)):
        header_of(nifti(**rows))


def test_affine_that_overflows_double_precision_is_refused() -> None:
    with pytest.raises(BadGeometry, match="expected a"):
        header_of(nifti(version=2, xyzt_units=1, srow_x=[1e307, 1e307, 0, 1e307]))


@pytest.mark.parametrize(
    ("unit", "factor", "said"),
    [(1, 1000.0, "metres"), (3, 0.001, "microns"), (0, 1.0, "does not name its unit")],
)
def test_other_units_become_millimetres_with_a_warning(unit: int, factor: float, said: str) -> None:
    rows: dict[str, Any] = {
        "srow_x": [0.1, 0, 0, 2],
        "srow_y": [0, 0.2, 0, 1],
        "srow_z": [0, 0, 0.3, 0],
    }
    header = header_of(nifti(xyzt_units=unit + 8, **rows))
    assert_allclose(spacing_of(header.affine), np.array([0.1, 0.2, 0.3]) * factor, rtol=1e-6)
    assert header.affine[0, 3] == pytest.approx(2 * factor)
    assert header.affine[3].tolist() == [0, 0, 0, 1]
    assert len(header.warnings) == 1
    assert said in header.warnings[0]


@pytest.mark.parametrize("unit", [4, 5, 6, 7])
def test_unknown_unit_codes_are_refused(unit: int) -> None:
    with pytest.raises(BadGeometry, match=f"got the unit code {unit}"):
        header_of(nifti(xyzt_units=unit))
