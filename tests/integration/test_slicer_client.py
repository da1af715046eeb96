"""The client for 3D Slicer: its HTTP layer and its module, against the real service."""

import importlib
import json
import socket
import sys
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import nibabel as nib
import numpy as np
import pytest
from LandmarkdLib.service import BackgroundRequest, Service, ServiceError
from numpy.testing import assert_allclose

from app.api.dependencies import hash_key
from app.io import landmark_stem, read_landmarks, read_truth, read_volume
from app.phantom import make_phantom, write_phantom
from tests.support import slicer_standin
from tests.support.services import RAW, ServiceProcess
from tests.support.slicer_standin import vtkMRMLScalarVolumeNode as Volume

MODELS = Path(__file__).resolve().parents[2] / "models"
KEY = "of-slicer"
FOREIGN_KEY = "schl\xfcssel \u2013 1"
BEARER = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store") / "phantom"


@pytest.fixture(scope="module")
def service(store: Path) -> Iterator[ServiceProcess]:
    keys = f"{hash_key(KEY)},{sha256(FOREIGN_KEY.encode()).hexdigest()}"
    process = ServiceProcess(MODELS, API_KEYS=keys, STORE=str(store.parent))
    yield process
    process.kill()


@pytest.fixture(scope="module")
def scan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A phantom without one of its landmarks."""
    path = tmp_path_factory.mktemp("scan") / "phantom.nii.gz"
    write_phantom(make_phantom(6), path)
    return path


@pytest.fixture(scope="module")
def answer(service: ServiceProcess, scan: Path) -> dict[str, Any]:
    """What the service says of the scan."""
    url = f"{service.url}/v1/landmarks?model=phantom"
    made: dict[str, Any] = httpx.post(
        url, content=scan.read_bytes(), headers=RAW | BEARER, timeout=60
    ).json()
    assert None in [each["ras_mm"] for each in made["landmarks"]]
    return made


def test_models_of_the_service_are_listed(service: ServiceProcess) -> None:
    assert "phantom" in Service(f"{service.url}/", KEY).models()
    assert "phantom" in Service(service.url.removeprefix("http://"), KEY).models()
    assert "phantom" in Service(service.url, FOREIGN_KEY).models()
    assert "phantom" in Service(service.url, f"{KEY}\n").models()


def test_a_key_that_cannot_be_sent_is_not_told(service: ServiceProcess) -> None:
    with pytest.raises(ServiceError, match="expected a key of one line") as caught:
        Service(service.url, f"{KEY}\n{KEY}").models()
    assert KEY not in str(caught.value)


def test_a_silent_service_does_not_keep_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its models are asked for in the window's thread, which stood still for 10 minutes."""
    monkeypatch.setattr("LandmarkdLib.service.CONNECT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began = time.monotonic()
        with pytest.raises(ServiceError, match=r"got TimeoutError|timed out"):
            Service("http://127.0.0.1:{1}".format(*silent.getsockname())).models()
    assert time.monotonic() - began < 10


def test_landmarks_are_those_of_the_service_and_progress_is_told(
    service: ServiceProcess, scan: Path, answer: dict[str, Any]
) -> None:
    told: list[tuple[str, float]] = []
    found = Service(service.url, KEY).detect(
        scan, "phantom", lambda text, share: told.append((text, share))
    )
    assert found["landmarks"] == [each | {"candidates": None} for each in answer["landmarks"]]
    assert told[0][0] == "sending the scan"
    assert told[-1][0].startswith("part ")
    assert all(-1.0 <= share <= 1.0 for _, share in told)


@pytest.mark.parametrize(
    ("key", "model", "message"),
    [("wrong", "phantom", "key"), (KEY, "nobody", "expected one of")],
)
def test_a_refusal_is_told_in_the_services_words(
    service: ServiceProcess, scan: Path, key: str, model: str, message: str
) -> None:
    with pytest.raises(ServiceError, match=message):
        Service(service.url, key).detect(scan, model, lambda *_: None)


def test_a_file_that_is_no_scan_is_refused(service: ServiceProcess, tmp_path: Path) -> None:
    (tmp_path / "scan.nrrd").write_bytes(b"no scan" * 300_000)
    with pytest.raises(ServiceError, match="expected"):
        Service(service.url, KEY).detect(tmp_path / "scan.nrrd", "phantom", lambda *_: None)


@pytest.mark.parametrize(
    "address", ["", "ftp://here", "http://here:port", "http://[::1", "http://127.0.0.1:9"]
)
def test_an_address_without_a_service_is_told(address: str) -> None:
    with pytest.raises(ServiceError, match="expected"):
        Service(address).models()


@pytest.mark.parametrize("stage", ["sending the scan", "preparing the scan"])
def test_cancelling_ends_the_request_here_and_there(
    service: ServiceProcess, scan: Path, stage: str
) -> None:
    connection = Service(service.url, KEY)

    def cancel_at(text: str, _share: float) -> None:
        if text == stage:
            connection.cancel()

    with pytest.raises(CancelledError):
        connection.detect(scan, "phantom", cancel_at)
    service.wait_for(code="client-left")


def test_a_request_in_the_background_hands_over_its_answer_or_its_error(
    service: ServiceProcess, scan: Path, answer: dict[str, Any]
) -> None:
    request = BackgroundRequest(Service(service.url, KEY), Service.detect, scan, "phantom")
    assert len(request.result()["landmarks"]) == len(answer["landmarks"])
    assert request.is_done(0)
    latest = request.progress()
    assert latest is not None
    assert latest[0].startswith("part ")
    assert request.progress() is None
    with pytest.raises(ServiceError):
        BackgroundRequest(Service(service.url), Service.detect, scan, "phantom").result()


class Panel:
    """The module in a Slicer that has loaded a volume."""

    def __init__(self, patch: pytest.MonkeyPatch, url: str) -> None:
        patch.setenv("LANDMARKD_API_KEY", KEY)
        self.scene = slicer_standin.install(patch)
        self.widget = importlib.import_module("Landmarkd").LandmarkdWidget()
        self.widget.setup()
        self.widget.address.text = url
        self.click("Connect")

    def click(self, text: str) -> None:
        buttons = {
            "Connect": self.widget.connect_button,
            "Find landmarks": self.widget.find_button,
            "Cancel": self.widget.cancel_button,
            "Save": self.widget.save_button,
            "Send": self.widget.send_button,
        }
        buttons[text].emit("clicked(bool)", False)

    def load(self, scan: Path, *, transform_id: str | None = None) -> Volume:
        image: Any = nib.load(scan)
        volume = self.scene.AddNewNodeByClass("vtkMRMLScalarVolumeNode", landmark_stem(scan))
        assert isinstance(volume, Volume)
        volume.voxels, volume.affine = np.asanyarray(image.dataobj), image.affine
        volume.file, volume.transform_id = str(scan), transform_id
        self.widget.volume.node = volume
        return volume

    def wait(self) -> None:
        assert self.widget.timer.active, self.widget.status.text
        assert not self.widget.find_button.enabled
        with suppress(ServiceError, CancelledError):
            self.widget.request.result()
        self.widget.timer.emit("timeout()")
        assert not self.widget.timer.active
        assert self.widget.find_button.enabled


@pytest.fixture
def panel(monkeypatch: pytest.MonkeyPatch, service: ServiceProcess) -> Panel:
    return Panel(monkeypatch, service.url)


def find(panel: Panel, scan: Path, **options: Any) -> Volume:
    volume = panel.load(scan, **options)
    panel.widget.model.currentText = "phantom"
    panel.click("Find landmarks")
    panel.wait()
    return volume


def test_points_and_regions_of_the_volume_appear_where_the_service_found_them(
    panel: Panel, scan: Path, answer: dict[str, Any]
) -> None:
    volume = find(panel, scan, transform_id="transform1")
    points: Any = volume.GetNodeReference("landmarkd.points")
    assert points.GetTransformNodeID() == "transform1"
    assert [point["label"] for point in points.points] == [
        each["name"] for each in answer["landmarks"]
    ]
    for point, each in zip(points.points, answer["landmarks"], strict=True):
        if each["ras_mm"] is None:
            assert point["ras_mm"] is None
            assert "not found" in point["description"]
        else:
            # Slicer's file has another affine in its last bits than the scan.
            assert_allclose(point["ras_mm"], each["ras_mm"], atol=1e-3)
            assert f"confidence {each['confidence']:.2f}" in point["description"]
    regions: Any = volume.GetNodeReference("landmarkd.regions")
    calibrated = [each for each in answer["landmarks"] if each["region95_mm"] and each["ras_mm"]]
    assert [radius for _, radius in regions.spheres] == [e["region95_mm"] for e in calibrated]
    assert regions.display.in_slices
    assert "of 6 landmarks found" in panel.widget.status.text


def test_a_second_search_keeps_the_points_that_were_corrected_after_the_first(
    panel: Panel, scan: Path
) -> None:
    volume = find(panel, scan)
    first: Any = volume.GetNodeReference("landmarkd.points")
    first.points[0]["ras_mm"] = (1.0, -2.0, 3.0)
    panel.click("Find landmarks")
    panel.wait()
    second: Any = volume.GetNodeReference("landmarkd.points")
    assert first.points[0]["ras_mm"] == (1.0, -2.0, 3.0)
    assert second.points[0]["ras_mm"] != (1.0, -2.0, 3.0)
    assert len({node.GetName() for node in panel.scene.nodes.values()}) == 5


def test_corrected_points_are_saved_beside_the_scan_where_the_trainer_finds_them(
    panel: Panel, scan: Path, tmp_path: Path
) -> None:
    copy = tmp_path / scan.name
    copy.write_bytes(scan.read_bytes())
    volume = find(panel, copy)
    points: Any = volume.GetNodeReference("landmarkd.points")
    name = points.points[0]["label"]
    points.points[0]["ras_mm"] = (1.0, -2.0, 3.0)
    panel.click("Save")
    saved = tmp_path / "phantom.mrk.json"
    assert_allclose(read_landmarks(saved)[name], (1.0, -2.0, 3.0))
    # It is not replaced without asking, and the stand-in says no.
    points.points[0]["ras_mm"] = (0.0, 0.0, 0.0)
    panel.click("Save")
    assert_allclose(read_landmarks(saved)[name], (1.0, -2.0, 3.0))


def test_a_volume_without_a_file_or_landmarks_is_not_saved(panel: Panel, scan: Path) -> None:
    volume = panel.load(scan)
    volume.file = str(scan.with_name("other.nii"))
    panel.click("Save")
    assert "without" in panel.widget.status.text
    volume.file = None
    panel.click("Save")
    assert "save the volume first" in panel.widget.status.text


def test_corrections_are_kept_by_the_service_as_a_person_left_the_points(
    panel: Panel, scan: Path, store: Path
) -> None:
    volume = find(panel, scan)
    points: Any = volume.GetNodeReference("landmarkd.points")
    found = [point for point in points.points if point["ras_mm"] is not None]
    (unseen,) = (point for point in points.points if point["ras_mm"] is None)
    moved, skipped, cleared, deleted, untouched = found
    moved["ras_mm"] = (20.0, 31.5, 28.0)
    skipped["missing"] = True
    cleared["ras_mm"] = None
    points.points.remove(deleted)
    panel.click("Send")
    panel.wait()
    # The one that the network has not found is not judged, either.
    summary = "kept by the service: 1 placed, 1 absent, 4 not judged: right if detected"
    assert panel.widget.status.text == summary
    (kept,) = store.glob("landmarks/*.mrk.json")
    truth = read_truth(kept)
    placed, unjudged = truth[moved["label"]], truth[untouched["label"]]
    assert placed is not None
    assert unjudged is not None
    assert_allclose(placed, (20.0, 31.5, 28.0), atol=1e-3)
    assert truth[skipped["label"]] is None
    assert_allclose(unjudged, untouched["ras_mm"], atol=1e-3)
    assert not {one["label"] for one in (cleared, deleted, unseen)} & truth.keys()
    voxels = read_volume((store / "scans" / f"{landmark_stem(kept)}.nii.gz").read_bytes()).voxels
    np.testing.assert_array_equal(voxels, np.asanyarray(volume.voxels))


def test_what_is_no_correction_of_the_answer_is_not_sent(panel: Panel, scan: Path) -> None:
    panel.load(scan)
    panel.click("Send")
    assert "without" in panel.widget.status.text
    volume = find(panel, scan)
    points: Any = volume.GetNodeReference("landmarkd.points")
    points.AddControlPoint(1.0, 2.0, 3.0, "F-7")
    panel.click("Send")
    assert "got one more, 'F-7'" in panel.widget.status.text
    points.points.pop()
    points.points[0]["ras_mm"] = (9e3, 0.0, 0.0)
    panel.click("Send")
    panel.wait()
    assert "expected a position in the scan" in panel.widget.status.text
    volume.voxels = volume.voxels + 1
    points.points[0]["ras_mm"] = (20.0, 31.5, 28.0)
    panel.click("Send")
    panel.wait()
    assert "digest" in panel.widget.status.text


def test_a_search_goes_on_though_the_window_keeps_pythons_lock(panel: Panel, scan: Path) -> None:
    panel.load(scan)
    panel.widget.model.currentText = "phantom"
    before = sys.getswitchinterval()
    # From here on no thread gives up the lock, unless it waits for something.
    sys.setswitchinterval(1000)
    try:
        panel.click("Find landmarks")
        end = time.monotonic() + 60
        while panel.widget.timer.active and time.monotonic() < end:
            panel.widget.timer.emit("timeout()")
    finally:
        sys.setswitchinterval(before)
    assert "of 6 landmarks found" in panel.widget.status.text


def test_a_search_that_is_cancelled_or_refused_says_so(panel: Panel, scan: Path) -> None:
    panel.load(scan)
    panel.widget.model.currentText = "phantom"
    panel.click("Find landmarks")
    panel.click("Cancel")
    panel.wait()
    assert panel.widget.status.text == "cancelled"
    panel.widget.model.currentText = "nobody"
    panel.click("Find landmarks")
    panel.wait()
    assert "expected one of" in panel.widget.status.text


def test_an_answer_for_a_volume_that_was_closed_is_dropped(panel: Panel, scan: Path) -> None:
    volume = panel.load(scan)
    panel.widget.model.currentText = "phantom"
    panel.click("Find landmarks")
    volume.remove_from_scene()
    panel.wait()
    assert "closed" in panel.widget.status.text
    assert len(panel.scene.nodes) == 1


def test_nothing_that_is_missing_stops_the_panel(panel: Panel) -> None:
    for button in ("Find landmarks", "Send", "Save", "Cancel"):
        panel.click(button)
    assert panel.widget.status.text == "Choose a volume."
    panel.widget.address.text = "ftp://nowhere"
    panel.click("Connect")
    assert "expected an address" in panel.widget.status.text
    assert json.dumps(slicer_standin.QSettings.kept).count("ftp") == 0
    assert KEY not in json.dumps(slicer_standin.QSettings.kept)
    panel.widget.cleanup()
