"""``POST /v1/landmarks`` and ``/v1/heatmaps``: a scan in, its landmarks or their heatmaps out."""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Final

from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from app.api.dependencies import (
    AdmittedDep,
    Shared,
    SharedDep,
    request_timeout_s,
    require_api_key,
    server_timing,
)
from app.api.openapi import HEATMAPS_CONTENT, LANDMARKS_CONTENT, UPLOAD_BODY, problems
from app.api.request_log import RequestRecord, record_of
from app.api.sse import EventStream, wants_events
from app.api.upload.plan import plan_upload
from app.api.upload.receive import Upload, cancel_on_disconnect, read_upload
from app.engine import AdmittedRequest, Engine, Progress
from app.errors import BadParameter, NotReady
from app.inference import (
    Detection,
    build_answer,
    heatmap_bytes,
    model_ref,
    timing_of,
    write_scan_heatmaps,
)
from app.io import FORMATS, AnswerFormat, LandmarksAnswer, TimingAnswer, negotiate_format
from app.model import LoadedModel

landmarks_router: Final = APIRouter()


class LandmarksQuery(BaseModel):
    """Query of ``POST /v1/landmarks``; unknown parameters are refused."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = Field(
        None,
        description="Name of the model, whose newest version is meant, or NAME@VERSION. Unset: the "
        "service's default model.",
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


class HeatmapsQuery(BaseModel):
    """Query of ``POST /v1/heatmaps``; unknown parameters are refused."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = Field(
        None,
        description="Name of the model, whose newest version is meant, or NAME@VERSION. Unset: the "
        "service's default model.",
    )
    landmark: str | None = Field(None, description="Name of a landmark. Unset: all of them.")
    timeout_s: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="Seconds from the end of the upload."
    )
    frame: int | None = Field(None, ge=0, description="Frame of a 4D file, from 0.")
    series: int | None = Field(None, ge=0, description="Series of a DICOM archive, from 0.")


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
    accept = request.headers.get("accept")
    streams = wants_events(accept)
    form = negotiate_format(FORMATS, query.format or ("json" if streams else None), accept)
    work = await _receive(request, shared, admitted, query)
    if streams:
        return EventStream(partial(_write_event, work, form))
    answer = await cancel_on_disconnect(request.receive, work.run())
    headers = {"Server-Timing": server_timing(answer.timing_ms)}
    return Response(form.write(answer), headers=headers, media_type=form.media_type)


@landmarks_router.post(
    "/v1/heatmaps",
    summary="Get heatmaps of a scan's landmarks",
    tags=["landmarks"],
    dependencies=[Depends(require_api_key)],
    response_class=Response,
    responses={
        200: {"description": "The heatmaps", "content": HEATMAPS_CONTENT},
        **problems(400, 401, 404, 408, 413, 415, 422, 429, 500, 503, 504, 507),
    },
    openapi_extra=UPLOAD_BODY,
)
async def make_heatmaps(
    request: Request,
    shared: SharedDep,
    admitted: AdmittedDep,
    query: Annotated[HeatmapsQuery, Query()],
) -> Response:
    """Upload a volume and get heatmaps on its own grid, as gzip NIfTI-1 of float32.

    A value is near the network's probability where its votes agree, and 0 where there are none. One
    landmark is an array of three axes; all of them are the fourth, in the order of the model's.
    """
    work = await _receive(request, shared, admitted, query)
    file, timing = await cancel_on_disconnect(request.receive, work.draw(admitted))
    headers = {"Server-Timing": server_timing(timing)}
    return Response(file, headers=headers, media_type="application/gzip")


async def _receive(
    request: Request,
    shared: Shared,
    admitted: AdmittedRequest,
    query: LandmarksQuery | HeatmapsQuery,
) -> "_Detection":
    """Receive the upload of a request, and refuse what its headers rule out."""
    start = time.perf_counter()
    record = record_of(request.scope)
    settings, engine = shared.settings, shared.engine
    timeout_s = request_timeout_s(query.timeout_s, settings)
    plan = plan_upload(request.headers, engine.max_body_bytes)
    _require_ready(engine)
    model = engine.registry.get(query.model)
    record.model = model.manifest.name
    chosen = _choose(query, model)
    check_head = partial(
        engine.precheck,
        model=model,
        frame=query.frame,
        series=query.series,
        timeout_s=timeout_s,
        client=admitted.client,
        heatmaps=1 if isinstance(chosen, int) else len(chosen),
    )
    upload = await read_upload(request, plan, settings, admitted, check_head)
    record.bytes = len(upload.content)
    shared.metrics.observe_stage("receive", upload.receive_ms / 1e3)
    return _Detection(
        engine, model, query, upload, timeout_s, start, record, admitted.client, chosen
    )


def _choose(query: LandmarksQuery | HeatmapsQuery, model: LoadedModel) -> Sequence[int] | int:
    """Number the landmarks whose heatmaps are wanted, or the one."""
    if isinstance(query, LandmarksQuery):
        return ()
    names = [landmark.name for landmark in model.manifest.landmarks]
    if query.landmark is None:
        return range(len(names))
    if query.landmark not in names:
        raise BadParameter(
            f"query.landmark: expected a landmark of {model.manifest.name}, which "
            f"GET /v1/models/{model.manifest.name} lists, got {query.landmark!r}"
        )
    return names.index(query.landmark)


@dataclass(frozen=True, slots=True)
class _Detection:
    """The work of one admitted request, whose upload has arrived."""

    engine: Engine
    model: LoadedModel
    query: LandmarksQuery | HeatmapsQuery
    upload: Upload
    timeout_s: float
    start: float
    record: RequestRecord
    client: str
    heatmaps: Sequence[int] | int

    async def run(
        self, on_progress: Callable[[Progress], None] = lambda _: None
    ) -> LandmarksAnswer:
        """Find the landmarks."""
        detection = await self._detect(on_progress)
        return build_answer(
            detection,
            model=model_ref(self.model),
            request_id=self.record.request_id,
            timing=self._timing(detection),
            measurements=self.model.manifest.measurements,
            candidates=isinstance(self.query, LandmarksQuery) and self.query.candidates,
        )

    async def draw(self, admitted: AdmittedRequest) -> tuple[bytes, TimingAnswer]:
        """Find the landmarks' votes, and make heatmaps of them in the time that is left."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.timeout_s
        detection = await self._detect(lambda _: None)
        volume, votes = detection.volume, detection.votes
        if votes is None:
            raise ValueError("expected a detection with votes, as was asked for, got none")
        work = partial(write_scan_heatmaps, votes, self.heatmaps, volume.shape, volume.affine)
        count = 1 if isinstance(self.heatmaps, int) else len(self.heatmaps)
        file = await self.engine.compute(
            work,
            admitted=admitted,
            memory=heatmap_bytes(votes, count, volume.shape),
            result_bytes=len,
            timeout_s=max(deadline - loop.time(), 0.0),
        )
        return file, self._timing(detection)

    async def _detect(self, on_progress: Callable[[Progress], None]) -> Detection:
        detection = await self.engine.detect(
            self.upload.content,
            self.model,
            frame=self.query.frame,
            series=self.query.series,
            timeout_s=self.timeout_s,
            client=self.client,
            on_progress=on_progress,
            keeps_votes=isinstance(self.query, HeatmapsQuery),
        )
        self.record.shape = detection.volume.shape
        return detection

    def _timing(self, detection: Detection) -> TimingAnswer:
        total_ms = 1e3 * (time.perf_counter() - self.start)
        return timing_of(detection, receive_ms=self.upload.receive_ms, total_ms=total_ms)


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
