"""command line -> Options: what a person asks of a training; None is left to the data."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from app.errors import BadParameter
from app.model import IntensitySpec

Missing = Literal["unknown", "absent"]
"""What a landmark without a position is, be it not named or named without one."""

WHOLE: Final = "whole"
NOBODY: Final = "none"

INTENSITIES: Final = "percentile:LOWER,UPPER, window:LOWER,UPPER, zscore or none"
BOUNDED: Final = ("percentile", "window")
"""Rules that have bounds."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """How long and how fast to learn.

    Attributes:
        steps: Optimiser steps.
        batch: Images per step; None: two, or as many as fit.
        rate: Peak learning rate.
        seed: Of everything random.
    """

    steps: int
    batch: int | None
    rate: float
    seed: int


@dataclass(frozen=True, slots=True)
class Options:
    """What was asked for.

    Attributes:
        scans: Folder of scans.
        landmarks: Folder of landmark files.
        folder: Model folder to write; of the first model, if a second one is trained.
        hold_out: Names of the scans to judge by; None: a fifth of them is chosen.
        spacing_mm: Of the grid; None: from the landmarks' extent.
        radius_mm: Voting radius; None: five voxels.
        tile: Edge of the tiles in voxels, or "whole"; None: from the data.
        filters: Channels per level.
        stride: Grid voxels per output voxel.
        schedule: How long and how fast to learn.
        mirror: Whether to learn from mirror images, too.
        start: Model folder whose weights to start from.
        device: As the command names it.
        strict: Whether warnings about the data stop the training.
        rotation_deg: Largest random rotation.
        missing: What a landmark without a position is.
        intensity: The rule for voxel values; None: percentiles that suit scans of any modality.
        cuts: Share of the steps that learn from scans which are cut amid the landmarks.
        folds: How many folds to cross-validate by; None: none.
        fold: The only fold to do; None: all, and then the model itself.
        subject: Regular expression of the part of a scan's name that says whom it shows.
        train_only: Names of scans that are learned from and never judged by.
    """

    scans: Path
    landmarks: Path
    folder: Path
    hold_out: tuple[str, ...] | None
    spacing_mm: float | None
    radius_mm: float | None
    tile: int | Literal["whole"] | None
    filters: tuple[int, ...]
    stride: Literal[1, 2]
    schedule: Schedule
    mirror: bool
    start: Path | None
    device: str
    strict: bool
    rotation_deg: float = 180.0
    missing: Missing = "unknown"
    intensity: IntensitySpec | None = None
    cuts: float = 0.0
    folds: int | None = None
    fold: int | None = None
    subject: str | None = None
    train_only: tuple[str, ...] = ()


def read_names(text: str | None) -> tuple[str, ...] | None:
    """Read a comma-separated list of scans; "none" is an empty one, None is no list."""
    if text is None or text == NOBODY:
        return None if text is None else ()
    return tuple(name.strip() for name in text.split(",") if name.strip())


def read_tile(text: str | None) -> int | Literal["whole"] | None:
    """Read an edge in voxels, or "whole".

    Raises:
        BadParameter: It is neither.
    """
    if text is None or text == WHOLE:
        return None if text is None else "whole"
    if not text.isdigit() or int(text) == 0:
        raise BadParameter(f"--tile: expected {WHOLE} or a number of voxels, got {text}")
    return int(text)


def read_filters(text: str) -> tuple[int, ...]:
    """Read comma-separated numbers of channels.

    Raises:
        BadParameter: They are no numbers.
    """
    words = text.split(",")
    if not all(word.strip().isdigit() for word in words):
        raise BadParameter(f"--filters: expected numbers such as 24,48,96,128, got {text}")
    return tuple(int(word) for word in words)


def read_intensity(text: str | None) -> IntensitySpec | None:
    """Read a rule for voxel values, such as ``window:-200,800``.

    Raises:
        BadParameter: It is none, or its bounds are not.
    """
    if text is None:
        return None
    method, _, rest = text.partition(":")
    keys = ("lower", "upper") if method in BOUNDED else ()
    bounds = rest.split(",") if rest else []
    try:
        # Zipped strictly, as too few or too many bounds are an error, too.
        table = {"method": method, **dict(zip(keys, bounds, strict=True))}
        return IntensitySpec.model_validate(table)
    except ValueError as error:
        message = f"--intensity: expected {INTENSITIES}, got {text}"
        raise BadParameter(message) from error
