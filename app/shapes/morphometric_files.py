"""A cohort -> files of programs for geometric morphometrics: TPS, Morphologika, NTS, CSV.

Coordinates are in mm, RAS of each scan. A missing point is NA, as geomorph reads it; in NTS it is a
number that the first line names, as in NTSYS.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Final

import numpy as np

from app.errors import BadParameter
from app.io import csv_text
from app.shapes.cohort import Cohort

NTS_MISSING: Final = -9999
"""No scan reaches ten metres."""

DECIMALS: Final = 9
"""Of mm: a voxel may be as small as 10 nm."""

NOT_IN_LABELS: Final = re.compile(r"[^\w.+-]+")
"""Spaces end a label, and quotation marks a file."""


def write_tps(cohort: Cohort) -> str:
    """Write a TPS file.

    Without a scale in every specimen geomorph warns that some may not be in mm, and takes the name
    of a specimen with SCALE in it for one.
    """
    lines = []
    for name, points in zip(_labels(cohort.specimens), cohort.points, strict=True):
        lines += [f"LM3={len(cohort.landmarks)}", *map(_row, points), "SCALE=1", f"ID={name}"]
    return "\n".join([*lines, ""])


def write_morphologika(cohort: Cohort) -> str:
    """Write a Morphologika file."""
    names = _labels(cohort.specimens)
    lines = [
        *("[individuals]", str(len(names))),
        *("[landmarks]", str(len(cohort.landmarks))),
        *("[dimensions]", "3"),
        *("[names]", *names),
        "[rawpoints]",
    ]
    for name, points in zip(names, cohort.points, strict=True):
        lines += [f"'{name}", *map(_row, points)]
    return "\n".join([*lines, ""])


def write_nts(cohort: Cohort) -> str:
    """Write an NTSYS file, a row for each specimen."""
    columns = [f"{name}_{axis}" for name in _labels(cohort.landmarks) for axis in "xyz"]
    missing = f"1 {NTS_MISSING}" if np.isnan(cohort.points).any() else "0"
    flat = np.nan_to_num(cohort.points, nan=NTS_MISSING).reshape(len(cohort.specimens), -1)
    lines = [
        f"1 {len(cohort.specimens)}L {len(columns)}L {missing} DIM=3",
        " ".join(_labels(cohort.specimens)),
        " ".join(columns),
        *map(_row, flat),
    ]
    return "\n".join([*lines, ""])


def write_csv(cohort: Cohort) -> str:
    """Write a CSV file, a row for each specimen."""
    columns = [f"{name}_{axis}" for name in cohort.landmarks for axis in "xyz"]
    flat = cohort.points.reshape(len(cohort.specimens), -1)
    rows = [[name, *map(_number, row)] for name, row in zip(cohort.specimens, flat, strict=True)]
    return csv_text([["specimen", *columns], *rows])


COHORT_FORMATS: Final[Mapping[str, Callable[[Cohort], str]]] = MappingProxyType(
    {"tps": write_tps, "morphologika": write_morphologika, "nts": write_nts, "csv": write_csv}
)


def _labels(names: Iterable[str]) -> list[str]:
    found: dict[str, str] = {}
    for name in names:
        label = NOT_IN_LABELS.sub("_", name)
        if label in found:
            raise BadParameter(
                f"expected names that differ without spaces and signs, got {found[label]!r} and "
                f"{name!r}, which both become {label}: rename one, or export CSV"
            )
        found[label] = name
    return list(found)


def _row(numbers: Iterable[float]) -> str:
    return " ".join(map(_number, numbers))


def _number(value: float) -> str:
    return "NA" if np.isnan(value) else f"{value:.{DECIMALS}f}"
