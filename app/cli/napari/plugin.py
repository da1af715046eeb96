"""What napari's plugin offers: readers of scans and landmarks, and a widget that asks a service.

The world of all layers here is mm, RAS: a scan has the affine of its file, and points lie in the
world itself, so that their sizes are mm, too.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from magicgui import magic_factory
from napari import Viewer
from napari.layers import Image, Layer
from napari.qt.threading import WorkerBase, create_worker
from napari.types import LayerDataTuple
from napari.utils.notifications import show_warning
from pydantic import ValidationError

from app.cli.client import Client
from app.errors import BadVoxels
from app.geometry import Affine, assign_axes, scaling
from app.io import (
    LandmarksAnswer,
    RasPoint,
    is_landmark_file,
    read_file,
    read_landmarks,
    read_volume,
    write_nifti,
)

COLOURS: Final = {"detected": "lime", "low_confidence": "orange", "placed": "deepskyblue"}
"""Of the rings around points: as sure, doubtful, or from a file that says nothing of that."""

UNKNOWN_RADIUS_MM: Final = 0.5
"""Where no 95 % region is known; such points are crosses, as a ring would look like a region."""

UNITS: Final = ("mm", "mm", "mm")

Reader = Callable[[str], list[LayerDataTuple]]


def get_scan_reader(path: str | Sequence[str]) -> Reader | None:
    """Return what reads a scan; None for several files, which are no scan."""
    return _read_scan if isinstance(path, str) else None


def get_landmarks_reader(path: str | Sequence[str]) -> Reader | None:
    """Return what reads landmarks: an answer of the service, or a file of 3D Slicer's."""
    if not isinstance(path, str):
        return None
    if is_landmark_file(Path(path)):
        return _read_landmark_file
    try:
        LandmarksAnswer.model_validate_json(Path(path).read_bytes())
    except ValidationError:
        return None  # Any other JSON, which is for another plugin.
    return _read_answer


@magic_factory(
    call_button="Find landmarks",
    model={"tooltip": "Empty: the service's default model."},
    key={"widget_type": "Password", "tooltip": "Only for services that ask for one."},
)
def find_landmarks(
    viewer: Viewer,
    image: Image,
    address: str = "http://127.0.0.1:8000",
    model: str = "",
    key: str = "",
) -> WorkerBase:
    """Send an image to a service, and show its landmarks once they are there."""
    scan = write_nifti(_voxels_of(image), affine_of(image))

    def ask() -> LandmarksAnswer:
        with Client(address, api_key=key or None) as client:
            return client.detect(scan, model=model or None)

    def show(answer: LandmarksAnswer) -> None:
        viewer.add_layer(Layer.create(*as_points(answer, image.name)))

    # An error is raised again in the thread of the window, which shows it.
    return create_worker(ask, _connect={"returned": show})


def as_points(answer: LandmarksAnswer, name: str) -> LayerDataTuple:
    """Make the Points layer of an answer: rings of the size of 95 % regions, coloured by status.

    What the answer warns of is shown in napari's window, and stays in the metadata of the layer.
    """
    found = [one for one in answer.landmarks if one.ras_mm is not None]
    doubtful = sum(one.status == "low_confidence" for one in found)
    counts = {"doubtful": doubtful, "not found": len(answer.landmarks) - len(found)}
    said = "".join(f", {count} {what}" for what, count in counts.items() if count)
    for warning in answer.warnings:
        show_warning(f"{name}: {warning}")
    return _points(
        {one.name: np.array(one.ras_mm) for one in found},
        [one.region95_mm for one in found],
        [one.status for one in found],
        f"{name} {answer.model.name}{said}",
        answer.warnings,
    )


def affine_of(image: Image) -> Affine:
    """Return the map of an image's indices to mm of the world: its affine, scale and all the like.

    A world whose unit is no length, as of pixels, counts as one in mm.
    """
    corners = np.vstack([np.zeros(3), np.eye(3)])
    origin, *ends = (np.array(image.data_to_world(corner)) for corner in corners)
    affine = np.eye(4)
    affine[:3] = np.column_stack([*(end - origin for end in ends), origin])
    mm = [
        (1 * unit).to("mm").magnitude if unit.is_compatible_with("mm") else 1.0
        for unit in image.units
    ]
    return scaling(mm) @ affine


def _voxels_of(image: Image) -> np.ndarray:
    data = image.data[0] if image.multiscale else image.data
    if data.ndim != 3 or image.rgb:
        raise BadVoxels(f"expected an image of three axes, grey, got one of shape {data.shape}")
    return np.asarray(data)


def _read_scan(path: str) -> list[LayerDataTuple]:
    volume = read_volume(read_file(Path(path)))
    # In the order of the world's axes: napari slices no image whose affine exchanges them.
    order = np.argsort(assign_axes(volume.affine)[:, 0])
    affine = volume.affine[:, [*order, 3]]
    options = {"name": Path(path).name, "affine": affine, "units": UNITS}
    return [(volume.voxels.transpose(order), options, "image")]


def _read_answer(path: str) -> list[LayerDataTuple]:
    answer = LandmarksAnswer.model_validate_json(Path(path).read_bytes())
    return [as_points(answer, Path(path).stem)]


def _read_landmark_file(path: str) -> list[LayerDataTuple]:
    points = read_landmarks(Path(path))
    count = len(points)
    name = Path(path).name
    return [_points(points, [None] * count, ["placed"] * count, name)]


def _points(
    points: dict[str, RasPoint],
    radii_mm: list[float | None],
    statuses: list[str],
    name: str,
    warnings: Sequence[str] = (),
) -> LayerDataTuple:
    options: dict[str, Any] = {
        "name": name,
        "features": {"name": list(points), "status": statuses},
        "text": {"string": "{name}", "anchor": "upper_left", "color": "white"},
        "size": [2.0 * (radius or UNKNOWN_RADIUS_MM) for radius in radii_mm],
        "symbol": ["cross" if radius is None else "disc" for radius in radii_mm],
        "border_color": [COLOURS[status] for status in statuses],
        # A ring does not hide what it marks.
        "face_color": "transparent",
        "projection_mode": "rescale_spherical",
        "units": UNITS,
        "metadata": {"warnings": list(warnings)},
    }
    return np.array(list(points.values())).reshape(-1, 3), options, "points"
