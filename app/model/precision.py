"""Which precision a network computes in: decided by a fixed rule, never by a clock.

``auto`` takes the first precision below float32 that the device computes natively *and* the model
was verified in (``[precision]`` of its ``model.toml``); float32 otherwise. So the same model gives
the same answer in every process on the same kind of device.
"""

from typing import Literal, TypeAlias

import torch

from app.compute import fast_precisions
from app.model.loader import ONNX_SUFFIX
from app.model.manifest import Manifest
from app.model.sections import LowerPrecision

Precision: TypeAlias = Literal["float32"] | LowerPrecision
PrecisionSetting: TypeAlias = Precision | Literal["auto"]


def choose_precision(
    manifest: Manifest, device: torch.device, setting: PrecisionSetting
) -> Precision:
    """Choose the precision that a model computes in on a device."""
    if (manifest.network.program or "").endswith(ONNX_SUFFIX):
        return "float32"  # What it computes in is fixed in the file.
    if setting != "auto":
        return setting
    verified = manifest.precision.verified
    native = fast_precisions(device)
    return next((name for name in verified if name in native), "float32")
