"""The sections of a ``model.toml``, each validated by itself; the whole is in ``manifest``."""

import math
from contextlib import suppress
from typing import Annotated, Final, Literal, get_args

from pydantic import (
    BaseModel,
    Field,
    JsonValue,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from app.geometry import AXIS_CODES

WHOLE: Final = "whole"

Spacing = Annotated[float, Field(gt=0.0, le=100.0)]
TileEdge = Annotated[int, Field(ge=8, le=1024)]
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=128)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
LowerPrecision = Literal["bfloat16", "float16"]
LOWER_PRECISIONS: Final[tuple[LowerPrecision, ...]] = get_args(LowerPrecision)
Label = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]+$", max_length=128)]
ModelName = Annotated[str, Field(pattern=r"^[a-z0-9-]+$", max_length=64)]

Activation = Literal["none", "sigmoid", "softmax", "spatial_softmax"]
ACTIVATIONS: Final[dict[str, tuple[Activation, ...]]] = {
    "votes": ("sigmoid", "softmax"),
    "heatmaps": ("none", "sigmoid", "softmax", "spatial_softmax"),
    "coordinates": ("none", "sigmoid"),
}
"""What may turn scores into probabilities, by the kind of output."""

OWN_KEYS: Final = {
    "votes": ("offset_unit", "offset_order"),
    "heatmaps": ("heatmap_peak",),
    "coordinates": ("coordinate_unit", "coordinate_extras"),
}
"""Keys of ``[network]`` that belong to one kind of output."""

INTENSITY_KEYS: Final[dict[str, tuple[str, ...]]] = {
    "percentile": ("lower", "upper"),
    "window": ("lower", "upper"),
    "clip": ("lower", "upper", "mean", "deviation"),
}
"""Keys that an intensity rule needs, as no network was trained with bounds that nobody chose."""

Axis = Literal["i", "j", "k"]

MAX_MEMBERS: Final = 16
"""Networks that one model may average: each costs as much time as the first."""

SIGMA_POINTS: Final = 6
"""Votes by which a position with a variance is represented; see ``app.model.outputs``."""

ARCHITECTURE: Final = r"^[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_]*$"


class Section(BaseModel, extra="forbid", frozen=True, allow_inf_nan=False):
    """What all sections have in common: unknown keys are refused, and values never change."""


class IntensitySpec(Section):
    """How the model wants its voxel values; see ``app.preprocessing.intensity``."""

    method: Literal["percentile", "window", "zscore", "clip", "none"]
    lower: float = 0.0
    upper: float = 1.0
    mean: float = 0.0
    deviation: Annotated[float, Field(gt=0.0)] = 1.0
    region: Literal["all", "nonzero", "filled"] = "all"

    @model_validator(mode="after")
    def _check_bounds(self) -> "IntensitySpec":
        needed, given = INTENSITY_KEYS.get(self.method, ()), self.model_fields_set - {"method"}
        if not given >= set(needed):
            got = ", ".join(sorted(given)) or "none"
            raise ValueError(f"expected {', '.join(needed)} with {self.method!r}, got {got}")
        optional = {"region"} if self.method == "zscore" else set()
        if extra := sorted(given - {*needed, *optional}):
            raise ValueError(f"expected no {', '.join(extra)} with {self.method!r}")
        if needed and not self.lower < self.upper:
            raise ValueError(f"expected lower < upper, got {self.lower} and {self.upper}")
        if self.method == "percentile" and (self.lower < 0 or self.upper > 100):
            raise ValueError(f"expected percentiles in [0, 100], got {self.lower} and {self.upper}")
        return self

    @property
    def has_window(self) -> bool:
        """Whether two voxel values tell it all, so that a second network can share them."""
        return self.method in ("percentile", "window")


class InputSpec(Section):
    """The grid that the network was trained on, and how it slides over one.

    The edges of a tile are multiples of ``divisor`` and of the network's output stride. With
    ``tile_shape = "whole"`` a scan is one tile, padded up to such multiples, of at most
    ``max_voxels``; ``tile_overlap`` then says nothing. Where subjects lie as the affine says, as
    ``upright`` declares, no scan is looked at from other sides to find its landmarks. With
    ``trim``, a scan that was padded, far or with what is not its air, is seen without that.
    """

    orientation: Annotated[str, Field(min_length=3, max_length=3)]
    spacing_mm: tuple[Spacing, Spacing, Spacing]
    tile_shape: Literal["whole"] | tuple[TileEdge, TileEdge, TileEdge]
    tile_overlap: Annotated[float, Field(ge=0.0, le=0.9)] = 0.25
    tile_sigma: Annotated[float, Field(ge=0.1, le=1000.0)] = 0.25
    tile_layout: Literal["even", "nnunet", "monai"] = "even"
    divisor: Annotated[int, Field(ge=1, le=256)] = 1
    max_voxels: Annotated[int, Field(ge=1)] = 16_000_000
    upright: bool = False
    trim: bool = False
    intensity: IntensitySpec

    @model_validator(mode="after")
    def _check_orientation(self) -> "InputSpec":
        named = {pair for code in self.orientation for pair in AXIS_CODES if code in pair}
        if len(named) != len(AXIS_CODES):
            raise ValueError(f"expected one letter of each of LR, PA, IS, got {self.orientation!r}")
        return self


class NetworkSpec(Section):
    """The network, its weights, and how to read its output."""

    architecture: Annotated[str, Field(pattern=ARCHITECTURE)] | None = None
    arguments: dict[str, JsonValue] = {}
    program: FileName | None = None
    weights: FileName | None = None
    members: Annotated[tuple[FileName, ...], Field(max_length=MAX_MEMBERS - 1)] = ()
    sha256: Sha256
    output: Literal["votes", "heatmaps", "coordinates"] = "votes"
    activation: Activation | None = None
    mirror: tuple[Axis, ...] = ()
    output_stride: Annotated[int, Field(ge=1, le=16)] = 1
    offset_unit: Literal["voxel", "mm"] = "voxel"
    offset_order: Literal["axis", "landmark"] = "axis"
    heatmap_peak: Annotated[float, Field(gt=0.0)] | None = None
    coordinate_unit: Literal["voxel", "mm", "fraction"] = "voxel"
    coordinate_extras: tuple[Literal["log_variance", "presence"], ...] = ()

    @model_validator(mode="after")
    def _check_source(self) -> "NetworkSpec":
        if (self.architecture is None) == (self.program is None):
            raise ValueError("expected exactly one of architecture and program")
        if (self.architecture is None) != (self.weights is None):
            raise ValueError("expected weights with architecture, and no weights with program")
        if self.program is not None and self.arguments:
            raise ValueError("expected no arguments with program: it carries its own")
        if len(set(self.files)) < len(self.files):
            raise ValueError("expected every one of members once, and none that is the first")
        if len(set(self.mirror)) < len(self.mirror):
            raise ValueError("expected every axis of mirror once")
        return self

    @model_validator(mode="after")
    def _check_output(self) -> "NetworkSpec":
        for output, keys in OWN_KEYS.items():
            for key in self.model_fields_set.intersection(keys if output != self.output else ()):
                raise ValueError(f"expected {key} with output {output!r} only, got {self.output!r}")
        if self.output == "coordinates":
            return self._check_coordinates()
        known = ACTIVATIONS[self.output]
        if self.activation not in known:
            raise ValueError(
                f"expected activation {' or '.join(known)} with output {self.output!r}, "
                f"got {self.activation or 'no activation'}"
            )
        if self.heatmap_peak is None and self.activation == "spatial_softmax":
            raise ValueError("expected heatmap_peak with activation spatial_softmax")
        if self.heatmap_peak is not None and self.activation in ("sigmoid", "softmax"):
            raise ValueError(f"expected no heatmap_peak with activation {self.activation}")
        return self

    def _check_coordinates(self) -> "NetworkSpec":
        if len(set(self.coordinate_extras)) < len(self.coordinate_extras):
            raise ValueError("expected every one of coordinate_extras once")
        known = ACTIVATIONS["coordinates"] if "presence" in self.coordinate_extras else (None,)
        if self.activation not in known:
            raise ValueError(
                "expected activation none or sigmoid where coordinate_extras has presence, and no "
                f"activation where it has not, got {self.activation or 'no activation'}"
            )
        if self.output_stride != 1:
            raise ValueError(f"expected output_stride 1 with coordinates, got {self.output_stride}")
        return self

    @property
    def files(self) -> tuple[str, ...]:
        """The files of all members, the first one's first."""
        return (self.program or self.weights or "", *self.members)

    @property
    def votes_each(self) -> int | None:
        """How many votes each landmark gets; None: as many as there are voxels that pass."""
        if self.output != "coordinates":
            return None
        return SIGMA_POINTS if "log_variance" in self.coordinate_extras else 1


class VotingSpec(Section):
    """How votes are filtered and read out; distances in mm.

    A network that answers coordinates has no radius: all votes for a landmark belong together.
    Heatmaps are as wide along all axes in mm, or, with ``round_in = "voxels"``, in voxels; the
    radius is then that in voxels times the cube root of a voxel's volume.
    Landmarks nearer to the scan's border than ``region_margin_mm`` have no 95 % region. Regions are
    wider where votes scatter more than ``region_spread_mm``.
    """

    threshold: Annotated[float, Field(gt=0.0, lt=1.0)]
    radius_mm: Annotated[float, Field(gt=0.0)] = math.inf
    round_in: Literal["mm", "voxels"] = "mm"
    region_margin_mm: Annotated[float, Field(ge=0.0)] = 0.0
    region_spread_mm: Annotated[float, Field(gt=0.0)] | None = None
    smooth_mm: Annotated[float, Field(ge=0.0)] | None = None  # of no effect; see parse_manifest


class SurroundingSpec(Section):
    """A place beyond a landmark, on the straight line from another one through it."""

    beyond: str
    seen_from: str
    mm: Annotated[float, Field(gt=0.0)]


class ShapeSpec(Section):
    """The constellation: which modes agree with the mean shape.

    Structures that look alike, such as vertebrae, are told apart by what surrounds them. A scan
    that shows none of the ``surroundings`` has no landmark that is detected for sure. Nor has one
    whose subject is more than ``max_stretch`` times as large or as small as the mean shape along
    one of its axes, or turned by more than ``max_twist_deg`` about the longest; nor has a scan that
    is less than ``min_extent_mm`` thick. 95 % regions are wider for subjects whose landmarks are
    further than ``region_scale_mm`` from the fitted shape.
    """

    mean: FileName
    sha256: Sha256
    modes: Annotated[int, Field(ge=1, le=16)] = 4
    tolerance_mm: Annotated[float, Field(gt=0.0)]
    region_scale_mm: Annotated[float, Field(gt=0.0)] | None = None
    max_stretch: Annotated[float, Field(gt=1.0)] | None = None
    max_twist_deg: Annotated[float, Field(gt=0.0, lt=180.0)] | None = None
    min_extent_mm: Annotated[float, Field(gt=0.0)] | None = None
    surroundings: tuple[SurroundingSpec, ...] = ()


class RefineSpec(Section):
    """A second model, of a folder within this one, that looks again in the subject's own pose."""

    folder: FileName
    sha256: Sha256


class PrecisionSpec(Section):
    """In which precisions below float32 the model was verified.

    Each value is the largest shift in mm of any landmark against float32, over the scans that it
    was verified with.
    """

    bfloat16: Annotated[float, Field(ge=0.0)] | None = None
    float16: Annotated[float, Field(ge=0.0)] | None = None

    @property
    def verified(self) -> dict[LowerPrecision, float]:
        """The precisions that are there, with their shifts in mm, in order of preference."""
        shifts = ((name, getattr(self, name)) for name in LOWER_PRECISIONS)
        return {name: shift for name, shift in shifts if shift is not None}


def is_label(text: str) -> bool:
    """Say whether a landmark may have this name."""
    with suppress(ValidationError):
        return TypeAdapter(Label).validate_python(text) == text
    return False


def is_model_name(text: str) -> bool:
    """Say whether a model may have this name."""
    with suppress(ValidationError):
        return TypeAdapter(ModelName).validate_python(text) == text
    return False


class LandmarkSpec(Section):
    """One landmark; the order of the sections is the order of the network's channels."""

    name: Label
    description: str = ""
    mirror: str = ""
    group: str = ""
    presence_threshold: Annotated[float, Field(ge=0.0)] = 0.25
    region95_mm: Annotated[float, Field(gt=0.0)] | None = None


class SelfCheckSpec(Section):
    """What is run when the model is loaded; it is ready only if this passes."""

    input: Annotated[str, Field(pattern=r"^(noise|phantom):\d{1,9}$")]
    expected: FileName | None = None
    tolerance: Annotated[float, Field(gt=0.0, le=1.0)] = 0.02
    tolerance_mm: Annotated[float, Field(gt=0.0)] | None = None

    @model_validator(mode="after")
    def _check_kind(self) -> "SelfCheckSpec":
        if not self.is_phantom and self.expected is None:
            raise ValueError("expected key 'expected' (a safetensors file) with input noise")
        if self.is_phantom and self.tolerance_mm is None:
            raise ValueError("expected key 'tolerance_mm' with input phantom")
        return self

    @property
    def is_phantom(self) -> bool:
        """Whether landmarks of a phantom are checked, instead of the network's output for noise."""
        return self.input.startswith("phantom")

    @property
    def seed(self) -> int:
        """Of the noise or the phantom."""
        return int(self.input.partition(":")[2])
