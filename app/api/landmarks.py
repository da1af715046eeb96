"""``POST /v1/landmarks``: a scan in, its landmarks out."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Final

from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from app.api.dependencies import (
    AdmittedDep,
    SharedDep,
    request_timeout_s,
    require_api_key,
    server_timing,
)
from app.api.openapi import LANDMARKS_CONTENT, UPLOAD_BODY, problems
from app.api.request_log import RequestRecord, record_of
from app.api.sse import EventStream, wants_events
from app.api.upload.plan import plan_upload
from app.api.upload.receive import Upload, cancel_on_disconnect, read_upload
from app.engine import Engine, Progress
from app.errors import NotReady
from app.inference import build_answer, model_ref, timing_of
from app.io import FORMATS, AnswerFormat, LandmarksAnswer, negotiate_format
from app.model import LoadedModel

landmarks_router: Final = APIRouter()


class LandmarksQuery(BaseModel):
    """Query of ``POST /v1/landmarks``; unknown parameters are refused."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = Field(
        None, description="Name of the model. Unset: the service's default model."
    )
    format: str | None = Field(
        None,
        description="json, mrk.json, csv, tsv, fcsv, long or measurements. Takes precedence over "
        "Accept.",
    )
    timeout_s: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="Seconds from the end of the upload."
    )
    frame: int | None = Field(None, ge=0, description="Frame of a 4D file, from 0.")
    series: int | None = Field(None, ge=0, description="Series of a DICOM archive, from 0.")
    candidates: bool = Field(False, description="List all modes of each landmark.")


@landmarks_router.post(
    "/v1/landmarks",
    summary="Find the landmarks of a scan",
    tags=["landmarks"],
    dependencies=[Depends(require_api_key)],
    response_model=LandmarksAnswer,
    responses={
        200: {"description": "The landmarks", "content": LANDMARKS_CONTENT},
        **problems(400, 401, 404, 406, 408, 413, 415, 422, 429, 500, 503, 504, 507),
    },
    openapi_extra=UPLOAD_BODY,
)
async def find_landmarks(
    request: Request,
    shared: SharedDep,
    admitted: AdmittedDep,
    query: Annotated[LandmarksQuery, Query()],
) -> Response:
    """Upload a scan (NIfTI, NRRD, MetaImage, or DICOM in a ZIP archive) and get its landmarks.

    Whatever the request's headers or the file's header rule out is refused before the rest of the
    body is read. The work is cancelled when the client disconnects.
    """
    start = time.perf_counter()
    record = record_of(request.scope)
    settings, engine = shared.settings, shared.engine
    accept = request.headers.get("accept")
    streams = wants_events(accept)
    form = negotiate_format(FORMATS, query.format or ("json" if streams else None), accept)
    timeout_s = request_timeout_s(query.timeout_s, settings)
    plan = plan_upload(request.headers, engine.max_body_bytes)
    _require_ready(engine)
    model = engine.registry.get(query.model)
    record.model = model.manifest.name
    check_head = partial(
        engine.precheck,
        model=model,
        frame=query.frame,
        series=query.series,
        timeout_s=timeout_s,
        client=admitted.client,
    )
    upload = await read_upload(request, plan, settings, admitted, check_head)
    record.bytes = len(upload.content)
    shared.metrics.observe_stage("receive", upload.receive_ms / 1e3)
    work = _Detection(engine, model, query, upload, timeout_s, start, record, admitted.client)
    if streams:
        return EventStream(partial(_write_event, work, form))
    answer = await cancel_on_disconnect(request.receive, work.run())
    headers = {"Server-Timing": server_timing(answer.timing_ms)}
    return Response(form.write(answer), headers=headers, media_type=form.media_type)


@dataclass(frozen=True, slots=True)
class _Detection:
    """The work of one admitted request, whose upload has arrived."""

    engine: Engine
    model: LoadedModel
    query: LandmarksQuery
    upload: Upload
    timeout_s: float
    start: float
    record: RequestRecord
    client: str

    async def run(
        self, on_progress: Callable[[Progress], None] = lambda _: None
    ) -> LandmarksAnswer:
        detection = await self.engine.detect(
            self.upload.content,
            self.model,
            frame=self.query.frame,
            series=self.query.series,
            timeout_s=self.timeout_s,
            client=self.client,
            on_progress=on_progress,
        )
        self.record.shape = detection.volume.shape
        total_ms = 1e3 * (time.perf_counter() - self.start)
        return build_answer(
            detection,
            model=model_ref(self.model),
            request_id=self.record.request_id,
            timing=timing_of(detection, receive_ms=self.upload.receive_ms, total_ms=total_ms),
            measurements=self.model.manifest.measurements,
            candidates=self.query.candidates,
        )


async def _write_event(
    work: _Detection, form: AnswerFormat, on_progress: Callable[[Progress], None]
) -> bytes:
    """Write the data of an ``answer`` event: JSON as it is, other formats as a JSON string."""
    content = form.write(await work.run(on_progress))
    return content if form.name == "json" else json.dumps(content.decode()).encode()


def _require_ready(engine: Engine) -> None:
    """Refuse before the body is read, rather than after."""
    state = engine.readiness()
    if not state.ready:
        raise NotReady(f"expected a ready service, got one that is not: {state.reason}")
