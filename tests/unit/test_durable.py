"""Durable files: the old content or the new one, whenever the process is killed."""

import errno
import os
import stat
import subprocess
import sys
from functools import partial
from itertools import count
from pathlib import Path

import pytest

from app.durable import PARTIAL, lock, replacing, write_file
from tests.support.killing import killed_at

OLD, NEW = b"old", b"new" * 100_000


def test_process_killed_at_any_step_leaves_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    path, seen = tmp_path / "file", list[bytes]()
    for step in count():
        path.write_bytes(OLD)
        killed = killed_at(step, partial(write_file, path, NEW))
        seen.append(path.read_bytes())
        leftovers = {one for one in tmp_path.iterdir() if one != path}
        assert all(one.name.endswith(PARTIAL) for one in leftovers)
        if not killed:
            break
    assert set(seen) == {OLD, NEW}
    assert seen == sorted(seen, reverse=True)  # "old" is behind "new".
    assert sum(content == NEW for content in seen) > 1


def test_content_is_on_the_disk_before_its_name_and_the_name_before_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, steps = tmp_path / "file", list[tuple[str, bool]]()
    fsync = os.fsync

    def note(descriptor: int) -> None:
        steps.append((Path(f"/proc/self/fd/{descriptor}").readlink().name, path.exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    write_file(path, NEW)
    assert steps == [(f".file.{os.getpid()}{PARTIAL}", False), (tmp_path.name, True)]


@pytest.mark.parametrize("letter", ["x", "\N{CJK UNIFIED IDEOGRAPH-4E2D}"])
def test_name_may_be_as_long_as_any(tmp_path: Path, letter: str) -> None:
    path = tmp_path / (letter * (250 // len(letter.encode())) + ".json")
    write_file(path, NEW)
    assert path.read_bytes() == NEW


def test_a_pipe_is_written_to_and_stays(tmp_path: Path) -> None:
    """A command of root put a file in the place of ``/dev/null``."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_file(path, OLD)
        assert path.is_fifo()
        assert os.read(descriptor, len(NEW)) == OLD
    finally:
        os.close(descriptor)


WRITES = """
import sys
from pathlib import Path
from app.durable import write_file

write_file(Path(sys.argv[1]), b"new")
"""


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_link_to_the_output_stays_where_that_is_a_file(tmp_path: Path, stream: str) -> None:
    """A command of root put a file in the place of ``/dev/stdout``, and left the output empty."""
    link, output = tmp_path / stream, tmp_path / "output"
    link.symlink_to(f"/proc/self/fd/{('stdout', 'stderr').index(stream) + 1}")
    output.write_bytes(OLD)
    with output.open("ab") as file:
        command = [sys.executable, "-c", WRITES, str(link)]
        subprocess.run(command, check=True, **{stream: file})  # type: ignore[call-overload]
    assert link.is_symlink()
    assert output.read_bytes() == OLD + b"new"


def test_fault_names_the_file_that_was_asked_for(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere" / "file", tmp_path):
        with pytest.raises(OSError, match=r"No such file|directory") as caught:
            write_file(path, NEW)
        assert caught.value.filename == str(path)


@pytest.mark.parametrize("mode", [0o600, 0o664, 0o444])
def test_a_file_that_is_replaced_stays_for_whom_it_was(tmp_path: Path, mode: int) -> None:
    """A table of patients that its owner alone might read became one for all."""
    path = tmp_path / "file"
    path.write_bytes(OLD)
    path.chmod(mode)
    with replacing(path) as partial:
        partial.write_bytes(NEW)
        assert stat.S_IMODE(partial.stat().st_mode) == 0o600
        partial.chmod(0o644)
    assert (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) == (NEW, mode)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a file to another user")
def test_a_file_that_root_replaces_stays_its_owners(tmp_path: Path) -> None:
    """With the mode alone, who owned it might not even read it any more."""
    path = tmp_path / "file"
    path.write_bytes(OLD)
    path.chmod(0o640)
    os.chown(path, 65534, 12)
    write_file(path, NEW)
    kept = path.stat()
    assert (kept.st_uid, kept.st_gid, stat.S_IMODE(kept.st_mode)) == (65534, 12, 0o640)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has any group")
def test_a_file_of_another_user_stays_its_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who shares a folder by its group may replace a colleague's file, but not give it away."""
    path, chown = tmp_path / "file", os.chown
    path.write_bytes(OLD)
    path.chmod(0o660)
    chown(path, 65534, 12)

    def refuse_users(path: Path, user: int, group: int) -> None:
        if user != -1:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        chown(path, user, group)

    monkeypatch.setattr(os, "chown", refuse_users)
    write_file(path, NEW)
    kept = path.stat()
    assert (kept.st_uid, kept.st_gid, stat.S_IMODE(kept.st_mode)) == (0, 12, 0o660)


def test_a_file_system_without_modes_keeps_no_file_from_being_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All files of such have one mode, and some refuse to be told that very one."""
    path = tmp_path / "file"
    path.touch(0o600)

    def refuse(*_given: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "chmod", refuse)
    write_file(path, NEW)
    assert path.read_bytes() == NEW


def test_block_that_fails_leaves_the_old_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(OLD)

    def write_half(target: Path) -> None:
        with replacing(target) as half:
            half.write_bytes(NEW[:100])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_half(path)
    assert path.read_bytes() == OLD
    assert list(tmp_path.iterdir()) == [path]


AS_ON_WINDOWS = """
import os, sys
sys.modules["fcntl"] = None
open_ = os.open

def open_no_folder(path, *arguments, **keys):
    if os.path.isdir(path):
        raise PermissionError(13, "Permission denied", path)
    return open_(path, *arguments, **keys)

os.open = open_no_folder
from app.cli.main import main
main()
"""


def test_command_runs_where_the_system_has_no_flock_and_opens_no_folder(tmp_path: Path) -> None:
    command = [sys.executable, "-c", AS_ON_WINDOWS, "phantom", "scan.nii.gz"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "scan.nii.gz").stat().st_size > 1000


def test_a_file_is_locked_until_it_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with path.open("w") as one, path.open("w") as other:
        lock(one)
        with pytest.raises(BlockingIOError):
            lock(other)
        one.close()
        lock(other, wait=True)
