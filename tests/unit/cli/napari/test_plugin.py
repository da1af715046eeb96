"""The plugin, in a real napari; these tests run where it is installed, without a display.

QT_QPA_PLATFORM=offscreen python -m pytest tests/unit/cli/napari
"""

import gzip
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

from app.cli.client import Client, ProblemError
from app.errors import BadVoxels
from app.geometry import transform
from app.io import LandmarksAnswer, write_nifti
from app.io.slicer import write_mrk_json
from tests.support.answers import make_answer
from tests.support.napari_window import make_context_current
from tests.support.scan_files import as_nrrd
from tests.support.services import ServiceProcess, toy_models, toy_scan

if find_spec("napari") is not None:
    make_context_current()
napari = pytest.importorskip("napari", reason="needs the extra napari")
npe2 = pytest.importorskip("npe2")
pytestmark = pytest.mark.filterwarnings("default")  # Qt's and napari's own are not ours

MANIFEST = Path(__file__).resolve().parents[4] / "app" / "cli" / "napari" / "napari.yaml"
AFFINE = np.array([[0, -2, 0, 9], [3, 0, 0, -4], [0, 0.1, 1, 2], [0, 0, 0, 1.0]])
VOXELS = np.random.default_rng(3).normal(size=(6, 7, 9)).astype(np.float32)
POINTS = np.array([[1.0, 2.0, 3.0], [np.nan] * 3, [4.0, 5.0, 6.0]])


@pytest.fixture
def plugin() -> Any:
    from app.cli.napari import plugin  # noqa: PLC0415 - it imports napari

    return plugin


@pytest.fixture
def viewer() -> Iterator[Any]:
    """A window of napari, in which the plugin is installed."""
    manager = npe2.PluginManager.instance()
    if "landmarkd" not in manager:
        manager.register(npe2.PluginManifest.from_file(MANIFEST))
    opened = napari.Viewer(show=False)
    yield opened
    opened.close()


def layers_of(reader: Callable[[str], list[Any]] | None, path: Path) -> list[Any]:
    assert reader is not None
    return [napari.layers.Layer.create(*layer) for layer in reader(str(path))]


def answer_of() -> LandmarksAnswer:
    answer = make_answer(["a", "b", "c"], POINTS, [0.6, None, None])
    doubtful = answer.landmarks[2].model_copy(update={"status": "low_confidence"})
    landmarks = [*answer.landmarks[:2], doubtful]
    return answer.model_copy(update={"landmarks": landmarks, "warnings": ["voxels are large"]})


@pytest.mark.parametrize("name", ["scan.nii", "scan.nrrd"])
def test_scan_lies_in_its_world(plugin: Any, tmp_path: Path, name: str) -> None:
    content = write_nifti(VOXELS, AFFINE) if name.endswith("nii") else as_nrrd(VOXELS, AFFINE)
    (tmp_path / name).write_bytes(content)
    (layer,) = layers_of(plugin.get_scan_reader(str(tmp_path / name)), tmp_path / name)
    # Its first two axes are exchanged.
    np.testing.assert_array_equal(layer.data, VOXELS.swapaxes(0, 1))
    assert_allclose(layer.data_to_world((2, 1, 3)), transform(AFFINE, np.array([1.0, 2, 3])))
    assert_allclose(plugin.affine_of(layer), AFFINE[:, [1, 0, 2, 3]], atol=1e-5)
    assert [str(unit) for unit in layer.units] == ["millimeter"] * 3


def test_image_is_sent_in_mm_whatever_its_unit_of_length(plugin: Any) -> None:
    image = napari.layers.Image(VOXELS, scale=(400, 0.5, 2), units=("um", "mm", "pixel"))
    assert_allclose(plugin.affine_of(image), np.diag([0.4, 0.5, 2.0, 1.0]))


def test_answer_is_rings_as_large_as_its_regions(plugin: Any, tmp_path: Path) -> None:
    path = tmp_path / "answer.json"
    path.write_text(answer_of().model_dump_json())
    (layer,) = layers_of(plugin.get_landmarks_reader(str(path)), path)
    assert_allclose(layer.data, POINTS[[0, 2]])
    assert_allclose(layer.size, [1.2, 1.0])
    assert layer.text.values.tolist() == ["a", "c"]
    assert list(layer.features["status"]) == ["detected", "low_confidence"]
    assert not np.array_equal(layer.border_color[0], layer.border_color[1])
    assert [str(symbol) for symbol in layer.symbol] == ["disc", "cross"]
    assert layer.name == "answer m, 1 doubtful, 1 not found"


def test_warnings_are_shown_and_stay_with_the_layer(plugin: Any, tmp_path: Path) -> None:
    path = tmp_path / "answer.json"
    path.write_text(answer_of().model_dump_json())
    records = napari.utils.notifications.notification_manager.records
    before = len(records)
    (layer,) = layers_of(plugin.get_landmarks_reader(str(path)), path)
    assert [record.message for record in records[before:]] == ["answer: voxels are large"]
    assert layer.metadata["warnings"] == ["voxels are large"]


def test_points_of_slicer_lie_where_those_of_the_answer_do(plugin: Any, tmp_path: Path) -> None:
    path = tmp_path / "points.mrk.json"
    path.write_bytes(write_mrk_json(answer_of()))
    (layer,) = layers_of(plugin.get_landmarks_reader(str(path)), path)
    assert_allclose(layer.data, POINTS[[0, 2]], atol=1e-3)
    assert layer.text.values.tolist() == ["a", "c"]


def test_other_json_is_left_to_other_plugins(plugin: Any, tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("{}")
    assert plugin.get_landmarks_reader(str(tmp_path / "other.json")) is None
    assert plugin.get_landmarks_reader(["a.json", "b.json"]) is None


def test_window_opens_scan_and_landmarks_by_the_plugin(viewer: Any, tmp_path: Path) -> None:
    (tmp_path / "scan.nii.gz").write_bytes(gzip.compress(write_nifti(VOXELS, AFFINE)))
    (tmp_path / "found.json").write_text(answer_of().model_dump_json())
    viewer.open(tmp_path / "scan.nii.gz", plugin="landmarkd")
    viewer.open(tmp_path / "found.json", plugin="landmarkd")
    assert [type(layer).__name__ for layer in viewer.layers] == ["Image", "Points"]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    process = ServiceProcess(toy_models(tmp_path_factory.mktemp("napari")))
    yield process
    process.kill()


def until(holds: Callable[[], object]) -> None:
    """Run Qt's event loop until something holds."""
    application, end = napari.qt.get_qapp(), time.monotonic() + 60
    while not holds():
        application.processEvents()
        assert time.monotonic() < end


def test_button_sends_the_image_and_shows_its_landmarks(
    viewer: Any, service: ServiceProcess, tmp_path: Path
) -> None:
    (tmp_path / "scan.nii").write_bytes(toy_scan())
    viewer.open(tmp_path / "scan.nii", plugin="landmarkd")
    _, panel = viewer.window.add_plugin_dock_widget("landmarkd")
    panel.address.value = service.url
    panel.call_button.native.click()
    until(lambda: len(viewer.layers) == 2)
    points = viewer.layers[1]
    with Client(service.url) as client:
        landmarks = client.detect(toy_scan()).landmarks
    expected = {one.name: one.ras_mm for one in landmarks if one.ras_mm is not None}
    assert_allclose(points.data, list(expected.values()), atol=1e-4)
    assert list(points.features["name"]) == list(expected)


def test_refusal_of_the_service_reaches_the_window(
    viewer: Any, service: ServiceProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors: list[object] = []
    # From here napari's window shows errors.
    monkeypatch.setattr(sys, "excepthook", lambda _kind, error, _trace: errors.append(error))
    viewer.add_image(VOXELS)
    _, panel = viewer.window.add_plugin_dock_widget("landmarkd")
    panel.address.value, panel.model.value = service.url, "nobody"
    panel.call_button.native.click()
    until(lambda: errors)
    assert isinstance(errors[0], ProblemError)
    assert "nobody" in str(errors[0])
    assert len(viewer.layers) == 1


def test_colour_images_are_not_sent(plugin: Any, viewer: Any) -> None:
    image = viewer.add_image(np.zeros((5, 6, 3), np.uint8), rgb=True)
    with pytest.raises(BadVoxels, match="three axes"):
        plugin.find_landmarks()(viewer=viewer, image=image)
