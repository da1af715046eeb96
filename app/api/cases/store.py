"""The store: a folder of cases in the layout that ``landmarkd train`` reads.

::

    STORE/MODEL/scans/ID.nii.gz
    STORE/MODEL/landmarks/ID.mrk.json

A case exists once its landmark file does. Each file is there whole or not at all; the scan is
written first, and deleted last. So a process that is killed leaves whole cases, and at most a scan
or a temporary file, which the next start removes.

A case belongs to the name of the key that kept it; what was kept without one, or has come from
elsewhere, belongs to nobody, and anybody may change it.
"""

import os
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from app.durable import PARTIAL, lock, sync, write_file
from app.errors import BadParameter, Forbidden, NotStored, StartupError, UnknownCase
from app.io import CaseAnswer, Content, read_case

SCANS: Final = "scans"
LANDMARKS: Final = "landmarks"
SCAN: Final = ".nii.gz"
LANDMARK_FILE: Final = ".mrk.json"
LOCK: Final = ".lock"

FILE_BYTES: Final = 512 << 10
"""A file counts as so many at least, so that the quota bounds the number of cases, too."""

CASE_ID: Final = re.compile(r"[0-9a-f]{32}(-frame\d{1,9})?")
MODEL: Final = re.compile(r"[a-z0-9-]{1,64}")


@dataclass(frozen=True, slots=True)
class Keeper:
    """Who keeps or deletes cases.

    Attributes:
        name: Of their key; None where there are no keys.
        is_admin: Whether they may change everybody's cases.
    """

    name: str | None = None
    is_admin: bool = False

    def may_change(self, owner: str | None) -> bool:
        """Return whether they may replace or delete a case of an owner."""
        return self.is_admin or owner is None or self.name in {None, owner}


class CaseStore:
    """Cases on disk; several processes may share them.

    Args:
        root: The folder; made if it is not there, and no other user of the machine may read it
            then.
        quota: Maximum bytes of all files, each counted as ``FILE_BYTES`` or more.
        max_share: The part of it that one owner may take.

    Raises:
        StartupError: The folder cannot be used.
    """

    def __init__(self, root: Path, quota: int, max_share: float = 1.0) -> None:
        self._root = root
        self._quota = quota
        self._share = int(quota * max_share)
        self._owners: dict[str, tuple[int, str | None]] = {}
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            (root / LOCK).touch()
            with self._locked():
                self._remove_leftovers()
        except OSError as error:
            raise StartupError(
                f"LANDMARKD_STORE: expected a folder that can be written, got {error.strerror}"
            ) from error

    def keep(self, case: CaseAnswer, scan: Content, landmarks: bytes, keeper: Keeper) -> None:
        """Keep a case, in place of the one of its id, if there is one.

        Raises:
            Forbidden: It would replace another's.
            NotStored: There is no room for it, or the disk does not take it, or is not there.
        """
        paths = self._paths(case.model.name, case.id)
        with _translate_errors(), self._locked():
            usage = self._usage()
            usage[_check_owner(paths[1], keeper)] -= sum(map(_size, paths))
            self._check_room(usage, keeper.name, _count(len(scan)) + _count(len(landmarks)))
            try:
                for path, content in zip(paths, (scan, landmarks), strict=True):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    write_file(path, content)
            except OSError:
                self._remove_leftovers()
                raise

    def list(self, model: str, after: str, limit: int) -> tuple[list[CaseAnswer], str | None]:
        """List cases behind an id, in their order; gives the last one's id if there are more.

        Raises:
            BadParameter: The model is none that has a name, such as one of a name and a version.
            NotStored: The store is not there.
        """
        if not MODEL.fullmatch(model):
            raise BadParameter(
                f"query.model: expected the name of a model, without a version, got {model[:64]!r}"
            )
        folder = self._root / model / LANDMARKS
        with _translate_errors():
            (self._root / LOCK).stat()
            names = [file.name for file in _files(folder)]
        ids = (name.removesuffix(LANDMARK_FILE) for name in names if name.endswith(LANDMARK_FILE))
        ahead = sorted(case_id for case_id in ids if case_id > after)
        found = (_read(folder / (case_id + LANDMARK_FILE)) for case_id in ahead[:limit])
        cases = [case for case in found if case is not None]
        return cases, ahead[limit - 1] if len(ahead) > limit else None

    def delete(self, model: str, case_id: str, keeper: Keeper) -> None:
        """Delete a case.

        Raises:
            Forbidden: It is another's.
            UnknownCase: There is none.
            NotStored: The disk does not let it go, or is not there.
        """
        scan, landmarks = self._paths(model, case_id)
        with _translate_errors(), self._locked():
            if not landmarks.exists():
                raise UnknownCase(f"expected a case of {model}, got {case_id!r}, which is none")
            _check_owner(landmarks, keeper)
            for path in filter(Path.exists, (landmarks, scan)):  # Others' files have no scan.
                path.unlink(missing_ok=True)
                sync(path.parent)

    def _paths(self, model: str, case_id: str) -> tuple[Path, Path]:
        """Return where scan and landmark file of a case are, or would be."""
        if not (MODEL.fullmatch(model) and CASE_ID.fullmatch(case_id)):
            got = f"{model[:64]}/{case_id[:64]}"
            raise UnknownCase(f"expected the name of a model and the id of its case, got {got!r}")
        folder = self._root / model
        return folder / SCANS / (case_id + SCAN), folder / LANDMARKS / (case_id + LANDMARK_FILE)

    def _usage(self) -> Counter[str | None]:
        """Sum what is counted of each owner's files; reads cases that it has not read yet."""
        usage, known = Counter[str | None](), self._owners
        self._owners = {}
        # A disk of its own has lost+found, which only root may read.
        for model in (path for path in self._root.iterdir() if MODEL.fullmatch(path.name)):
            owners = {}
            for file in _files(model / LANDMARKS):
                stat, read = file.stat(), known.get(file.path)
                if read is None or read[0] != stat.st_mtime_ns:
                    read = stat.st_mtime_ns, _owner(Path(file.path))
                self._owners[file.path] = read
                usage[read[1]] += _count(stat.st_size)
                owners[file.name.removesuffix(LANDMARK_FILE)] = read[1]
            for file in _files(model / SCANS):
                usage[owners.get(file.name.removesuffix(SCAN))] += _count(file.stat().st_size)
        return usage

    def _check_room(self, usage: Counter[str | None], owner: str | None, more: int) -> None:
        # Where there are no keys, all are one client.
        full = owner is not None and usage[owner] + more > self._share
        if full or usage.total() + more > self._quota:
            raise NotStored(
                f"expected at most {self._quota:,} bytes in the store (LANDMARKD_STORE_MAX_BYTES), "
                f"{self._share:,} of one key, each file counted as {FILE_BYTES:,} or more; "
                f"got {usage.total():,}, {usage[owner]:,} of this key, and {more:,} more; "
                "delete cases, or have the quota raised"
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
        """Exclude other threads and processes.

        The file is not made here. Where a disk is not mounted any more, there is none, and a case
        would be kept in the folder below, where nobody finds it once the disk is back.
        """
        with (self._root / LOCK).open("r+") as file:
            lock(file, wait=True)
            yield


@contextmanager
def _translate_errors() -> Iterator[None]:
    """Say what the disk said."""
    try:
        yield
    except OSError as error:
        raise NotStored(
            f"expected a disk that has the store and takes a change, got: {error.strerror}"
        ) from error


def _files(folder: Path) -> Iterator[os.DirEntry[str]]:
    """List the files of a folder, if it is one."""
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        yield from (entry for entry in entries if entry.is_file())


def _size(path: Path) -> int:
    return _count(path.stat().st_size) if path.is_file() else 0


def _count(size: int) -> int:
    return max(size, FILE_BYTES)


def _read(path: Path) -> CaseAnswer | None:
    """Read a case; None if it was deleted meanwhile, or the file has come from elsewhere."""
    try:
        return read_case(path)
    except (OSError, TypeError, ValueError, LookupError):
        return None


def _owner(landmarks: Path) -> str | None:
    """Read whose a case is; None: nobody's, or there is none."""
    case = _read(landmarks)
    return None if case is None else case.key


def _check_owner(landmarks: Path, keeper: Keeper) -> str | None:
    """Refuse to change another's case; gives whose it is."""
    owner = _owner(landmarks)
    if not keeper.may_change(owner):
        raise Forbidden(
            f"expected a case that you may change, got one that {owner} has kept; "
            "that key may replace or delete it, or the admin key"
        )
    return owner
