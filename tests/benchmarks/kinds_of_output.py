"""Networks of all three kinds of output, trained alike for a short time, as model folders."""

import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import thread_time
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Float, Float64
from monai.networks.nets.dynunet import DynUNet
from monai.networks.nets.regressor import Regressor
from safetensors.torch import save_model
from torch import Tensor, nn
from torch.nn import functional

from app.geometry import transform
from app.model.manifest import parse_manifest
from app.model.selfcheck import write_selfcheck
from app.phantom import make_phantom
from app.preprocessing import make_grid
from app.training.fit.augment import Sample
from app.training.fit.losses import make_targets, vote_loss
from tests.benchmarks.scans import PHANTOM
from tests.support.model_folders import write_manifest

EDGE: Final = 72
"""Of the one tile of the coordinate network, in voxels: no phantom's grid is larger."""

TILE: Final = 48
STRIDE: Final = 2
"""Of dense networks, as of the shipped one."""

BATCH: Final = 2
RATE: Final = 1e-3
RADIUS_MM: Final = 8.0
SIGMA_MM: Final = 4.0
HEAT_WEIGHT: Final = 40.0
"""How much more a heatmap's top counts than the empty voxels around it."""

LANDMARKS: Final = 6
UNET: Final[dict[str, Any]] = {
    "spatial_dims": 3,
    "in_channels": 1,
    "kernel_size": [3, 3, 3],
    "strides": [2, 2, 2],
    "upsample_kernel_size": [2, 2],
    "filters": [16, 32, 64],
    "norm_name": ("GROUP", {"num_groups": 4, "affine": True}),
}
REGRESSOR: Final[dict[str, Any]] = {
    "in_shape": [1, EDGE, EDGE, EDGE],
    "out_shape": [LANDMARKS, 4],
    "channels": [8, 16, 32, 64, 64],
    "strides": [2, 2, 2, 2, 2],
}

Scan = tuple[Float[Tensor, "i j k"], Float64[np.ndarray, "landmarks 3"]]
"""A phantom on the model's grid; its landmarks in voxels, NaN where absent."""

Loss = Callable[[nn.Module, Sequence[Scan], np.random.Generator], Tensor]


@dataclass(frozen=True, slots=True)
class Kind:
    """How one kind of network is made, trained and read.

    Attributes:
        make: Its constructor.
        arguments: Of the constructor.
        loss: Of a batch of scans.
        network: Keys of ``[network]``.
        changes: Other sections of the manifest that differ from those of the shipped model.
    """

    make: type[nn.Module]
    arguments: dict[str, Any]
    loss: Loss
    network: dict[str, object]
    changes: dict[str, dict[str, object]]


def load_scans(seeds: Sequence[int]) -> list[Scan]:
    """Generate phantoms, and bring them to the grid of the shipped model."""
    manifest = parse_manifest("phantom", (PHANTOM / "model.toml").read_text(encoding="utf-8"))
    scans = []
    for seed in seeds:
        phantom = make_phantom(seed)
        grid = make_grid(phantom.volume, manifest.input, torch.device("cpu"))
        names = [phantom.names.index(landmark.name) for landmark in manifest.landmarks]
        points = transform(np.linalg.inv(grid.to_world), phantom.points[names])
        scans.append((grid.voxels, points))
    return scans


def train(kind: Kind, scans: Sequence[Scan], cpu_s: float) -> nn.Module:
    """Train a network for some seconds of one processor."""
    torch.manual_seed(1)
    random = np.random.default_rng(1)
    network = kind.make(**kind.arguments)
    optimiser = torch.optim.AdamW(network.parameters(), RATE)
    begin = thread_time()
    while (spent := thread_time() - begin) < cpu_s:
        for group in optimiser.param_groups:
            group["lr"] = RATE * min(1.0, 2 * (1 - spent / cpu_s))
        batch = [scans[index] for index in random.integers(0, len(scans), BATCH)]
        optimiser.zero_grad()
        kind.loss(network, batch, random).backward()
        optimiser.step()
    return network.eval()


def write_folder(root: Path, name: str, kind: Kind, network: nn.Module) -> Path:
    """Write a trained network as a model folder beside the shipped one's manifest."""
    folder = root / name
    folder.mkdir()
    table = tomllib.loads((PHANTOM / "model.toml").read_text(encoding="utf-8"))
    table |= {"name": name, "selfcheck": {"input": "noise:7", "expected": "selfcheck.safetensors"}}
    table.pop("precision", None)
    table["network"] = {
        "architecture": f"monai.networks.nets:{kind.make.__name__}",
        "arguments": kind.arguments,
        "weights": "weights.safetensors",
        "sha256": "0" * 64,
        **kind.network,
    }
    for section, keys in kind.changes.items():
        table[section] = keys if section == "voting" else table[section] | keys
    save_model(network, str(folder / "weights.safetensors"))
    write_manifest(folder, table)
    write_selfcheck(folder)
    return folder


def export_onnx(folder: Path, name: str, kind: Kind, network: nn.Module) -> Path:
    """Write a trained network, of which a model folder is there, as ONNX beside that folder."""
    other = folder.with_name(name)
    other.mkdir()
    table = tomllib.loads((folder / "model.toml").read_text(encoding="utf-8"))
    table["name"] = name
    table["network"] = {"program": "network.onnx", "sha256": "0" * 64, **kind.network}
    torch.onnx.export(
        network,
        (torch.zeros(2, 1, *table["input"]["tile_shape"]),),
        other / "network.onnx",
        dynamo=True,
        external_data=False,
        dynamic_shapes=({0: "n"},),
    )
    write_manifest(other, table)
    write_selfcheck(other)
    return other


def _cut(scan: Scan, edge: int, first: np.ndarray) -> Scan:
    """Cut a tile of a scan that begins at a voxel; zeros where it ends."""
    voxels, points = scan
    i, j, k = first
    tile = voxels[i : i + edge, j : j + edge, k : k + edge]
    a, b, c = (edge - size for size in tile.shape)
    return functional.pad(tile, (0, c, 0, b, 0, a)), points - first


def _draw_tiles(batch: Sequence[Scan], random: np.random.Generator) -> list[Scan]:
    """Draw a tile of each scan."""
    starts = (np.maximum(np.array(voxels.shape) - TILE, 0) for voxels, _ in batch)
    firsts = [random.integers(0, start + 1) for start in starts]
    return [_cut(scan, TILE, first) for scan, first in zip(batch, firsts, strict=True)]


def _vote_loss(network: nn.Module, batch: Sequence[Scan], random: np.random.Generator) -> Tensor:
    visible = torch.ones(TILE, TILE, TILE, dtype=torch.bool)
    samples = [
        Sample(tile[None], points, visible, frozenset(np.flatnonzero(np.isnan(points[:, 0]))))
        for tile, points in _draw_tiles(batch, random)
    ]
    targets = make_targets(samples, 2.0, STRIDE, RADIUS_MM)
    output = network(torch.stack([sample.image for sample in samples]))
    score, offset = vote_loss(output, targets, RADIUS_MM / 2.0)
    return score + offset


def _heat_loss(network: nn.Module, batch: Sequence[Scan], random: np.random.Generator) -> Tensor:
    tiles = _draw_tiles(batch, random)
    axis = (torch.arange(TILE // STRIDE) + 0.5) * STRIDE - 0.5
    points = torch.from_numpy(np.stack([points for _, points in tiles])).float()
    square = (2.0 * (points[..., None] - axis)).square().unbind(2)
    away = (
        square[0][..., None, None] + square[1][..., None, :, None] + square[2][..., None, None, :]
    )
    truth = (-0.5 * away / SIGMA_MM**2).exp().nan_to_num()
    output = network(torch.stack([tile[None] for tile, _ in tiles]))
    error = functional.binary_cross_entropy_with_logits(output, truth, reduction="none")
    weight = 1 + HEAT_WEIGHT * truth
    return (weight * error).mean()


def _coordinate_loss(
    network: nn.Module, batch: Sequence[Scan], random: np.random.Generator
) -> Tensor:
    rooms = [EDGE - np.array(voxels.shape) for voxels, _ in batch]
    firsts = [random.integers(0, np.minimum(room, 4) + 1) for room in rooms]
    tiles = [_cut(scan, EDGE, first) for scan, first in zip(batch, firsts, strict=True)]
    points = torch.from_numpy(np.stack([points for _, points in tiles])).float()
    present = points.isfinite().all(2)
    output = network(torch.stack([tile[None] for tile, _ in tiles]))
    away = functional.smooth_l1_loss(
        EDGE * output[..., :3][present], points[present] + 0.5, reduction="mean"
    )
    presence = functional.binary_cross_entropy_with_logits(output[..., 3], present.float())
    return away + presence


KINDS: Final = {
    "votes": Kind(
        DynUNet,
        UNET | {"out_channels": 4 * LANDMARKS},
        _vote_loss,
        {"activation": "sigmoid", "output_stride": STRIDE},
        {"voting": {"threshold": 0.3, "radius_mm": RADIUS_MM}},
    ),
    "heatmaps": Kind(
        DynUNet,
        UNET | {"out_channels": LANDMARKS},
        _heat_loss,
        {"output": "heatmaps", "activation": "sigmoid", "output_stride": STRIDE},
        {"voting": {"threshold": 0.2, "radius_mm": 1.794 * SIGMA_MM}},
    ),
    "coordinates": Kind(
        Regressor,
        REGRESSOR,
        _coordinate_loss,
        {
            "output": "coordinates",
            "coordinate_unit": "fraction",
            "coordinate_extras": ["presence"],
            "activation": "sigmoid",
        },
        {"voting": {"threshold": 0.5}, "input": {"tile_shape": [EDGE] * 3}},
    ),
}
"""The kinds; the two dense networks are the shipped one but for their last layer."""
