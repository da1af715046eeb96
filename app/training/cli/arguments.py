"""Arguments and options that several commands share, and the check that the extra is installed."""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import typer

from app.errors import StartupError

REQUIRED: Final = ("matplotlib", "scipy", "tomlkit")
"""What the extra ``train`` installs; the service runs without."""

FOLDER: Final[dict[str, Any]] = {"exists": True, "file_okay": False}

ModelFolder = Annotated[Path, typer.Argument(help="A model folder.")]
Scans = Annotated[Path, typer.Option(help="Folder of .nii and .nii.gz files.")]
Landmarks = Annotated[Path, typer.Option(help="Folder of landmark files of the same names.")]
MissingIs = Annotated[
    Literal["unknown", "absent"],
    typer.Option("--missing", help="How to count a landmark without a position."),
]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda:N.")]


def require_extra() -> None:
    """Check that the packages which only the trainer needs are installed.

    Raises:
        StartupError: One is not.
    """
    missing = [name for name in REQUIRED if find_spec(name) is None]
    if missing:
        raise StartupError(
            f"this command needs {', '.join(missing)}: pip install 'landmarkd[train]'"
        )
