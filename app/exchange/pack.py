"""A model folder -> one file to share, and back.

The file is a ZIP archive of a folder ``NAME@VERSION`` with what the manifest names, the card, the
licence, and ``SHA256SUMS`` in the form that sha256sum checks. Nothing in it is compressed, and it
has no dates: the same folder makes the same bytes everywhere, and no file holds more than its size.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from posixpath import dirname
from shutil import copyfileobj
from tempfile import TemporaryDirectory
from typing import Final
from zipfile import ZIP_STORED, BadZipFile, ZipFile, ZipInfo

from app.durable import naming, replacing
from app.errors import BadParameter, ModelRefused
from app.model import Manifest, hash_file, read_manifest, scan_models

SUMS: Final = "SHA256SUMS"

CARD: Final = "README.md"
EXTRAS: Final = (CARD, "LICENSE", "LICENSE.md", "LICENSE.txt")
"""Files that no manifest names, and that are shared."""

TABLE: Final = re.compile(r"(?<=[`(])[A-Za-z0-9][A-Za-z0-9._/-]*\.csv(?=[`)])")
"""A table that a card names, as code or in a link."""

VERSION: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")
"""Versions that may be part of a folder's name."""

PLACE: Final = re.compile(
    r"[a-z0-9-]{1,64}@[A-Za-z0-9][A-Za-z0-9._+-]{0,31}(/[A-Za-z0-9][A-Za-z0-9._-]{0,127}){1,2}"
)
"""Paths in an archive: files of the folder, and of the folder of its second model."""

MAX_FILES: Final = 64
MAX_SUMS: Final = 1 << 16
EPOCH: Final = (1980, 1, 1, 0, 0, 0)
BLOCK: Final = 1 << 20


def pack_model(folder: Path, output: Path | None = None, tables: bool = False) -> Path:
    """Write a model folder as one file.

    Args:
        folder: The model folder; the caller has checked that it serves.
        output: File to write; None: ``NAME-VERSION.zip`` in the working directory.
        tables: Whether to pack ``find_tables`` as well.

    Raises:
        ModelRefused: The folder is no model, or its version cannot be part of a name.
        BadParameter: The output exists, or a table lies too deep in the folder.
    """
    manifest = read_manifest(folder)
    if not VERSION.fullmatch(manifest.version):
        raise ModelRefused(
            f"{folder.name}: version: expected letters, digits, '.', '_', '+' and '-', as it "
            f"becomes part of a name, got {manifest.version!r}"
        )
    output = output or Path(f"{manifest.name}-{manifest.version}.zip")
    if output.exists():
        raise BadParameter(f"-o: expected a file that is not there yet, {output.name} is")
    top = f"{manifest.name}@{manifest.version}"
    more = find_tables(folder) if tables else []
    if deep := [name for name in more if not PLACE.fullmatch(f"{top}/{name}")]:
        raise BadParameter(f"--tables: expected TABLE.csv or FOLDER/TABLE.csv, got {deep[0]}")
    files = sorted({*_files(folder, manifest), *more})
    sums = "".join(f"{hash_file(folder / name)}  {name}\n" for name in files)
    with replacing(output) as partial, ZipFile(partial, "w") as archive:
        archive.writestr(_entry(f"{top}/{SUMS}"), sums)
        for name in files:
            _add(archive, f"{top}/{name}", folder / name)
    return output


def find_tables(folder: Path) -> list[str]:
    """List the tables in a model folder that its card names; they may name scans, as of patients.

    Returns:
        Paths relative to the folder.
    """
    card = folder / CARD
    text = card.read_text(encoding="utf-8") if card.is_file() else ""
    return sorted(name for name in set(TABLE.findall(text)) if (folder / name).is_file())


def install_model(file: Path, models: Path, check: Callable[[Path], object]) -> tuple[Path, bool]:
    """Unpack a file beside the other models, in a folder ``NAME@VERSION``.

    Nothing that is there is changed; a file with a wrong hash, or with anything else than a model,
    leaves nothing.

    Args:
        file: As ``pack_model`` writes it.
        models: The folder of model folders.
        check: Raises if a folder does not serve; it is then not installed.

    Returns:
        The folder, and whether it is new.

    Raises:
        StartupError: There is no such folder of models.
        ModelRefused: The file is something else, is damaged, or its version is there with other
            content.
    """
    scan_models(models)
    try:
        with ZipFile(file) as archive:
            top, files = _list_files(archive, file)
            target = models / top
            sums = _read_sums(archive, top, files)
            if target.exists():
                if not _has(target, sums):
                    raise ModelRefused(f"{file.name}: {top} is there already, with other content")
                return target, False
            with naming(target), TemporaryDirectory(prefix=".", dir=models) as temporary:
                folder = Path(temporary) / top
                _extract(archive, Path(temporary), top, sums)
                check(folder)
                folder.rename(target)
    except (BadZipFile, KeyError, NotImplementedError, RuntimeError, EOFError, ValueError) as error:
        raise ModelRefused(
            f"{file.name}: expected a file that landmarkd pack wrote, got {error!s:.200}"
        ) from error
    return target, True


def _files(folder: Path, manifest: Manifest) -> Iterator[str]:
    """List what belongs to a model, relative to its folder."""
    yield "model.toml"
    yield from manifest.network.files
    if manifest.shape is not None:
        yield manifest.shape.mean
    if manifest.selfcheck.expected is not None:
        yield manifest.selfcheck.expected
    yield from (name for name in EXTRAS if (folder / name).is_file())
    if manifest.refine is not None:
        inner = folder / manifest.refine.folder
        yield from (f"{inner.name}/{name}" for name in _files(inner, read_manifest(inner)))


def _entry(name: str) -> ZipInfo:
    """Describe a file of an archive, the same at any time."""
    entry = ZipInfo(name, EPOCH)
    entry.compress_type, entry.create_system = ZIP_STORED, 3
    entry.external_attr = 0o100644 << 16
    return entry


def _add(archive: ZipFile, name: str, path: Path) -> None:
    entry = _entry(name)
    entry.file_size = path.stat().st_size
    with path.open("rb") as source, archive.open(entry, "w") as target:
        copyfileobj(source, target, BLOCK)


def _list_files(archive: ZipFile, file: Path) -> tuple[str, set[str]]:
    """Refuse archives of anything else than the files of one folder, as large as they say.

    Returns:
        The folder, and the names of its files in it.
    """
    entries = archive.infolist()
    names = {entry.filename for entry in entries}
    if not 1 < len(entries) <= MAX_FILES or len(names) < len(entries):
        raise BadZipFile(f"{len(entries)} files")
    folders = set(map(dirname, names))
    for name in names:
        if name in folders or not PLACE.fullmatch(name):
            raise BadZipFile(f"a file {name!r:.100}")
    top, *others = {name.partition("/")[0] for name in names}
    if others:
        raise BadZipFile("files of several models")
    if any(entry.compress_type != ZIP_STORED for entry in entries):
        raise BadZipFile("compressed files")
    size = file.stat().st_size
    if sum(entry.file_size for entry in entries) > size:
        raise BadZipFile("files that are larger than all of it")
    if not all(0 <= entry.header_offset < size for entry in entries):
        raise BadZipFile("files that begin outside of it")
    return top, {name.removeprefix(f"{top}/") for name in names}


def _extract(archive: ZipFile, root: Path, top: str, sums: Mapping[str, str]) -> None:
    """Write the files of an archive, each of which must have its promised hash."""
    archive.extractall(root)  # To paths that are all of the form of PLACE.
    for name, digest in sums.items():
        if hash_file(root / top / name) != digest:
            raise BadZipFile(f"another hash of {name} than its {SUMS} promises")


def _read_sums(archive: ZipFile, top: str, files: set[str]) -> dict[str, str]:
    """Read the hash of each file of a model's folder, and of nothing else."""
    entry = archive.getinfo(f"{top}/{SUMS}")
    if entry.file_size > MAX_SUMS:  # It may be as large as the archive.
        raise BadZipFile(f"{SUMS} of {entry.file_size} bytes")
    lines = (line.partition("  ") for line in archive.read(entry).decode("utf-8").splitlines())
    sums = {name: digest for digest, _, name in lines}
    if others := sums.keys() ^ (files - {SUMS}):
        raise BadZipFile(f"a {SUMS} that differs from its files in {min(others)!r:.100}")
    return sums


def _has(folder: Path, sums: Mapping[str, str]) -> bool:
    """Say whether a folder holds the files of these hashes."""
    return all(
        (folder / name).is_file() and hash_file(folder / name) == digest
        for name, digest in sums.items()
    )
