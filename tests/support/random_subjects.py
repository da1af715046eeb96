"""Random models of two networks with mean shapes, and scans of their subjects, for tests.

A landmark is a Gaussian of a width of its own. Networks know it by the curvature of its logarithm,
so that the edge of a wider one, or another subject, looks alike; and they take less for it what has
something bright on one side, so that a subject upside down is another one to them.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from safetensors.numpy import save_file
from scipy.spatial.transform import Rotation

from app.model.manifest import parse_manifest
from app.model.selfcheck import write_selfcheck
from tests.support.model_folders import manifest_table, write_manifest
from tests.support.onnx_files import array, graph, node, value
from tests.support.oracle import Array
from tests.support.random_models import EPSILON, climb, climbing
from tests.support.random_scans import RandomScan, encode
from tests.support.reference_two_networks import Stage
from tests.support.reference_votes import Network

SubjectKind = Literal[
    "whole",
    "cut",
    "padded",
    "upside down",
    "two",
    "stretched",
    "turned",
    "thin",
    "noise",
    "blurred",
    "half",
]

WIDTHS_MM: Final = (3.0, 6.0)
"""Least and greatest standard deviation of a blob; those between are in a geometric series."""

GAIN: Final = 130.0
"""Of the score, by which it falls with the square of the difference to a landmark's curvature."""

BIAS: Final = 3.0

ASIDE: Final = 3
"""Voxels along k between a place and that whose brightness counts against it."""


@dataclass(frozen=True, slots=True)
class SubjectModel:
    """Both networks of a model, and how wide its landmarks are and where, in mm."""

    first: Stage
    second: Stage
    widths: Array
    points: Array


def make_subject_model(
    root: Path, name: str, rng: np.random.Generator, *, turns: bool = False
) -> SubjectModel:
    """Make a model folder of two networks; ``rng`` decides all of it.

    With ``turns``, the first network sees a scan in other orientations while it shows nothing.
    """
    count = int(rng.integers(5, 7))
    widths = rng.permutation(np.geomspace(*WIDTHS_MM, count))
    points = _points_apart(count, rng)
    folder = root / name
    folder.mkdir()
    inner = folder / "refine"
    inner.mkdir()
    table = _table("refine", count, rng)
    table["input"] |= {"spacing_mm": rng.choice([1.0, 1.2, 1.4], 3).tolist()}
    table["input"] |= {"tile_shape": [40, 36, 40]}
    table["shape"] = _shape(rng)
    turn = Rotation.from_rotvec(rng.normal(0, 2, 3)).as_matrix()
    scale = float(rng.uniform(0.8, 1.2))
    posed = scale * (points - points.mean(axis=0)) @ turn.T
    second = _write(inner, table, scale * widths, posed, rng)
    table = _table(name, count, rng)
    table["input"] |= {"trim": bool(rng.random() < 0.7), "upright": True}
    table["input"]["tile_shape"] = "whole" if rng.random() < 0.6 else [24, 28, 24]
    if turns:
        table["input"] |= {"tile_shape": "whole", "upright": False, "spacing_mm": [2.0] * 3}
    table["refine"] = {"folder": "refine", "sha256": "0" * 64}
    table["measurements"] = _measurements(count, rng)
    has_shape = rng.random() < 0.85
    if has_shape:
        table["shape"] = _shape(rng) | _limits(rng)
    first = _write(folder, table, widths, points if has_shape else None, rng)
    return SubjectModel(first, second, widths, points)


def _points_apart(count: int, rng: np.random.Generator) -> Array:
    """Choose points that lie some 11 mm apart at least."""
    points = [np.zeros(3)]
    while len(points) < count:
        point = rng.uniform(-15, 15, 3)
        if min(np.linalg.norm(point - other) for other in points) > 11:
            points.append(point)
    return np.array(points)


def _table(name: str, count: int, rng: np.random.Generator) -> dict[str, Any]:
    """Choose what both networks have."""
    table = manifest_table(name, count)
    table["input"] |= {
        "spacing_mm": rng.choice([1.6, 2.0, 2.4], 3).tolist(),
        "orientation": str(rng.choice(["RAS", "LPS", "SAR", "PIR"])),
        "intensity": {"method": "window", "lower": 0.0, "upper": 100.0},
        "tile_overlap": 0.25,
    }
    table["network"] = {
        "program": "network.onnx",
        "sha256": "0" * 64,
        "activation": "sigmoid",
        "output_stride": 1,
        "offset_order": str(rng.choice(["axis", "landmark"])),
        "offset_unit": str(rng.choice(["voxel", "mm"])),
    }
    table["voting"] = {"threshold": 0.3, "radius_mm": float(rng.uniform(5.0, 7.0))}
    table["voting"] |= {"region_margin_mm": float(rng.choice([0.0, 2.0, 6.0]))}
    if rng.random() < 0.8:
        table["voting"]["region_spread_mm"] = float(rng.choice([0.2, 0.5, 1.0]))
    for landmark in table["landmarks"]:
        landmark["presence_threshold"] = float(rng.choice([0.02, 0.05, 0.1]))
        if rng.random() < 0.9:
            landmark["region95_mm"] = float(rng.uniform(0.5, 4.0))
    return table


def _shape(rng: np.random.Generator) -> dict[str, Any]:
    shape: dict[str, Any] = {"mean": "shape.safetensors", "sha256": "0" * 64}
    shape["modes"] = int(rng.integers(4, 8))
    shape["tolerance_mm"] = float(rng.uniform(2.0, 3.5))
    if rng.random() < 0.8:
        shape["region_scale_mm"] = float(rng.choice([0.3, 0.8]))
    return shape


def _limits(rng: np.random.Generator) -> dict[str, Any]:
    """Choose what subjects may be like, each limit or none."""
    limits = {
        "max_stretch": float(rng.uniform(1.1, 1.3)),
        "max_twist_deg": float(rng.uniform(8, 15)),
        "min_extent_mm": float(rng.uniform(20, 30)),
        "surroundings": [
            {"beyond": "1", "seen_from": "2", "mm": float(rng.uniform(4, 14))},
            {"beyond": "3", "seen_from": "1", "mm": float(rng.uniform(4, 14))},
        ][: rng.integers(1, 3)],
    }
    return {key: one for key, one in limits.items() if rng.random() < 0.6}


def _measurements(count: int, rng: np.random.Generator) -> list[dict[str, Any]]:
    """Choose a measurement of each kind between any landmarks."""
    kinds = {"distance": 2, "angle": 4, "plane_angle": 6, "line_distance": 3, "projection": 4}
    measurements = []
    for kind, points in (kinds | {"ratio": 4}).items():
        names = rng.permutation(count)
        if points > count:
            names = np.concatenate([names, names[1 : 1 + points - count]])
        one: dict[str, Any] = {
            "name": kind,
            "kind": kind,
            "points": [str(1 + int(n)) for n in names[:points]],
        }
        if kind != "plane_angle" and rng.random() < 0.5:
            one["plane"] = str(rng.choice(["sagittal", "coronal", "axial"]))
        one["interval_scale"] = float(rng.uniform(0.7, 1.5))
        measurements.append(one)
    return measurements


def _write(
    folder: Path, table: dict[str, Any], widths: Array, mean: Array | None, rng: np.random.Generator
) -> Stage:
    """Write a folder and its network, which is the same in NumPy."""
    data, answer = _network(table, widths, rng)
    (folder / "network.onnx").write_bytes(data)
    if mean is not None:
        save_file({"mean": mean}, folder / "shape.safetensors")
    write_manifest(folder, table)
    write_selfcheck(folder)
    text = (folder / "model.toml").read_text(encoding="utf-8")
    return Stage(parse_manifest(folder.name, text), [answer], mean)


def _network(
    table: dict[str, Any], widths: Array, rng: np.random.Generator
) -> tuple[bytes, Network]:
    """Make a network as an ONNX file, and the same in NumPy."""
    network, count = table["network"], len(widths)
    spacing = np.array(table["input"]["spacing_mm"])
    unit = spacing if network["offset_unit"] == "mm" else np.ones(3)
    # Of a logarithm two voxels apart, and of its second differences in mm.
    steps = widths[:, None] ** 2 / spacing**2 * unit / 2
    curved = -(widths**2) / 3
    steps *= rng.uniform(0.8, 1.2, (count, 1))
    shifts = rng.normal(0, 0.15, (count, 3)) * unit
    against = float(np.float32(rng.uniform(0.5, 1.5)))
    aside = np.zeros((1, 1, 1, 1, 2 * ASIDE + 1))
    aside[..., -1] = against
    own_nodes, own_numbers = climbing("x", steps, shifts, network["offset_order"])
    nodes = [
        *[one for one in own_nodes if one.output[0] not in ("scores", "y")],
        node("Conv", "padded second minus", "off"),
        node("Mul", "off off", "square"),
        node("Mul", "square gain", "loss"),
        node("Conv", "x aside", "beside", pads=[0, 0, ASIDE, 0, 0, ASIDE]),
        node("Add", "loss beside", "both"),
        node("Sub", "bias both", "scores"),
        own_nodes[-1],
    ]
    numbers = [
        array("second", curved[:, None, None, None, None] * _second_differences(spacing)),
        array("minus", -np.ones(count)),
        array("gain", [GAIN]),
        array("aside", aside),
        array("bias", [BIAS]),
        *own_numbers,
    ]
    outputs = [value("y", ("n", 4 * count, "u", "v", "w"))]
    data: bytes = graph(nodes, *numbers, outputs=outputs).SerializeToString()
    is_by_axis = network["offset_order"] == "axis"

    def answer(tile: Array) -> Array:
        beside = np.pad(tile, [(0, 0), (0, 0), (0, ASIDE)])[:, :, ASIDE:]
        off = curved[:, None, None, None] * _curvature(tile, spacing) - 1
        scores = BIAS - against * beside - GAIN * off**2
        offsets = steps[..., None, None, None] * climb(tile) + shifts[..., None, None, None]
        offsets = offsets.swapaxes(0, 1) if is_by_axis else offsets
        return np.concatenate([scores, offsets.reshape(-1, *tile.shape)])

    return data, answer


def _second_differences(spacing_mm: Array) -> Array:
    """Make the kernel of the sum of second derivatives, (3 3 3)."""
    kernel = np.zeros((3, 3, 3))
    for axis, mm in enumerate(spacing_mm):
        np.moveaxis(kernel, axis, 0)[:, 1, 1] += np.array([1.0, -2.0, 1.0]) / mm**2
    return kernel


def _curvature(tile: Array, spacing_mm: Array) -> Array:
    """Sum the second derivatives of a logarithm."""
    line = np.pad(np.log(np.maximum(tile, 0) + EPSILON), 1, mode="edge")
    total = np.zeros(tile.shape)
    for axis, mm in enumerate(spacing_mm):
        ends = [np.take(line, range(n, n + tile.shape[axis]), axis) for n in range(3)]
        inner = tuple(slice(None) if a == axis else slice(1, -1) for a in range(3))
        total += (ends[0] - 2 * ends[1] + ends[2])[inner] / mm**2
    return total


def make_subject_scan(
    model: SubjectModel, kind: SubjectKind, rng: np.random.Generator
) -> RandomScan:
    """Make a scan of a subject, or of noise, in a file of any format."""
    spacing, turn = rng.uniform(1.5, 2.4, 3), _turn(kind, rng)
    sizes = rng.uniform(0.95, 1.05) * np.ones(3)
    if kind == "stretched":
        sizes[rng.integers(3)] *= rng.choice([0.65, 1.5])
    points = (model.points - model.points.mean(axis=0)) * sizes @ turn.T
    points += rng.normal(0, 0.4, points.shape)
    widths, gone = model.widths, rng.random(len(points)) < 0.1
    if kind == "two":
        keep = rng.permutation(len(points))[: len(points) - int(rng.integers(0, 2))]
        away = rng.choice([-1, 1], 3) * rng.uniform(8, 14, 3)
        points, gone = np.vstack([points, points[keep] + away]), np.append(gone, gone[keep])
        widths = np.append(widths, widths[keep])
    extent = np.ptp(points, axis=0) + 2 * rng.uniform(5, 9)
    shape = np.ceil(extent / spacing).astype(int)
    if kind == "cut":
        axis = int(rng.integers(3))
        shape[axis] = int(0.65 * shape[axis])
    if kind == "thin":
        shape[rng.integers(3)] = int(rng.integers(3, 7))
    middle_mm = (points.max(axis=0) + points.min(axis=0)) / 2
    if kind == "half":
        axis, end = int(rng.integers(3)), int(rng.choice([-1, 1]))
        middle_mm[axis] += end * spacing[axis] * shape[axis] / 4
        shape[axis] //= 2
    affine = np.diag([*spacing, 1.0])
    affine[:3, 3] = middle_mm - spacing * (shape - 1) / 2 + rng.normal(0, 1, 3)
    world = affine[:3, 3] + np.moveaxis(np.indices(tuple(shape)), 0, -1) * spacing
    voxels = np.zeros(shape)
    wider = 1.3 if kind == "blurred" else 1.0
    for point, width in zip(points[~gone], wider * widths[~gone], strict=True):
        off = ((world - point) ** 2).sum(axis=-1)
        voxels = np.maximum(voxels, 100 * np.exp(-0.5 * off / width**2))
    voxels += rng.normal(0, 15.0 if kind == "noise" else rng.choice([0.2, 1.0]), shape)
    if kind == "padded":
        width = [tuple(rng.integers(0, 8, 2).tolist()) for _ in range(3)]
        voxels = np.pad(voxels, width, constant_values=rng.choice([-3000.0, voxels.min()]))
        affine[:3, 3] -= spacing * [before for before, _ in width]
    return encode(voxels, affine, rng, scaled=False)


def _turn(kind: SubjectKind, rng: np.random.Generator) -> Array:
    """Choose how a subject lies."""
    tilt = 0.5 if kind == "turned" else 0.08
    turn = Rotation.from_rotvec(rng.normal(0, tilt, 3)).as_matrix()
    if kind == "upside down":
        turn = turn @ np.diag([-1.0, 1.0, -1.0])
    return np.asarray(turn)
