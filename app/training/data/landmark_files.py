"""Landmark file -> named points: the formats that imaging tools write, read into RAS mm."""

import csv
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from jaxtyping import Float64

RasPoint = Float64[np.ndarray, " 3"]
Frame = Literal["LPS", "RAS"]
Named = Iterable[tuple[str, RasPoint]]

SUFFIXES: Final = (".mrk.json", ".fcsv", ".csv", ".tsv")
LPS_SIGN: Final = np.array([-1.0, -1.0, 1.0])


def read_landmarks(path: Path) -> dict[str, RasPoint]:
    """Read the defined points of a landmark file.

    Args:
        path: A 3D Slicer Markups file (``.mrk.json``), a Slicer list (``.fcsv``) or a table
            (``.csv``, ``.tsv``) with columns ``label,l,p,s`` (LPS mm) or ``name,x,y,z`` (RAS mm).

    Returns:
        Position in mm, RAS, by landmark name, in file order. Points that the file marks as not
        defined are left out.

    Raises:
        ValueError: The file is of no known kind, a name stands twice, or a number cannot be read.
    """
    try:
        return _by_name(_read(path)[1])
    except (ValueError, LookupError, TypeError, AttributeError, csv.Error) as error:
        # A file of another build fails wherever its build first differs.
        reason = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
        raise ValueError(f"{path.name} cannot be read: {reason}") from error


def declared_frame(path: Path) -> Frame:
    """Say which frame the numbers of a landmark file claim to be in; the file can be read."""
    return _read(path)[0]


def is_landmark_file(path: Path) -> bool:
    """Say whether a file's name is that of a landmark file."""
    return path.name.lower().endswith(SUFFIXES)


def landmark_stem(path: Path) -> str:
    """Name the scan that a landmark file belongs to: its file name without the known endings."""
    for suffix in SUFFIXES:
        if path.name.lower().endswith(suffix):
            return path.name[: -len(suffix)]
    return path.stem


def _by_name(pairs: Named) -> dict[str, RasPoint]:
    points: dict[str, RasPoint] = {}
    for label, point in pairs:
        if label in points:
            raise ValueError(f"expected every landmark once, got {label!r} twice")
        if not np.isfinite(point).all():
            raise ValueError(f"expected finite coordinates, got {point} for {label!r}")
        points[label] = point
    return points


def _read(path: Path) -> tuple[Frame, Named]:
    """Read the frame that a file declares, and its points, which are turned into RAS."""
    name = path.name.lower()
    if not is_landmark_file(path):
        raise ValueError(f"expected a file ending in {', '.join(SUFFIXES)}, got {path.name}")
    text = path.read_text(encoding="utf-8-sig")
    if name.endswith(".mrk.json"):
        return _markups(json.loads(text))
    if name.endswith(".fcsv"):
        return _fcsv(text)
    reader = csv.DictReader(text.splitlines(), delimiter="\t" if name.endswith("tsv") else ",")
    return _table(reader)


def _markups(document: Mapping[str, Any]) -> tuple[Frame, Named]:
    frame: Frame = "LPS"
    pairs = []
    for markup in document["markups"]:
        frame = "LPS" if str(markup.get("coordinateSystem", "LPS")) in ("LPS", "1") else "RAS"
        points = markup["controlPoints"]
        if not isinstance(points, list):
            raise TypeError(f"expected a list of controlPoints, got {type(points).__name__}")
        for point in points:
            if point.get("positionStatus", "defined") == "defined":
                place = np.asarray(point["position"], dtype=np.float64).reshape(3)
                pairs.append((str(point["label"]), _sign(frame) * place))
    return frame, pairs


def _fcsv(text: str) -> tuple[Frame, Named]:
    frame: Frame = "LPS"
    pairs = []
    for line in text.splitlines():
        if line.startswith("#"):
            if "CoordinateSystem" in line:
                # Slicer before 4.11 wrote numbers: 0 is RAS, 1 is LPS.
                frame = "RAS" if line.split("=")[1].strip() in ("RAS", "0") else "LPS"
            continue
        fields = next(csv.reader([line]), [])
        if len(fields) >= 12 and (len(fields) < 15 or fields[14] != "0"):
            pairs.append((fields[11], _sign(frame) * np.asarray(fields[1:4], dtype=np.float64)))
    return frame, pairs


def _table(rows: "csv.DictReader[str]") -> tuple[Frame, Named]:
    columns = rows.fieldnames or ()
    frame: Frame
    if {"label", "l", "p", "s"} <= set(columns):
        frame, label, axes = "LPS", "label", "lps"
    elif {"name", "x", "y", "z"} <= set(columns):
        frame, label, axes = "RAS", "name", "xyz"
    else:
        raise ValueError(
            f"expected columns label,l,p,s or name,x,y,z, got {','.join(columns) or 'none'}"
        )
    pairs = [
        (row[label], _sign(frame) * np.array([row[axis] for axis in axes], dtype=np.float64))
        for row in rows
        if row.get("defined", "1") not in ("0", "false")
    ]
    return frame, pairs


def _sign(frame: str) -> RasPoint:
    return LPS_SIGN if frame == "LPS" else np.ones(3)
