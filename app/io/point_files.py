"""Named points -> a file that 3D Slicer opens: its Markups, schema 1.0.3."""

import json
from collections.abc import Sequence

import numpy as np

from app.geometry import LPS_FROM_RAS, Points, transform
from app.io.schemas import MARKUPS_SCHEMA


def markups_json(names: Sequence[str], points: Points) -> str:
    """Write named points, in mm, RAS, as a 3D Slicer Markups document (LPS mm).

    Points that are NaN are listed as undefined and have no position.
    """
    controls: list[dict[str, object]] = []
    for name, point in zip(names, transform(LPS_FROM_RAS, points), strict=True):
        if np.isfinite(point).all():
            place = {"position": point.tolist(), "positionStatus": "defined"}
            controls.append({"label": name, **place})
        else:
            controls.append({"label": name, "positionStatus": "undefined"})
    markup = {
        "type": "Fiducial",
        "coordinateSystem": "LPS",
        "coordinateUnits": "mm",
        "controlPoints": controls,
    }
    return json.dumps({"@schema": MARKUPS_SCHEMA, "markups": [markup]}, indent=1) + "\n"
