"""A MONAI bundle -> its files and its components, as data. Nothing of it is computed or called.

A bundle's configuration names Python classes (``_target_``), and holds expressions (``$``) and
references (``@``), all of which MONAI would run. Here only literals count: numbers, text and lists.
"""

import re
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from errno import EINVAL
from pathlib import Path, PurePosixPath
from shutil import copyfileobj
from tempfile import TemporaryDirectory
from typing import Any, Final
from zipfile import ZIP_DEFLATED, ZIP_STORED, BadZipFile, ZipFile, ZipInfo

from app.errors import ModelRefused

Json = Mapping[str, Any]

METADATA: Final = "configs/metadata.json"
CONFIG: Final = "configs/inference.json"
NETWORKS: Final = ("models/model.onnx", "models/model.pt", "models/model.ts")
FILES: Final = (METADATA, CONFIG, *NETWORKS)
"""What is read of a bundle."""

MAX_ENTRIES: Final = 4096
MAX_INFLATION: Final = 16
"""Times the size of an archive that its files may have: weights are hardly compressed."""

MAX_DEPTH: Final = 8
"""Of lists in the arguments of a network."""

CLASS: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)
"""Name of a class, with its module or without."""


@contextmanager
def open_bundle(bundle: Path) -> Iterator[Path]:
    """Give the folder of a bundle; that of an archive is there for the time of the context.

    Yields:
        The folder, with all of FILES that the bundle has.

    Raises:
        ModelRefused: It is neither, or the archive is damaged or unsafe.
    """
    if bundle.is_dir():
        yield bundle
        return
    with TemporaryDirectory() as temporary:
        try:
            with ZipFile(bundle) as archive:
                _unpack(archive, Path(temporary), MAX_INFLATION * bundle.stat().st_size)
        except (
            BadZipFile, RuntimeError, EOFError, ValueError, OSError, OverflowError, zlib.error,
        ) as error:  # fmt: skip
            # Of its files, one that begins before it is a wrong argument; all else is the disk.
            if isinstance(error, OSError) and error.errno != EINVAL:
                raise
            raise ModelRefused(
                f"{bundle.name}: expected a folder, or a ZIP archive of one, with {METADATA}, "
                f"got {error!s:.200}"
            ) from error
        yield Path(temporary)


def _unpack(archive: ZipFile, folder: Path, max_bytes: int) -> None:
    """Write the files that are read; names of others are only looked at."""
    entries = {entry.filename: entry for entry in archive.infolist()}
    if len(archive.infolist()) > MAX_ENTRIES or len(entries) < len(archive.infolist()):
        raise BadZipFile(f"{len(archive.infolist())} files, at most {MAX_ENTRIES} names expected")
    for name in entries:
        if name.startswith("/") or "\\" in name or ".." in PurePosixPath(name).parts:
            raise BadZipFile(f"a file {name!r:.100} outside of it")
    tops = [top for name in entries if (top := name.removesuffix(METADATA)) != name]
    if len(tops) != 1 or tops[0].count("/") > 1 or not f"/{tops[0]}".endswith("/"):
        raise BadZipFile(f"{len(tops)} of them")
    wanted = {name: entries[tops[0] + name] for name in FILES if tops[0] + name in entries}
    if sum(entry.file_size for entry in wanted.values()) > max_bytes:
        raise BadZipFile(f"files that inflate more than {MAX_INFLATION} times")
    for name, entry in wanted.items():
        _inflate(archive, entry, folder / name)


def _inflate(archive: ZipFile, entry: ZipInfo, path: Path) -> None:
    """Write one file, which zipfile lets be no larger than it says."""
    if entry.compress_type not in (ZIP_STORED, ZIP_DEFLATED):
        raise BadZipFile("files that are neither stored nor deflated")
    path.parent.mkdir(exist_ok=True)
    with archive.open(entry) as source, path.open("xb") as target:
        copyfileobj(source, target)


def read_target(component: object) -> tuple[str, str, dict[str, Any]]:
    """Read a component: the module and the name of its class, and its arguments.

    Raises:
        ModelRefused: It is none.
    """
    target = component.get("_target_") if isinstance(component, dict) else component
    if not isinstance(component, dict) or not CLASS.fullmatch(str(target)):
        raise ModelRefused(f"_target_: expected the name of a class, got {target!r:.80}")
    module, _, name = str(target).rpartition(".")
    return module, name, {k: v for k, v in component.items() if k not in ("_target_", "_desc_")}


def check_literals(arguments: Json) -> None:
    """Refuse arguments of which something would have to be computed.

    Raises:
        ModelRefused: There is an expression, a reference, a macro or a component.
    """
    for key, value in arguments.items():
        if key.startswith("_") or not _is_literal(value):
            raise ModelRefused(
                f"{key:.80}: expected a literal, as nothing of a bundle is computed, "
                f"got {value!r:.80}"
            )


def _is_literal(value: object, depth: int = 0) -> bool:
    if isinstance(value, dict | list):
        inner = value.values() if isinstance(value, dict) else value
        named = isinstance(value, dict) and any(key.startswith("_") for key in value)
        return depth < MAX_DEPTH and not named and all(_is_literal(one, depth + 1) for one in inner)
    return value is not None and not (isinstance(value, str) and value.startswith(("$", "@", "%")))
