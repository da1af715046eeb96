"""Bytes of a TorchScript file -> nn.Module, for those who allow it.

torch parses and interprets TorchScript in C++ and reads its tensors with an unpickler of its own.
Calls that touch files are refused, but nobody has reviewed what else a file can do.
"""

import io
import re
import warnings
import zipfile
import zlib
from typing import Final
from zipfile import BadZipFile

import torch
from torch import nn

from app.errors import ModelRefused

SOURCE_LIMIT: Final = 1 << 24
"""Bytes of a source file in TorchScript: a hundred times what large networks have."""

OLD_SAVED: Final = bytes.fromhex("80028a0a6cfc9c46f9206aa850192e")
"""How a file of ``torch.save`` begins that is no archive, as before torch 1.6: a pickled number."""

FORBIDDEN: Final = re.compile(r"\btorch\.(save|from_file)\b|\bops\.(?!aten\.|prim\.)\w+\.\w+")
"""Calls in its source that reach outside their tensors."""


def read_script(data: bytes) -> nn.Module:
    """Read a TorchScript archive.

    Returns:
        The module, on the CPU.

    Raises:
        ModelRefused: It is no TorchScript, or calls operators that are refused.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            _check_source(archive)
    except BadZipFile:
        raise ModelRefused(
            "expected a zip archive as torch writes it, got something else"
        ) from None
    with warnings.catch_warnings():
        # torch calls TorchScript deprecated; so does models/README.md, and old files keep working.
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            module: nn.Module = torch.jit.load(io.BytesIO(data), map_location="cpu")
        except RuntimeError as error:
            first = str(error).partition("\n")[0]
            raise ModelRefused(f"expected a TorchScript file, got {first:.200}") from None
    return module


def is_saved(data: bytes) -> bool:
    """Return whether a file is one of ``torch.save``: a pickle, which is not read, and no code."""
    if data.startswith(OLD_SAVED):
        return True
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            names = {name.split("/")[1] for name in archive.namelist() if "/" in name}
    except BadZipFile:
        return False
    return "data.pkl" in names and names.isdisjoint({"code", "constants.pkl"})


def _check_source(archive: zipfile.ZipFile) -> None:
    """Refuse TorchScript whose source calls operators that reach outside their tensors."""
    for item in archive.infolist():
        if "/code/" not in item.filename or not item.filename.endswith(".py"):
            continue
        if item.file_size > SOURCE_LIMIT:
            raise ModelRefused(f"expected source up to {SOURCE_LIMIT} bytes, got {item.file_size}")
        try:
            source = archive.read(item).decode("utf-8", "replace")
        except (BadZipFile, zlib.error, RuntimeError) as error:
            raise ModelRefused(f"expected an undamaged archive, got {error}") from None
        if found := FORBIDDEN.search(source):
            raise ModelRefused(f"expected plain tensor operators, got {found[0]}")
