"""Wire formats: pydantic models of every answer.

Numbers are finite or null, and every coordinate names its frame.
"""

from datetime import datetime
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, Field

Status = Literal["detected", "low_confidence", "not_found", "out_of_field"]
Triple = Annotated[
    tuple[float, float, float], Field(json_schema_extra={"examples": [[1.5, -2.0, 30.25]]})
]
Row = tuple[float, float, float, float]
T = TypeVar("T")
Listed = Annotated[list[T], Field(fail_fast=True)]
"""Is refused for its first wrong item: a short document may have millions, with an error each."""


class _WireModel(BaseModel, frozen=True, allow_inf_nan=False):
    pass


class CandidateAnswer(_WireModel):
    """One mode of a landmark's votes."""

    ijk: Triple = Field(description="Voxel index in the uploaded array.")
    ras_mm: Triple = Field(description="In mm, RAS.")
    lps_mm: Triple = Field(description="In mm, LPS.")
    mass: float = Field(description="Vote weight per voxel that could have voted.")


class LandmarkAnswer(_WireModel):
    """One landmark; a missing one has no position."""

    name: str
    description: str
    status: Status = Field(
        description="`detected`; `low_confidence`: a position with low confidence; `not_found`; "
        "`out_of_field`: outside the scan."
    )
    ijk: Triple | None = Field(description="Voxel index in the uploaded array, of voxel centres.")
    ras_mm: Triple | None = Field(description="In mm, RAS (world axes of NIfTI).")
    lps_mm: Triple | None = Field(description="In mm, LPS (world axes of DICOM and 3D Slicer).")
    confidence: float | None = Field(
        description="In [0, 1]; 0.5 at the landmark's presence threshold."
    )
    mass: float | None = Field(description="Vote weight per voxel that could have voted.")
    coherence: float | None = Field(
        description="Fraction of the vote weight close to the estimate."
    )
    spread_mm: float | None = Field(
        description="Root mean square distance of the votes from the estimate; not an error bar."
    )
    region95_mm: float | None = Field(
        description="Radius that held 95 % of held-out errors; null if uncalibrated, or not "
        "calibrated so near to the border of the scan."
    )
    disagreement_mm: float | None = Field(
        description="Distance between the estimate and the centroid of the probabilities."
    )
    expected_ras_mm: Triple | None = Field(
        description="In mm, RAS: position predicted by the other landmarks, if it differs."
    )
    candidates: Listed[CandidateAnswer] | None = Field(
        description="All modes, best first; null unless requested with `candidates=true`."
    )
    decided_by: Literal["network", "person"] = Field(
        "network",
        description="`person`: accepted, or, without confidence, placed or marked absent by hand.",
    )

    @property
    def judgement(self) -> Literal["unjudged", "placed", "accepted", "absent"]:
        """What a person has said of it."""
        if self.decided_by == "network":
            return "unjudged"
        if self.lps_mm is None:
            return "absent"
        return "placed" if self.confidence is None else "accepted"


class MeasurementAnswer(_WireModel):
    """One measurement between landmarks."""

    name: str
    description: str
    points: Listed[str] = Field(default=[], description="Names of the landmarks it is between.")
    unit: Literal["mm", "deg", ""] = Field(description="Empty for a ratio.")
    value: float | None = Field(description="Null where a landmark is missing.")
    interval95: tuple[float, float] | None = Field(
        description="Bounds that hold the true value with 95 %; null where a landmark has no 95 % "
        "region."
    )
    reason: str = Field(description="Why value or interval are null.")


class ModelRef(_WireModel):
    """The model that answered."""

    name: str
    version: str
    digest: str = Field(description="SHA-256 over the contents of the model folder.")
    precision: str | None = Field(
        None, description="Precision of its networks, such as `bfloat16`."
    )
    description: str = Field("", description="What it finds, and in what scans.")


class VolumeAnswer(_WireModel):
    """The volume as it was read."""

    shape: tuple[int, int, int] = Field(description="Voxels along i, j, k.")
    spacing_mm: Triple = Field(description="Voxel spacing along i, j, k.")
    orientation: str = Field(description="Directions of i, j, k: one letter of each of LR, PA, IS.")
    affine: tuple[Row, Row, Row, Row] = Field(description="Voxel index → mm, RAS.")
    digest: str = Field(
        description="BLAKE3 of the uncompressed file; of a DICOM series, that of its files'."
    )


class TimingAnswer(_WireModel):
    """Time per stage, in ms."""

    receive: float
    decode: float
    prepare: float
    queue: float
    network: float
    vote: float
    locate: float
    total: float


class LandmarksAnswer(_WireModel):
    """The answer of ``POST /v1/landmarks``."""

    request_id: str
    model: ModelRef
    volume: VolumeAnswer
    landmarks: Listed[LandmarkAnswer]
    measurements: Listed[MeasurementAnswer] = Field(
        default=[], description="Those that the model names."
    )
    warnings: Listed[str]
    timing_ms: TimingAnswer


class CaseAnswer(_WireModel):
    """A scan that is kept with its corrected landmarks."""

    id: str = Field(description="From the scan's content; the name of both of its files.")
    model: ModelRef = Field(description="The model whose answer was corrected.")
    kept: str = Field(description="When, in UTC, ISO 8601.")
    key: str | None = Field(
        description="Name of the API key that kept it, or the start of the hash of one without a "
        "name; null where the service needs no key."
    )
    placed: int = Field(description="Number of points that a person placed.")
    accepted: int = Field(description="Number of points that a person found right.")
    absent: int = Field(description="Number of landmarks that a person found absent.")
    unjudged: int = Field(description="Number of landmarks that no person judged.")


class CasesAnswer(_WireModel):
    """The answer of ``GET /v1/cases``."""

    cases: list[CaseAnswer]
    next: str | None = Field(description="`after` of the next part of the list; null at its end.")


class LandmarkInfo(_WireModel):
    """One landmark of a model."""

    name: str
    description: str
    mirror: str | None = Field(description="Its left or right partner.")
    presence_threshold: float
    region95_mm: float | None = Field(
        description="Radius that held 95 % of held-out errors; null if uncalibrated. It is "
        "wider where votes scatter more than usual, or a subject is further from the mean shape."
    )


class ModelSummary(_WireModel):
    """One model folder, and whether it can be used."""

    name: str
    status: str = Field(description="`ready`, or the reason why not.")
    version: str | None = Field(description="Null if the model was refused.")
    description: str | None
    digest: str | None
    landmarks: int | None = Field(description="Number of landmarks that it finds.")


class ModelsAnswer(_WireModel):
    """The answer of ``GET /v1/models``."""

    models: list[ModelSummary]
    keeps_cases: bool = Field(description="Whether `POST /v1/cases` keeps corrected cases.")


class BatchInfo(_WireModel):
    """Measurement of one batch size on one device."""

    tile_shape: tuple[int, int, int] = Field(description="Voxels of each tile.")
    tiles: int = Field(description="Tiles in the batch.")
    seconds: float = Field(description="Shortest time for the whole batch.")
    chosen: bool = Field(description="Whether this is the current limit of the batch size.")


class DeviceInfo(_WireModel):
    """A device on which a model answers."""

    name: str = Field(description="As in `LANDMARKD_DEVICE`.")
    status: str = Field(description="`ready`, or the reason why not.")
    precision: str = Field(description="Precision of its networks there, such as `bfloat16`.")
    batches: list[BatchInfo] = Field(
        description="Measured on the batches of requests; empty before there were enough."
    )


class ModelInfo(_WireModel):
    """The answer of ``GET /v1/models/{name}``."""

    name: str
    status: str = Field(description="`ready`, or the reason why not.")
    version: str
    description: str
    license: str
    sample: str | None = Field(description="Where to get a public scan to try it with.")
    digest: str
    orientation: str = Field(description="Axes in which the network was trained.")
    spacing_mm: Triple = Field(description="Grid on which it was trained.")
    tile_shape: tuple[int, int, int] | Literal["whole"]
    landmarks: list[LandmarkInfo]
    verified_mm: dict[str, float] = Field(
        description="Precision below float32 → largest shift of a landmark in it, in mm."
    )
    devices: list[DeviceInfo]
    card: str | None = Field(description="The model card, Markdown.")


class ReadinessAnswer(_WireModel):
    """The answer of ``GET /readyz``, ready (200) or not (503)."""

    ready: bool
    reason: str = Field(
        description="`ready`, with the devices that have failed, if any; or the reason why not. "
        "Without a key where one is needed: `ready` or `not ready`."
    )
    models: dict[str, str] = Field(
        description="Model → `ready`, or the reason why not. Empty without a key where one is "
        "needed."
    )


class AliveAnswer(_WireModel):
    """The answer of ``GET /livez``."""

    alive: bool


class Problem(_WireModel):
    """Any error, as RFC 9457 problem details."""

    type: str
    title: str
    status: int
    detail: str = Field(description="What was expected and what was received.")
    code: str = Field(description="Stable, for programs; see docs/http.md.")
    request_id: str


class JobScanAnswer(_WireModel):
    """One scan of a job."""

    number: int = Field(description="Its place in the archive, from 0, without empty files.")
    state: Literal["queued", "running", "done", "failed"]
    tile: int = Field(0, description="Tiles that have run, while it is running.")
    tiles: int = Field(0, description="Tiles there are, as far as is known.")
    result: str | None = Field(None, description="Path of its landmarks, once it is done.")
    problem: Problem | None = Field(None, description="Why it has failed.")


class JobSummary(_WireModel):
    """A job, as in a list."""

    id: str
    state: Literal["queued", "running", "finished"] = Field(
        description="`finished`: each of its scans is done or has failed."
    )
    model: str
    reason: str | None = Field(
        None,
        description="Why scans of it wait: the service is not ready, the model is not loaded, or "
        "the disk has no room for a scan of an archive. They run once that is over. Null if none "
        "waits for such a reason.",
    )
    created: datetime
    expires: datetime | None = Field(description="When it is removed; null until it is finished.")
    total: int = Field(description="Number of its scans,")
    done: int = Field(description="of which these have landmarks,")
    failed: int = Field(description="and these a problem.")


class JobAnswer(JobSummary):
    """The answer of ``GET /v1/jobs/{id}``, and of calls that make a job."""

    scans: list[JobScanAnswer]


class JobsAnswer(_WireModel):
    """The answer of ``GET /v1/jobs``."""

    jobs: list[JobSummary] = Field(description="The newest first.")
    next: str | None = Field(
        None, description="The `after` of the next part of the list; null: this is the last one."
    )


class UploadSummary(_WireModel):
    """An upload that has not become a job."""

    id: str = Field(description="Its path is `/v1/uploads/` and this.")
    model: str
    offset: int = Field(description="Bytes that have arrived; the next part begins there.")
    length: int = Field(description="Bytes of the whole file.")
    expires: datetime = Field(description="When it is removed, unless more of it arrives.")


class UploadsAnswer(_WireModel):
    """The answer of ``GET /v1/uploads``."""

    uploads: list[UploadSummary] = Field(description="The newest first.")
