"""What was given as -o and --format -> where answers go, and in which format."""

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import typer
from rich.console import Console

from app.cli.batch import OF_ONE_SCAN, Files, LongTable, Model, Output, Sink
from app.cli.scan_files import find_read, name_answers, read_scan
from app.cli.terminal import fail
from app.durable import lock
from app.io import (
    SCAN_FORMATS,
    AnswerFormat,
    Format,
    LandmarksAnswer,
    ModelRef,
    find_evidence,
    load_report_writer,
    negotiate_format,
)
from app.settings import read_settings


def choose_writer(form: Format, series: int | None) -> Callable[[Path, LandmarksAnswer], bytes]:
    """Return what writes an answer, given the scan's path.

    A report says whose the images are, because it is for those who have them; a service's does not.
    """
    if isinstance(form, AnswerFormat):
        return lambda _, answer: form.write(answer)
    write = load_report_writer()
    find = partial(
        find_evidence, max_bytes=read_settings().max_inflated_bytes, series=series, identified=True
    )

    def write_report(path: Path, answer: LandmarksAnswer) -> bytes:
        with warnings.catch_warnings():
            # Those of pydicom and highdicom quote what is amiss, such as the name of a patient.
            warnings.simplefilter("ignore")
            return write(answer, find(read_scan(path)))

    return write_report


def choose_sink(
    files: list[Path],
    output: Path | None,
    form: Format,
    write: Callable[[Path, LandmarksAnswer], bytes],
    *,
    to_folder: bool,
    resume: bool,
) -> Sink:
    """Choose where answers go: standard output, a file, one table, or a folder of files."""
    if output is None:
        if len(files) > 1:
            fail("expected -o FOLDER, or -o TABLE.csv, for several scans")
        if not isinstance(form, AnswerFormat):
            fail(f"expected -o FILE.{form.name} for {form.name}, which is no text")
        # There is none where the shell has closed it, as by ``>&-``.
        readable = form.name == "json" and sys.stdout is not None and sys.stdout.isatty()
        return Output(form, _print_readable if readable else _print)
    output.parent.mkdir(parents=True, exist_ok=True)
    is_table = _is_table(output, form)
    if not (to_folder or is_table or output.is_dir()):
        return Files(_spare_scans({files[0]: output}), write)
    names = _names(files)
    if is_table:
        _spare_scans(dict.fromkeys(files, output))
        return LongTable(output, names, resume=resume, form=form.name)
    output.mkdir(exist_ok=True)
    targets = {path: output / f"{name}.{form.name}" for path, name in names.items()}
    return Files(_spare_scans(targets), write)


def _spare_scans(targets: dict[Path, Path]) -> dict[Path, Path]:
    """Refuse to put an answer in the place of a scan, or of a file in a folder that is one."""
    there = [target for target in targets.values() if target.exists()]
    if there and (read := find_read(there, targets)) is not None:
        fail(f"-o: expected another file than those that are read, got {read}")
    return targets


def _print(content: bytes) -> None:
    """Print an answer byte by byte as a file has it, whatever the encoding of the output is."""
    typer.echo(content, nl=not content.endswith(b"\n"))


def _print_readable(content: bytes) -> None:
    Console().print_json(content.decode())


@contextmanager
def writing_alone(output: Path | None, form: Format) -> Iterator[None]:
    """Keep other runs from a table of all scans, as each would drop rows that another has written.

    A table in which nothing was written does not stay.
    """
    if output is None or not _is_table(output, form):
        yield
        return
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("ab") as file:
        try:
            lock(file)
        except BlockingIOError:
            fail(
                f"expected a table that one run writes at a time, but another writes {output}; "
                "wait for its end, or give another -o"
            )
        except OSError:
            pass  # Not every file system has locks, and Windows has none.
        try:
            yield
        finally:
            if output.is_file() and output.stat().st_size == 0:
                output.unlink()


def _is_table(output: Path, form: Format) -> bool:
    return output.suffix == ".csv" and form.name in OF_ONE_SCAN and not output.is_dir()


def _names(files: list[Path]) -> dict[Path, str]:
    """Name the answers to scans, each otherwise."""
    names = name_answers(files)
    named: dict[str, Path] = {}
    for path in files:
        name = names[path]
        if name in named:
            fail(
                f"expected scans with different names, got {named[name]} and {path}, "
                f"whose answers would both be named {name}"
            )
        named[name] = path
    return names


def check_model(kept: set[Model], model: ModelRef) -> None:
    """End the command where the answers that a resumed run keeps are another model's."""
    for name, version in kept - {(model.name, model.version)}:
        fail(
            f"--resume: expected answers of {model.name} {model.version}, got those of {name} "
            f"{version}; give another -o, or leave --resume out to start again"
        )


def output_format(output: str, name: str | None, *, to_folder: bool) -> Format:
    """Return the format that was asked for: by name, or by the suffix of -o."""
    # The longest suffix first, so that x.mrk.json is not taken for plain JSON.
    names = sorted((form.name for form in SCAN_FORMATS), key=len, reverse=True)
    suffix = next((one for one in names if output.endswith(f".{one}")), None)
    if suffix == "csv":
        suffix = "long"  # One table; 3D Slicer's, which has no column for the scan, is asked for.
    if output and not (name or suffix or to_folder or Path(output).is_dir()):
        known = " ".join(f".{form.name}" for form in SCAN_FORMATS)
        fail(f"expected -o FOLDER/, -o FILE ending in one of {known}, or --format; got {output}")
    form = negotiate_format(SCAN_FORMATS, name or suffix, None)
    if to_folder and suffix and not (_is_table(Path(output), form) or Path(output).is_dir()):
        fail(
            f"expected -o FOLDER for several scans as {form.name}, or -o FILE.csv without --format "
            f"for one table of them, got {output}"
        )
    return form
