"""From a model folder to a network on a device.

============  ======================================================================================
manifest      ``model.toml``, validated key by key
files         files of the folder: inside it, and with the promised hash
editing       changes of ``model.toml`` that leave all else as people wrote it
sections      the sections of a manifest
modules       networks of an allow-list, ONNX files and TorchScript as nn.Modules
loader        the folder's weights, in an architecture, or its program, as an nn.Module
mean_shape    where the landmarks lie on average
network       tile batch -> Fields
outputs       what a network answers for a tile -> Field: votes, heatmaps or coordinates
cpu           convolutions and norms on a CPU
selfcheck     does a network answer what it answered when its folder was made?
versions      NAME or NAME@VERSION -> one of several folders
registry      the models that serve, why others do not, and hot reload
============  ======================================================================================
"""

from app.model.cpu import find_last_convolution, norm_groups
from app.model.editing import editing, read_document, update_hashes
from app.model.files import hash_file, write_tensors
from app.model.loader import load_module
from app.model.manifest import Manifest, parse_manifest, read_manifest
from app.model.mean_shape import Shape, load_shape, place_surroundings
from app.model.modules import build_network, find_architecture
from app.model.outputs import Field, make_output
from app.model.registry import (
    LoadedModel,
    PrecisionSetting,
    Registry,
    choose_precision,
    load_model,
    scan_models,
)
from app.model.sections import (
    LOWER_PRECISIONS,
    WHOLE,
    InputSpec,
    IntensitySpec,
    LandmarkSpec,
    LowerPrecision,
    ShapeSpec,
    is_label,
    is_model_name,
)
from app.model.selfcheck import check_noise, check_points, write_precisions, write_selfcheck
from app.model.versions import choose_version, newest_first, split_name

__all__ = [
    "LOWER_PRECISIONS", "WHOLE", "Field", "InputSpec", "IntensitySpec", "LandmarkSpec",
    "LoadedModel", "LowerPrecision", "Manifest", "PrecisionSetting", "Registry", "Shape",
    "ShapeSpec", "build_network", "check_noise", "check_points", "choose_precision",
    "choose_version", "editing", "find_architecture", "find_last_convolution", "hash_file",
    "is_label", "is_model_name", "load_model", "load_module", "load_shape", "make_output",
    "newest_first", "norm_groups", "parse_manifest", "place_surroundings", "read_document",
    "read_manifest", "scan_models", "split_name", "update_hashes", "write_precisions",
    "write_selfcheck", "write_tensors",
]  # fmt: skip
