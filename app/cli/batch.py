"""Scans -> files of answers: one for each scan, or one table of all; a run can be resumed."""

import codecs
import csv
import io
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeAlias

from pydantic import ValidationError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from app.cli.scan_files import read_scan, size_of
from app.cli.terminal import describe_fault
from app.durable import write_file
from app.errors import (
    BadParameter,
    InsufficientMemory,
    LandmarkdError,
    NotAVolume,
    TooLarge,
    show_controls,
)
from app.io import (
    LONG_COLUMNS,
    MEASUREMENT_COLUMNS,
    WIDE_COLUMNS,
    AnswerFormat,
    LandmarksAnswer,
    csv_text,
    name_in_utf8,
    write_answer,
)

Model: TypeAlias = tuple[str, str]
"""Name and version."""

MODEL_COLUMNS: Final = ["model", "version"]
"""The last ones of a table of all scans."""

ADDED_COLUMNS: Final = {"warnings", *MODEL_COLUMNS}
"""Those that tables of older releases lack."""

WIDE: Final = "wide"
"""The format that has columns for what the model measures, before the others."""

OF_ONE_SCAN: Final[Mapping[str, Sequence[str]]] = {
    "long": LONG_COLUMNS,
    "measurements": MEASUREMENT_COLUMNS,
    WIDE: WIDE_COLUMNS,
}
"""Columns of the formats that make one table of all scans."""


class Sink(ABC):
    """Where answers go; unless it says otherwise, none is there from an earlier run."""

    def has(self, path: Path) -> bool:
        """Return whether the answer to a scan is there, from an earlier run."""
        del path
        return False

    def models(self) -> set[Model]:
        """Return which models the answers of earlier runs are of, as far as they say."""
        return set()

    @abstractmethod
    def write(self, path: Path, answer: LandmarksAnswer) -> None:
        """Keep the answer to a scan."""


class Output(Sink):
    """The standard output, for a single scan."""

    def __init__(self, form: AnswerFormat, write: Callable[[bytes], None]) -> None:
        self._form, self._write = form, write

    def write(self, path: Path, answer: LandmarksAnswer) -> None:
        """Write an answer."""
        del path
        self._write(self._form.write(answer))


class Files(Sink):
    """A file for each scan."""

    def __init__(
        self, targets: Mapping[Path, Path], write: Callable[[Path, LandmarksAnswer], bytes]
    ) -> None:
        """Write to each scan's target what a function returns of its path and its answer."""
        self._targets, self._write = targets, write

    def has(self, path: Path) -> bool:
        """Return whether the file is there."""
        return self._targets[path].exists()

    def models(self) -> set[Model]:
        """Return the models of the answers in JSON; other formats do not name them."""
        found = set()
        for target in self._targets.values():
            if target.suffix == ".json" and target.exists():
                with suppress(ValidationError):
                    model = LandmarksAnswer.model_validate_json(target.read_bytes()).model
                    found.add((model.name, model.version))
        return found

    def write(self, path: Path, answer: LandmarksAnswer) -> None:
        """Write the file, whole or not at all."""
        write_file(self._targets[path], self._write(path, answer))


class LongTable(Sink):
    """One CSV file with rows for each scan: of landmarks, of measurements, or one of all these."""

    def __init__(
        self, target: Path, names: Mapping[Path, str], *, resume: bool, form: str = "long"
    ) -> None:
        """Start a table, or go on with one.

        Args:
            target: The file.
            names: What the first column says of each scan.
            resume: Whether to keep what it holds, but for its last scan where its rows may be cut
                off: it is among ``names``, to be answered again, or the table ends within a line.
            form: What a row is of: ``long``, a landmark; ``measurements``; or ``wide``, a scan.

        Raises:
            BadParameter: It holds something else.
        """
        self._target = target
        self._form = form
        # No file in UTF-8 can hold bytes of another encoding, which a name may have.
        self._names = {path: name_in_utf8(name) for path, name in names.items()}
        rows: list[list[str]] = []
        whole = True
        if resume and target.exists():
            known = ["scan", *OF_ONE_SCAN[form], *MODEL_COLUMNS]
            rows, whole = _read_table(target, known, is_wide=form == WIDE)
        self._columns = rows[0] if rows else None
        # The last line may be cut off within the name of its model.
        named = rows[1:] if whole else rows[1:-1]
        self._models = {(row[-2], row[-1]) for row in named} - {("", "")}
        last = rows[-1][0] if len(rows) > 1 else None
        # What is not of this run, such as of a batch before it, would not be answered again.
        if whole and last not in self._names.values():
            last = None
        # Written with the first answer: what is there is lost no sooner.
        kept = [row for row in rows[1:] if row[0] != last]
        self._kept: list[list[str]] | None = [*rows[:1], *kept]
        self._done = {row[0] for row in kept}

    def has(self, path: Path) -> bool:
        """Return whether the table holds a scan."""
        return self._names[path] in self._done

    def models(self) -> set[Model]:
        """Return the models that the table names."""
        return self._models

    def write(self, path: Path, answer: LandmarksAnswer) -> None:
        """Append the rows of a scan.

        Raises:
            BadParameter: What is measured of it is not what the table has columns for.
        """
        header, *rows = csv.reader(io.StringIO(write_answer(answer, self._form).decode()))
        columns = ["scan", *header, *MODEL_COLUMNS]
        if self._columns not in (None, columns):
            raise BadParameter("expected the same measurements as of the scans before, got others")
        self._columns = columns
        name = self._names[path]
        lines = [[name, *row, answer.model.name, answer.model.version] for row in rows]
        mode = "a"
        if self._kept is not None:
            # Over what is kept, which so is there at any time; in place, as this file is locked.
            mode = "r+" if self._kept else "w"
            lines = [*(self._kept or [columns]), *lines]
            self._kept = None
        with self._target.open(mode, encoding="utf-8", newline="") as file:
            file.write(csv_text(lines))  # In one piece, so that hardly anything is ever cut off.
            if mode == "r+":
                file.truncate()


def _read_table(path: Path, columns: list[str], *, is_wide: bool) -> tuple[list[list[str]], bool]:
    """Read the rows of a table of all scans, and whether the last one is whole.

    What older releases did not write is empty. A wide table has other columns behind the first.

    Raises:
        BadParameter: It is something else, or was not saved as it was written.
    """
    # A table may be cut off within a character, and spreadsheets put a mark before the first one.
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    try:
        text = decoder.decode(path.read_bytes())
    except UnicodeDecodeError as error:
        raise BadParameter(
            f"--resume: expected a table in UTF-8, got another encoding in {path}; was it saved by "
            "a spreadsheet?"
        ) from error
    try:
        rows = [row for row in csv.reader(io.StringIO(text, newline="")) if row]
    except csv.Error as error:  # Such as a quotation mark that has no second one.
        raise BadParameter(f"--resume: expected a table as CSV, got {path}: {error}") from error
    # A column that was added, moved or left out would shift what is appended.
    header = rows[0] if rows else columns
    measured = header[1 : 1 - len(columns)] if is_wide else []
    columns = [columns[0], *measured, *columns[1:]]
    known = [name for name in columns if name in header or name not in ADDED_COLUMNS]
    if header != known:
        raise BadParameter(
            f"--resume: expected a table of all scans, with the columns {','.join(columns)}; "
            f"got {','.join(header)[:200]} in {path}"
        )
    whole = text.endswith("\n")
    if rows and not whole and len(rows[-1]) == 1:
        # Cut off within a name, which may be that of the scan before, or begin as another's.
        del rows[-1]
        whole = True
    for row in rows if whole else rows[:-1]:
        if len(row) != len(header):
            raise BadParameter(
                f"--resume: expected {len(header)} columns in each row of {path}, got {len(row)}"
            )
    if header != columns:
        cells = (dict(zip(header, row, strict=False)) for row in rows[1:])
        rows = [columns, *([row.get(name, "") for name in columns] for row in cells)]
    return rows, whole


@dataclass
class Tally:
    """What came of all scans.

    Attributes:
        scans: That were answered.
        skipped: That were answered before.
        found: Landmarks with a position.
        doubtful: Those of them with low confidence.
        landmarks: All that were looked for.
        failures: A line for each scan that could not be answered.
        warnings: The names of the scans that each warning is about.
        interrupted: Whether Ctrl-C left the rest out.
    """

    scans: int = 0
    skipped: int = 0
    found: int = 0
    doubtful: int = 0
    landmarks: int = 0
    failures: list[str] = field(default_factory=list)
    warnings: dict[str, list[str]] = field(default_factory=dict)
    interrupted: bool = False

    def add(self, name: str, answer: LandmarksAnswer) -> str:
        """Count the answer to a scan of a name; returns in short what was found."""
        found = sum(landmark.ijk is not None for landmark in answer.landmarks)
        for warning in answer.warnings:
            self.warnings.setdefault(warning, []).append(name)
        self.scans += 1
        self.found += found
        self.landmarks += len(answer.landmarks)
        self.doubtful += sum(one.status == "low_confidence" for one in answer.landmarks)
        return f"{found} of {len(answer.landmarks)} found"

    def summary(self) -> str:
        """Describe all in one line."""
        text = f"{_count(self.scans)}, {self.found} of {self.landmarks} landmarks"
        if self.doubtful:
            text += f", {self.doubtful} doubtful"
        if self.skipped:
            text += f"; {_count(self.skipped)} left out, answered before"
        return text + (f"; {len(self.failures)} failed" if self.failures else "")


def _answer(
    path: Path, find: Callable[[bytes], LandmarksAnswer], max_bytes: int | None
) -> LandmarksAnswer:
    try:
        return find(_read(path, max_bytes))
    except MemoryError as error:
        raise InsufficientMemory(
            "expected a scan that fits the memory, got a larger one"
        ) from error


def _read(path: Path, max_bytes: int | None) -> bytes:
    try:
        # Before it is read: the system may end the process that takes too much memory.
        if max_bytes is not None and (size := size_of(path)) > max_bytes:
            raise TooLarge(
                f"expected at most {max_bytes:,} bytes, got {size:,}; the limit is "
                "LANDMARKD_MAX_INFLATED_BYTES"
            )
        return read_scan(path)
    except OSError as error:
        own = str(error.filename) == str(path)
        raise NotAVolume(error.strerror if own else describe_fault(error)) from error


def _count(scans: int) -> str:
    return f"{scans} scan{'' if scans == 1 else 's'}"


def detect_all(
    files: Sequence[Path],
    find: Callable[[bytes], LandmarksAnswer],
    sink: Sink,
    console: Console,
    *,
    resume: bool = False,
    max_bytes: int | None = None,
) -> Tally:
    """Find the landmarks of scans; one that fails does not stop the others.

    Ctrl-C does, and an answer that cannot be written, as no other could be written either.

    With ``resume``, scans whose answer is there are left out; those of more than ``max_bytes`` fail
    without being read.
    """
    tally = Tally()
    bar = Progress(
        TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(),
        TimeElapsedColumn(), TextColumn("{task.fields[last]}", markup=False), console=console,
    )  # fmt: skip
    shown: AbstractContextManager[object] = bar if len(files) > 1 else nullcontext()
    task = bar.add_task("Detecting", total=len(files), last="")
    times = Counter(path.name for path in files)
    with shown, _stopping(tally):
        for path in files:
            name = path.name if times[path.name] == 1 else str(path)
            shown_name = show_controls(name)
            bar.update(task, description=shown_name)
            last = "there already"
            if resume and sink.has(path):
                tally.skipped += 1
            else:
                try:
                    answer = _answer(path, find, max_bytes)
                    sink.write(path, answer)
                    last = tally.add(name, answer)
                except LandmarkdError as error:
                    tally.failures.append(f"{name}: {error}")
                    last = "failed"
            bar.update(task, advance=1, last=f"{shown_name}: {last}")
    return tally


@contextmanager
def _stopping(tally: Tally) -> Iterator[None]:
    """End a block at Ctrl-C or an answer that cannot be written, and note it."""
    try:
        yield
    except KeyboardInterrupt:
        tally.interrupted = True
    except OSError as error:
        tally.failures.append(describe_fault(error))
