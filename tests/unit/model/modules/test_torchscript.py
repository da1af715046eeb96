"""TorchScript: where it is allowed, calls that touch files are refused all the same."""

import io
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from app.errors import ModelRefused
from app.model.modules.torchscript import read_script
from tests.support.model_folders import TILE, build_network, manifest_table, scripted


class Payload:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.trace),)


def saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def test_file_that_is_no_archive_is_refused() -> None:
    with pytest.raises(ModelRefused, match="expected a zip archive"):
        read_script(b"not a zip archive")


def test_damaged_or_endless_source_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    data = scripted(build_network(manifest_table()))
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        code = next(item for item in archive.infolist() if item.filename.endswith(".py"))
    at = code.header_offset + 30 + len(code.filename) + code.compress_size
    damaged = data[:at] + bytes(8) + data[at + 8 :]
    with pytest.raises(ModelRefused, match="expected an undamaged archive, got "):
        read_script(damaged)
    monkeypatch.setattr("app.model.modules.torchscript.SOURCE_LIMIT", 10)
    with pytest.raises(ModelRefused, match="expected source up to 10 bytes, got "):
        read_script(data)


def test_torchscript_answers_what_its_module_answers() -> None:
    network = build_network(manifest_table())
    tiles = torch.rand(3, 1, *TILE)
    torch.testing.assert_close(read_script(scripted(network))(tiles), network(tiles))


class Writes(nn.Module):
    """Writes a file when it is called."""

    def forward(self, tiles: Tensor) -> Tensor:
        torch.save(tiles, "stolen")
        return tiles


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_torchscript_that_writes_files_is_refused() -> None:
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(Writes()), buffer)
    with pytest.raises(ModelRefused, match=r"expected plain tensor operators, got torch.save"):
        read_script(buffer.getvalue())


def test_pickle_posing_as_torchscript_is_refused_unread(tmp_path: Path) -> None:
    trace = tmp_path / "unpickled"
    with pytest.raises(ModelRefused, match="expected a TorchScript file"):
        read_script(saved(Payload(trace)))
    assert not trace.exists()
