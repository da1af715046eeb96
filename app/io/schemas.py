"""What crosses the wire: pydantic models of every answer.

Numbers are finite or null, and every coordinate names its frame.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

# As app.voting.landmarks has it; repeated here so that a client need not import torch.
Status = Literal["detected", "low_confidence", "not_found", "out_of_field"]
Triple = Annotated[
    tuple[float, float, float], Field(json_schema_extra={"examples": [[1.5, -2.0, 30.25]]})
]
Row = tuple[float, float, float, float]


class _Wire(BaseModel):
    model_config = ConfigDict(frozen=True, allow_inf_nan=False)


class CandidateAnswer(_Wire):
    """One mode of a landmark's votes."""

    ijk: Triple = Field(description="In voxels of the uploaded array.")
    ras_mm: Triple = Field(description="In mm, RAS.")
    lps_mm: Triple = Field(description="In mm, LPS.")
    mass: float = Field(description="Vote weight, per voxel that could have voted.")


class LandmarkAnswer(_Wire):
    """One landmark; a missing one has no place."""

    name: str
    description: str
    status: Status = Field(
        description="`detected`; `low_confidence`: a place, but doubt; `not_found`; "
        "`out_of_field`: the scan does not reach there."
    )
    ijk: Triple | None = Field(description="In voxels of the uploaded array; index = voxel centre.")
    ras_mm: Triple | None = Field(description="In mm, RAS (NIfTI's world).")
    lps_mm: Triple | None = Field(description="In mm, LPS (DICOM's and 3D Slicer's world).")
    confidence: float | None = Field(
        description="In [0, 1]; 0.5 at the landmark's presence threshold."
    )
    mass: float | None = Field(description="Vote weight, per voxel that could have voted.")
    coherence: float | None = Field(description="Share of the vote weight close to the estimate.")
    spread_mm: float | None = Field(
        description="Root mean square distance of the votes from the estimate; not an error bar."
    )
    region95_mm: float | None = Field(
        description="Radius that held 95 % of held-out errors; null if uncalibrated."
    )
    disagreement_mm: float | None = Field(
        description="Distance between the estimate and the centroid of the probabilities."
    )
    expected_ras_mm: Triple | None = Field(
        description="In mm, RAS: where the other landmarks put it, if that is elsewhere."
    )
    candidates: list[CandidateAnswer] | None = Field(
        description="All modes, best first; null unless asked for with `candidates=true`."
    )


class ModelRef(_Wire):
    """Which model answered."""

    name: str
    version: str
    digest: str = Field(description="SHA-256 over the model folder's contents.")
    precision: str | None = Field(
        None, description="What its networks computed in, such as `bfloat16`."
    )


class VolumeAnswer(_Wire):
    """The volume as it was read."""

    shape: tuple[int, ...] = Field(description="Voxels along i, j, k.")
    spacing_mm: Triple = Field(description="Along i, j, k.")
    orientation: str = Field(description="Where i, j, k point to: one letter of each LR, PA, IS.")
    affine: tuple[Row, Row, Row, Row] = Field(description="Voxel index → mm, RAS.")
    digest: str = Field(description="BLAKE3 of the uncompressed file.")


class TimingAnswer(_Wire):
    """Where the time went, in ms."""

    receive: float
    decode: float
    prepare: float
    queue: float
    network: float
    vote: float
    locate: float
    total: float


class LandmarksAnswer(_Wire):
    """The answer of ``POST /v1/landmarks``."""

    request_id: str
    model: ModelRef
    volume: VolumeAnswer
    landmarks: list[LandmarkAnswer]
    warnings: list[str]
    timing_ms: TimingAnswer


class LandmarkInfo(_Wire):
    """One landmark that a model knows."""

    name: str
    description: str
    mirror: str | None = Field(description="Its left or right partner.")
    presence_threshold: float
    region95_mm: float | None = Field(
        description="Radius that held 95 % of held-out errors; null if uncalibrated."
    )


class ModelSummary(_Wire):
    """One model folder and whether it may be used."""

    name: str
    status: str = Field(description="`ready`, or why not.")
    version: str | None = Field(description="Null if the model was refused.")
    description: str | None
    digest: str | None
    landmarks: int | None = Field(description="How many it finds.")


class ModelsAnswer(_Wire):
    """The answer of ``GET /v1/models``."""

    models: list[ModelSummary]


class BatchInfo(_Wire):
    """What was measured of one batch size, on one device."""

    tile_shape: tuple[int, int, int] = Field(description="Voxels of each tile.")
    tiles: int = Field(description="Tiles in the batch.")
    seconds: float = Field(description="For the whole batch, at best.")
    chosen: bool = Field(description="Whether a batch now has at most so many tiles.")


class DeviceInfo(_Wire):
    """A device on which a model answers."""

    name: str = Field(description="As `LANDMARKD_DEVICE` has it.")
    status: str = Field(description="`ready`, or why not.")
    precision: str = Field(description="What its networks compute in there, such as `bfloat16`.")
    batches: list[BatchInfo] = Field(
        description="Measured on batches as they came; empty before there were enough."
    )


class ModelInfo(_Wire):
    """The answer of ``GET /v1/models/{name}``."""

    name: str
    status: str = Field(description="`ready`, or why not.")
    version: str
    description: str
    license: str
    digest: str
    orientation: str = Field(description="The axes the network was trained in.")
    spacing_mm: Triple = Field(description="The grid it was trained on.")
    tile_shape: tuple[int, int, int] | Literal["whole"]
    landmarks: list[LandmarkInfo]
    verified_mm: dict[str, float] = Field(
        description="Precision below float32 → largest shift of a landmark in it, in mm."
    )
    devices: list[DeviceInfo]
    card: str | None = Field(description="The model card, Markdown.")


class ReadinessAnswer(_Wire):
    """The answer of ``GET /readyz``, ready (200) or not (503)."""

    ready: bool
    reason: str = Field(
        description="`ready`, with what is out if some devices work and some do not; or why not."
    )
    models: dict[str, str] = Field(description="Model → `ready`, or why not.")


class AliveAnswer(_Wire):
    """The answer of ``GET /livez``."""

    alive: Literal[True]


class Problem(_Wire):
    """Any error, as RFC 9457 problem details."""

    type: str
    title: str
    status: int
    detail: str = Field(description="What was expected and what came.")
    code: str = Field(description="Stable and for machines; see the README.")
    request_id: str
