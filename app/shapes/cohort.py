"""Landmark files of many specimens -> one array, in which what is missing stays missing."""

import csv
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from jaxtyping import Bool, Float64
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

DOUBTFUL: Final = "low_confidence"

Specimen = tuple[str, Mapping[str, RasPoint], Collection[str] | None]
"""Name; position in mm, RAS, of each landmark by name, NaN where it is missing; and the names of
those whose position is doubtful, None where the file does not say."""


@dataclass(frozen=True, slots=True)
class Cohort:
    """The landmarks of several specimens.

    Attributes:
        specimens: Names of the specimens.
        landmarks: Names of all landmarks that any of them lists.
        points: Positions in mm, RAS of each specimen's own scan; NaN where missing.
        doubtful: Which of them have low confidence; None if that is not known of all specimens.
    """

    specimens: tuple[str, ...]
    landmarks: tuple[str, ...]
    points: Float64[np.ndarray, "specimens landmarks 3"]
    doubtful: Bool[np.ndarray, "specimens landmarks"] | None = None

    def count_missing(self) -> int:
        """Count the points that are missing."""
        return int((~np.isfinite(self.points).all(axis=2)).sum())

    def count_doubtful(self) -> int:
        """Count the points that are known to be doubtful."""
        return 0 if self.doubtful is None else int(self.doubtful.sum())


def read_cohort(path: Path, *, detected_only: bool = False) -> Cohort:
    """Read the landmarks of many specimens.

    Args:
        path: What ``landmarkd detect`` wrote of many scans: a folder of landmark files or of
            answers in JSON, named after their scans, or one table of all.
        detected_only: Whether doubtful points count as missing.

    Returns:
        The specimens by name, the landmarks in the order in which they are first listed.

    Raises:
        BadParameter: There is no such thing, a file cannot be read, two have one name, or nothing
            says which points are doubtful, where that matters.
    """
    found: dict[str, Mapping[str, RasPoint]] = {}
    doubts: list[Collection[str] | None] = []
    for name, points, doubted in _read_table(path) if path.is_file() else _read_folder(path):
        if name in found:
            raise BadParameter(f"expected each specimen once, got {name} twice in {path}")
        found[name] = points
        doubts.append(doubted)
    names = dict.fromkeys(name for points in found.values() for name in points)
    if not names:
        raise BadParameter(f"expected landmark files or a table of them, found none in {path}")
    stack = [[points.get(name, MISSING) for name in names] for points in found.values()]
    stacked = np.array(stack, dtype=np.float64)
    said = [doubted for doubted in doubts if doubted is not None]
    known = len(said) == len(doubts)
    doubtful = np.array([[name in one for name in names] for one in said]) if known else None
    if detected_only:
        if doubtful is None:
            raise BadParameter(
                "expected answers in JSON, or a table with a column status, to leave out doubtful "
                f"points; got files that do not say which are in {path}"
            )
        stacked[doubtful] = np.nan
    return Cohort(tuple(found), tuple(names), stacked, doubtful)


def _read_folder(folder: Path) -> Iterator[Specimen]:
    if not folder.is_dir():
        raise BadParameter(f"expected a folder of landmark files, or a table, got {folder}")
    for path in list_shown(folder):
        try:
            if is_landmark_file(path):
                yield name_in_utf8(landmark_stem(path)), read_landmarks(path, undefined=True), None
            elif path.name.endswith(ANSWER_SUFFIX):
                answer = LandmarksAnswer.model_validate_json(path.read_bytes())
                points = {one.name: np.array(one.ras_mm or MISSING) for one in answer.landmarks}
                doubted = {one.name for one in answer.landmarks if one.status == DOUBTFUL}
                yield name_in_utf8(path.name.removesuffix(ANSWER_SUFFIX)), points, doubted
        except ValidationError:
            raise BadParameter(f"{path.name}: expected an answer of landmarkd, got none") from None
        except (ValueError, OSError) as error:
            raise BadParameter(f"{path.name}: {error}") from error


def _read_table(path: Path) -> Iterator[Specimen]:
    """Read a table with a row for each landmark of each scan."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            yield from _read_rows(path.name, csv.DictReader(file))
    except (UnicodeDecodeError, csv.Error) as error:
        raise BadParameter(f"{path.name}: expected a table as CSV in UTF-8: {error}") from error


def _read_rows(table: str, rows: "csv.DictReader[str]") -> list[Specimen]:
    axes = ("ras_x_mm", "ras_y_mm", "ras_z_mm")
    columns = rows.fieldnames or ()
    if not {"scan", "label", *axes} <= set(columns):
        raise BadParameter(
            f"{table}: expected a table with columns scan, label, {', '.join(axes)}, "
            f"got {','.join(columns)[:200] or 'none'}"
        )
    specimens: dict[str, dict[str, RasPoint]] = {}
    doubted: dict[str, set[str]] = {}
    for row in rows:
        if not any(row[name] for name in ("scan", "label", *axes)):
            continue  # A spreadsheet may end in rows of commas alone.
        if not (row["scan"] and row["label"]):  # None in a row that is cut short, as of a remark.
            raise BadParameter(
                f"{table}, line {rows.line_num}: expected a scan and a label, got a row without"
            )
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
        if row.get("status") == DOUBTFUL:
            doubted.setdefault(row["scan"], set()).add(row["label"])
    says = "status" in columns
    return [
        (name, points, doubted.get(name, ()) if says else None)
        for name, points in specimens.items()
    ]


def _read_point(cells: Sequence[str | None]) -> RasPoint | None:
    """Read x, y, z, NaN where all are missing; None if they are neither a point nor missing.

    Spreadsheets may leave out the commas behind the last cell of a row that holds something.
    """
    try:
        point = np.array([np.nan if is_missing(cell) else float(cell or "") for cell in cells])
    except ValueError:
        return None
    return point if np.isfinite(point).all() or np.isnan(point).all() else None
