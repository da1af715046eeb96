"""A small training as nnLandmark leaves it, and inference as nnU-Net does it."""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import combinations, product
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import torch
from dynamic_network_architectures.architectures.unet import PlainConvUNet, ResidualEncoderUNet
from jaxtyping import Float
from scipy.ndimage import gaussian_filter, zoom
from torch import Tensor, nn
from torch.nn import functional

from app.exchange.plans import RESAMPLING
from app.inference import Detector, load_checked
from app.io import read_volume
from app.model.manifest import Manifest
from app.model.outputs import make_output
from app.voting import GridFrame, filter_votes, locate
from app.voting.readout import Readout

PATCH = (24, 32, 28)
SPACING = (2.0, 1.0, 1.5)
"""Of the network's axes, which are j, i, k of the file."""

TRANSPOSE = (1, 2, 0)
ORIENTATION = "LPS"
BALL_RADIUS = 4
THRESHOLD = 0.2
"""Where a ball falls below it, no label marks it."""

SIGNS = (1.0, -1.0)
"""Of the blobs at the two landmarks, in noise."""

ARGUMENTS: Mapping[str, Any] = {
    "n_stages": 3,
    "features_per_stage": [8, 12, 16],
    "conv_op": "torch.nn.modules.conv.Conv3d",
    "kernel_sizes": [[1, 3, 3], [3, 3, 3], [3, 3, 3]],
    "strides": [[1, 1, 1], [1, 2, 2], [2, 2, 2]],
    "n_conv_per_stage": [1, 1, 1],
    "n_conv_per_stage_decoder": [1, 1],
    "conv_bias": True,
    "norm_op": "torch.nn.modules.instancenorm.InstanceNorm3d",
    "norm_op_kwargs": {"eps": 1e-05, "affine": True},
    "dropout_op": None,
    "dropout_op_kwargs": None,
    "nonlin": "torch.nn.LeakyReLU",
    "nonlin_kwargs": {"inplace": True},
}
CLASSES = {"conv_op": nn.Conv3d, "norm_op": nn.InstanceNorm3d, "nonlin": nn.LeakyReLU}


def make_plans() -> dict[str, Any]:
    """Make the content of ``plans.json``, as far as it says how to use a network."""
    architecture = {
        "network_class_name": "dynamic_network_architectures.architectures.unet.PlainConvUNet",
        "arch_kwargs": dict(ARGUMENTS),
        "_kw_requires_import": ["conv_op", "norm_op", "dropout_op", "nonlin"],
    }
    lowres = {
        "data_identifier": "nnUNetPlans_3d_lowres",
        "patch_size": list(PATCH),
        "spacing": [4.0, 2.0, 3.0],
        "normalization_schemes": ["ZScoreNormalization"],
        "use_mask_for_norm": [False],
        "architecture": architecture,
        **RESAMPLING,
    }
    fullres = {"inherits_from": "3d_lowres", "spacing": list(SPACING)}
    return {
        "dataset_name": "Dataset900_Blobs",
        "plans_name": "nnUNetPlans",
        "image_reader_writer": "SimpleITKIO",
        "transpose_forward": list(TRANSPOSE),
        "transpose_backward": np.argsort(TRANSPOSE).tolist(),
        "configurations": {"3d_lowres": lowres, "3d_fullres": fullres},
        "foreground_intensity_properties_per_channel": {
            "0": {"mean": 3.0, "std": 2.0, "percentile_00_5": -2.0, "percentile_99_5": 9.0}
        },
    }


def make_dataset() -> dict[str, Any]:
    """Make the content of ``dataset.json``."""
    return {
        "channel_names": {"0": "MRI"},
        "labels": {"background": 0, "dark": 2, "bright": 1},
        "numTraining": 8,
        "file_ending": ".nii.gz",
        "licence": "CC0-1.0",
    }


def write_results(
    root: Path,
    networks: Sequence[nn.Module],
    plans: Mapping[str, Any] | None = None,
    dataset: Mapping[str, Any] | None = None,
    mirror: tuple[int, ...] | None = None,
) -> Path:
    """Write the folder of a training, with a checkpoint for each fold."""
    plans, dataset = plans or make_plans(), dataset or make_dataset()
    (root / "plans.json").write_text(json.dumps(plans))
    (root / "dataset.json").write_text(json.dumps(dataset))
    for fold, network in enumerate(networks):
        (root / f"fold_{fold}").mkdir()
        optimizer = torch.optim.SGD(network.parameters(), 1e-2, momentum=0.99, nesterov=True)
        state = {
            "network_weights": network.state_dict(),
            "optimizer_state": optimizer.state_dict(),
            "grad_scaler_state": None,
            "logging": {"ema_fg_dice": [np.float64(0.25)], "train_losses": [np.float32(0.5)]},
            "_best_ema": np.float64(0.25),
            "current_epoch": 1000,
            "init_args": {
                "plans": plans,
                "configuration": "3d_fullres",
                "fold": fold,
                "dataset_json": dataset,
                "device": torch.device("cuda"),
            },
            "trainer_name": "nnLandmark",
            "inference_allowed_mirroring_axes": mirror,
        }
        torch.save(state, root / f"fold_{fold}" / "checkpoint_final.pth")
    return root


def make_case(
    shape: tuple[int, ...], seed: int, margin: int = 6
) -> tuple[Float[np.ndarray, "i j k"], Float[np.ndarray, "2 3"]]:
    """Make a scan in the network's axes, with a bright and a dark blob, and where they are.

    Args:
        shape: Of the scan.
        seed: Of the generator.
        margin: Least distance of a blob from the scan's ends; if it is negative, some are outside.
    """
    random = np.random.default_rng(seed)
    points = np.array([random.uniform(margin, np.array(shape) - 1 - margin) for _ in SIGNS])
    voxels = np.stack(np.meshgrid(*map(np.arange, shape), indexing="ij"), axis=-1)
    values = gaussian_filter(random.standard_normal(shape), 1.0)
    for sign, point in zip(SIGNS, points, strict=True):
        away = ((voxels - point) ** 2).sum(-1)
        values += 3 * sign * np.exp(-away / 8.0)
    return (100 + 20 * values).astype(np.float32), points


def make_target(shape: tuple[int, ...], points: np.ndarray) -> Float[Tensor, "2 i j k"]:
    """Make heatmaps that fall evenly from 1 to 0."""
    voxels = np.stack(np.meshgrid(*map(np.arange, shape), indexing="ij"), axis=-1)
    away = np.linalg.norm(voxels[None] - points.round()[:, None, None, None], axis=-1)
    return torch.from_numpy(np.clip(1 - away / (BALL_RADIUS + 1), 0, 1)).float()


def build(*, residual: bool = False, **arguments: object) -> nn.Module:
    """Build a network as nnU-Net does from its plans."""
    given = {**ARGUMENTS, **CLASSES, "input_channels": 1, "num_classes": len(SIGNS), **arguments}
    if residual:
        given["n_blocks_per_stage"] = given.pop("n_conv_per_stage")
    kind = ResidualEncoderUNet if residual else PlainConvUNet
    network: nn.Module = kind(**given, deep_supervision=False)
    return network


@cache
def trained(seed: int, *, labels: bool = False) -> nn.Module:
    """Train a network for some seconds, to answer heatmaps or labels and a background."""
    torch.manual_seed(seed)
    return train(build(num_classes=len(SIGNS) + labels), seed, labels=labels)


def train(network: nn.Module, seed: int = 0, *, labels: bool = False) -> nn.Module:
    """Train a network as ``trained`` does."""
    optimizer = torch.optim.Adam(network.parameters(), 1e-2)
    for step in range(120):
        values, points = make_case(PATCH, 1000 * seed + step, margin=-6)
        logits, target = network(standardise(values)[None, None]), make_target(PATCH, points)
        # Few voxels are marked.
        if labels:
            marked = torch.cat([torch.full_like(target[:1], THRESHOLD), target]).argmax(0)
            weight = torch.tensor([1.0, 20.0, 20.0])
            loss = functional.cross_entropy(logits, marked[None], weight)
        else:
            weight = torch.tensor(20.0)
            loss = functional.binary_cross_entropy_with_logits(logits[0], target, pos_weight=weight)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return network.eval()


def standardise(values: np.ndarray) -> Tensor:
    """Bring values to mean 0 and standard deviation 1."""
    return torch.from_numpy((values - values.mean()) / values.std())


@torch.inference_mode()
def predict(
    networks: Sequence[nn.Module], values: np.ndarray, mirror: Sequence[int] = ()
) -> Float[Tensor, "channels i j k"]:
    """Predict the logits of a preprocessed scan as nnU-Net does, but in float32.

    Tiles that overlap by half are weighted by a Gaussian of an eighth of their edges, and their
    logits averaged; so are those of mirror images, and at last those of folds. A smaller scan is
    padded on both sides.
    """
    missing = [max(edge - size, 0) for edge, size in zip(PATCH, values.shape, strict=True)]
    padding = [(few // 2, few - few // 2) for few in missing]
    tiles = torch.from_numpy(np.pad(standardise(values), padding))[None]
    shape = tiles.shape[1:]
    peak = np.zeros(PATCH)
    peak[tuple(edge // 2 for edge in PATCH)] = 1
    importance = gaussian_filter(peak, [edge / 8 for edge in PATCH], mode="constant")
    importance /= importance.max()
    importance[importance == 0] = importance[importance > 0].min()
    weight = torch.from_numpy(importance).float()
    starts = []
    for size, edge in zip(shape, PATCH, strict=True):
        count = int(np.ceil((size - edge) / (edge * 0.5))) + 1
        starts.append([round(first) for first in np.linspace(0, size - edge, count)])
    images = [some for n in range(len(mirror) + 1) for some in combinations(mirror, n)]
    total: Tensor | float = 0.0
    for network in networks:
        sums, weights = torch.zeros(()), torch.zeros(shape)
        for first in product(*starts):
            spans = [slice(a, a + edge) for a, edge in zip(first, PATCH, strict=True)]
            place = (..., spans[0], spans[1], spans[2])
            answer: Tensor = torch.zeros(())
            for axes in images:
                dims = [axis + 2 for axis in axes]
                answer = answer + network(tiles[place][None].flip(dims)).flip(dims)[0]
            if sums.dim() == 0:
                sums = torch.zeros(len(answer), *shape)
            sums[place] += weight * answer / len(images)
            weights[place] += weight
        total = total + sums / weights
    inner = [slice(low, size - high) for (low, high), size in zip(padding, shape, strict=True)]
    return torch.as_tensor(total / len(networks))[:, *inner]


def respace(
    values: Float[np.ndarray, "i j k"], spacing: Sequence[float]
) -> Float[np.ndarray, "i j k"]:
    """Show a case of the network's spacing in voxels of another, with noise of their own."""
    if tuple(spacing) == SPACING:
        return values
    factors = np.array(SPACING) / spacing
    shown = zoom(values, factors, order=1, mode="nearest", grid_mode=True)
    return np.asarray(shown + np.random.default_rng(0).normal(0, 3, shown.shape), np.float32)


def scan_of(values: Float[np.ndarray, "j i k"], spacing: Sequence[float] = SPACING) -> bytes:
    """Write a scan that SimpleITK reads and nnU-Net permutes to these values."""
    read = values.transpose(np.argsort(TRANSPOSE))  # As SimpleITK reads it: k, j, i.
    k, j, i = (spacing[list(TRANSPOSE).index(axis)] for axis in range(3))
    signs = [1.0 if code in "RAS" else -1.0 for code in ORIENTATION]
    affine = np.diag([*(sign * mm for sign, mm in zip(signs, (i, j, k), strict=True)), 1.0])
    image = nib.Nifti1Image(read.transpose(2, 1, 0), affine)
    image.header.set_xyzt_units("mm")
    content: bytes = image.to_bytes()
    return content


def to_file(points: np.ndarray) -> np.ndarray:
    """Map indices of the network's input to those of the file."""
    return np.asarray(points[:, np.argsort(TRANSPOSE)][:, ::-1])


def detect(
    folder: Path, values: np.ndarray, spacing: Sequence[float] = SPACING
) -> tuple[np.ndarray, int]:
    """Find the landmarks, in voxels of the file; and say of how many tiles."""
    detection = Detector(load_checked(folder, torch.device("cpu"))).detect(
        read_volume(scan_of(values, spacing))
    )
    assert [one.status for one in detection.landmarks] == ["detected"] * 2
    return np.array([one.ijk for one in detection.landmarks]), detection.tiles


def read_out(logits: Tensor, manifest: Manifest) -> np.ndarray:
    """Read the landmarks of heatmaps that are there whole, in voxels of the file."""
    i, j, k = logits.shape[1:]
    voting = manifest.voting
    readout = Readout(
        2,
        (i, j, k),
        SPACING,
        voting.radius_mm,
        heatmap_threshold=voting.threshold,
        round_in_voxels=voting.round_in == "voxels",
    )
    field = make_output(manifest).field(logits, logits.shape[1:])
    frame = GridFrame(np.eye(4), np.diag([*SPACING, 1.0]))
    votes = filter_votes(field, voting.threshold)
    return to_file(np.array([one.ijk for one in locate(votes, readout, frame, manifest.landmarks)]))
