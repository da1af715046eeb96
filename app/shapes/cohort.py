"""Landmark files of many specimens -> one array, in which what is missing stays missing."""

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from jaxtyping import Float64
from pydantic import ValidationError

from app.errors import BadParameter
from app.io import (
    LandmarksAnswer,
    RasPoint,
    is_landmark_file,
    is_missing,
    landmark_stem,
    list_shown,
    name_in_utf8,
    read_landmarks,
)

ANSWER_SUFFIX: Final = ".json"
MISSING: Final = (np.nan, np.nan, np.nan)

Specimen = tuple[str, Mapping[str, RasPoint]]
"""Name, and position in mm, RAS, of each landmark by name; NaN where it is missing."""


@dataclass(frozen=True, slots=True)
class Cohort:
    """The landmarks of several specimens.

    Attributes:
        specimens: Names of the specimens.
        landmarks: Names of all landmarks that any of them lists.
        points: Positions in mm, RAS of each specimen's own scan; NaN where missing.
    """

    specimens: tuple[str, ...]
    landmarks: tuple[str, ...]
    points: Float64[np.ndarray, "specimens landmarks 3"]

    def count_missing(self) -> int:
        """Count the points that are missing."""
        return int((~np.isfinite(self.points).all(axis=2)).sum())


def read_cohort(path: Path) -> Cohort:
    """Read the landmarks of many specimens.

    Args:
        path: What ``landmarkd detect`` wrote of many scans: a folder of landmark files or of
            answers in JSON, named after their scans, or one table of all.

    Returns:
        The specimens by name, the landmarks in the order in which they are first listed.

    Raises:
        BadParameter: There is no such thing, a file cannot be read, or two have one name.
    """
    found: dict[str, Mapping[str, RasPoint]] = {}
    for name, points in _read_table(path) if path.is_file() else _read_folder(path):
        if name in found:
            raise BadParameter(f"expected each specimen once, got {name} twice in {path}")
        found[name] = points
    names = dict.fromkeys(name for points in found.values() for name in points)
    if not names:
        raise BadParameter(f"expected landmark files or a table of them, found none in {path}")
    stack = [[points.get(name, MISSING) for name in names] for points in found.values()]
    return Cohort(tuple(found), tuple(names), np.array(stack, dtype=np.float64))


def _read_folder(folder: Path) -> Iterator[Specimen]:
    if not folder.is_dir():
        raise BadParameter(f"expected a folder of landmark files, or a table, got {folder}")
    for path in list_shown(folder):
        try:
            if is_landmark_file(path):
                yield name_in_utf8(landmark_stem(path)), read_landmarks(path, undefined=True)
            elif path.name.endswith(ANSWER_SUFFIX):
                answer = LandmarksAnswer.model_validate_json(path.read_bytes())
                points = {one.name: np.array(one.ras_mm or MISSING) for one in answer.landmarks}
                yield name_in_utf8(path.name.removesuffix(ANSWER_SUFFIX)), points
        except ValidationError:
            raise BadParameter(f"{path.name}: expected an answer of landmarkd, got none") from None
        except (ValueError, OSError) as error:
            raise BadParameter(f"{path.name}: {error}") from error


def _read_table(path: Path) -> Iterator[Specimen]:
    """Read a table with a row for each landmark of each scan."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            yield from _read_rows(path.name, csv.DictReader(file)).items()
    except (UnicodeDecodeError, csv.Error) as error:
        raise BadParameter(f"{path.name}: expected a table as CSV in UTF-8: {error}") from error


def _read_rows(table: str, rows: "csv.DictReader[str]") -> dict[str, dict[str, RasPoint]]:
    axes = ("ras_x_mm", "ras_y_mm", "ras_z_mm")
    columns = rows.fieldnames or ()
    if not {"scan", "label", *axes} <= set(columns):
        raise BadParameter(
            f"{table}: expected a table with columns scan, label, {', '.join(axes)}, "
            f"got {','.join(columns)[:200] or 'none'}"
        )
    specimens: dict[str, dict[str, RasPoint]] = {}
    for row in rows:
        if not any(row[name] for name in ("scan", "label", *axes)):
            continue  # A spreadsheet may end in rows of commas alone.
        cells = [row[axis] for axis in axes]
        if (point := _read_point(cells)) is None:
            raise BadParameter(
                f"{table}, line {rows.line_num}: expected three finite numbers, or none, got "
                f"{','.join(cell or '' for cell in cells)}"
            )
        points = specimens.setdefault(row["scan"], {})
        if row["label"] in points:
            raise BadParameter(f"{table}: {row['scan']} lists {row['label']} twice")
        points[row["label"]] = point
    return specimens


def _read_point(cells: Sequence[str | None]) -> RasPoint | None:
    """Read x, y, z, NaN where all are missing; None if they are neither a point nor missing.

    Spreadsheets may leave out the commas behind the last cell of a row that holds something.
    """
    try:
        point = np.array([np.nan if is_missing(cell) else float(cell or "") for cell in cells])
    except ValueError:
        return None
    return point if np.isfinite(point).all() or np.isnan(point).all() else None
