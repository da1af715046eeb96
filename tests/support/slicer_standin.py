"""Stand-ins for exactly those classes of 3D Slicer that its module uses; anything else is an error.

Their names and arguments are those of Slicer 5 (MRML nodes, PythonQt, VTK). Nodes keep what they
are given, ``exportNode`` writes NRRD as Slicer does, and timers fire when a test says so.
"""

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from app.geometry import LPS_FROM_RAS, Affine, transform
from tests.support.scan_files import as_nrrd


class Node:
    """What all nodes of a scene share."""

    def __init__(self, scene: "Scene", number: int, name: str) -> None:
        self._scene: Scene | None = scene
        self._name, self._id = name, f"{type(self).__name__}{number}"
        self._references: dict[str, str] = {}
        self._attributes: dict[str, str] = {}
        self.transform_id: str | None = None
        self.display: DisplayNode | None = None

    def GetName(self) -> str:
        return self._name

    def GetID(self) -> str:
        return self._id

    def GetScene(self) -> "Scene | None":
        return self._scene

    def remove_from_scene(self) -> None:
        self._scene = None

    def SetAttribute(self, name: str, value: str) -> None:
        self._attributes[name] = value

    def GetAttribute(self, name: str) -> str | None:
        return self._attributes.get(name)

    def SetNodeReferenceID(self, role: str, node_id: str) -> None:
        self._references[role] = node_id

    def GetNodeReference(self, role: str) -> "Node | None":
        assert self._scene is not None
        return self._scene.nodes.get(self._references.get(role, ""))

    def GetTransformNodeID(self) -> str | None:
        return self.transform_id

    def SetAndObserveTransformNodeID(self, node_id: str | None) -> None:
        self.transform_id = node_id

    def CreateDefaultDisplayNodes(self) -> None:
        self.display = self.display or DisplayNode()

    def GetDisplayNode(self) -> "DisplayNode | None":
        return self.display


class DisplayNode:
    opacity = 1.0
    in_slices = False

    def SetOpacity(self, opacity: float) -> None:
        self.opacity = opacity

    def SetVisibility2D(self, visible: bool) -> None:
        self.in_slices = visible


class vtkMRMLScalarVolumeNode(Node):
    voxels: np.ndarray
    affine: Affine
    file: str | None = None

    def GetStorageNode(self) -> Any:
        return None if self.file is None else SimpleNamespace(GetFileName=lambda: self.file)


class vtkMRMLMarkupsFiducialNode(Node):
    PositionUndefined, PositionPreview, PositionDefined, PositionMissing = range(4)

    def __init__(self, scene: "Scene", number: int, name: str) -> None:
        super().__init__(scene, number, name)
        self.points: list[dict[str, Any]] = []

    def AddControlPoint(self, x: float, y: float, z: float, label: str) -> int:
        self.points.append({"label": label, "ras_mm": (x, y, z), "description": ""})
        return len(self.points) - 1

    def SetNthControlPointDescription(self, index: int, text: str) -> None:
        self.points[index]["description"] = text

    def UnsetNthControlPointPosition(self, index: int) -> None:
        self.points[index]["ras_mm"] = None

    def GetNumberOfControlPoints(self) -> int:
        return len(self.points)

    def GetNthControlPointLabel(self, index: int) -> str:
        label: str = self.points[index]["label"]
        return label

    def GetNthControlPointPosition(self, index: int, position: list[float]) -> None:
        position[:] = self.points[index]["ras_mm"] or (0.0, 0.0, 0.0)

    def GetNthControlPointPositionStatus(self, index: int) -> int:
        if self.points[index].get("missing"):
            return self.PositionMissing
        return (
            self.PositionUndefined if self.points[index]["ras_mm"] is None else self.PositionDefined
        )


class vtkMRMLModelNode(Node):
    spheres: Any = None

    def SetAndObservePolyData(self, mesh: Any) -> None:
        self.spheres = mesh


class Scene:
    KINDS: ClassVar[dict[str, type[Node]]] = {
        kind.__name__: kind
        for kind in (vtkMRMLScalarVolumeNode, vtkMRMLMarkupsFiducialNode, vtkMRMLModelNode)
    }

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}

    def GenerateUniqueName(self, name: str) -> str:
        taken = sum(node.GetName().startswith(name) for node in self.nodes.values())
        return f"{name}_{taken}" if taken else name

    def AddNewNodeByClass(self, kind: str, name: str) -> Node:
        node = self.KINDS[kind](self, len(self.nodes) + 1, name)
        self.nodes[node.GetID()] = node
        return node


class Widget:
    """Any widget of Qt: its signals, and the properties that the module sets."""

    Password = 2

    def __init__(self, text: Any = "") -> None:
        self.text = text
        self.items: list[str] = []
        self.rows: list[Any] = []
        self._signals: dict[str, Any] = {}

    def connect(self, signal: str, slot: Any) -> None:
        self._signals[signal] = slot

    def emit(self, signal: str, *arguments: Any) -> None:
        self._signals[signal](*arguments)


class Edit(Widget):
    def setEchoMode(self, mode: int) -> None:
        self.mode = mode


class ComboBox(Widget):
    def clear(self) -> None:
        self.items.clear()

    def addItems(self, items: list[str]) -> None:
        self.items += items
        self.currentText = self.items[0] if self.items else ""

    currentText = ""


class NodeComboBox(Widget):
    node: Node | None = None

    def setMRMLScene(self, scene: Scene) -> None:
        self.scene = scene

    def currentNode(self) -> Node | None:
        return self.node


class ProgressBar(Widget):
    range = (0, 100)
    value = 0

    def setRange(self, low: int, high: int) -> None:
        self.range = low, high

    def setValue(self, value: int) -> None:
        self.value = value


class Timer(Widget):
    active = False

    def setInterval(self, milliseconds: int) -> None:
        self.milliseconds = milliseconds

    def start(self) -> None:
        self.active = True

    def stop(self) -> None:
        self.active = False


class Layout(Widget):
    def addRow(self, *cells: Any) -> None:
        self.rows.append(cells)

    def addWidget(self, widget: Widget) -> None:
        self.rows.append(widget)

    def addStretch(self, factor: int) -> None:
        self.rows.append(factor)


class QSettings:
    kept: ClassVar[dict[str, str]] = {}

    def value(self, name: str, default: str) -> str:
        return self.kept.get(name, default)

    def setValue(self, name: str, value: str) -> None:
        self.kept[name] = value


class Glyphs:
    """What VTK is asked for: a sphere of a radius at every point."""

    def SetInputData(self, data: Any) -> None:
        self._data = data

    def SetSourceConnection(self, _port: Any) -> None: ...

    def SetScaleModeToScaleByScalar(self) -> None: ...

    def Update(self) -> None: ...

    def GetOutput(self) -> list[tuple[tuple[float, ...], float]]:
        return list(zip(self._data.points, self._data.radii, strict=True))


class PolyData:
    def SetPoints(self, points: Any) -> None:
        self.points = points.all

    def GetPointData(self) -> "PolyData":
        return self

    def SetScalars(self, array: Any) -> None:
        self.radii = array.all


class Values:
    """Of ``vtkPoints`` and ``vtkDoubleArray``."""

    def __init__(self) -> None:
        self.all: list[Any] = []

    def SetName(self, name: str) -> None:
        self.name = name

    def InsertNextPoint(self, *point: float) -> None:
        self.all.append(point)

    def InsertNextValue(self, value: float) -> None:
        self.all.append(value)


class Sphere:
    def SetRadius(self, _radius: float) -> None: ...

    def SetThetaResolution(self, _parts: int) -> None: ...

    def SetPhiResolution(self, _parts: int) -> None: ...

    def GetOutputPort(self) -> None: ...


def export_node(node: vtkMRMLScalarVolumeNode, path: str, properties: dict[str, Any]) -> bool:
    encoding = "gzip" if properties["useCompression"] else "raw"
    content = as_nrrd(node.voxels, node.affine, encoding=encoding)
    # Slicer's writer, Teem, notes no date: it writes a volume twice as the same bytes.
    head, separator, data = content.partition(b"\n\n")
    lines = [line for line in head.split(b"\n") if not line.startswith(b"# ")]
    Path(path).write_bytes(b"\n".join(lines) + separator + data)
    return True


def save_node(node: vtkMRMLMarkupsFiducialNode, path: str) -> bool:
    """Write the part of a Markups file that readers need."""
    controls = []
    for point in node.points:
        control = {"label": point["label"], "positionStatus": "undefined"}
        if point["ras_mm"] is not None:
            lps = transform(LPS_FROM_RAS, np.array(point["ras_mm"])).tolist()
            control |= {"positionStatus": "defined", "position": lps}
        controls.append(control)
    markup = {"type": "Fiducial", "coordinateSystem": "LPS", "controlPoints": controls}
    Path(path).write_text(json.dumps({"markups": [markup]}), encoding="utf-8")
    return True


class ModuleWidget:
    """``ScriptedLoadableModuleWidget``: it has the panel's layout."""

    def setup(self) -> None:
        self.layout = Layout()


class ModuleBase:
    def __init__(self, parent: Any = None) -> None:
        self.parent = parent


def install(patch: pytest.MonkeyPatch) -> Scene:
    """Put the stand-ins where imports find them; returns the scene."""
    slicer = ModuleType("slicer")
    scene = Scene()
    util = SimpleNamespace(
        exportNode=export_node, saveNode=save_node, confirmOkCancelDisplay=lambda _: False
    )
    vars(slicer).update(mrmlScene=scene, util=util, qMRMLNodeComboBox=NodeComboBox)
    loadable = ModuleType("slicer.ScriptedLoadableModule")
    vars(loadable).update(
        ScriptedLoadableModule=ModuleBase,
        ScriptedLoadableModuleLogic=ModuleBase,
        ScriptedLoadableModuleWidget=ModuleWidget,
    )
    qt = SimpleNamespace(
        QTimer=Timer, QLineEdit=Edit, QSettings=QSettings, QComboBox=ComboBox, QPushButton=Widget,
        QProgressBar=ProgressBar, QLabel=Widget, QFormLayout=Layout,
    )  # fmt: skip
    vtk = SimpleNamespace(
        vtkPoints=Values, vtkDoubleArray=Values, vtkPolyData=PolyData, vtkSphereSource=Sphere,
        vtkGlyph3D=Glyphs,
    )  # fmt: skip
    modules = {
        "slicer": slicer, "slicer.ScriptedLoadableModule": loadable, "qt": qt, "vtk": vtk,
        "ctk": SimpleNamespace(ctkCollapsibleButton=Widget),
    }  # fmt: skip
    for name, module in modules.items():
        patch.setitem(sys.modules, name, module)
    patch.setattr(QSettings, "kept", {})
    patch.delitem(sys.modules, "Landmarkd", raising=False)
    return scene
