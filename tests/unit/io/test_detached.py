"""Headers of voxels in another file are read as if both were one."""

import gzip
import re
from pathlib import Path

import pytest
from numpy.testing import assert_allclose, assert_array_equal

from app.errors import NotAVolume
from app.io import files_of, read_file, read_volume
from tests.support.detached_files import ARRAY, write_hdr, write_mhd, write_nhdr
from tests.support.nifti_files import AFFINE, nifti
from tests.support.scan_files import as_metaimage, as_nrrd


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
@pytest.mark.parametrize("offset", [0, 352])
def test_nifti(tmp_path: Path, order: str, offset: int) -> None:
    write_hdr(tmp_path / "s.hdr", order=order, offset=offset)
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
