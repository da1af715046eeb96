"""``POST /v1/votes``: the output of a client's own network in; landmarks, votes or heatmaps out."""

import math
import time
from functools import partial
from typing import Annotated, Final, Literal

from fastapi import APIRouter, Depends, Query, Response
from pydantic import BaseModel, Field, field_validator

from app.api.dependencies import (
    CallDep,
    TimeLimit,
    accept_of,
    request_timeout_s,
    require_api_key,
    timed_response,
)
from app.api.openapi import VOTES_BODY, VOTES_CONTENT, headers, offer, problems
from app.api.upload.kinds import ARRAYS
from app.api.upload.receive import cancel_on_disconnect, read_upload
from app.inference import VotesRequest, answer_votes, build_answer, forecast_votes, timing_of
from app.io import FORMATS, AnswerFormat, LandmarksAnswer, ModelRef, VolumeLimits, negotiate_format
from app.voting import VOTES_FORMATS, Layout, VotesFormat

votes_router: Final = APIRouter()

ALL_FORMATS: Final[tuple[AnswerFormat | VotesFormat, ...]] = (*FORMATS, *VOTES_FORMATS)

NO_MODEL: Final = ModelRef(name="votes", version="", digest="")
"""Named in answers instead of a model: the network is the client's own."""

MAX_NAME_CHARACTERS: Final = 128


class VotesQuery(BaseModel, extra="forbid"):
    """Query of ``POST /v1/votes``; unknown parameters are refused."""

    format: str | None = Field(
        None,
        description="Votes, one row `landmark, probability, x, y, z` each: rows.csv or rows.npy. "
        "Heatmaps: nii.gz. Landmarks: the others. Takes precedence over Accept.",
        json_schema_extra=offer(form.name for form in ALL_FORMATS),
    )
    channels: Literal["first", "last"] = Field("last", description="Which axis holds channels.")
    order: Literal["axis", "landmark"] = Field(
        "axis",
        description="Offset channels of landmark c of C: `axis`: c, c+C, c+2C along i, j, k; "
        "`landmark`: 3c, 3c+1, 3c+2.",
    )
    background: bool | None = Field(
        None,
        description="Whether channel 0 is the background. Unset: inferred from the channel count.",
    )
    activation: Literal["sigmoid", "softmax"] | None = Field(
        None,
        description="Of `scores`. Unset: softmax with a background channel, sigmoid without.",
    )
    threshold: float = Field(0.5, ge=0, le=1, description="Smallest probability of a vote.")
    radius_mm: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="Distance from a landmark within which your network's voxels vote for it. "
        "Unset: 10 voxels. Landmarks are located from the votes within 0.6 of it.",
    )
    smooth_mm: float = Field(
        0.0, ge=0, allow_inf_nan=False, description="Sigma of a Gaussian filter on heatmaps."
    )
    sample_shape: str | None = Field(
        None,
        pattern=r"^\d{1,5},\d{1,5},\d{1,5}$",
        description="`i,j,k`: the part of the array that is used, from 0,0,0. Unset: all of it. A "
        "row is kept if 0 <= position < sample_shape; voxels beyond cast no votes for landmarks.",
    )
    names: str | None = Field(
        None,
        max_length=8192,
        description="Names of the landmarks, comma-separated. Unset: 0, 1, 2, …",
    )
    candidates: bool = Field(False, description="List all modes of each landmark.")
    timeout_s: TimeLimit = None

    @field_validator("names")
    @classmethod
    def _check_names(cls, names: str | None) -> str | None:
        parts = _split_names(names)
        if len(set(parts)) < len(parts):
            raise ValueError("expected every name once")
        if not all(part.isprintable() and 1 <= len(part) <= MAX_NAME_CHARACTERS for part in parts):
            raise ValueError(f"expected printable names of 1 to {MAX_NAME_CHARACTERS} characters")
        return names


@votes_router.post(
    "/v1/votes",
    summary="Bring your own network's output",
    tags=["votes"],
    dependencies=[Depends(require_api_key)],
    response_model=LandmarksAnswer,
    responses={
        200: {
            "description": "Landmarks, votes or heatmaps",
            "content": VOTES_CONTENT,
            **headers("Server-Timing", "X-Warnings"),
        },
        **problems(400, 401, 406, 408, 413, 415, 422, 429, 500, 503, 504, 507),
    },
    openapi_extra=VOTES_BODY,
)
async def find_landmarks_of_votes(call: CallDep, query: Annotated[VotesQuery, Query()]) -> Response:
    """Upload probabilities or scores and offsets; get landmarks, votes or heatmaps.

    No model takes part: the answer names `votes` in its place. Votes are treated as those of the
    service's own models, except that there is no mean shape to check their landmarks against.
    """
    engine, metrics, record = call.engine, call.shared.metrics, call.record
    form = negotiate_format(ALL_FORMATS, query.format, accept_of(call.request.headers))
    timeout_s = request_timeout_s(query.timeout_s, call.shared.settings)
    (content,) = await read_upload(call, ARRAYS)
    metrics.stages.labels("receive").observe(call.receive_ms / 1e3)
    memory, max_votes = forecast_votes(content, engine.memory.limit)
    question = _question_of(query, form, engine.limits, max_votes)
    work = engine.compute(
        partial(answer_votes, content, question),
        admitted=call.admitted,
        memory=memory,
        result_bytes=lambda answer: len(answer[1] or b""),
        timeout_s=timeout_s,
    )
    detection, file = await cancel_on_disconnect(call.request.receive, work)
    record.shape = detection.volume.shape
    metrics.voxels.observe(math.prod(record.shape))
    metrics.observe_stages(detection.timing)
    timing = timing_of(detection, receive_ms=call.receive_ms, start_s=call.start_s)
    if isinstance(form, AnswerFormat):
        landmarks = build_answer(
            detection,
            model=NO_MODEL,
            request_id=record.request_id,
            timing=timing,
            candidates=query.candidates,
        )
        file = form.write(landmarks)
    return timed_response(file, timing, form.media_type, detection.warnings)


def _question_of(
    query: VotesQuery, form: AnswerFormat | VotesFormat, limits: VolumeLimits, max_votes: int
) -> VotesRequest:
    shape = None
    if query.sample_shape is not None:
        i, j, k = (int(part) for part in query.sample_shape.split(","))
        shape = (i, j, k)
    return VotesRequest(
        layout=Layout(query.channels, query.order, query.background, query.activation),
        threshold=query.threshold,
        radius_mm=query.radius_mm,
        smooth_mm=query.smooth_mm,
        sample_shape=shape,
        names=_split_names(query.names),
        limits=limits,
        max_votes=max_votes,
        file=form if isinstance(form, VotesFormat) else None,
        received_s=time.perf_counter(),
    )


def _split_names(names: str | None) -> tuple[str, ...]:
    return () if names is None else tuple(part.strip() for part in names.split(","))
