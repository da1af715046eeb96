"""app/model."""

from app.model.files import hash_file
from app.model.loader import find_architecture, load_module
from app.model.manifest import (
    WHOLE,
    InputSpec,
    IntensitySpec,
    LandmarkSpec,
    Manifest,
    read_manifest,
)
from app.model.mean_shape import load_shape
from app.model.network import Field
from app.model.precision import PrecisionSetting
from app.model.registry import LoadedModel, Registry, load_model, scan_models
from app.model.selfcheck import check, write_selfcheck

__all__ = [
    "WHOLE",
    "Field",
    "InputSpec",
    "IntensitySpec",
    "LandmarkSpec",
    "LoadedModel",
    "Manifest",
    "PrecisionSetting",
    "Registry",
    "check",
    "find_architecture",
    "hash_file",
    "load_model",
    "load_module",
    "load_shape",
    "read_manifest",
    "scan_models",
    "write_selfcheck",
]
