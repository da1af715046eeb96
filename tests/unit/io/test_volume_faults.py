"""Volume: truncated, padded and randomly damaged files, and decompression bombs."""

import gzip
import re
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from app.errors import (
    BrokenVolume,
    LandmarkdError,
    NotAVolume,
)
from app.io.volume import HEAD_BYTES, MAX_TRAILING_BYTES, Selection, check_header, read_volume
from tests.support.nifti_files import LARGE_ENOUGH, SHAPE, assert_fit_for_use, counting, nifti


@pytest.mark.parametrize("kept", [0, 100, 347, 348, 352, 353, 500, 631])
@pytest.mark.parametrize("zipped", [False, True])
def test_truncated_file_is_refused(kept: int, zipped: bool) -> None:
    content = nifti()[:kept]
    refused = NotAVolume if kept < 348 else BrokenVolume
    with pytest.raises(refused, match=r"^expected .*, got "):
        read_volume(gzip.compress(content) if zipped else content)


def test_gzip_checksum_is_verified_after_the_last_voxel() -> None:
    content = bytearray(nifti(zipped=True))
    content[-8] ^= 1
    with pytest.raises(BrokenVolume, match="corrupt"):
        read_volume(bytes(content))


def test_file_in_several_gzip_members_is_read() -> None:
    plain = nifti()
    members = b"".join(gzip.compress(plain[i : i + 100]) for i in range(0, len(plain), 100))
    assert_array_equal(read_volume(members).voxels, counting())


@pytest.mark.parametrize("zipped", [False, True])
def test_padding_is_read_with_a_warning_and_more_than_that_refused(zipped: bool) -> None:
    def padded(size: int) -> bytes:
        content = nifti() + bytes(size)
        return gzip.compress(content) if zipped else content

    volume = read_volume(padded(MAX_TRAILING_BYTES))
    assert volume.warnings == ("65,536 bytes after the voxels were ignored",)
    assert_array_equal(volume.voxels, counting())
    with pytest.raises(BrokenVolume, match=r"expected 632 bytes.* got more"):
        read_volume(padded(MAX_TRAILING_BYTES + 1))


@pytest.mark.parametrize(
    ("fields", "behind", "zipped"),
    [
        ({}, 1 << 28, True),
        ({"dim": [3, 700, 700, 700, 1, 1, 1, 1]}, 0, True),
        ({"dim": [3, 700, 700, 700, 1, 1, 1, 1]}, 0, False),
        ({"vox_offset": 1 << 30}, 0, True),
    ],
    ids=["zeros after the voxels", "claim in gzip", "claim in a plain file", "far voxels"],
)
def test_decompression_bomb_takes_almost_no_memory(
    fields: dict[str, Any], behind: int, zipped: bool
) -> None:
    content = nifti(**fields) + bytes(behind)
    bomb = gzip.compress(content, 9) if zipped else content
    del content
    tracemalloc.start()
    try:
        with pytest.raises(BrokenVolume):
            read_volume(bomb)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "fields",
    [{}, {"datatype": 32}, {"xyzt_units": 0}, {"sform_code": 0}, {"dim": [2, 7, 20] + [1] * 5}],
)
def test_neither_warnings_nor_errors_quote_the_patient(fields: dict[str, Any]) -> None:
    names = {"descrip": b"DOE^JOHN", "db_name": b"DOE^JOHN", "intent_name": b"DOE^JOHN"}
    content = nifti(np.ones(SHAPE, "int16"), **{**names, **fields}) + b"DOE^JOHN"
    try:
        said = " ".join(read_volume(content).warnings)
    except LandmarkdError as error:
        said = str(error)
    assert said
    assert "DOE" not in said


SOURCES = (
    nifti(),
    nifti(counting(dtype="float32"), version=2, order=">", scl_slope=2.0, qform_code=1),
    nifti(counting((*SHAPE, 2), "float64"), scl_slope=0.5, xyzt_units=3),
)


@st.composite
def damaged_files(draw: st.DrawFn) -> bytes:
    """Overwrite bytes of a valid file before and after compression; truncate it or append to it."""

    def overwrite(content: bytes) -> bytes:
        changed = bytearray(content)
        for at, value in draw(st.lists(st.tuples(st.integers(0, 700), st.integers(0, 255)))):
            changed[at % len(changed)] = value
        return bytes(changed)

    content = overwrite(draw(st.sampled_from(SOURCES)))
    if draw(st.booleans()):
        content = overwrite(gzip.compress(content))
    return content[: draw(st.integers(0, 2000))] + draw(st.binary(max_size=20))


@settings(max_examples=400)
@given(content=damaged_files(), frame=st.none() | st.integers(-1, 2))
def test_random_damage_gives_a_valid_volume_or_a_named_error(
    content: bytes, frame: int | None
) -> None:
    try:
        volume = read_volume(content, LARGE_ENOUGH, Selection(frame))
    except LandmarkdError as error:
        said = str(error)
    else:
        assert_fit_for_use(volume)
        said = "expected nothing else, got it"
    assert re.match("expected .*, got ", said)


@settings(max_examples=100)
@given(content=st.binary(max_size=800), zipped=st.booleans())
def test_random_bytes_give_a_named_error(content: bytes, zipped: bool) -> None:
    with pytest.raises(LandmarkdError, match=r"^expected .*, got "):
        read_volume(gzip.compress(content) if zipped else content)


@pytest.mark.parametrize("kept", [352, 400])
def test_a_file_that_ends_behind_its_header_is_damaged_by_its_header_alone(kept: int) -> None:
    """Before it is compared with any model, for which it might be too large."""
    content = nifti()[:kept]
    with pytest.raises(BrokenVolume, match="as the header declares"):
        check_header(content)
    # The start of a longer file says nothing of its length.
    check_header(content.ljust(HEAD_BYTES, b"\0"))
