"""LandmarksAnswer -> files that 3D Slicer and spreadsheets open: mrk.json, fcsv, csv, tsv.

Positions are in mm, LPS. A missing landmark keeps its row and its label but has no position.
"""

import csv
import io
import json
from collections.abc import Iterable
from typing import Final

from app.io.schemas import MARKUPS_SCHEMA, LandmarkAnswer, LandmarksAnswer

FCSV_HEADER: Final = (
    "# Markups fiducial file version = 4.11\n"
    "# CoordinateSystem = LPS\n"
    "# columns = id,x,y,z,ow,ox,oy,oz,vis,sel,lock,label,desc,associatedNodeID\n"
)
TABLE_COLUMNS: Final = (
    "label", "l", "p", "s",
    "defined", "selected", "visible", "locked", "description",
)  # fmt: skip
LONG_COLUMNS: Final = (
    "label", "status", "confidence",
    "l", "p", "s", "ras_x_mm", "ras_y_mm", "ras_z_mm", "i", "j", "k",
    "spread_mm", "region95_mm", "description",
)  # fmt: skip
# vtkMRMLMarkupsNode::PositionStatus, written after the columns that the header names.
FCSV_UNDEFINED: Final = 0
FCSV_DEFINED: Final = 2


def write_mrk_json(answer: LandmarksAnswer) -> bytes:
    """Write a Slicer Markups file, schema 1.0.3, with the confidence as a measurement."""
    markup = {
        "type": "Fiducial",
        "name": answer.model.name,
        "coordinateSystem": "LPS",
        "coordinateUnits": "mm",
        "locked": False,
        "fixedNumberOfControlPoints": False,
        "labelFormat": "%N-%d",
        "lastUsedControlPointNumber": len(answer.landmarks),
        "controlPoints": [
            _control_point(number, landmark)
            for number, landmark in enumerate(answer.landmarks, start=1)
        ],
        "measurements": [
            {
                "name": "confidence",
                "enabled": True,
                "printFormat": "%5.3f",
                "controlPointValues": [landmark.confidence or 0.0 for landmark in answer.landmarks],
            }
        ],
    }
    return json.dumps({"@schema": MARKUPS_SCHEMA, "markups": [markup]}, indent=1).encode()


def write_fcsv(answer: LandmarksAnswer) -> bytes:
    """Write a legacy Slicer fiducial list (4.11)."""
    rows = []
    for number, landmark in enumerate(answer.landmarks, start=1):
        status = FCSV_UNDEFINED if landmark.lps_mm is None else FCSV_DEFINED
        place = landmark.lps_mm or (0, 0, 0)
        flags = (0, 0, 0, 1, 1, 1, 0)  # orientation as a quaternion, visible, selected, locked
        texts = (landmark.name, landmark.description, "")
        rows.append((number, *place, *flags, *texts, status, 0))
    return FCSV_HEADER.encode() + _table(rows, ",")


def write_csv(answer: LandmarksAnswer) -> bytes:
    """Write Slicer's control point table, comma-separated."""
    return _control_point_table(answer, ",")


def write_tsv(answer: LandmarksAnswer) -> bytes:
    """Write Slicer's control point table, tab-separated."""
    return _control_point_table(answer, "\t")


def write_long(answer: LandmarksAnswer) -> bytes:
    """Write a CSV of all that is known of each landmark, one row each; empty cell: unknown."""
    nowhere = ("", "", "")
    rows: list[Iterable[object]] = [LONG_COLUMNS]
    rows.extend(
        (
            landmark.name,
            landmark.status,
            landmark.confidence,
            *(landmark.lps_mm or nowhere),
            *(landmark.ras_mm or nowhere),
            *(landmark.ijk or nowhere),
            landmark.spread_mm,
            landmark.region95_mm,
            landmark.description,
        )
        for landmark in answer.landmarks
    )
    return _table(rows, ",")


def _control_point(number: int, landmark: LandmarkAnswer) -> dict[str, object]:
    point: dict[str, object] = {
        "id": str(number),
        "label": landmark.name,
        "description": landmark.description,
        "associatedNodeID": "",
        "orientation": [-1.0, 0.0, 0.0, 0.0, -1.0, 0.0, 0.0, 0.0, 1.0],
        "selected": True,
        "locked": False,
        "visibility": True,
        "positionStatus": "undefined" if landmark.lps_mm is None else "defined",
    }
    if landmark.lps_mm is not None:
        point["position"] = landmark.lps_mm
    return point


def _control_point_table(answer: LandmarksAnswer, separator: str) -> bytes:
    rows: list[Iterable[object]] = [TABLE_COLUMNS]
    for landmark in answer.landmarks:
        defined = int(landmark.lps_mm is not None)
        place = landmark.lps_mm or (0, 0, 0)
        rows.append((landmark.name, *place, defined, 1, 1, 0, landmark.description))
    return _table(rows, separator)


def _table(rows: Iterable[Iterable[object]], separator: str) -> bytes:
    text = io.StringIO()
    csv.writer(text, delimiter=separator, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()
