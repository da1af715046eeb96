"""Durable files: the old content or the new one, whenever the process is killed."""

import os
from functools import partial
from itertools import count
from pathlib import Path

import pytest

from app.durable import PARTIAL, replacing, write_file
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


def test_fault_names_the_file_that_was_asked_for(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere" / "file", tmp_path):
        with pytest.raises(OSError, match=r"No such file|directory") as caught:
            write_file(path, NEW)
        assert caught.value.filename == str(path)


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
