"""From a model folder to a network on a device.

============  ======================================================================================
manifest      ``model.toml``, validated key by key
files         files of the folder: inside it, and with the promised hash
loader        an allow-listed architecture with its weights, or a program, as an nn.Module
onnx          ONNX files, checked, and computed by ONNX Runtime
torchscript   TorchScript files, where they are allowed
mean_shape    where the landmarks lie on average
network       tile batch -> Fields
outputs       what a network answers for a tile -> Field: votes, heatmaps or coordinates
cpu_kernels   convolutions and group norms on a CPU
precision     the precision that a network computes in, by a fixed rule
selfcheck     does a network answer what it answered when its folder was made?
registry      the models that serve, why others do not, and hot reload
============  ======================================================================================
"""

from app.model.files import hash_file
from app.model.loader import find_architecture, load_module
from app.model.manifest import (
    LOWER_PRECISIONS,
    WHOLE,
    InputSpec,
    IntensitySpec,
    LandmarkSpec,
    LowerPrecision,
    Manifest,
    read_manifest,
)
from app.model.mean_shape import load_shape
from app.model.outputs import Field
from app.model.precision import PrecisionSetting
from app.model.registry import LoadedModel, Registry, load_model, scan_models
from app.model.selfcheck import check_noise, check_points, write_precisions, write_selfcheck

__all__ = [
    "LOWER_PRECISIONS", "WHOLE", "Field", "InputSpec", "IntensitySpec", "LandmarkSpec",
    "LoadedModel", "LowerPrecision", "Manifest", "PrecisionSetting", "Registry",
    "check_noise", "check_points", "find_architecture", "hash_file", "load_model", "load_module",
    "load_shape", "read_manifest", "scan_models", "write_precisions", "write_selfcheck",
]  # fmt: skip
