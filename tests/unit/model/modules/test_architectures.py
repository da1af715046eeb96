"""U-Nets of nnU-Net: their arguments name classes, of which only those on a list are taken."""

import importlib
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import pytest
import torch
from dynamic_network_architectures.architectures.unet import PlainConvUNet, ResidualEncoderUNet
from torch import nn

from app.errors import ModelRefused
from app.model.modules import build_network

UNET = "dynamic_network_architectures.architectures.unet"
SHARED: Mapping[str, Any] = {
    "input_channels": 1,
    "n_stages": 3,
    "features_per_stage": [4, 8, 8],
    "kernel_sizes": [[1, 3, 3], [3, 3, 3], [3, 3, 3]],
    "strides": [[1, 1, 1], [1, 2, 2], [2, 2, 2]],
    "num_classes": 2,
    "n_conv_per_stage_decoder": [1, 1],
    "conv_bias": True,
    "norm_op_kwargs": {"eps": 1e-5, "affine": True},
    "nonlin_kwargs": {"inplace": True},
}
NAMES = {
    "conv_op": "torch.nn.modules.conv.Conv3d",
    "norm_op": "torch.nn.InstanceNorm3d",
    "nonlin": "torch.nn.LeakyReLU",
}
CLASSES = {"conv_op": nn.Conv3d, "norm_op": nn.InstanceNorm3d, "nonlin": nn.LeakyReLU}
KINDS = [
    (PlainConvUNet, {"n_conv_per_stage": [1, 2, 1]}),
    (ResidualEncoderUNet, {"n_blocks_per_stage": [1, 2, 1]}),
]


def build(kind: type[nn.Module] = PlainConvUNet, **arguments: object) -> nn.Module:
    given = {**SHARED, **NAMES, "n_conv_per_stage": 1, **arguments}
    arguments = {key: value for key, value in given.items() if value is not None}
    weights = {"w": torch.zeros(40_000)}
    return build_network("toy", f"{UNET}:{kind.__name__}", arguments, weights)


@pytest.mark.parametrize("supervised", [False, True])
@pytest.mark.parametrize(("kind", "blocks"), KINDS)
def test_network_answers_what_the_original_does(
    kind: type[nn.Module], blocks: dict[str, object], supervised: bool
) -> None:
    """The heads that nnU-Net trains with at lower resolution are there, and not answered."""
    torch.manual_seed(2)
    original = kind(**SHARED, **CLASSES, **blocks).eval()
    arguments = {"n_conv_per_stage": None, "deep_supervision": supervised, **blocks}
    built = build(kind, **arguments).eval()
    built.load_state_dict(original.state_dict())
    tile = torch.rand(2, 1, 8, 16, 24)
    with torch.inference_mode():
        torch.testing.assert_close(built(tile), original(tile), rtol=0, atol=0)


@pytest.mark.parametrize("layer", ["os.system", "torch.nn.Bilinear", "torch.load", "Conv3d"])
def test_layer_outside_the_list_is_refused(layer: str) -> None:
    with pytest.raises(ModelRefused, match=r"network\.arguments\.conv_op: expected one of torch"):
        build(conv_op=layer)


def test_network_much_larger_than_its_weights_is_refused() -> None:
    with pytest.raises(ModelRefused, match="about the size of its weights"):
        build(features_per_stage=[512, 1024, 1024])


def test_package_that_is_missing_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> ModuleType:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(ModelRefused, match=r"pip install 'landmarkd\[nnunet\]'"):
        build()
