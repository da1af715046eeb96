"""Landmark files of 3D Slicer and spreadsheets, written and read: mrk.json, fcsv, CSV, TSV.

Written positions are in mm, LPS; a missing landmark keeps its row and its label but has no
position. Files of other tools may be in RAS; whatever is read is turned into mm, RAS.
"""

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from jaxtyping import Float64

from app.geometry import LPS_FROM_RAS, Points, transform
from app.io.schemas import LandmarkAnswer, LandmarksAnswer, MeasurementAnswer, Triple

RasPoint = Float64[np.ndarray, " 3"]
Frame = Literal["LPS", "RAS"]


class FilePoint(NamedTuple):
    """A point of a file: in mm, RAS, None if not defined; and whether it is not in the scan."""

    label: str
    ras_mm: RasPoint | None
    absent: bool = False


MARKUPS_SCHEMA: Final = (
    "https://raw.githubusercontent.com/slicer/slicer/master/Modules/Loadable/Markups/"
    "Resources/Schema/markups-schema-v1.0.3.json#"
)
"""Slicer refuses Markups files that do not name their schema."""

LANDMARK_SUFFIXES: Final = (".mrk.json", ".fcsv", ".csv", ".tsv")
"""Of the files that ``read_landmarks`` reads."""

FCSV_HEADER: Final = (
    "# Markups fiducial file version = 4.11\n"
    "# CoordinateSystem = LPS\n"
    "# columns = id,x,y,z,ow,ox,oy,oz,vis,sel,lock,label,desc,associatedNodeID\n"
)
TABLE_COLUMNS: Final = ("label", *"lps", "defined", "selected", "visible", "locked", "description")
LONG_COLUMNS: Final = (
    "label", "status", "confidence",
    "l", "p", "s", "ras_x_mm", "ras_y_mm", "ras_z_mm", "i", "j", "k",
    "spread_mm", "region95_mm", "decided_by", "description", "warnings",
)  # fmt: skip
MEASUREMENT_COLUMNS: Final = (
    "name", "value", "unit", "low95", "high95", "reason", "description", "warnings",
)  # fmt: skip
OWN_KEY: Final = "landmarkd"
"""What Slicer's schema has no key for stands under one of our own, which Slicer passes over."""

READ_TABLES: Final[Sequence[tuple[str, str, Frame]]] = (
    ("label", "lps", "LPS"),
    ("label", "ras", "RAS"),
    ("name", "xyz", "RAS"),
)
"""Columns of the names and of the axes, and the frame, of tables that are read."""

# vtkMRMLMarkupsNode::PositionStatus, written after the columns that the header names.
FCSV_UNDEFINED: Final = 0
FCSV_DEFINED: Final = 2
FCSV_MISSING: Final = 3
FCSV_LABEL: Final = 11
FCSV_STATUS: Final = 14

RAS_SIGNS: Final[Mapping[Frame, RasPoint]] = {"LPS": np.array([-1.0, -1.0, 1.0]), "RAS": np.ones(3)}
"""Factors from the frame of a file to RAS."""

FRAMES: Final[Mapping[str, Frame]] = {"LPS": "LPS", "1": "LPS", "RAS": "RAS", "0": "RAS"}
"""Names of frames in files; Slicer before 4.11 wrote numbers."""


def write_mrk_json(answer: LandmarksAnswer) -> bytes:
    """Write a Slicer Markups file, schema 1.0.3, with the confidence as a measurement."""
    landmarks = answer.landmarks
    confidence = {
        "name": "confidence",
        "enabled": True,
        "printFormat": "%5.3f",
        "controlPointValues": [_certainty(landmark) for landmark in landmarks],
    }
    points = [(landmark.name, _described(landmark), landmark.lps_mm) for landmark in landmarks]
    measured = [
        {
            "name": one.name,
            "enabled": True,
            "value": one.value,
            "units": one.unit,
            "description": _interval(one),
        }
        for one in answer.measurements
        if one.value is not None
    ]
    return _markups(points, [confidence, *measured]).encode()


def markups_json(names: Sequence[str], points: Points) -> str:
    """Write named points as a Slicer Markups file, schema 1.0.3.

    Args:
        names: Labels of the points.
        points: In mm, RAS; NaN: undefined, listed without a position.
    """
    lps = transform(LPS_FROM_RAS, points)
    positions = [(x, y, z) if np.isfinite([x, y, z]).all() else None for x, y, z in lps.tolist()]
    return _markups([(name, "", at) for name, at in zip(names, positions, strict=True)], [])


def write_fcsv(answer: LandmarksAnswer) -> bytes:
    """Write a legacy Slicer fiducial list (4.11), whose reader stops at a line of 1024 bytes."""
    rows = []
    for number, landmark in enumerate(answer.landmarks, start=1):
        status = FCSV_UNDEFINED if landmark.lps_mm is None else FCSV_DEFINED
        position = landmark.lps_mm or (0, 0, 0)
        flags = (0, 0, 0, 1, 1, 1, 0)  # orientation as a quaternion, visible, selected, locked
        description = _described(landmark, max_bytes=300)  # A label may take half of a line.
        rows.append((number, *position, *flags, landmark.name, description, "", status, 0))
    told = (*answer.warnings, *map(_measured, answer.measurements))
    remarks = "".join(f"# {line}\n" for one in told for line in wrap(one, 250))
    return (FCSV_HEADER + remarks + csv_text(rows)).encode()


def write_table(answer: LandmarksAnswer, separator: str = ",") -> bytes:
    """Write Slicer's control point table."""
    rows: list[Iterable[object]] = [TABLE_COLUMNS]
    for landmark in answer.landmarks:
        defined, position = int(landmark.lps_mm is not None), landmark.lps_mm or (0, 0, 0)
        rows.append((landmark.name, *position, defined, 1, 1, 0, _described(landmark)))
    return csv_text(rows, separator).encode()


def write_long(answer: LandmarksAnswer) -> bytes:
    """Write a CSV with one row for each landmark and all its fields; empty cell: unknown."""
    missing, warnings = ("", "", ""), " | ".join(answer.warnings)
    rows: list[Iterable[object]] = [LONG_COLUMNS]
    rows.extend(
        (
            *(one.name, one.status, one.confidence),
            *(one.lps_mm or missing),
            *(one.ras_mm or missing),
            *(one.ijk or missing),
            *(one.spread_mm, one.region95_mm, one.decided_by, one.description, warnings),
        )
        for one in answer.landmarks
    )
    return csv_text(rows).encode()


def write_measurements(answer: LandmarksAnswer) -> bytes:
    """Write a CSV with one row for each measurement; empty cell: unknown."""
    rows: list[Iterable[object]] = [MEASUREMENT_COLUMNS]
    warnings = " | ".join(answer.warnings)
    for one in answer.measurements:
        told = (*(one.interval95 or ("", "")), one.reason, one.description, warnings)
        rows.append((one.name, one.value, one.unit, *told))
    return csv_text(rows).encode()


def read_landmarks(path: Path, *, undefined: bool = False) -> dict[str, RasPoint]:
    """Read the points of a landmark file.

    Args:
        path: A 3D Slicer Markups file (``.mrk.json``), a Slicer list (``.fcsv``) or a table
            (``.csv``, ``.tsv``) with columns ``label,l,p,s`` (LPS mm), ``label,r,a,s`` or
            ``name,x,y,z`` (RAS mm); a point without coordinates, or with NA, is not defined.
        undefined: Whether to list points that the file marks as not defined, with NaN.

    Returns:
        Position in mm, RAS, by landmark name, in file order.

    Raises:
        ValueError: The file is of no known format, lists a name twice, or cannot be parsed.
    """
    return {
        name: np.full(3, np.nan) if point.ras_mm is None else point.ras_mm
        for name, point in read_points(path).items()
        if undefined or point.ras_mm is not None
    }


def read_points(path: Path) -> dict[str, FilePoint]:
    """Read all that a landmark file says of its points, in mm, RAS; as ``read_landmarks``."""
    try:
        return _by_name(_read(path)[1])
    except (ValueError, LookupError, TypeError, AttributeError, csv.Error) as error:
        # An unexpected structure may raise any of these.
        kind = {ValueError: "", KeyError: "nothing by the name of "}.get(type(error))
        reason = f"{type(error).__name__}: {error}" if kind is None else f"{kind}{error}"
        raise ValueError(f"{path.name} cannot be read: {reason}") from error


def declared_frame(path: Path) -> Frame:
    """Return the frame that a readable landmark file declares for its coordinates."""
    return _read(path)[0]


def is_missing(cell: str | None) -> bool:
    """Return whether a cell of a table stands for no number: it is empty, or R's NA, or NaN."""
    return (cell or "").strip().lower() in {"", "na", "nan"}


def is_landmark_file(path: Path) -> bool:
    """Return whether a file has one of the suffixes of landmark files."""
    return path.name.lower().endswith(LANDMARK_SUFFIXES)


def landmark_stem(path: Path) -> str:
    """Return the name of the scan that a landmark file belongs to: its name without suffixes."""
    for suffix in LANDMARK_SUFFIXES:
        if path.name.lower().endswith(suffix):
            return path.name[: -len(suffix)]
    return path.stem


def _measured(measurement: MeasurementAnswer) -> str:
    """Describe a measurement in one line."""
    value = "none" if measurement.value is None else f"{measurement.value:.4g} {measurement.unit}"
    return f"{measurement.name}: {value} ({_interval(measurement)})"


def _described(landmark: LandmarkAnswer, max_bytes: int | None = None) -> str:
    """Describe a landmark, with what Slicer has no place for: status or region, or who decided."""
    region_mm, judgement = landmark.region95_mm, landmark.judgement
    if judgement != "unjudged":
        remark = f"{'marked absent' if judgement == 'absent' else judgement} by a person"
    elif landmark.status != "detected":
        remark = landmark.status.replace("_", " ")
    else:
        remark = "" if region_mm is None else f"95 % within {region_mm:.3g} mm"
    # Slicer takes each line of a table for a row, whatever quotes are around it.
    told = " ".join(landmark.description.split()).encode()[:max_bytes].decode(errors="ignore")
    return "; ".join(filter(None, (told, remark)))


def _certainty(landmark: LandmarkAnswer) -> float:
    """Return the confidence as a number, which Slicer expects; 1 for a point placed by a person."""
    if landmark.confidence is None:
        return float(landmark.judgement == "placed")
    return landmark.confidence


def _interval(measurement: MeasurementAnswer) -> str:
    """Describe how sure a measurement is."""
    if measurement.interval95 is None:
        return measurement.reason
    return "95 % interval {:.4g} to {:.4g}".format(*measurement.interval95)


def _markups(
    points: Iterable[tuple[str, str, Triple | None]],
    measurements: Sequence[Mapping[str, object]],
) -> str:
    """Write a Markups file from labels, descriptions and positions in mm, LPS.

    It has no name of its own: Slicer then names the list after the file, so that those of many
    scans can be told apart.
    """
    controls = [
        {
            "id": str(number),
            "label": label,
            "description": description,
            "associatedNodeID": "",
            "orientation": [-1.0, 0.0, 0.0, 0.0, -1.0, 0.0, 0.0, 0.0, 1.0],
            "selected": True,
            "locked": False,
            "visibility": True,
            "positionStatus": "undefined" if lps_mm is None else "defined",
        }
        | ({} if lps_mm is None else {"position": lps_mm})
        for number, (label, description, lps_mm) in enumerate(points, start=1)
    ]
    markup = {
        "type": "Fiducial",
        "coordinateSystem": "LPS",
        "coordinateUnits": "mm",
        "locked": False,
        "fixedNumberOfControlPoints": False,
        "labelFormat": "%N-%d",
        "lastUsedControlPointNumber": len(controls),
        "controlPoints": controls,
        "measurements": measurements,
    }
    return json.dumps({"@schema": MARKUPS_SCHEMA, "markups": [markup]}, indent=1)


def csv_text(rows: Iterable[Iterable[object]], separator: str = ",") -> str:
    """Write rows of cells as a table; cells that hold a character of a line's end are quoted."""
    text, end = io.StringIO(), "\r\n\0"  # No text holds all three.
    csv.writer(text, delimiter=separator, lineterminator=end).writerows(rows)
    return text.getvalue().replace(end, "\n")


def _by_name(points: Iterable[FilePoint]) -> dict[str, FilePoint]:
    named: dict[str, FilePoint] = {}
    for label, ras_mm, absent in points:
        if label in named:
            raise ValueError(f"expected every landmark once, got {label!r} twice")
        if ras_mm is not None and not np.isfinite(ras_mm).all():
            raise ValueError(f"expected finite coordinates, got {ras_mm} for {label!r}")
        named[label] = FilePoint(label, ras_mm, absent)
    return named


def _read(path: Path) -> tuple[Frame, list[FilePoint]]:
    """Read the frame that a file declares, and its points, converted to RAS."""
    name = path.name.lower()
    if not is_landmark_file(path):
        raise ValueError(
            f"expected a file ending in {', '.join(LANDMARK_SUFFIXES)}, got {path.name}"
        )
    # Lines end in \n alone here: texts may hold what splitlines takes for ends, such as U+2028.
    text = path.read_text(encoding="utf-8-sig")
    if name.endswith(".mrk.json"):
        return _read_markups(json.loads(text))
    if name.endswith(".fcsv"):
        return _read_fcsv(text)
    separator = "\t" if name.endswith("tsv") else ","
    return _read_table(csv.DictReader(text.split("\n"), delimiter=separator))


def _read_markups(document: Mapping[str, Any]) -> tuple[Frame, list[FilePoint]]:
    frame: Frame = "LPS"
    points: list[FilePoint] = []
    for markup in document["markups"]:
        frame = _frame(str(markup.get("coordinateSystem", "LPS")))
        units = markup.get("coordinateUnits", "mm")
        # Perhaps a code, its scheme and its meaning: mm, UCUM, millimeter.
        if (units[0] if isinstance(units, list) else units) != "mm":
            raise ValueError(f"expected coordinates in mm, got {units}")
        controls = markup["controlPoints"]
        if not isinstance(controls, list):
            raise TypeError(f"expected a list of controlPoints, got {type(controls).__name__}")
        for control in controls:
            position, status = None, control.get("positionStatus", "defined")
            if status == "defined":
                position = RAS_SIGNS[frame] * np.array(control["position"], np.float64).reshape(3)
            judged = control.get(OWN_KEY) or {}
            absent = status == "missing" or judged.get("decided_by") == "person"
            points.append(FilePoint(str(control["label"]), position, absent and position is None))
    return frame, points


def _read_fcsv(text: str) -> tuple[Frame, list[FilePoint]]:
    frame: Frame | None = None
    points: list[FilePoint] = []
    lines = text.split("\n")
    for line in lines:
        if line.startswith("#") and "CoordinateSystem" in line:
            # A spreadsheet fills the line up with commas.
            frame = _frame(line.partition("=")[2].partition(",")[0])
    if frame is None:
        raise ValueError("expected a line '# CoordinateSystem = LPS' or RAS, got none")
    for row in csv.reader(line for line in lines if not line.startswith("#")):
        if not any(row):
            continue
        if len(row) <= FCSV_LABEL:
            raise ValueError(f"expected rows of at least 12 columns, got {len(row)}")
        ras_mm = RAS_SIGNS[frame] * np.asarray(row[1:4], dtype=np.float64)
        # Before Slicer 4.11, all points are defined.
        status = int("".join(row[FCSV_STATUS : FCSV_STATUS + 1]) or FCSV_DEFINED)
        position = ras_mm if status == FCSV_DEFINED else None
        points.append(FilePoint(row[FCSV_LABEL], position, status == FCSV_MISSING))
    return frame, points


def _frame(name: str) -> Frame:
    if (frame := FRAMES.get(name.strip().upper())) is None:
        raise ValueError(f"expected coordinates in LPS or RAS, got {name.strip()!r}")
    return frame


def _read_table(rows: "csv.DictReader[str]") -> tuple[Frame, list[FilePoint]]:
    columns = rows.fieldnames or ()
    for label, axes, frame in READ_TABLES:
        if {label, *axes} <= set(columns):
            # A spreadsheet may end in rows of commas alone.
            kept = (row for row in rows if any(row[name] for name in (label, *axes)))
            return frame, [FilePoint(row[label] or "", _position(row, axes, frame)) for row in kept]
    raise ValueError(
        "expected columns label,l,p,s or label,r,a,s or name,x,y,z, got "
        f"{','.join(columns) or 'none'}"
    )


def _position(row: Mapping[str, str], axes: str, frame: Frame) -> RasPoint | None:
    """Read the position of a row; None if it has none, or says that it means nothing."""
    cells = [row[axis] for axis in axes]
    defined = (row.get("defined") or "1").strip().lower()
    is_defined = defined == "true" or (defined != "false" and float(defined) != 0)
    if not is_defined or all(map(is_missing, cells)):
        return None
    return RAS_SIGNS[frame] * np.array(cells, dtype=np.float64)
