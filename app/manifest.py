"""model.toml -> Manifest: what a model folder promises, key by key.

The contract is versioned by ``schema``. Unknown keys are refused, so a typing error never becomes a
silent default.
"""

import tomllib
from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from app.errors import ModelRefused

SCHEMA: Final = 1
WHOLE: Final = "whole"

Spacing = Annotated[float, Field(gt=0.0, le=100.0)]
TileEdge = Annotated[int, Field(ge=8, le=1024)]
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=128)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=False, allow_inf_nan=False)


class IntensitySpec(_Section):
    """How the model wants its voxel values; see ``app.grid.normalise``."""

    method: Literal["percentile", "window", "zscore", "none"]
    lower: float = 0.0
    upper: float = 1.0

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        if self.method in ("percentile", "window") and not self.lower < self.upper:
            raise ValueError(f"expected lower < upper, got {self.lower} and {self.upper}")
        if self.method == "percentile" and not (0 <= self.lower and self.upper <= 100):
            raise ValueError(f"expected percentiles in [0, 100], got {self.lower} and {self.upper}")
        return self


class InputSpec(_Section):
    """The grid that the network was trained on, and how it slides over one."""

    orientation: str
    spacing_mm: tuple[Spacing, Spacing, Spacing]
    tile_shape: Literal["whole"] | tuple[TileEdge, TileEdge, TileEdge]
    tile_overlap: Annotated[float, Field(ge=0.0, le=0.9)] = 0.25
    divisor: Annotated[int, Field(ge=1, le=256)] = 1
    max_voxels: Annotated[int, Field(ge=1)] = 16_000_000
    intensity: IntensitySpec

    @model_validator(mode="after")
    def _check_orientation(self) -> Self:
        axes = sorted(
            "LR PA IS".split().index(pair)
            for code in self.orientation
            for pair in ("LR", "PA", "IS")
            if code in pair
        )
        if len(self.orientation) != 3 or axes != [0, 1, 2]:
            raise ValueError(f"expected one letter of each of LR, PA, IS, got {self.orientation!r}")
        return self


class NetworkSpec(_Section):
    """The network, its weights, and how to read its output."""

    architecture: str | None = None
    arguments: dict[str, object] = {}
    program: FileName | None = None
    weights: FileName | None = None
    sha256: Sha256
    activation: Literal["sigmoid", "softmax"]
    output_stride: Annotated[int, Field(ge=1, le=16)] = 1
    offset_unit: Literal["voxel", "mm"] = "voxel"
    offset_order: Literal["axis", "landmark"] = "axis"

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if (self.architecture is None) == (self.program is None):
            raise ValueError("expected exactly one of architecture and program")
        if (self.architecture is None) != (self.weights is None):
            raise ValueError("expected weights with architecture, and no weights with program")
        return self


class VotingSpec(_Section):
    """How votes are filtered and read out; distances in mm."""

    threshold: Annotated[float, Field(gt=0.0, lt=1.0)]
    radius_mm: Annotated[float, Field(gt=0.0)]
    smooth_mm: Annotated[float, Field(ge=0.0)]


class ShapeSpec(_Section):
    """The constellation: which modes agree with the mean shape."""

    mean: FileName
    sha256: Sha256
    modes: Annotated[int, Field(ge=1, le=16)] = 4
    tolerance_mm: Annotated[float, Field(gt=0.0)]


class LandmarkSpec(_Section):
    """One landmark; the order of the sections is the order of the network's channels."""

    name: Annotated[str, Field(min_length=1, max_length=128)]
    description: str = ""
    mirror: str = ""
    presence_threshold: Annotated[float, Field(ge=0.0)] = 0.25
    region95_mm: Annotated[float, Field(gt=0.0)] | None = None


class SelfCheckSpec(_Section):
    """What is run when the model is loaded; it is ready only if this passes."""

    input: Annotated[str, Field(pattern=r"^(noise|phantom):\d{1,9}$")]
    expected: FileName | None = None
    tolerance: Annotated[float, Field(gt=0.0, le=1.0)] = 0.02
    tolerance_mm: Annotated[float, Field(gt=0.0)] | None = None

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        kind = self.input.split(":")[0]
        if kind == "noise" and self.expected is None:
            raise ValueError("expected key 'expected' (a safetensors file) with input noise")
        if kind == "phantom" and self.tolerance_mm is None:
            raise ValueError("expected key 'tolerance_mm' with input phantom")
        return self


class Manifest(_Section):
    """A whole model.toml."""

    schema_version: Annotated[Literal[1], Field(alias="schema")]
    name: Annotated[str, Field(pattern=r"^[a-z0-9-]+$", max_length=64)]
    version: Annotated[str, Field(min_length=1, max_length=32)]
    description: str
    license: str
    input: InputSpec
    network: NetworkSpec
    voting: VotingSpec
    shape: ShapeSpec | None = None
    landmarks: Annotated[tuple[LandmarkSpec, ...], Field(min_length=1, max_length=4096)]
    selfcheck: SelfCheckSpec

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        names = [landmark.name for landmark in self.landmarks]
        if len(set(names)) != len(names):
            raise ValueError("expected every landmark name once")
        for landmark in self.landmarks:
            if landmark.mirror and landmark.mirror not in names:
                raise ValueError(f"mirror of {landmark.name!r} is no landmark: {landmark.mirror!r}")
        return self


def read_manifest(folder: Path) -> Manifest:
    """Read and validate the ``model.toml`` of a model folder.

    Args:
        folder: The model folder; its name must be the model's name.

    Returns:
        The manifest.

    Raises:
        ModelRefused: The file is missing or breaks the contract; every broken key is named.
    """
    path = folder / "model.toml"
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelRefused(f"{folder.name}: expected a file model.toml, found none") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ModelRefused(f"{folder.name}: model.toml is not TOML: {error}") from None
    try:
        manifest = Manifest.model_validate(table)
    except ValidationError as error:
        reasons = "; ".join(
            f"{'.'.join(str(part) for part in item['loc']) or 'model.toml'}: {item['msg']}"
            for item in error.errors()
        )
        raise ModelRefused(f"{folder.name}: {reasons}") from None
    if manifest.name != folder.name:
        raise ModelRefused(
            f"{folder.name}: name: expected the folder's name, got {manifest.name!r}"
        )
    return manifest
