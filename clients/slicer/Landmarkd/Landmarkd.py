"""3D Slicer module: the landmarks of the loaded volume, found by a landmarkd service.

Slicer finds this file by its name, and the classes in it by theirs. Requests and answers are in
``LandmarkdLib``, which knows nothing of Slicer.
"""

from __future__ import annotations

import json
import os
import tempfile
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any, Callable, Iterable

from LandmarkdLib.answers import (
    PlacedPoint,
    ShownPoint,
    correct,
    shown_points,
    summarise,
    summarise_case,
)
from LandmarkdLib.service import BackgroundRequest, Service, ServiceError

try:
    import ctk
    import qt
    import slicer
    import vtk
    from slicer.ScriptedLoadableModule import (
        ScriptedLoadableModule,
        ScriptedLoadableModuleLogic,
        ScriptedLoadableModuleWidget,
    )
except ImportError:  # in a Python without Slicer the file can be read, but shows nothing
    ScriptedLoadableModule = ScriptedLoadableModuleLogic = ScriptedLoadableModuleWidget = object

ADDRESS = "http://127.0.0.1:8000"
ADDRESS_SETTING = "Landmarkd/Address"
KEY_VARIABLE = "LANDMARKD_API_KEY"
"""The key comes from the environment or the form, and is written nowhere."""

POINTS_ROLE = "landmarkd.points"
REGIONS_ROLE = "landmarkd.regions"
"""Roles in which a volume refers to the nodes with its landmarks."""

ANSWER = "landmarkd.answer"
"""Attribute of the points with the answer that they show; it is saved with the scene."""

SCAN_SUFFIXES = (".nii.gz", ".nii", ".nrrd", ".mha", ".mgz", ".mgh")
POLL_MS = 50
LENT_S = 0.02
"""Of these, what the thread of a request has for sure; the window stays fluent in the rest."""

STEPS = 1000
"""Of the progress bar."""


class Landmarkd(ScriptedLoadableModule):
    """What Slicer lists of the module."""

    def __init__(self, parent: Any) -> None:
        super().__init__(parent)
        parent.title = "Landmarkd"
        parent.categories = ["Quantification"]
        parent.dependencies = []
        parent.contributors = ["landmarkd contributors"]
        parent.helpText = "Finds anatomical landmarks in the loaded volume, by a landmarkd service."
        parent.acknowledgementText = ""


class LandmarkdLogic(ScriptedLoadableModuleLogic):
    """What the module does with nodes of the scene."""

    def export(self, volume: Any, folder: Path) -> Path:
        """Write a volume as NRRD, in its own frame: parent transforms are left out."""
        path = folder / "scan.nrrd"
        if not slicer.util.exportNode(volume, str(path), {"useCompression": 1}):
            raise ServiceError("expected a volume that Slicer can write, got one that it cannot")
        return path

    def show(self, volume: Any, answer: dict[str, Any]) -> None:
        """Add landmarks and their 95 % regions to the scene.

        Earlier ones stay, as they may have been corrected; ``save`` takes the latest. Both are
        moved by the volume's parent transform, as the volume is.
        """
        shown = shown_points(answer)
        name = f"{volume.GetName()} {answer['model']['name']}"
        points = self._node(volume, POINTS_ROLE, "vtkMRMLMarkupsFiducialNode", name)
        points.SetAttribute(ANSWER, json.dumps(answer))
        for point in shown:
            index = points.AddControlPoint(*(point.ras_mm or (0.0, 0.0, 0.0)), point.name)
            points.SetNthControlPointDescription(index, point.description)
            if point.ras_mm is None:
                points.UnsetNthControlPointPosition(index)
        title = f"{name} 95 % regions"
        regions = self._node(volume, REGIONS_ROLE, "vtkMRMLModelNode", title)
        regions.SetAndObservePolyData(_spheres(shown))
        regions.GetDisplayNode().SetOpacity(0.3)
        regions.GetDisplayNode().SetVisibility2D(True)

    def save(self, volume: Any) -> Path:
        """Save a volume's landmarks beside its file, in the layout that ``landmarkd train`` reads.

        Raises:
            ServiceError: It has none, or no file; or Slicer cannot write there.
        """
        points = self._points(volume)
        target = self.target(volume)
        if not slicer.util.saveNode(points, str(target)):
            raise ServiceError(f"expected a folder to write to, but {target} cannot be written")
        return target

    def target(self, volume: Any) -> Path:
        """Return where ``save`` writes.

        Raises:
            ServiceError: The volume was not loaded from a file.
        """
        storage = volume.GetStorageNode()
        scan = Path(storage.GetFileName() or "") if storage is not None else Path()
        stems = (scan.name[: -len(end)] for end in SCAN_SUFFIXES if scan.name.endswith(end))
        stem = next(stems, scan.stem)
        if not stem:
            raise ServiceError("expected a volume that lies in a file; save the volume first")
        return scan.with_name(f"{stem}.mrk.json")

    def corrected(self, volume: Any) -> dict[str, Any]:
        """Return the answer that a volume's points show, as they are now.

        Raises:
            ServiceError: It has none, or there is a point that is none of the landmarks.
        """
        node = self._points(volume)
        numbers = range(node.GetNumberOfControlPoints())
        return correct(json.loads(node.GetAttribute(ANSWER)), [_placed(node, n) for n in numbers])

    def _points(self, volume: Any) -> Any:
        points = volume.GetNodeReference(POINTS_ROLE)
        if points is None:
            raise ServiceError("expected a volume with landmarks, got one without")
        return points

    def _node(self, volume: Any, role: str, kind: str, name: str) -> Any:
        node = slicer.mrmlScene.AddNewNodeByClass(kind, slicer.mrmlScene.GenerateUniqueName(name))
        volume.SetNodeReferenceID(role, node.GetID())
        node.CreateDefaultDisplayNodes()
        node.SetAndObserveTransformNodeID(volume.GetTransformNodeID())
        return node


def _placed(node: Any, number: int) -> PlacedPoint:
    """Read a control point, in the frame of its node, which is that of the volume."""
    status, ras = node.GetNthControlPointPositionStatus(number), [0.0, 0.0, 0.0]
    node.GetNthControlPointPosition(number, ras)
    return PlacedPoint(
        name=node.GetNthControlPointLabel(number),
        ras_mm=(ras[0], ras[1], ras[2]) if status == node.PositionDefined else None,
        missing=status == node.PositionMissing,
    )


def _spheres(shown: Iterable[ShownPoint]) -> Any:
    """Make a sphere as large as each 95 % region."""
    positions, radii = vtk.vtkPoints(), vtk.vtkDoubleArray()
    radii.SetName("region95_mm")
    for point in shown:
        if point.ras_mm is not None and point.radius_mm is not None:
            positions.InsertNextPoint(*point.ras_mm)
            radii.InsertNextValue(point.radius_mm)
    regions = vtk.vtkPolyData()
    regions.SetPoints(positions)
    regions.GetPointData().SetScalars(radii)
    sphere = vtk.vtkSphereSource()
    sphere.SetRadius(1.0)
    sphere.SetThetaResolution(24)
    sphere.SetPhiResolution(12)
    glyphs = vtk.vtkGlyph3D()
    glyphs.SetInputData(regions)
    glyphs.SetSourceConnection(sphere.GetOutputPort())
    glyphs.SetScaleModeToScaleByScalar()
    glyphs.Update()
    return glyphs.GetOutput()


class LandmarkdWidget(ScriptedLoadableModuleWidget):
    """The module's panel."""

    def setup(self) -> None:
        """Build the panel; Slicer calls it once."""
        super().setup()
        self.logic = LandmarkdLogic()
        self.request: BackgroundRequest | None = None
        self.timer = qt.QTimer()
        self.timer.setInterval(POLL_MS)
        self.timer.connect("timeout()", self.poll)
        self._build_service()
        self._build_landmarks()
        self.layout.addStretch(1)
        self._set_running(running=False)

    def cleanup(self) -> None:
        """End with the module; Slicer calls it."""
        if self.request is not None:
            self.request.cancel()
            self.timer.stop()

    def connect_service(self) -> None:
        """List the service's models."""
        self.model.clear()
        try:
            names = self._service().models()
        except ServiceError as error:
            self.status.text = str(error)
            return
        qt.QSettings().setValue(ADDRESS_SETTING, self.address.text)
        self.model.addItems(names)
        self.status.text = f"{len(names)} models" if names else "the service has no models"

    def find(self) -> None:
        """Send the volume, and go on when ``poll`` sees the answer."""
        volume = self.volume.currentNode()
        if volume is None or not self.model.currentText:
            self.status.text = "Load a volume, connect to a service, and choose a model."
            return
        self._start(volume, Service.detect, self.model.currentText, self._show)

    def send(self) -> None:
        """Send the volume with its points as they are now, for the service to learn from."""
        volume = self.volume.currentNode()
        if volume is None:
            self.status.text = "Choose a volume."
            return
        try:
            answer = self.logic.corrected(volume)
        except ServiceError as error:
            self.status.text = str(error)
            return
        self._start(volume, Service.keep, answer, summarise_case)

    def _start(
        self,
        volume: Any,
        ask: Callable[..., dict[str, Any]],
        argument: Any,
        finish: Callable[[dict[str, Any]], str],
    ) -> None:
        """Send a volume in the background; ``poll`` hands the answer to ``finish``."""
        # Removed when the answer is there: the thread reads from it.
        self._folder = tempfile.TemporaryDirectory()
        try:
            service = self._service()
            scan = self.logic.export(volume, Path(self._folder.name))
        except ServiceError as error:
            self._folder.cleanup()
            self.status.text = str(error)
            return
        self._sent, self._finish = volume, finish
        self.request = BackgroundRequest(service, ask, scan, argument)
        self._set_running(running=True)

    def cancel(self) -> None:
        """Stop the request."""
        if self.request is not None:
            self.request.cancel()

    def poll(self) -> None:
        """Show how far the request is, and its end."""
        if self.request is None:
            return
        done = self.request.is_done(LENT_S)
        progress = self.request.progress()
        if progress is not None:
            self.status.text, share = progress
            self.bar.setRange(0, STEPS if share >= 0 else 0)
            self.bar.setValue(int(STEPS * max(share, 0.0)))
        if done:
            request, self.request = self.request, None
            self._set_running(running=False)
            self._folder.cleanup()
            self.status.text = self._end(request)

    def save(self) -> None:
        """Save the points, corrected or not, beside the volume's file."""
        volume = self.volume.currentNode()
        if volume is None:
            self.status.text = "Choose a volume."
            return
        try:
            target = self.logic.target(volume)
            question = f"{target} is there already. Replace it?"
            if not target.exists() or slicer.util.confirmOkCancelDisplay(question):
                self.status.text = f"saved {self.logic.save(volume)}"
        except ServiceError as error:
            self.status.text = str(error)

    def _end(self, request: BackgroundRequest) -> str:
        """Say what has become of a request."""
        try:
            return self._finish(request.result())
        except CancelledError:
            return "cancelled"
        except ServiceError as error:
            return str(error)

    def _show(self, answer: dict[str, Any]) -> str:
        if self._sent.GetScene() is None:
            return "the volume has been closed meanwhile"
        self.logic.show(self._sent, answer)
        return summarise(answer)

    def _service(self) -> Service:
        return Service(self.address.text, self.key.text)

    def _set_running(self, *, running: bool) -> None:
        self.find_button.enabled = self.send_button.enabled = not running
        self.cancel_button.enabled = running
        self.bar.visible = running
        if running:
            self.timer.start()
        else:
            self.timer.stop()

    def _build_service(self) -> None:
        form = self._section("Service")
        self.address = qt.QLineEdit()
        self.address.text = qt.QSettings().value(ADDRESS_SETTING, ADDRESS)
        form.addRow("Address:", self.address)
        self.key = qt.QLineEdit()
        self.key.setEchoMode(qt.QLineEdit.Password)
        self.key.text = os.environ.get(KEY_VARIABLE, "")
        self.key.toolTip = "Only for services that ask for one; it is not stored."
        form.addRow("Key:", self.key)
        self.connect_button = self._button("Connect", self.connect_service)
        form.addRow(self.connect_button)

    def _build_landmarks(self) -> None:
        form = self._section("Landmarks")
        self.volume = slicer.qMRMLNodeComboBox()
        self.volume.nodeTypes = ["vtkMRMLScalarVolumeNode"]
        self.volume.addEnabled = False
        self.volume.removeEnabled = False
        self.volume.setMRMLScene(slicer.mrmlScene)
        form.addRow("Volume:", self.volume)
        self.model = qt.QComboBox()
        form.addRow("Model:", self.model)
        self.find_button = self._button("Find landmarks", self.find)
        form.addRow(self.find_button)
        self.cancel_button = self._button("Cancel", self.cancel)
        form.addRow(self.cancel_button)
        self.bar = qt.QProgressBar()
        form.addRow(self.bar)
        self.status = qt.QLabel()
        self.status.wordWrap = True
        form.addRow(self.status)
        self.save_button = self._button("Save points beside the scan", self.save)
        form.addRow(self.save_button)
        self.send_button = self._button("Send corrections", self.send)
        self.send_button.toolTip = (
            "The service keeps the scan with its points, to learn from them, if it has a store."
        )
        form.addRow(self.send_button)

    def _section(self, title: str) -> Any:
        section = ctk.ctkCollapsibleButton()
        section.text = title
        self.layout.addWidget(section)
        return qt.QFormLayout(section)

    def _button(self, text: str, action: Callable[[], None]) -> Any:
        button = qt.QPushButton(text)
        button.connect("clicked(bool)", lambda *_: action())
        return button
