"""The store: a folder of cases in the layout that ``landmarkd train`` reads.

::

    STORE/MODEL/scans/ID.nii.gz
    STORE/MODEL/landmarks/ID.mrk.json

A case exists once its landmark file does. Each file is written under a temporary name, made durable
and renamed, the scan first; a case is deleted in the opposite order. So a process that is killed
leaves whole cases, and at most a scan or a temporary file, which the next start removes.
"""

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from app.errors import NotStored, StartupError, UnknownCase
from app.io import CaseAnswer, read_case

SCANS: Final = "scans"
LANDMARKS: Final = "landmarks"
SCAN: Final = ".nii.gz"
LANDMARK_FILE: Final = ".mrk.json"
PARTIAL: Final = ".partial"
LOCK: Final = ".lock"

CASE_ID: Final = re.compile(r"[0-9a-f]{32}(-frame\d{1,9})?")
MODEL: Final = re.compile(r"[a-z0-9-]{1,64}")


class CaseStore:
    """Cases on disk; several processes may share them.

    Args:
        root: The folder; is made if it is not there.
        quota: Maximum bytes of all files.

    Raises:
        StartupError: The folder cannot be used.
    """

    def __init__(self, root: Path, quota: int) -> None:
        self._root = root
        self._quota = quota
        try:
            root.mkdir(parents=True, exist_ok=True)
            with self._locked():
                self._remove_leftovers()
        except OSError as error:
            raise StartupError(
                f"LANDMARKD_STORE: expected a folder that can be written, got {error.strerror}"
            ) from error

    def keep(self, case: CaseAnswer, scan: bytes, landmarks: bytes) -> bool:
        """Keep a case, in place of the one of its id, if there is one.

        Args:
            case: Which case.
            scan: Its ``.nii.gz``.
            landmarks: Its landmark file.

        Returns:
            Whether it replaces one.

        Raises:
            NotStored: There is no room for it.
        """
        paths = self._paths(case.model.name, case.id)
        with self._locked():
            replaced = paths[1].exists()
            self._check_room(len(scan) + len(landmarks) - sum(map(_size, paths)))
            try:
                for path, content in zip(paths, (scan, landmarks), strict=True):
                    _write(path, content)
            except OSError as error:
                self._remove_leftovers()
                raise NotStored(
                    f"expected a disk that takes the case, got: {error.strerror}"
                ) from error
        return replaced

    def list(self, model: str, after: str, limit: int) -> tuple[list[CaseAnswer], str | None]:
        """List cases of a model in the order of their ids.

        Args:
            model: Its name.
            after: Id behind which to start; empty: at the first one.
            limit: How many to list at most.

        Returns:
            The cases, and the last one's id if there are more.
        """
        folder = self._root / model / LANDMARKS
        paths = sorted(folder.glob(f"*{LANDMARK_FILE}")) if MODEL.fullmatch(model) else []
        ahead = [path for path in paths if _id_of(path) > after]
        cases = [case for path in ahead[:limit] if (case := _read(path)) is not None]
        return cases, _id_of(ahead[limit - 1]) if len(ahead) > limit else None

    def delete(self, model: str, case_id: str) -> None:
        """Delete a case.

        Raises:
            UnknownCase: There is none.
        """
        scan, landmarks = self._paths(model, case_id)
        with self._locked():
            if not landmarks.exists():
                raise UnknownCase(f"expected a case of {model}, got {case_id!r}, which is none")
            for path in (landmarks, scan):
                path.unlink(missing_ok=True)
                _sync_folder(path.parent)

    def _paths(self, model: str, case_id: str) -> tuple[Path, Path]:
        """Return where scan and landmark file of a case are, or would be."""
        if not (MODEL.fullmatch(model) and CASE_ID.fullmatch(case_id)):
            raise UnknownCase("expected the name of a model and the id of one of its cases")
        folder = self._root / model
        return folder / SCANS / (case_id + SCAN), folder / LANDMARKS / (case_id + LANDMARK_FILE)

    def _check_room(self, more: int) -> None:
        used = sum(_size(path) for path in self._root.glob("*/*/*"))
        if used + more > self._quota:
            raise NotStored(
                f"expected at most {self._quota:,} bytes in the store (LANDMARKD_STORE_MAX_BYTES), "
                f"got {used:,} and {more:,} more; delete cases, or have the quota raised"
            )

    def _remove_leftovers(self) -> None:
        """Remove what is left of keeping or deleting a case that came to no end."""
        for path in self._root.glob(f"*/*/*{PARTIAL}"):
            path.unlink()
        for scan in self._root.glob(f"*/{SCANS}/*{SCAN}"):
            case_id = scan.name.removesuffix(SCAN)
            ours = CASE_ID.fullmatch(case_id) is not None
            if ours and not self._paths(scan.parents[1].name, case_id)[1].exists():
                scan.unlink()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Exclude other threads and processes; the system unlocks for one that is killed."""
        with (self._root / LOCK).open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _write(path: Path, content: bytes) -> None:
    """Write a file so that it is there either whole or not at all, and durable afterwards."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + PARTIAL)
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Make names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _id_of(path: Path) -> str:
    return path.name.removesuffix(LANDMARK_FILE)


def _read(path: Path) -> CaseAnswer | None:
    """Read a case; None if it was deleted meanwhile, or the file has come from elsewhere."""
    try:
        return read_case(path)
    except (OSError, ValueError, LookupError):
        return None
