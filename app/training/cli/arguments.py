"""Arguments and options that several commands share, and what they are turned into.

What pulls in torch is imported in the functions, as the help must not wait for it.
"""

import math
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer
from rich.console import Console

from app.errors import StartupError
from app.settings import read_settings, spell_out

if TYPE_CHECKING:
    from app.model import LoadedModel
    from app.training.data.specimens import SpecimenFiles

REQUIRED: Final = ("matplotlib", "scipy")
"""What the extra ``train`` installs; the service runs without."""

FOLDER: Final[dict[str, Any]] = {"exists": True, "file_okay": False}

ModelFolder = Annotated[Path, typer.Argument(help="A model folder.", callback=spell_out)]
Scans = Annotated[
    Path, typer.Option(help="Folder of scans: .nii, .nii.gz, .nrrd, .mha, .mhd, .mgz, .zip.")
]
Landmarks = Annotated[Path, typer.Option(help="Folder of landmark files of the same names.")]
MissingIs = Annotated[
    Literal["unknown", "absent"],
    typer.Option("--missing", help="How to count a landmark without a position."),
]
Device = Annotated[
    str, typer.Option(envvar="LANDMARKD_DEVICE", help="auto, cpu or cuda:N; the first of several.")
]


def finite(number: float | None) -> float | None:
    """Pass on the number of an option, unless it is one that no bound of the option stops.

    Raises:
        BadParameter: It is infinite or NaN.
    """
    if number is not None and not math.isfinite(number):
        raise typer.BadParameter(f"expected a finite number, got {number}")
    return number


def prepare() -> None:
    """Check that what only the trainer needs is installed, and take as many threads as a service.

    Raises:
        StartupError: Something is not, or a setting cannot be used.
    """
    missing = [name for name in REQUIRED if find_spec(name) is None]
    if missing:
        raise StartupError(
            f"this command needs {', '.join(missing)}: pip install 'landmarkd[train]'"
        )
    from app.compute import limit_threads

    limit_threads(read_settings().threads)


def load_model(folder: Path, device: str) -> "LoadedModel":
    """Load a model folder on a device, as a service with the same settings does.

    Its precision is theirs, too, so that what is measured is what a service answers; TorchScript is
    loaded only if they allow it.

    Raises:
        ModelRefused: The folder breaks the contract.
    """
    from app.compute import choose_device
    from app.inference import load_checked

    settings = read_settings()
    allow = settings.allow_torchscript
    return load_checked(folder, choose_device(device), settings.precision, allow_torchscript=allow)


def pair_scans(scans: Path, landmarks: Path, only: Sequence[str]) -> "list[SpecimenFiles]":
    """Pair scans and landmark files by name, all or the named ones.

    Raises:
        BadParameter: A folder, a landmark file or a named scan is missing.
    """
    from app.training.data.specimens import pair_files

    try:
        return pair_files(scans, landmarks, only)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def make_console(*, stderr: bool = False) -> Console:
    """Make a console that prints names as they are: no ``[left]`` is taken for markup."""
    return Console(stderr=stderr, markup=False, emoji=False)
