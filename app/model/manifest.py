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
from typing import Annotated, Literal, get_args

from pydantic import BaseModel, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from app.errors import ModelRefused, describe_unknown
from app.measurements import MeasurementSpec, check_names
from app.model.files import read_text
from app.model.sections import (
    WHOLE,
    InputSpec,
    LandmarkSpec,
    ModelName,
    NetworkSpec,
    PrecisionSpec,
    RefineSpec,
    Section,
    SelfCheckSpec,
    ShapeSpec,
    VotingSpec,
)

logger = logging.getLogger("landmarkd.model")


class Manifest(Section):
    """A whole model.toml."""

    schema_version: Annotated[Literal[1], Field(alias="schema")]
    name: ModelName
    version: Annotated[str, Field(min_length=1, max_length=32)]
    description: str
    license: str
    sample: Annotated[str, Field(pattern=r"^https://[!-~]+$", max_length=512)] | None = None
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
    def _check_names(self) -> "Manifest":
        partners = {landmark.name: landmark.mirror for landmark in self.landmarks}
        check_names(self.measurements, partners.keys())
        if len(partners) != len(self.landmarks):
            raise ValueError("expected every landmark name once")
        for name, mirror in partners.items():
            if mirror and partners.get(mirror) != name:
                raise ValueError(
                    f"mirror of landmark {name!r}: expected a landmark whose mirror it is, "
                    f"got {mirror!r}"
                )
        for place in self.shape.surroundings if self.shape else ():
            if {place.beyond, place.seen_from} - partners.keys() or place.beyond == place.seen_from:
                raise ValueError(
                    "shape.surroundings: expected two landmarks of the model, got "
                    f"{place.beyond!r} and {place.seen_from!r}"
                )
        return self

    @model_validator(mode="after")
    def _check_refine(self) -> "Manifest":
        if self.refine is not None and not self.input.intensity.has_window:
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
        if self.voting.radius_mm < min(self.input.spacing_mm):
            raise ValueError(
                f"voting.radius_mm: expected {min(self.input.spacing_mm):g} mm, the shortest edge "
                f"of a voxel (input.spacing_mm), or more, got {self.voting.radius_mm:g}"
            )
        if self.voting.round_in == "voxels" and self.network.output != "heatmaps":
            raise ValueError("voting.round_in: expected network.output 'heatmaps' with 'voxels'")
        if coordinates and self.refine is not None and self.shape is None:
            raise ValueError("refine: expected a section shape with network.output 'coordinates'")
        if self.input.tile_layout == "monai" and self.network.output != "heatmaps":
            raise ValueError(
                "input.tile_layout: expected 'monai' with network.output 'heatmaps' only, "
                f"got {self.network.output!r}"
            )
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
    def folders(self) -> tuple[str, ...]:
        """Folders of its networks within that of the model: of the first, of the second if any."""
        return (".",) if self.refine is None else (".", self.refine.folder)

    @property
    def channels(self) -> tuple[int, int]:
        """How many channels of a dense output are scores, and how many are offsets."""
        background = self.network.activation == "softmax"
        offsets = 3 * len(self.landmarks) if self.network.output == "votes" else 0
        return len(self.landmarks) + background, offsets

    @property
    def mirror_axes(self) -> tuple[int, ...]:
        """Axes of a tile along which its mirror images are looked at, too."""
        return tuple("ijk".index(axis) for axis in self.network.mirror)

    @property
    def left_right(self) -> int:
        """The axis of a tile along which left and right lie."""
        return next(axis for axis, code in enumerate(self.input.orientation) if code in "LR")

    @property
    def partners(self) -> list[int]:
        """Number of each landmark's partner on the other side; its own if it has none."""
        numbers = {landmark.name: number for number, landmark in enumerate(self.landmarks)}
        return [numbers[landmark.mirror or landmark.name] for landmark in self.landmarks]


def read_manifest(folder: Path) -> Manifest:
    """Read and validate the ``model.toml`` of a model folder.

    Args:
        folder: The model folder; its name must be the model's name, or ``NAME@VERSION``.

    Raises:
        ModelRefused: The file is missing or breaks the contract; every broken key is named.
    """
    return parse_manifest(folder.name, read_text(folder, "model.toml"))


def parse_manifest(name: str, text: str) -> Manifest:
    """Validate the text of a ``model.toml``.

    Raises:
        ModelRefused: The text breaks the contract; every broken key is named.
    """
    try:
        # Through JSON, because only there does pydantic's strict mode take a list for a tuple.
        table = json.dumps(tomllib.loads(text))
    except (ValueError, RecursionError) as error:  # no TOML, a number too long, or tables too deep
        raise ModelRefused(f"{name}: model.toml is not TOML: {error}") from None
    except TypeError:
        raise ModelRefused(f"{name}: model.toml: expected no dates or times, got one") from None
    try:
        manifest = Manifest.model_validate_json(table, strict=True)
    except ValidationError as error:
        reasons = "; ".join(_reason(item) for item in error.errors(include_url=False))
        raise ModelRefused(f"{name}: {reasons}") from None
    full = f"{manifest.name}@{manifest.version}"
    if name not in (manifest.name, full):
        got = full if "@" in name else manifest.name
        raise ModelRefused(f"{name}: name: expected the folder's name, got {got!r}")
    if manifest.voting.smooth_mm is not None:
        logger.info("%s: voting.smooth_mm has no effect on landmarks; remove it", name)
    return manifest


def _reason(item: ErrorDetails) -> str:
    """Say which key is wrong, why, and what it holds."""
    # Brackets mark the branch of a union that pydantic tried, which is no key.
    key = ".".join(str(part) for part in item["loc"] if "[" not in str(part)) or "model.toml"
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] == "extra_forbidden":
        section = f"{key.rpartition('.')[0]}: ".removeprefix(": ")
        return section + describe_unknown("key", str(item["loc"][-1]), _keys_beside(item["loc"]))
    if item["type"] == "missing" and item["loc"][-1] == "sha256":
        message += " (written by `landmarkd check FOLDER --write`)"
    if item["type"] in ("missing", "value_error"):
        return f"{key}: {message}"
    return f"{key}: {message}, got {item['input']!r:.80}"


def _keys_beside(loc: tuple[int | str, ...]) -> list[str]:
    """List the keys of the section that a wrong key is in."""
    section: type[BaseModel] = Manifest
    for part in loc[:-1]:  # Of indices and of branches of unions, no section has a key.
        field = section.model_fields.get(str(part))
        section = _section_in(field and field.annotation) or section
    return [field.alias or name for name, field in section.model_fields.items()]


def _section_in(annotation: object) -> type[BaseModel] | None:
    """Find the section that a type is made of, such as one in a tuple."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_section_in, get_args(annotation))), None)
