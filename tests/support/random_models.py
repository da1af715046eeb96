"""Random small models of all kinds, and their networks as functions of float64, for tests.

Most are ONNX files whose numbers are chosen: they find blobs in scans. Beside each stands the same
in NumPy. Networks of MONAI have random weights.
"""

from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from onnx import NodeProto, TensorProto
from safetensors.torch import save_model
from torch import nn

from app.model.manifest import Manifest, parse_manifest
from app.model.selfcheck import write_selfcheck
from tests.support.model_folders import build_network, manifest_table, write_manifest
from tests.support.onnx_files import array, graph, node, value
from tests.support.oracle import Array
from tests.support.random_scans import EXTENT
from tests.support.reference_votes import Network

EPSILON = 1e-2
"""Added to voxel values before their logarithm, whose gradient points to a blob's centre."""

DISTURBANCE = 5e-5
"""Of what a network is shown and answers, in which float32 errs by a tenth of it at most."""

INTENSITIES: dict[str, list[dict[str, Any]]] = {
    "even": [
        {"method": "percentile", "lower": 1.0, "upper": 99.5},
        {"method": "percentile", "lower": 0.0, "upper": 100.0},
        {"method": "window", "lower": 0.0, "upper": 100.0},
        {"method": "clip", "lower": 0.0, "upper": 100.0, "mean": 0.0, "deviation": 100.0},
    ],
    "nnunet": [{"method": "zscore", "region": region} for region in ("all", "nonzero", "filled")],
}
"""By tile layout; MONAI's has those of ours."""


@dataclass(frozen=True, slots=True)
class ModelKind:
    """What is not left to chance.

    Attributes:
        output: As in a manifest.
        activation: Likewise; None for coordinates.
        layout: Likewise.
        members: How many networks answer.
        whole: Whether it takes grids whole.
        architecture: Whether it is a network of MONAI, with random weights.
    """

    output: str
    activation: str | None
    layout: str = "even"
    members: int = 1
    whole: bool = False
    architecture: bool = False

    @property
    def title(self) -> str:
        """What it is, in words."""
        parts = [self.output, self.activation, self.layout if self.layout != "even" else None]
        parts += ["whole" if self.whole else None, "U-Net" if self.architecture else None]
        parts += [f"{self.members} members" if self.members > 1 else None]
        return " ".join(filter(None, parts))


@dataclass(frozen=True, slots=True)
class RandomModel:
    """A model folder that can be served, and its networks.

    Attributes:
        manifest: As the folder says.
        networks: The members.
    """

    manifest: Manifest
    networks: list[Network]


def make_random_model(
    root: Path, name: str, kind: ModelKind, rng: np.random.Generator
) -> RandomModel:
    """Make a model folder.

    Args:
        root: Where to make it.
        name: Of the folder.
        kind: What the model is.
        rng: Decides all else: axes, spacing, tiles, stride, thresholds, numbers of the networks.
    """
    folder = root / name
    folder.mkdir()
    landmarks = int(rng.integers(2, 4))
    table = manifest_table(name, landmarks)
    is_field = kind.output != "coordinates"
    stride = int(rng.choice([1, 2, 3])) if is_field and not kind.architecture else 1
    table["input"] = _random_input(kind, stride, rng)
    spacing = table["input"]["spacing_mm"]
    # The classes of a softmax share what there is.
    most = 0.25 if kind.activation == "softmax" else 0.5
    table["voting"] = {"threshold": float(rng.uniform(0.1, most))}
    if is_field:
        table["voting"]["radius_mm"] = float(rng.uniform(1.5, 3.5) * max(spacing))
    if kind.output == "heatmaps" and rng.random() < 0.4:
        table["voting"]["round_in"] = "voxels"
    for landmark in table["landmarks"]:
        landmark["presence_threshold"] = float(rng.choice([0.05, 0.1, 0.3]))
    if kind.members > 1:
        table["landmarks"][0]["mirror"], table["landmarks"][1]["mirror"] = "2", "1"
    table["network"] = _random_network(kind, stride, rng)
    make = _of_monai if kind.architecture else _of_onnx
    networks = [make(folder, table, member, rng) for member in table["network"]["files"]]
    files = table["network"].pop("files")
    table["network"]["weights" if kind.architecture else "program"] = files[0]
    table["network"]["members"] = files[1:]
    write_manifest(folder, table)
    write_selfcheck(folder)
    text = (folder / "model.toml").read_text(encoding="utf-8")
    return RandomModel(parse_manifest(name, text), networks)


def disturb(network: Network, seed: int, way: int) -> Network:
    """Let a network see and answer all a little otherwise; -1 is the opposite way of 1."""
    rng, by = np.random.default_rng(seed), way * DISTURBANCE

    def answer(tile: Array) -> Array:
        answered = network(tile * (1 + by * rng.standard_normal(tile.shape)))
        # Channel by channel, too: noise of each voxel is averaged out by the sums over them.
        channels = rng.standard_normal((len(answered), *[1] * (answered.ndim - 1)))
        noise = channels + rng.standard_normal(answered.shape)
        return np.asarray(answered + by * np.maximum(np.abs(answered), 1) * noise)

    return answer


def _random_input(kind: ModelKind, stride: int, rng: np.random.Generator) -> dict[str, Any]:
    """Choose the axes, the spacing and the tiles of a model."""
    ends = [str(rng.choice(list(pair))) for pair in ("LR", "PA", "IS")]
    step = 2 * stride
    tile: Any = [step * -(-int(edge) // step) for edge in rng.integers(8, 15, 3)]
    if kind.output == "coordinates":
        tile = [EXTENT + 4, EXTENT + 6, EXTENT + 8]
    intensities = INTENSITIES.get(kind.layout, INTENSITIES["even"])
    return {
        "orientation": "".join(rng.permutation(ends)),
        "spacing_mm": [float(mm) for mm in rng.choice([0.8, 1.0, 1.3, 1.6], 3)],
        "tile_shape": "whole" if kind.whole else tile,
        "tile_overlap": float(rng.choice([0.0, 0.25, 0.5])),
        "tile_sigma": float(rng.choice([0.125, 0.25])),
        "tile_layout": kind.layout,
        "divisor": 4 if kind.whole else 1,
        "trim": bool(rng.random() < 0.7),
        "intensity": intensities[rng.integers(len(intensities))],
    }


def _random_network(kind: ModelKind, stride: int, rng: np.random.Generator) -> dict[str, Any]:
    """Choose how the answers of networks are read; ``files`` are those of its members."""
    suffix = "safetensors" if kind.architecture else "onnx"
    network: dict[str, Any] = {"sha256": "0" * 64, "output": kind.output}
    network["files"] = [f"member{index}.{suffix}" for index in range(kind.members)]
    if kind.activation is not None:
        network["activation"] = kind.activation
    if kind.members > 1:
        network["mirror"] = [
            str(axis) for axis in rng.permutation(list("ijk"))[: rng.integers(1, 3)]
        ]
    if kind.output == "coordinates":
        network["coordinate_unit"] = str(rng.choice(["voxel", "mm", "fraction"]))
        network["coordinate_extras"] = ["log_variance", "presence"][: 1 + bool(kind.activation)]
        return network
    network["output_stride"] = stride
    if kind.output == "votes":
        network["offset_order"] = str(rng.choice(["axis", "landmark"]))
        network["offset_unit"] = str(rng.choice(["voxel", "mm"]))
    elif kind.activation in ("none", "spatial_softmax"):
        # What a blob has of all of a scan is some hundredths, in each of its voxels.
        scale = 1.0 if kind.activation == "none" else 0.05
        network["heatmap_peak"] = float(scale * rng.uniform(0.8, 1.4))
    return network


def _of_monai(folder: Path, table: dict[str, Any], file: str, rng: np.random.Generator) -> Network:
    """Make a U-Net with random weights, whose scores are far from 0."""
    network = table["network"]
    network["architecture"] = "monai.networks.nets:UNet"
    channels = 4 * len(table["landmarks"]) + (network["activation"] == "softmax")
    network["arguments"] = {
        "spatial_dims": 3,
        "in_channels": 1,
        "out_channels": channels,
        "channels": [4, 8],
        "strides": [2],
        "norm": ["INSTANCE", {"affine": True}],
    }
    module = build_network(table, int(rng.integers(1000)))
    last = [part for part in module.modules() if isinstance(part, nn.Conv3d)][-1]
    with torch.no_grad():
        last.weight *= 4.0
    save_model(module, str(folder / file))
    exact = deepcopy(module).double()

    def answer(tile: Array) -> Array:
        with torch.no_grad():
            output = exact(torch.from_numpy(np.ascontiguousarray(tile))[None, None])
        return np.asarray(output[0].numpy())

    return answer


def _of_onnx(folder: Path, table: dict[str, Any], file: str, rng: np.random.Generator) -> Network:
    """Make a network that finds blobs, as an ONNX file."""
    if table["network"]["output"] == "coordinates":
        data, answer = _centres(table, rng)
    else:
        data, answer = _blobs(table, rng)
    (folder / file).write_bytes(data)
    return answer


def _blobs(table: dict[str, Any], rng: np.random.Generator) -> tuple[bytes, Network]:
    """Make a network whose scores rise with voxel values; its offsets climb their logarithm.

    At a Gaussian, such an offset is that to its centre, times its variance over a chosen one.
    """
    network, landmarks = table["network"], len(table["landmarks"])
    stride = network["output_stride"]
    gain, bias = _scores(network, landmarks, rng)
    nodes, source = list[NodeProto](), "x"
    if stride > 1:
        edges = [stride] * 3
        nodes.append(node("AveragePool", "x", "mean", kernel_shape=edges, strides=edges))
        source = "mean"
    numbers = [array("gain", gain.reshape(-1, 1, 1, 1, 1)), array("bias", bias)]
    channels = len(gain)
    if network["output"] == "heatmaps":
        nodes.append(node("Conv", f"{source} gain bias", "y"))
        steps, shifts = np.zeros((0, 3)), np.zeros((0, 3))
    else:
        channels += 3 * landmarks
        unit = np.array(
            table["input"]["spacing_mm"] if network["offset_unit"] == "mm" else [1.0] * 3
        )
        steps = rng.uniform(2, 9, (landmarks, 1)) * unit / (2 * stride)
        shifts = rng.normal(0, 1, (landmarks, 3)) * unit
        own_nodes, own_numbers = climbing(source, steps, shifts, network["offset_order"])
        nodes += own_nodes
        numbers += own_numbers
    outputs = [value("y", ("n", channels, "u", "v", "w"))]
    data: bytes = graph(nodes, *numbers, outputs=outputs).SerializeToString()
    is_by_axis = network.get("offset_order", "axis") == "axis"

    def answer(tile: Array) -> Array:
        i, j, k = (edge // stride for edge in tile.shape)
        tile = tile.reshape(i, stride, j, stride, k, stride).mean(axis=(1, 3, 5))
        scores = gain[:, None, None, None] * tile + bias[:, None, None, None]
        offsets = steps[..., None, None, None] * climb(tile) + shifts[..., None, None, None]
        offsets = offsets.swapaxes(0, 1) if is_by_axis else offsets
        return np.concatenate([scores, offsets.reshape(-1, i, j, k)])

    return data, answer


def climb(tile: Array) -> Array:
    """Take the differences of logarithms two voxels apart along each axis, (3 i j k)."""
    line = np.pad(np.log(np.maximum(tile, 0) + EPSILON), 1, mode="edge")
    ahead, behind, here = slice(2, None), slice(None, -2), slice(1, -1)
    return np.stack(
        [
            line[ahead, here, here] - line[behind, here, here],
            line[here, ahead, here] - line[here, behind, here],
            line[here, here, ahead] - line[here, here, behind],
        ]
    )


def _scores(
    network: dict[str, Any], landmarks: int, rng: np.random.Generator
) -> tuple[Array, Array]:
    """Choose the factors and summands of scores; those of a background are 0."""
    activation = network["activation"]
    count = landmarks + (activation == "softmax")
    gain, bias = rng.uniform(0.7, 1.4, count), np.zeros(count)
    if activation != "none":
        gain, bias = 8 * gain, -rng.uniform(1.5, 4, count)
    if activation == "softmax":
        gain[0] = bias[0] = 0.0
    return gain.astype(np.float32).astype(np.float64), bias.astype(np.float32).astype(np.float64)


def climbing(
    source: str, steps: Array, shifts: Array, order: str
) -> tuple[list[NodeProto], list[TensorProto]]:
    """Make the nodes of offsets; steps and shifts are (landmarks 3)."""
    weights = np.zeros((*steps.shape, 1, 3, 3, 3))
    for axis in range(3):
        # One step ahead along this axis, and one behind, in the middle of the others.
        line = np.moveaxis(weights[:, axis, 0], 1 + axis, 1)[:, :, 1, 1]
        line[:, 2], line[:, 0] = steps[:, axis], -steps[:, axis]
    if order == "axis":
        weights, shifts = weights.swapaxes(0, 1), shifts.swapaxes(0, 1)
    nodes = [
        node("Relu", source, "above"),
        node("Add", "above epsilon", "sum"),
        node("Log", "sum", "log"),
        node("Pad", "log pads", "padded", mode="edge"),
        node("Conv", "padded weights shifts", "offsets"),
        node("Conv", f"{source} gain bias", "scores"),
        node("Concat", "scores offsets", "y", axis=1),
    ]
    numbers = [
        array("epsilon", [EPSILON]),
        array("pads", [0, 0, 1, 1, 1, 0, 0, 1, 1, 1], "i8"),
        array("weights", weights.reshape(-1, 1, 3, 3, 3)),
        array("shifts", shifts.reshape(-1)),
    ]
    return nodes, numbers


def _centres(table: dict[str, Any], rng: np.random.Generator) -> tuple[bytes, Network]:
    """Make a network that answers the centre of mass of its tile, and places beside it.

    A mass of 1 in the tile's middle is added, so that a blank tile has a centre, too.
    """
    network, tile = table["network"], table["input"]["tile_shape"]
    landmarks, extras = len(table["landmarks"]), network["coordinate_extras"]
    units = {"voxel": np.ones(3), "mm": np.array(table["input"]["spacing_mm"])}
    unit = units.get(network["coordinate_unit"], 1 / np.array(tile))
    first = 0.5 if network["coordinate_unit"] == "fraction" else 0.0
    places = (np.indices(tuple(tile)).reshape(3, -1).T + first) * unit
    beside = rng.normal(0, 2, (landmarks, 3)) * unit
    # Standard deviations from one voxel to more than the scan has along an axis.
    sigmas = rng.uniform(1, 12, landmarks) * unit.mean()
    said = {"log_variance": 2 * np.log(sigmas), "presence": rng.uniform(0, 2, landmarks)}
    rest = np.stack([said[name] for name in extras], axis=1)
    ramps = np.column_stack([places, np.ones(len(places))])
    middle = ramps.mean(axis=0)
    nodes = [
        node("Flatten", "x", "flat", axis=1),
        node("MatMul", "flat ramps", "own"),
        node("Add", "own middle", "sums"),
        node("Split", "sums parts", "moments mass", axis=1),
        node("Div", "moments mass", "centre"),
        node("Unsqueeze", "centre axis", "row"),
        node("Add", "row beside", "positions"),
        node("MatMul", "positions zeros", "none"),
        node("Add", "none rest", "extras"),
        node("Concat", "positions extras", "y", axis=2),
    ]
    numbers = [
        array("ramps", ramps),
        array("middle", middle),
        array("parts", [3, 1], "i8"),
        array("axis", [1], "i8"),
        array("beside", beside[None]),
        array("zeros", np.zeros((3, len(extras)))),
        array("rest", rest[None]),
    ]
    inputs, outputs = [value("x", ("n", 1, *tile))], [value("y", ("n", landmarks, 3 + len(extras)))]
    data: bytes = graph(nodes, *numbers, inputs=inputs, outputs=outputs).SerializeToString()

    def answer(tile: Array) -> Array:
        sums = tile.ravel() @ ramps + middle
        return np.concatenate([sums[:3] / sums[3] + beside, rest], axis=1)

    return data, answer
