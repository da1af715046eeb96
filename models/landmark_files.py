"""Landmark file -> named points: the formats that imaging tools write, read into RAS mm."""

import csv
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import numpy as np
from jaxtyping import Float64

RasPoint = Float64[np.ndarray, " 3"]

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
    name = path.name.lower()
    if name.endswith(".mrk.json"):
        pairs = _markups(json.loads(path.read_text(encoding="utf-8")))
    elif name.endswith(".fcsv"):
        pairs = _fcsv(path.read_text(encoding="utf-8"))
    elif name.endswith((".csv", ".tsv")):
        lines = path.read_text(encoding="utf-8").splitlines()
        pairs = _table(csv.DictReader(lines, delimiter="\t" if name.endswith("tsv") else ","))
    else:
        raise ValueError(f"expected a file ending in {', '.join(SUFFIXES)}, got {path.name}")
    points: dict[str, RasPoint] = {}
    for label, point in pairs:
        if label in points:
            raise ValueError(f"expected every landmark once, got {label!r} twice in {path.name}")
        if not np.isfinite(point).all():
            raise ValueError(f"expected finite coordinates, got {point} for {label!r}")
        points[label] = point
    return points


def landmark_stem(path: Path) -> str:
    """Name the scan that a landmark file belongs to: its file name without the known endings."""
    for suffix in SUFFIXES:
        if path.name.lower().endswith(suffix):
            return path.name[: -len(suffix)]
    return path.stem


def _markups(document: Mapping[str, list[dict[str, object]]]) -> Iterable[tuple[str, RasPoint]]:
    for markup in document["markups"]:
        system = str(markup.get("coordinateSystem", "LPS"))
        sign = LPS_SIGN if system in ("LPS", "1") else np.ones(3)
        points = markup["controlPoints"]
        if not isinstance(points, list):
            raise TypeError(f"expected a list of controlPoints, got {type(points).__name__}")
        for point in points:
            if point.get("positionStatus", "defined") == "defined":
                yield str(point["label"]), sign * np.asarray(point["position"], dtype=np.float64)


def _fcsv(text: str) -> Iterable[tuple[str, RasPoint]]:
    sign = LPS_SIGN
    for line in text.splitlines():
        if line.startswith("#"):
            if "CoordinateSystem" in line:
                system = line.split("=")[1].strip()
                # Slicer before 4.11 wrote numbers: 0 is RAS, 1 is LPS.
                sign = np.ones(3) if system in ("RAS", "0") else LPS_SIGN
            continue
        fields = next(csv.reader([line]), [])
        if len(fields) >= 12 and (len(fields) < 15 or fields[14] != "0"):
            yield fields[11], sign * np.asarray(fields[1:4], dtype=np.float64)


def _table(rows: Iterable[Mapping[str, str]]) -> Iterable[tuple[str, RasPoint]]:
    for row in rows:
        if row.get("defined", "1") in ("0", "false"):
            continue
        if "l" in row:
            yield (
                row["label"],
                LPS_SIGN * np.array([row["l"], row["p"], row["s"]], dtype=np.float64),
            )
        else:
            yield row["name"], np.array([row["x"], row["y"], row["z"]], dtype=np.float64)
