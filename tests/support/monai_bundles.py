"""A small MONAI bundle, as its authors write one."""

import json
import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch
from monai.networks.nets.unet import UNet
from torch import nn

from tests.support.nnunet_results import PATCH, SPACING, train

RADIUS_MM: Final = "voting.radius_mm=5.8"
"""Where the heatmaps that the network was trained with fall to 0.2: 4 voxels of 3 mm³."""

ARGUMENTS: Final[Mapping[str, Any]] = {
    "spatial_dims": 3,
    "in_channels": 1,
    "out_channels": 2,
    "channels": [8, 16, 16],
    "strides": [2, 2],
    "num_res_units": 1,
    "norm": ["INSTANCE", {"affine": True}],
}


def make_metadata(**output: object) -> dict[str, Any]:
    """Make the content of ``metadata.json``."""
    image = {
        "type": "image", "modality": "CT", "num_channels": 1, "spatial_shape": list(PATCH),
        "dtype": "float32", "is_patch_data": True, "channel_def": {"0": "image"},
    }  # fmt: skip
    pred = {"type": "image", "num_channels": 2, "channel_def": {"1": "dark", "0": "bright"}}
    return {
        "version": "0.3.1",
        "name": "Blobs",
        "authors": "Nobody",
        "description": "Two blobs",
        "network_data_format": {"inputs": {"image": image}, "outputs": {"pred": pred | output}},
    }


def make_config(**others: object) -> dict[str, Any]:
    """Make the content of ``inference.json``, with what MONAI computes besides literals."""
    transforms = [
        {"_target_": "LoadImaged", "keys": "image"},
        {"_target_": "EnsureChannelFirstd", "keys": "image"},
        {"_target_": "Orientationd", "keys": "image", "axcodes": "PLS"},
        {"_target_": "Spacingd", "keys": "image", "pixdim": list(SPACING), "mode": "bilinear"},
        {"_target_": "monai.transforms.NormalizeIntensityD", "keys": ["image"]},
        {"_target_": "EnsureTyped", "keys": "image"},
    ]
    return {
        "imports": ["$import glob"],
        "device": "$torch.device('cpu')",
        "network_def": {"_target_": "UNet", **ARGUMENTS},
        "network": "$@network_def.to(@device)",
        "preprocessing": {"_target_": "Compose", "transforms": transforms},
        "inferer": {
            "_target_": "SlidingWindowInferer", "roi_size": list(PATCH), "overlap": 0.5,
            "mode": "gaussian",
        },
        "postprocessing": {
            "_target_": "Compose",
            "transforms": [{"_target_": "Activationsd", "keys": "pred", "sigmoid": True}],
        },
        **others,
    }  # fmt: skip


def build() -> nn.Module:
    """Build a network that was not trained."""
    torch.manual_seed(1)
    network: nn.Module = UNet(**ARGUMENTS).eval()
    return network


@cache
def trained() -> nn.Module:
    """Train a network of MONAI for some seconds."""
    torch.manual_seed(0)
    return train(UNet(**ARGUMENTS))


def write_bundle(
    root: Path,
    network: nn.Module,
    file: str = "model.pt",
    metadata: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Write the folder of a bundle."""
    (root / "configs").mkdir(parents=True)
    (root / "models").mkdir()
    (root / "configs" / "metadata.json").write_text(json.dumps(metadata or make_metadata()))
    (root / "configs" / "inference.json").write_text(json.dumps(config or make_config()))
    path, tiles = root / "models" / file, torch.zeros(2, 1, *PATCH)
    with warnings.catch_warnings():
        # torch 2.13 exports by what it has itself deprecated.
        warnings.simplefilter("ignore")
        if file.endswith(".pt"):
            torch.save(network.state_dict(), path)
        elif file.endswith(".ts"):
            torch.jit.trace(network, tiles).save(str(path))
        else:
            torch.onnx.export(
                network, (tiles,), path, dynamo=True, external_data=False,
                dynamic_shapes=({0: "n"},),
            )  # fmt: skip
    return root
