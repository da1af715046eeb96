"""Paths that were given -> the scans among them, and their bytes."""

import io
import os
import zipfile
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Final

from app.errors import NotAVolume
from app.io import (
    SCAN_SUFFIXES,
    files_of,
    is_dicom,
    is_own_report,
    list_shown,
    open_file,
    read_file,
    scan_stem,
)

HEAD_BYTES: Final = 1024
ZIP_MAGIC: Final = b"PK"

Scan = bytes | str | Path
"""A file of any format that is read, or its path; or that of a header with its voxels beside it, or
of a folder of DICOM files."""


def list_scans(paths: Iterable[Path]) -> Iterator[Path]:
    """List scans: files as they are given, the scans in folders, and folders of DICOM files.

    A folder without any scan by its name, but with DICOM files, is one scan. So is one with a file
    that cannot be read: it fails by itself, later, and does not keep others from being found.
    """
    for path in paths:
        if not path.is_dir():
            yield path
            continue
        try:
            scans = [file for file in list_shown(path) if _is_scan(file)]
            if not scans and any(file.stat().st_size for file in _dicom_files(path)):
                scans = [path]
        except OSError:
            scans = [path]
        yield from scans


def list_unread(paths: Iterable[Path], scans: Collection[Path]) -> list[Path]:
    """List what else is in the folders among paths, given their scans; not what is hidden."""
    read = {file for scan in scans for file in files_of(scan)}
    return [
        entry
        for folder in paths
        if folder.is_dir() and folder not in scans
        for entry in list_shown(folder)
        if entry not in read
    ]


def name_answers(paths: Iterable[Path]) -> dict[Path, str]:
    """Name the answers to scans: as the file or folder, without suffixes.

    Where several scans share a name, those of as many folders above as tell them apart stand
    before it: without regard to case, too, as file systems may have none, so that the answer to
    ``mouse`` would replace that to ``Mouse``. Scans that no folder tells apart keep their names.

    Of ``.`` it is the folder's own; a link goes by its own name, as data sets that are kept by
    git-annex consist of links to files that are named by their content.
    """
    alike: dict[str, dict[Path, tuple[str, ...]]] = {}
    for path in paths:
        _, *folders, name = Path(os.path.abspath(path)).parts  # noqa: PTH100 - resolve() follows links
        stem = scan_stem(name)
        alike.setdefault(stem.casefold(), {})[path] = (*folders, stem)
    names: dict[Path, str] = {}
    for places in alike.values():
        depths = range(1, max(map(len, places.values())) + 1)
        apart = (
            depth
            for fold in (str.casefold, str)
            for depth in depths
            if len({tuple(map(fold, at[-depth:])) for at in places.values()}) == len(places)
        )
        depth = next(apart, 1)
        names |= {path: "_".join(at[-depth:]) for path, at in places.items()}
    return names


def find_read(files: Iterable[Path], scans: Iterable[Path]) -> Path | None:
    """Find what is a scan among files, or is read as a part of a folder that is one; else None."""
    places = {_follow(file) for file in files}
    around = {folder for place in places for folder in place.parents}
    for scan in scans:
        if (place := _follow(scan)) in places:
            return scan
        inner = _dicom_files(scan) if place in around else files_of(scan)
        if (part := next((one for one in inner if _follow(one) in places), None)) is not None:
            return part
    return None


def _follow(file: Path) -> Path:
    return Path(os.path.realpath(file))  # Path.resolve raises where links lead to themselves.


def size_of(path: Path) -> int:
    """Return how many bytes a scan has: of a folder, its DICOM files together."""
    files = _dicom_files(path) if path.is_dir() else files_of(path)
    return sum(file.stat().st_size for file in files)


def read_scan(scan: Scan) -> bytes:
    """Read a scan as it is uploaded: the DICOM files of a folder, and below, in a ZIP archive.

    Raises:
        NotAVolume: There are none in the folder, or no voxels beside a header.
    """
    if isinstance(scan, bytes):
        return scan
    path = Path(scan)
    if not path.is_dir():
        return read_file(path)
    files = list(_dicom_files(path))
    if not any(file.stat().st_size for file in files):
        raise NotAVolume(f"expected a scan, or a folder of DICOM files, got none in {path}")
    target = io.BytesIO()
    # Neither names nor dates of files are anybody's business.
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as archive:
        for number, file in enumerate(files):
            archive.writestr(zipfile.ZipInfo(str(number)), file.read_bytes())
    return target.getvalue()


def open_scan(scan: Scan) -> io.BufferedIOBase:
    """Open a scan to be uploaded in parts; a file is not read as a whole, if it is sent as it is.

    Raises:
        NotAVolume: There are no DICOM files in the folder, or no voxels beside a header.
    """
    if isinstance(scan, bytes) or Path(scan).is_dir():
        return io.BytesIO(read_scan(scan))
    return open_file(Path(scan))


def _is_scan(file: Path) -> bool:
    """Tell a scan among the files of a folder by its name; a pipe is one only if it is given."""
    return file.name.endswith(SCAN_SUFFIXES) and not file.is_fifo()


def _dicom_files(folder: Path) -> Iterator[Path]:
    """List the DICOM files of a folder, and empty ones: slices, perhaps, that were not copied.

    Reports of ours among them, as of an earlier run, are left out: they hold no image.
    """
    for file in sorted(folder.rglob("*")):
        if file.is_file() and not file.name.startswith("."):
            with file.open("rb") as stream:
                head = stream.read(HEAD_BYTES)
            is_image = is_dicom(head) and not head.startswith(ZIP_MAGIC) and not is_own_report(head)
            if is_image or not head:
                yield file
