"""The command ``landmarkd``: serve, detect, check, models, phantom, export, import, pack, install.

Commands import what they need when they run, so that help and errors do not wait for torch.
"""

import gc
import io
import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from app.cli import INTERRUPTED
from app.cli.batch import Tally, detect_all
from app.cli.exchange import importing, install, pack
from app.cli.export import export
from app.cli.outputs import (
    check_model,
    choose_sink,
    choose_writer,
    output_format,
    writing_alone,
)
from app.cli.scan_files import list_scans, list_unread, read_scan
from app.cli.terminal import console, describe_fault, fail, print_error, print_warning
from app.errors import BadParameter, LandmarkdError, StartupError, show_controls
from app.io import (
    SCAN_FORMATS,
    SCAN_SUFFIXES,
    LandmarksAnswer,
    ModelRef,
    Volume,
)
from app.settings import PREFIX, Settings, read_settings, spell_out, url_host

app = typer.Typer(add_completion=False, no_args_is_help=True)
app.add_typer(importing, name="import")

TRAINER = "app.training"
"""The image of the service leaves it out."""

STDERR = 2
"""The last of the descriptors of standard streams."""

LISTED = 3
"""What a warning names of many."""

ModelsDir = Annotated[
    Path | None, typer.Option(help="Folder of model folders (default: LANDMARKD_MODELS_DIR).")
]
Device = Annotated[
    str | None, typer.Option(help="auto, cpu or cuda:N (default: LANDMARKD_DEVICE).")
]
Frame = Annotated[int | None, typer.Option(min=0, help="Frame of a file of several, from 0.")]
ModelName = Annotated[
    str | None,
    typer.Option("-m", "--model", help="Model, or its folder (default: LANDMARKD_DEFAULT_MODEL)."),
]


def main() -> None:
    """Run the command; expected errors are printed as one line."""
    _open_standard_streams()
    try:
        app()
    except LandmarkdError as error:
        fail(f"{error.title}: {error}")
    except OSError as error:
        fail(describe_fault(error))
    except ModuleNotFoundError as error:
        # Where only the client is installed, as docs/python.md says, most commands lack something.
        fail(
            f"Cannot start: this command needs {error.name}, which is not installed; install "
            "landmarkd with all that it depends on, or let a service detect: landmarkd detect --url"
        )


def _open_standard_streams() -> None:
    """Open on nothing what the shell has closed, as by ``2>&-``; write what an encoding lacks.

    Else sockets and files get these numbers, and what is written to the log or by libraries; and a
    Greek name ends a command whose output is in Latin-1.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= STDERR:
        pass
    os.close(descriptor)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


@app.callback(invoke_without_command=True)
def landmarkd(
    show_version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.")
    ] = False,
) -> None:
    """Find anatomical landmarks in 3D scans."""
    if show_version:
        typer.echo(f"landmarkd {version('landmarkd')}")
        raise typer.Exit


@app.command()
def serve(
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port; 0 takes a free one.")] = None,
    demo: Annotated[
        bool, typer.Option(help="Show the answer to a generated scan once ready.")
    ] = False,
) -> None:
    """Run the service. All other settings are environment variables LANDMARKD_*."""
    chosen = os.environ.get(f"{PREFIX}LOG_FORMAT")
    log_format = "text" if not chosen and (demo or os.isatty(STDERR)) else None
    settings = read_settings(host=host, port=port, log_format=log_format)
    listener = _listen(settings)
    # Imports and models make 660,000 long-lived objects, which collections would traverse again and
    # again, for a sixth of the startup time; the server enables them when it is ready.
    gc.disable()
    # Imports torch, so it comes after all errors in the command itself.
    from app.server import serve as serve_until_stopped

    url = f"http://{url_host(settings.host)}:{listener.getsockname()[1]}"
    if demo:
        from app.cli.demo import start_demo

        start_demo(url, Console())
    raise typer.Exit(serve_until_stopped(settings, listener))


def _listen(settings: Settings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except (OSError, TypeError) as error:  # The latter of a name that no host can have.
        listener.close()
        reason = error.strerror if isinstance(error, OSError) else error
        raise StartupError(
            f"expected a free address, but {settings.host}:{settings.port} cannot be used "
            f"({reason}); choose another with --host or --port, with make HOST= or PORT="
        ) from None
    return listener


@app.command()
def detect(
    scans: Annotated[
        list[Path], typer.Argument(help="Scans, or folders of scans or of DICOM files.")
    ],
    output: Annotated[
        str,
        typer.Option(
            "-o",
            "--output",
            help="File; for several scans or a folder of them, a folder. What ends in .csv is one "
            "table of all scans, also of a single one.",
        ),
    ] = "",
    model: ModelName = None,
    url: Annotated[
        str | None, typer.Option(help="Use the service at this URL instead of this process.")
    ] = None,
    format_: Annotated[
        str | None,
        typer.Option(
            "--format",
            help=f"{' '.join(form.name for form in SCAN_FORMATS)}. Default: by -o, or json.",
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Leave out scans whose answer is there already.")
    ] = False,
    series: Annotated[
        int | None, typer.Option(min=0, help="Series of DICOM files of several, from 0.")
    ] = None,
    frame: Frame = None,
    models_dir: ModelsDir = None,
    device: Device = None,
) -> None:
    """Find the landmarks of scans, in this process or by a running service."""
    files = _find_scans(scans)
    to_folder = files != scans or len(files) > 1 or output.endswith(("/", os.sep))
    form = output_format(output, format_, to_folder=to_folder)
    write = choose_writer(form, series)
    target = Path(output) if output else None
    with ExitStack() as stack, writing_alone(target, form):
        sink = choose_sink(files, target, form, write, to_folder=to_folder, resume=resume)
        check = partial(check_model, sink.models() if resume else set())
        with console.status("Loading the model" if url is None else "Connecting"):
            find = _finder(stack, url, model, models_dir, device, check)
            find = partial(find, frame=frame, series=series)
        # A service has limits of its own.
        max_bytes = read_settings().max_inflated_bytes if url is None else None
        tally = detect_all(files, find, sink, console, resume=resume, max_bytes=max_bytes)
    _conclude(tally, output if to_folder else "")


def _find_scans(paths: list[Path]) -> list[Path]:
    """List the scans among paths and in folders, and say what else is in the folders."""
    files = list(list_scans(paths))
    suffixes = ", ".join(SCAN_SUFFIXES)
    if unread := list_unread(paths, set(files)):
        listed = ", ".join([path.name for path in unread[:LISTED]] + ["…"] * (len(unread) > LISTED))
        print_warning(f"{len(unread)} not read, as names of scans end in {suffixes}: {listed}")
    if not files:
        fail(f"expected scans ({suffixes}), found none")
    return files


def _conclude(tally: Tally, target: str) -> None:
    """Say what came of all scans, if their answers went to a folder or table; exit accordingly.

    Warnings are said in any case, as most formats do not hold them: once each, since all scans of a
    folder may share one.
    """
    for failure in tally.failures:
        print_error(failure)
    for warning, names in tally.warnings.items():
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        print_warning(f"{names[0]}{others}: {warning}")
    if target:
        console.print(f"{tally.summary()} -> {target}", markup=False, highlight=False)
    if tally.interrupted:
        hint = "; --resume goes on from here" if target else ""
        console.print(f"interrupted{hint}", style="yellow")
        raise typer.Exit(INTERRUPTED)
    if tally.failures:
        raise typer.Exit(1)


def _finder(
    stack: ExitStack,
    url: str | None,
    model: str | None,
    models_dir: Path | None,
    device: str | None,
    check: Callable[[ModelRef], None],
) -> Callable[..., LandmarksAnswer]:
    """Return what finds the landmarks of a scan, given its bytes, frame and series.

    The model is checked as soon as it is known: that of a service by its first answer, whose
    version is then asked for, as the service may load another among the scans.
    """
    if url is None:
        from app.cli.local import LocalDetector

        detector = LocalDetector(read_settings(models_dir=models_dir, device=device), model)
        check(detector.ref)
        return detector.detect
    from app.cli.client import Client, Unreachable

    client = stack.enter_context(Client(url))
    is_there, wanted = False, model

    def find(content: bytes, **selection: int | None) -> LandmarksAnswer:
        nonlocal is_there, wanted
        # Not of one that has never answered, or is gone: each scan would wait for minutes.
        detect = client.detect_patiently if is_there else client.detect_in_turn
        try:
            answer = detect(content, model=wanted, **selection)
        except Unreachable:
            is_there = False
            raise
        is_there = True
        check(answer.model)
        wanted = f"{answer.model.name}@{answer.model.version}"
        return answer

    return find


@app.command()
def check(
    folder: Annotated[Path, typer.Argument(help="A model folder.", callback=spell_out)],
    write: Annotated[
        bool,
        typer.Option(help="Write self-check file and hashes; with --scans, precisions."),
    ] = False,
    scans: Annotated[
        list[Path] | None,
        typer.Option(help="With --write: scan to verify lower precisions with; may be repeated."),
    ] = None,
    device: Device = None,
) -> None:
    """Validate a model folder and run its self-check."""
    from app.cli.local import load_model
    from app.model import write_selfcheck

    if scans and not write:
        raise BadParameter("--scans: expected --write beside it, got none")
    if find_spec(TRAINER):
        from app.training import describe_unfinished

        if unfinished := describe_unfinished(folder):
            fail(unfinished)
    settings = read_settings(device=device)
    if write:
        write_selfcheck(folder, allow_torchscript=settings.allow_torchscript)
    if scans:
        _verify_precisions(folder, scans, settings)
    manifest = load_model(folder, settings).manifest
    console.print(
        f"[green]{manifest.name} {manifest.version} is fine[/green]: "
        f"{len(manifest.landmarks)} landmarks, self-check passed"
    )


def _verify_precisions(folder: Path, scans: list[Path], settings: Settings) -> None:
    """Measure how far landmarks shift in precisions below float32, and write it to the manifest."""
    from app.compute import choose_device
    from app.inference import verify_precisions
    from app.io import read_volume
    from app.model import write_precisions

    def volumes() -> Iterator[Volume]:
        return (read_volume(read_scan(path)) for path in scans)

    device, allow = choose_device(settings.device), settings.allow_torchscript
    results = verify_precisions(folder, volumes, device, allow_torchscript=allow)
    shifts_mm = {}
    for result in results:
        if result.shift_mm is None:
            console.print(f"{result.precision}: {result.reason}", markup=False)
        else:
            console.print(f"{result.precision}: landmarks shift by {result.shift_mm:.2g} mm")
            shifts_mm[result.precision] = result.shift_mm
    if not results:
        fail("expected --scans in which the model detects landmarks, got none")
    write_precisions(folder, shifts_mm)


@app.command()
def models(models_dir: ModelsDir = None, device: Device = None) -> None:
    """List the models of a folder, and whether each can be used."""
    from app.cli.local import load_model
    from app.model import Registry

    settings = read_settings(models_dir=models_dir, device=device)
    registry = Registry(settings.models_dir, partial(load_model, settings=settings))
    registry.load_all()
    # Folded, as what is cut off could not be typed.
    table = Table(Column("model", overflow="fold"), "version", "landmarks", "status", "description")
    for name, model in registry.models.items():
        manifest = model.manifest
        count = str(len(manifest.landmarks))
        cells = name, manifest.version, count, "ready", manifest.description
        table.add_row(*(Text(show_controls(cell)) for cell in cells))
    for name, reason in registry.refusals.items():
        table.add_row(*(Text(show_controls(cell)) for cell in (name, "", "", reason, "")))
    Console().print(table)
    if registry.refusals:
        raise typer.Exit(1)


@app.command()
def phantom(
    output: Annotated[
        Path, typer.Argument(help="Scan to write, ending in .nii.gz; with --count, a folder.")
    ],
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random generator.")] = 6,
    count: Annotated[
        int | None,
        typer.Option(min=1, help="Write so many, of this seed on, into its scans and landmarks."),
    ] = None,
) -> None:
    """Write a generated scan, and its true landmarks as .mrk.json beside it."""
    from app.phantom import make_phantom, write_phantom, write_phantoms

    if count is None:
        write_phantom(make_phantom(seed), output)
    else:
        write_phantoms(output, count, seed)


app.command()(export)
app.command()(pack)
app.command()(install)
if find_spec(TRAINER):
    from app.training import COMMANDS

    for command in COMMANDS:
        app.command()(command)
