"""NRRD: types, encodings, spaces, frames, and headers that are refused."""

import gzip
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from app.errors import BadGeometry, BadVoxels, BrokenVolume, LandmarkdError, NotAVolume, TooLarge
from app.geometry import scaling
from app.io.volume import HEAD_BYTES, Selection, VolumeLimits, check_header, read_volume
from tests.support.nifti_files import AFFINE, SHAPE, assert_fit_for_use, counting
from tests.support.scan_files import WORLDS, as_nrrd

DTYPES = (
    "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float32", "float64",
)  # fmt: skip


@pytest.mark.parametrize("encoding", ["raw", "gzip"])
@pytest.mark.parametrize("endian", ["little", "big"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_type_is_read_as_stored(dtype: str, endian: str, encoding: str) -> None:
    array = counting(dtype=dtype)
    volume = read_volume(as_nrrd(array, encoding=encoding, endian=endian))
    assert volume.voxels.dtype == np.dtype(dtype)
    assert_array_equal(volume.voxels, array)
    assert_allclose(volume.affine, AFFINE)
    assert volume.warnings == ()
    assert_fit_for_use(volume)


@pytest.mark.parametrize("space", WORLDS)
def test_every_space_that_names_the_patients_sides_gives_ras(space: str) -> None:
    assert_allclose(read_volume(as_nrrd(space=space)).affine, AFFINE)


@pytest.mark.parametrize(
    "space", ["scanner-xyz", "3D-right-handed", "left-posterior-superior-time", "nowhere"]
)
def test_spaces_that_do_not_are_refused(space: str) -> None:
    content = as_nrrd().replace(b"left-posterior-superior", space.encode())
    with pytest.raises(BadGeometry, match="expected the space"):
        read_volume(content)


def test_the_whole_file_may_be_zipped_and_has_the_digest_of_the_plain_one() -> None:
    plain = as_nrrd()
    assert read_volume(gzip.compress(plain)).digest == read_volume(plain).digest
    with pytest.raises(BrokenVolume, match="zipped again"):
        read_volume(gzip.compress(as_nrrd(encoding="gzip")))


def test_digest_is_that_of_header_and_inflated_voxels() -> None:
    fast, small = (
        as_nrrd(encoding="gzip").split(b"\n\n", 1)[0] + b"\n\n" + gzip.compress(voxels, level)
        for voxels, level in ((counting().tobytes("F"), 1), (counting().tobytes("F"), 9))
    )
    assert fast != small
    assert read_volume(fast).digest == read_volume(small).digest


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("encoding", ["raw", "gzip"])
@pytest.mark.parametrize("frame", range(3))
def test_frames_lie_before_or_behind_the_axes_in_space(
    frame: int, encoding: str, first: bool
) -> None:
    frames = np.stack([counting() + 100 * n for n in range(3)], axis=0 if first else 3)
    none = np.full((1, 3), np.nan)
    directions = np.diag([-1.0, -1.0, 1.0]) @ AFFINE[:3, :3]
    fields: dict[str, Any] = {
        "kinds": ["list", *["domain"] * 3] if first else [*["domain"] * 3, "list"],
        "space directions": np.concatenate([none, directions.T] if first else [directions.T, none]),
    }
    content = as_nrrd(frames, encoding=encoding, **fields)
    assert_array_equal(
        read_volume(content, selection=Selection(frame=frame)).voxels, counting() + 100 * frame
    )
    with pytest.raises(BadGeometry, match=r"got 3 frames .* choose a frame, from 0"):
        check_header(content)


@pytest.mark.parametrize(
    ("shape", "none", "said"),
    [
        ((2, *SHAPE, 2), (0, 4), "before or behind the axes in space, got both"),
        ((7, 5, 2, 4), (2,), "side by side, got 3 of 4"),
        (SHAPE, (1,), "side by side, got 2 of 3"),
        ((65_537, 1, 1, 1), (0,), "at most 65,536 frames before the axes in space, got 65,537"),
    ],
)
def test_axes_in_space_are_three_with_all_frames_to_one_side(
    shape: tuple[int, ...], none: tuple[int, ...], said: str
) -> None:
    directions = np.full((len(shape), 3), np.nan)
    for axis in set(range(len(shape))) - set(none):
        directions[axis] = np.roll([1, 0, 0], axis)
    fields: dict[str, Any] = {"space directions": directions}
    with pytest.raises(BadGeometry, match=said):
        check_header(as_nrrd(counting(shape, "uint8"), **fields))


def test_vectors_are_not_frames() -> None:
    directions = np.concatenate([np.full((1, 3), np.nan), AFFINE[:3, :3].T])
    fields: dict[str, Any] = {
        "kinds": ["vector", *["domain"] * 3],
        "space directions": directions,
    }
    content = as_nrrd(counting((3, *SHAPE)), **fields)
    with pytest.raises(BadVoxels, match="got vectors or colours"):
        read_volume(content)


@pytest.mark.parametrize(
    "unit", ["um", "micron", "\u03bcm", "\u00b5m", "\u00b5m of latin-1"], ids=ascii
)
def test_lengths_in_micron_become_mm_with_a_warning(unit: str) -> None:
    fields: dict[str, Any] = {"space units": ["um"] * 3}
    letters = unit.split(maxsplit=1)[0].encode("latin-1" if "latin" in unit else "utf-8")
    volume = read_volume(as_nrrd(**fields).replace(b'"um"', b'"%b"' % letters))
    assert_allclose(volume.affine[:3], AFFINE[:3] / 1e3)
    assert volume.warnings == ("the file measures in microns; they were converted to millimetres",)


@pytest.mark.parametrize(
    ("unit", "factor", "said"), [("cm", 10, "centimetres"), ("m", 1e3, "metres")]
)
def test_longer_units_become_mm_with_a_warning(unit: str, factor: float, said: str) -> None:
    fields: dict[str, Any] = {"space units": [unit] * 3}
    volume = read_volume(as_nrrd(affine=scaling([1 / factor] * 3) @ AFFINE, **fields))
    assert_allclose(volume.affine, AFFINE)
    (warning,) = volume.warnings
    assert f"measures in {said};" in warning


def test_lengths_in_mm_give_no_warning() -> None:
    fields: dict[str, Any] = {"space units": ["mm"] * 3}
    assert read_volume(as_nrrd(**fields)).warnings == ()


@pytest.mark.parametrize("units", ["furlong furlong furlong", "mm mm cm"])
def test_other_units_are_refused(units: str) -> None:
    fields: dict[str, Any] = {"space units": units.split()}
    with pytest.raises(BadGeometry, match="expected space units of mm, cm, m or um, got others"):
        read_volume(as_nrrd(**fields))


@pytest.mark.parametrize(
    "line",
    ["a:b:=1\na:c:=2", "type:=DOE", "sizes:x:=DOE: 1", "content: DOE:=1", "content: DOE := 1"],
)
def test_what_comes_first_tells_a_pair_from_a_field(line: str) -> None:
    content = as_nrrd().replace(b"endian:", line.encode() + b"\nendian:")
    assert_allclose(read_volume(content).affine, AFFINE)


@pytest.mark.parametrize(
    ("old", "new"), [(b",", b", "), (b",", b" ,"), (b"(", b"( "), (b")", b" )")]
)
def test_vectors_may_hold_spaces(old: bytes, new: bytes) -> None:
    content = as_nrrd()
    assert content.count(old) >= 4
    head, voxels = content.split(b"\n\n", 1)
    volume = read_volume(head.replace(old, new) + b"\n\n" + voxels)
    assert_allclose(volume.affine, AFFINE)


@pytest.mark.parametrize(
    ("old", "new", "error", "said"),
    [
        (b"encoding: raw", b"encoding: bzip2", NotAVolume, "got bzip2"),
        (b"encoding: raw", b"encoding: DOE", NotAVolume, "got another"),
        (b"encoding: raw", b"encoding: raw\ndata file: DOE.raw", NotAVolume, "in another file"),
        (b"encoding: raw", b"encoding: raw\nbyte skip: 7", BrokenVolume, "got a byte skip"),
        (b"encoding: raw", b"encoding: raw\nencoding: raw", BrokenVolume, "each once"),
        (b"encoding: raw\n", b"", BrokenVolume, "with encoding, got one without"),
        (b"type: int16", b"type: block", BadVoxels, "another NRRD type"),
        (b"endian: little", b"# little", BrokenVolume, "endian: little or big"),
        (b"dimension: 3", b"dimension: 4", BrokenVolume, "as the dimension says"),
        (b"sizes: 7 5 4", b"sizes: 7 5 0", BadGeometry, "none empty"),
        (b"sizes: 7 5 4", b"sizes: 7 5 -4", BrokenVolume, "whole numbers in sizes"),
        (b"sizes: 7 5 4", b"sizes: 7 5 \xb2", BrokenVolume, "whole numbers in sizes"),
        (b"sizes: 7 5 4", b"sizes: 7 5 " + b"4" * 5000, BrokenVolume, "whole numbers in sizes"),
        (b"sizes: 7 5 4", b"sizes: 7 5 4" + b" 1" * 14, BrokenVolume, "up to 16 whole numbers"),
        (b"sizes: 7 5 4", b"sizes: 7 5 400", BrokenVolume, "a body that holds"),
        (b"space origin:", b"origin:", BadGeometry, "with space origin"),
        (b"space directions:", b"directions:", BadGeometry, "with space directions"),
        (b"space origin: (", b"space origin: (nan,", BrokenVolume, "3 numbers in space origin"),
        (b"space origin: (", b"space origin: (1_0,", BrokenVolume, "3 numbers in space origin"),
        (b"space directions: (", b"space directions: x (", BrokenVolume, "directions, got 4"),
        (b"space directions: (", b"space directions: ((", BrokenVolume, "in space directions"),
        (b"space origin: (", b"space origin: ", BrokenVolume, "vectors in space origin"),
        (b"encoding: raw", b"encoding: raw\nnotes", BrokenVolume, "each once"),
        (b"space origin: (-20", b"space origin: (9e9", BadGeometry, "is its unit of length right"),
        (b"space origin: (-20", b"space origin: (9e999", BadGeometry, "a finite affine"),
        (b"space: left", b"measured: left", BadGeometry, "got none or another"),
    ],
)
def test_header_that_places_no_scan_in_space_is_refused(
    old: bytes, new: bytes, error: type[LandmarkdError], said: str
) -> None:
    content = as_nrrd()
    assert old in content
    with pytest.raises(error, match=f"^expected .*{said}") as caught:
        read_volume(content.replace(old, new, 1))
    assert "DOE" not in str(caught.value)


def test_header_of_another_file_is_told_though_no_empty_line_ends_it() -> None:
    """As ITK and 3D Slicer write .nhdr files, where teem writes an empty line, too."""
    head, _ = as_nrrd().split(b"\n\n", 1)
    with pytest.raises(NotAVolume, match="in another file"):
        read_volume(head + b"\ndata file: DOE.raw\n")
    assert read_volume(as_nrrd().replace(b"\n\n", b"\ndata file:=DOE.raw\n\n", 1)).warnings == ()


@pytest.mark.parametrize(
    ("header", "limit"),
    [(b"# x\n" * 20_000, "2,048 lines"), (b"x" * 70_000 + b"\n", "65,536 bytes")],
)
def test_header_without_an_end_is_refused(header: bytes, limit: str) -> None:
    with pytest.raises(BrokenVolume, match=f"at most {limit}, got a longer one"):
        read_volume(b"NRRD0004\n" + header)
    with pytest.raises(BrokenVolume, match="cut short"):
        read_volume(b"NRRD0004\n" + header[:1000])


@pytest.mark.parametrize("start", [b"NRRD0004\n", b"NDims = 3\n"])
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_no_more_lines_of_a_header_are_looked_at_than_honest_ones_have(
    start: bytes, pack: Callable[[bytes], bytes]
) -> None:
    """On the event loop: of 108 bytes, packed, 20,000 lines took it as long as 20 requests."""
    content = pack(start + b"#\xff\n" * 20_000 + b"\n")
    with pytest.raises(BrokenVolume, match=r"at most 2,048 lines, got a longer one"):
        check_header(content)
    honest = as_nrrd().replace(b"\n\n", b"\n" + b"key:=value\n" * 2000 + b"\n", 1)
    check_header(honest)


def test_limits_are_checked_by_the_header_alone() -> None:
    head = as_nrrd(encoding="gzip").split(b"\n\n", 1)[0] + b"\n\n"
    head = head.ljust(HEAD_BYTES, b"\0")  # The start of a longer file.
    with pytest.raises(TooLarge, match="limit is LANDMARKD_MAX_AXIS"):
        check_header(head, VolumeLimits(axis=6))
    assert check_header(head).shape == SHAPE


def test_texts_of_a_header_are_neither_read_nor_quoted() -> None:
    fields: dict[str, Any] = {"content": "DOE^JOHN", "sample units": "DOE^JOHN", "patient": "DOE"}
    volume = read_volume(as_nrrd(np.ones(SHAPE, "uint8"), **fields))
    assert "DOE" not in " ".join(volume.warnings)
    assert volume.warnings
