"""Files of tensors are written whole, for all to read."""

import os
import stat
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from app.model import write_tensors
from tests.support.full_disk import limited_files


def test_tensors_that_the_disk_does_not_take_leave_the_file_before_and_say_why(
    tmp_path: Path,
) -> None:
    path = tmp_path / "weights.safetensors"
    write_tensors(path, {"a": torch.zeros(2, 3)})
    before = path.read_bytes()
    with limited_files(50_000), pytest.raises(OSError, match="File too large") as caught:
        write_tensors(path, {"a": torch.zeros(200, 300)})
    assert caught.value.filename == str(path)
    assert [one.read_bytes() for one in tmp_path.iterdir()] == [before]


def test_tensors_are_for_all_to_read_and_stored_once(tmp_path: Path) -> None:
    path, shared = tmp_path / "weights.safetensors", torch.rand(2, 3, 4)
    turned, empty = torch.rand(3, 2).T, torch.zeros(0)
    tensors = {"b": shared, "a": shared, "turned": turned, "empty": empty, "none": empty}
    before = os.umask(0o077)
    try:
        write_tensors(path, tensors)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    stored = load_file(path)
    assert stored.keys() == {"a", "turned", "empty", "none"}
    assert all(torch.equal(stored[name], tensors[name]) for name in stored)
