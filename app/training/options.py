"""What the command line asked of a training; None leaves a choice to the data."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from app.errors import BadParameter
from app.model import WHOLE, IntensitySpec

Missing = Literal["unknown", "absent"]
"""How a landmark without a position counts, whether its file lists it or not."""

Precision = Literal["float32", "bfloat16"]
"""Of the passes of a network in training."""

NO_NAMES: Final = "none"

INTENSITIES: Final = "percentile:LOWER,UPPER or window:LOWER,UPPER"
BOUNDED: Final = ("percentile", "window")
"""Intensity rules that have bounds; images are changed at random within these."""


@dataclass(frozen=True, slots=True)
class Options:
    """The options of ``landmarkd train`` and ``landmarkd refine``.

    The others are those of ``Recipe``, where they are described.

    Attributes:
        scans: Folder of scans.
        landmarks: Folder of landmark files.
        folder: Model folder to write; that of the first network, if a second one is trained.
        inner: Folder of that one within it, such as ``refine``; empty: the first one is trained.
        hold_out: Names of the scans to validate on; None: a fifth of them is chosen.
        tile: Edge of the tiles in voxels, or "whole"; None: from the data.
        mirror: Whether to train on mirror images as well.
        start: Model folder whose weights to start from.
        augmentation: Values of ``Augmentation`` by name, in place of what follows from the data.
        device: As the command names it.
        strict: Whether warnings about the data stop the training.
        folds: Number of folds of a cross-validation; None: none.
        fold: The only fold to train; None: all, and then the model itself.
        subject: Regular expression of the part of a scan's name that identifies its subject.
        train_only: Names of scans that are trained on and never held out.
    """

    scans: Path
    landmarks: Path
    folder: Path
    hold_out: tuple[str, ...] | None
    spacing_mm: float | None
    radius_mm: float | None
    tile: int | Literal["whole"] | None
    filters: tuple[int, ...]
    steps: int
    batch: int | None
    rate: float
    seed: int
    mirror: bool
    start: Path | None
    device: str
    strict: bool
    stride: Literal[1, 2] = 2
    precision: Precision | None = None
    augmentation: Mapping[str, Any] = field(default_factory=dict)
    missing: Missing = "unknown"
    intensity: IntensitySpec | None = None
    cuts: float = 0.0
    folds: int | None = None
    fold: int | None = None
    subject: str | None = None
    train_only: tuple[str, ...] = ()
    inner: str = ""

    @property
    def network_folder(self) -> Path:
        """Model folder of the network that is trained."""
        return self.folder / self.inner


def read_names(text: str | None) -> tuple[str, ...] | None:
    """Parse a comma-separated list of scans; "none" is an empty list, None is no list."""
    if text is None or text == NO_NAMES:
        return None if text is None else ()
    return tuple(name.strip() for name in text.split(",") if name.strip())


def read_tile(text: str | None) -> int | Literal["whole"] | None:
    """Parse an edge in voxels, or "whole".

    Raises:
        BadParameter: It is neither.
    """
    if text is None or text == WHOLE:
        return None if text is None else "whole"
    if not text.isdecimal() or int(text) == 0:
        raise BadParameter(f"--tile: expected {WHOLE} or a number of voxels, got {text}")
    return int(text)


def read_filters(text: str) -> tuple[int, ...]:
    """Parse comma-separated numbers of channels.

    Raises:
        BadParameter: They are no numbers.
    """
    words = text.split(",")
    if not all(word.strip().isdecimal() for word in words):
        raise BadParameter(f"--filters: expected numbers such as 24,48,96,128, got {text}")
    return tuple(int(word) for word in words)


def read_intensity(text: str | None) -> IntensitySpec | None:
    """Parse a rule for voxel values, such as ``window:-200,800``.

    Raises:
        BadParameter: There is no such rule, or its bounds are wrong.
    """
    if text is None:
        return None
    method, _, rest = text.partition(":")
    message = f"--intensity: expected {INTENSITIES}, got {text}"
    if method not in BOUNDED:
        raise BadParameter(message)
    bounds = rest.split(",") if rest else []
    try:
        # Zipped strictly, as too few or too many bounds are an error as well.
        table = {"method": method, **dict(zip(("lower", "upper"), bounds, strict=True))}
        return IntensitySpec.model_validate(table)
    except ValueError as error:
        raise BadParameter(message) from error
