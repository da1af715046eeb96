"""Files by their paths: headers of voxels in another file, and formats that nibabel reads."""

import gzip
import re
import sys
from pathlib import Path
from typing import cast

import nibabel as nib
import numpy as np
import pytest
from nibabel.spatialimages import SpatialImage
from nibabel.testing import data_path
from numpy.testing import assert_allclose, assert_array_equal

from app.errors import NotAVolume
from app.io import Selection, files_of, read_file, read_volume
from tests.support.detached_files import ARRAY, write_hdr, write_mhd, write_nhdr
from tests.support.nifti_files import AFFINE, nifti
from tests.support.scan_files import as_metaimage, as_nrrd

REAL = Path(str(data_path))
"""Files of many formats that nibabel brings with it."""


def check(path: Path) -> None:
    volume = read_volume(read_file(path))
    assert_array_equal(volume.voxels, ARRAY)
    assert_allclose(volume.affine, AFFINE, atol=1e-4)  # NIfTI's is float32.
    assert sorted(files_of(path)) == sorted(path.parent.iterdir())
    assert files_of(path)[0] == path


@pytest.mark.parametrize("encoding", ["raw", "gzip"])
def test_nrrd(tmp_path: Path, encoding: str) -> None:
    write_nhdr(tmp_path / "s.nhdr", encoding)
    check(tmp_path / "s.nhdr")


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
def test_nrrd_whose_field_is_not_the_last(tmp_path: Path, line_end: bytes) -> None:
    path = tmp_path / "s.nhdr"
    write_nhdr(path)
    lines = path.read_bytes().strip().split(b"\n")
    (field,) = [line for line in lines if re.match(rb"data ?file:", line)]
    lines.remove(field)
    others = [lines[0], b"key:=data file: other.raw", *lines[1:]]
    name = field.partition(b":")[2].strip()
    text = [*others[:3], b"data file: ./" + name, *others[3:], b"", b"data file: ignored"]
    path.write_bytes(line_end.join(text))
    check(path)


@pytest.mark.parametrize("name", ["s.raw", "other name.zraw"])
@pytest.mark.parametrize("zipped", [False, True])
def test_metaimage(tmp_path: Path, name: str, zipped: bool) -> None:
    path = tmp_path / "s.mhd"
    (tmp_path / name).write_bytes(write_mhd(path, name, zipped=zipped))
    check(path)
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    check(path)


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("offset", [0, 560])
@pytest.mark.parametrize("version", [1, 2])
def test_nifti(tmp_path: Path, order: str, offset: int, version: int) -> None:
    write_hdr(tmp_path / "s.hdr", order=order, offset=offset, version=version)
    check(tmp_path / "s.hdr")


def test_nifti_of_compressed_files(tmp_path: Path) -> None:
    path = tmp_path / "s.hdr.gz"
    write_hdr(path)
    check(path)
    path.with_name("s.hdr").write_bytes(gzip.decompress(path.read_bytes()))
    path.unlink()
    check(tmp_path / "s.hdr")


def test_a_link_to_a_header_finds_the_voxels_beside_what_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    header = tmp_path / "kept" / "s.mhd"
    header.with_name("s.raw").write_bytes(write_mhd(header))
    (tmp_path / "s.mhd").symlink_to(header)
    assert read_file(tmp_path / "s.mhd") == read_file(header)
    assert files_of(tmp_path / "s.mhd") == (tmp_path / "s.mhd", tmp_path / "kept" / "s.raw")


@pytest.mark.parametrize("name", ["scaled+tlrc.HEAD", "phantom_EPI_asc_CLEAR_2_1.PAR"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_link_finds_what_nibabel_reads_beside_what_it_leads_to(tmp_path: Path, name: str) -> None:
    """As of a data set that is made of several, to be learned from."""
    (tmp_path / name).symlink_to(REAL / name)
    assert read_file(tmp_path / name) == read_file(REAL / name)
    assert files_of(tmp_path / name) == (tmp_path / name, *files_of(REAL / name)[1:])


def test_a_header_reads_no_file_elsewhere(tmp_path: Path) -> None:
    path = tmp_path / "scans" / "s.mhd"
    path.parent.mkdir()
    (tmp_path / "secret.raw").write_bytes(write_mhd(path))
    names = ("../secret.raw", str(tmp_path / "secret.raw"), "", ".", "..", "s.raw", "a\0b", "LIST")
    for name in names:
        write_mhd(path, name)
        with pytest.raises(NotAVolume, match=r"voxels of s\.mhd in one file beside it, got none"):
            read_file(path)
        assert files_of(path) == (path,)


def test_other_files_are_read_as_they_are(tmp_path: Path) -> None:
    contents = {
        "whole.mhd": as_metaimage(ARRAY),
        "whole.nhdr": as_nrrd(ARRAY),
        "whole.hdr": nifti(),
        "broken.hdr.gz": b"\x1f\x8b\x08\0 no gzip",
        "cut.hdr.gz": gzip.compress(nifti())[:100],
        "cut.hdr": b"\x1c\2\0\0ni2\0",
        "empty.hdr": b"",
        "empty.mhd": b"",
        "scan.nii": nifti(),
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
        assert read_file(tmp_path / name) == content
        assert files_of(tmp_path / name) == (tmp_path / name,)
    missing = tmp_path / "missing.mhd"
    assert files_of(missing) == (missing,)
    with pytest.raises(FileNotFoundError):
        read_file(missing)


@pytest.mark.parametrize(
    ("name", "frame"),
    [
        ("scaled+tlrc.HEAD", None),
        ("example4d+orig.HEAD", 2),
        ("test.mgz", 1),
        ("tiny.mnc", None),
        ("small.mnc", None),
        ("phantom_EPI_asc_CLEAR_2_1.PAR", 1),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_nibabel_reads_has_its_values_and_affine(name: str, frame: int | None) -> None:
    image = cast("SpatialImage", nib.load(REAL / name))
    expected = np.atleast_3d(image.get_fdata()).reshape(*image.shape[:3], -1)[..., frame or 0]
    volume = read_volume(read_file(REAL / name), selection=Selection(frame=frame))
    assert_allclose(volume.voxels, expected, rtol=1e-6)
    assert_allclose(volume.affine, image.affine)
    assert volume.warnings == ()
    assert REAL / name in files_of(REAL / name)
    assert len(files_of(REAL / name)) == (2 if name.endswith(("HEAD", "PAR")) else 1)


def test_frames_that_come_first_are_not_taken_for_an_axis() -> None:
    with pytest.raises(NotAVolume, match=r"expected a MINC file of three axes, got 4 in minc1_4d"):
        read_file(REAL / "minc1_4d.mnc")


def test_scan_that_takes_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(NotAVolume, match=r"package h5py, which small\.mnc takes: .*\[minc"):
        read_file(REAL / "small.mnc")


def test_file_that_nibabel_does_not_read_is_refused_with_what_it_says(tmp_path: Path) -> None:
    path = tmp_path / "broken.mnc"
    path.write_bytes(b"no scan")
    with pytest.raises(NotAVolume, match=r"got broken\.mnc, of which it says: Cannot work out"):
        read_file(path)
    assert files_of(path) == (path,)
    with pytest.raises(FileNotFoundError):
        read_file(tmp_path / "missing.mnc")
