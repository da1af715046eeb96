"""model.toml -> Manifest: what a model folder promises, key by key.

The contract is versioned by ``schema`` and explained to users in ``models/README.md``. Unknown keys
are refused, so a typing error never becomes a silent default; so are values of another type ("0.3"
is no number), and a key that is refused is named with what was expected and what came.
"""

import json
import logging
import math
import tomllib
from pathlib import Path
from typing import Annotated, Final, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator
from pydantic_core import ErrorDetails

from app.errors import ModelRefused
from app.measurements import MeasurementSpec, check_names
from app.model.files import read_text

logger = logging.getLogger("landmarkd.model")

WHOLE: Final = "whole"

Spacing = Annotated[float, Field(gt=0.0, le=100.0)]
TileEdge = Annotated[int, Field(ge=8, le=1024)]
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=128)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
LowerPrecision = Literal["bfloat16", "float16"]
LOWER_PRECISIONS: Final[tuple[LowerPrecision, ...]] = get_args(LowerPrecision)
Label = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]+$", max_length=128)]

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

SIGMA_POINTS: Final = 6
"""Votes by which a position with a variance is represented; see ``app.model.outputs``."""

ARCHITECTURE: Final = r"^[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_]*$"


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class IntensitySpec(_Section):
    """How the model wants its voxel values; see ``app.preprocessing.grid.normalise``."""

    method: Literal["percentile", "window", "zscore", "none"]
    lower: float = 0.0
    upper: float = 1.0

    @model_validator(mode="after")
    def _check_bounds(self) -> "IntensitySpec":
        if self.method in ("percentile", "window") and not self.lower < self.upper:
            raise ValueError(f"expected lower < upper, got {self.lower} and {self.upper}")
        if self.method == "percentile" and (self.lower < 0 or self.upper > 100):
            raise ValueError(f"expected percentiles in [0, 100], got {self.lower} and {self.upper}")
        return self


class InputSpec(_Section):
    """The grid that the network was trained on, and how it slides over one.

    The edges of a tile are multiples of ``divisor`` and of the network's output stride. With
    ``tile_shape = "whole"`` a scan is one tile, padded up to such multiples, of at most
    ``max_voxels``; ``tile_overlap`` then says nothing. Where subjects lie as the affine says, as
    ``upright`` declares, no scan is looked at from other sides.
    """

    orientation: Annotated[str, Field(min_length=3, max_length=3)]
    spacing_mm: tuple[Spacing, Spacing, Spacing]
    tile_shape: Literal["whole"] | tuple[TileEdge, TileEdge, TileEdge]
    tile_overlap: Annotated[float, Field(ge=0.0, le=0.9)] = 0.25
    divisor: Annotated[int, Field(ge=1, le=256)] = 1
    max_voxels: Annotated[int, Field(ge=1)] = 16_000_000
    upright: bool = False
    intensity: IntensitySpec

    @model_validator(mode="after")
    def _check_orientation(self) -> "InputSpec":
        axes = sorted(
            ["LR", "PA", "IS"].index(pair)
            for code in self.orientation
            for pair in ("LR", "PA", "IS")
            if code in pair
        )
        if axes != [0, 1, 2]:
            raise ValueError(f"expected one letter of each of LR, PA, IS, got {self.orientation!r}")
        return self


class NetworkSpec(_Section):
    """The network, its weights, and how to read its output."""

    architecture: Annotated[str, Field(pattern=ARCHITECTURE)] | None = None
    arguments: dict[str, JsonValue] = {}
    program: FileName | None = None
    weights: FileName | None = None
    sha256: Sha256
    output: Literal["votes", "heatmaps", "coordinates"] = "votes"
    activation: Activation | None = None
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
    def votes_each(self) -> int | None:
        """How many votes each landmark gets; None: as many as there are voxels that pass."""
        if self.output != "coordinates":
            return None
        return SIGMA_POINTS if "log_variance" in self.coordinate_extras else 1


class VotingSpec(_Section):
    """How votes are filtered and read out; distances in mm.

    A network that answers coordinates has no radius: all votes for a landmark belong together.
    """

    threshold: Annotated[float, Field(gt=0.0, lt=1.0)]
    radius_mm: Annotated[float, Field(gt=0.0)] = math.inf
    smooth_mm: Annotated[float, Field(ge=0.0)] | None = None  # of no effect; see parse_manifest


class ShapeSpec(_Section):
    """The constellation: which modes agree with the mean shape."""

    mean: FileName
    sha256: Sha256
    modes: Annotated[int, Field(ge=1, le=16)] = 4
    tolerance_mm: Annotated[float, Field(gt=0.0)]


class RefineSpec(_Section):
    """A second model, of a folder within this one, that looks again in the subject's own pose."""

    folder: FileName
    sha256: Sha256


class PrecisionSpec(_Section):
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


class LandmarkSpec(_Section):
    """One landmark; the order of the sections is the order of the network's channels."""

    name: Label
    description: str = ""
    mirror: str = ""
    group: str = ""
    presence_threshold: Annotated[float, Field(ge=0.0)] = 0.25
    region95_mm: Annotated[float, Field(gt=0.0)] | None = None


class SelfCheckSpec(_Section):
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
    refine: RefineSpec | None = None
    precision: PrecisionSpec = PrecisionSpec()
    landmarks: Annotated[tuple[LandmarkSpec, ...], Field(min_length=1, max_length=4096)]
    measurements: Annotated[tuple[MeasurementSpec, ...], Field(max_length=1024)] = ()
    selfcheck: SelfCheckSpec

    @model_validator(mode="after")
    def _check_measurements(self) -> "Manifest":
        check_names(self.measurements, {landmark.name for landmark in self.landmarks})
        return self

    @model_validator(mode="after")
    def _check_names(self) -> "Manifest":
        partners = {landmark.name: landmark.mirror for landmark in self.landmarks}
        if len(partners) != len(self.landmarks):
            raise ValueError("expected every landmark name once")
        for name, mirror in partners.items():
            if mirror and partners.get(mirror) != name:
                raise ValueError(
                    f"mirror of landmark {name!r}: expected a landmark whose mirror it is, "
                    f"got {mirror!r}"
                )
        return self

    @model_validator(mode="after")
    def _check_refine(self) -> "Manifest":
        if self.refine is not None and self.input.intensity.method not in ("percentile", "window"):
            raise ValueError(
                "refine: expected input.intensity.method percentile or window, whose bounds both "
                f"networks share, got {self.input.intensity.method!r}"
            )
        return self

    @model_validator(mode="after")
    def _check_tile(self) -> "Manifest":
        if self.input.tile_shape != WHOLE:
            if any(edge % self.tile_step for edge in self.input.tile_shape):
                raise ValueError(
                    f"input.tile_shape: expected multiples of {self.tile_step} (input.divisor and "
                    f"network.output_stride), got {list(self.input.tile_shape)}"
                )
        elif self.tile_step**3 > self.input.max_voxels:
            raise ValueError(
                f"input.max_voxels: expected room for one block of {self.tile_step}^3 voxels, "
                f"got {self.input.max_voxels}"
            )
        return self

    @model_validator(mode="after")
    def _check_output(self) -> "Manifest":
        coordinates = self.network.output == "coordinates"
        if coordinates == ("radius_mm" in self.voting.model_fields_set):
            raise ValueError(
                "voting.radius_mm: expected none with network.output 'coordinates'"
                if coordinates
                else "voting.radius_mm: Field required"
            )
        if coordinates and self.refine is not None and self.shape is None:
            raise ValueError("refine: expected a section shape with network.output 'coordinates'")
        if self.network.activation == "spatial_softmax" and self.input.tile_shape != WHOLE:
            raise ValueError(
                "network.activation: expected input.tile_shape 'whole' with spatial_softmax, whose "
                f"sum is over a whole scan, got {list(self.input.tile_shape)}"
            )
        return self

    @property
    def tile_step(self) -> int:
        """What every edge of a tile is a multiple of, in voxels: divisor and output stride."""
        return math.lcm(self.input.divisor, self.network.output_stride)

    @property
    def channels(self) -> tuple[int, int]:
        """How many channels of a dense output are scores, and how many are offsets."""
        background = self.network.activation == "softmax"
        offsets = 3 * len(self.landmarks) if self.network.output == "votes" else 0
        return len(self.landmarks) + background, offsets


def read_manifest(folder: Path) -> Manifest:
    """Read and validate the ``model.toml`` of a model folder.

    Args:
        folder: The model folder; its name must be the model's name.

    Returns:
        The manifest.

    Raises:
        ModelRefused: The file is missing or breaks the contract; every broken key is named.
    """
    return parse_manifest(folder.name, read_text(folder, "model.toml"))


def parse_manifest(name: str, text: str) -> Manifest:
    """Validate the text of a ``model.toml``.

    Args:
        name: Name of its folder.
        text: What the file says.

    Returns:
        The manifest.

    Raises:
        ModelRefused: The text breaks the contract; every broken key is named.
    """
    try:
        # Through JSON, because only there does pydantic's strict mode take a list for a tuple.
        table = json.dumps(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise ModelRefused(f"{name}: model.toml is not TOML: {error}") from None
    except TypeError:
        raise ModelRefused(f"{name}: model.toml: expected no dates or times, got one") from None
    try:
        manifest = Manifest.model_validate_json(table, strict=True)
    except ValidationError as error:
        reasons = "; ".join(_reason(item) for item in error.errors(include_url=False))
        raise ModelRefused(f"{name}: {reasons}") from None
    if manifest.name != name:
        raise ModelRefused(f"{name}: name: expected the folder's name, got {manifest.name!r}")
    if manifest.voting.smooth_mm is not None:
        logger.info("%s: voting.smooth_mm has no effect on landmarks; remove it", name)
    return manifest


def _reason(item: ErrorDetails) -> str:
    """Say which key is wrong, why, and what it holds."""
    # Brackets mark the branch of a union that pydantic tried, which is no key.
    key = ".".join(str(part) for part in item["loc"] if "[" not in str(part)) or "model.toml"
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] in ("missing", "value_error"):
        return f"{key}: {message}"
    return f"{key}: {message}, got {item['input']!r:.80}"
