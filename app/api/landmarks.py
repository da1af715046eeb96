"""HTTP request -> HTTP answer: what may be called, and what each call does."""

import json
import time
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from app.api.dependencies import (
    SharedDep,
    require_admin_key,
    require_api_key,
    server_timing,
    timeout_of,
)
from app.api.models import describe_model, list_models
from app.api.openapi import LANDMARKS_CONTENT, UPLOAD_BODY, problems
from app.api.request_log import RequestRecord, record_of
from app.api.sse import EventStream, wants_events
from app.api.upload.plan import Upload, plan_upload, read_upload, while_connected
from app.engine import METRICS_MEDIA_TYPE, Engine, Progress
from app.errors import NotReady
from app.inference import Detection, build_answer, reference, timing_of
from app.io import (
    AliveAnswer,
    Format,
    LandmarksAnswer,
    ModelInfo,
    ModelsAnswer,
    ReadinessAnswer,
    TimingAnswer,
    choose_format,
)
from app.model import LoadedModel

JSON: Final = "application/json"
router: Final = APIRouter()


class LandmarksQuery(BaseModel):
    """Query of ``POST /v1/landmarks``; an unknown name is refused, not ignored."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = Field(None, description="Which model; may be left out if there is one.")
    format: str | None = Field(
        None, description="json, mrk.json, csv, tsv, fcsv or long; wins over Accept."
    )
    timeout_s: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="Seconds from the end of the upload."
    )
    frame: int | None = Field(None, ge=0, description="Which frame of a 4D file, from 0.")
    candidates: bool = Field(False, description="List all modes of each landmark.")


@router.post(
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
    request: Request, shared: SharedDep, query: Annotated[LandmarksQuery, Query()]
) -> Response:
    """Upload a volume (NIfTI-1 or NIfTI-2, gzipped or not) and get its landmarks.

    All that the head of the request tells is checked before its body is read. A client that
    leaves takes its work with it.
    """
    start = time.perf_counter()
    record = record_of(request.scope)
    settings, engine = shared.settings, shared.engine
    accept = request.headers.get("accept")
    streams = wants_events(accept)
    form = choose_format(query.format or ("json" if streams else None), accept)
    timeout_s = timeout_of(query.timeout_s, settings)
    plan = plan_upload(request.headers, settings.max_body_bytes)
    with ExitStack() as held:
        held.enter_context(engine.admit(plan.length))
        _require_ready(engine)
        model = engine.registry.get(query.model)
        record.model = model.manifest.name
        upload = await read_upload(
            request,
            plan,
            max_bytes=settings.max_body_bytes,
            timeout_s=settings.body_timeout_s,
            look=partial(engine.look, model=model, frame=query.frame, timeout_s=timeout_s),
        )
        record.bytes = len(upload.content)
        shared.metrics.observe_stage("receive", upload.receive_ms / 1e3)
        asked = _Asked(engine, model, query, timeout_s, start)
        if streams:
            # The place is kept until the last event.
            return EventStream(partial(_write, asked, upload, form, record), held.pop_all())
        work = asked.detect(upload)
        detection = await while_connected(request.receive, work)
    record.shape = detection.volume.shape
    timing = asked.timing(detection, upload)
    headers = {"Server-Timing": server_timing(timing)}
    answer = form.write(asked.answer(detection, timing, record.request_id))
    return Response(answer, headers=headers, media_type=form.media_type)


@dataclass(frozen=True, slots=True)
class _Asked:
    """One question about one scan, and when it was asked."""

    engine: Engine
    model: LoadedModel
    query: LandmarksQuery
    timeout_s: float
    start: float

    def detect(
        self, upload: Upload, watch: Callable[[Progress], None] | None = None
    ) -> Coroutine[Any, Any, Detection]:
        frame, timeout_s = self.query.frame, self.timeout_s
        return self.engine.detect(
            upload.content, self.model, frame=frame, timeout_s=timeout_s, watch=watch
        )

    def timing(self, detection: Detection, upload: Upload) -> TimingAnswer:
        total_ms = 1e3 * (time.perf_counter() - self.start)
        return timing_of(detection, receive_ms=upload.receive_ms, total_ms=total_ms)

    def answer(
        self, detection: Detection, timing: TimingAnswer, request_id: str
    ) -> LandmarksAnswer:
        return build_answer(
            detection,
            model=reference(self.model),
            request_id=request_id,
            timing=timing,
            candidates=self.query.candidates,
        )


async def _write(
    asked: _Asked,
    upload: Upload,
    form: Format,
    record: RequestRecord,
    watch: Callable[[Progress], None],
) -> bytes:
    """Answer as the last event; JSON in one line, other formats as a JSON string."""
    detection = await asked.detect(upload, watch)
    record.shape = detection.volume.shape
    answer = asked.answer(detection, asked.timing(detection, upload), record.request_id)
    content = form.write(answer)
    return content if form.name == "json" else json.dumps(content.decode()).encode()


@router.get(
    "/v1/models",
    summary="List the models",
    tags=["models"],
    dependencies=[Depends(require_api_key)],
    responses=problems(401),
)
async def get_models(shared: SharedDep) -> ModelsAnswer:
    """List all model folders, those that were refused with the reason."""
    return list_models(shared.engine)


@router.get(
    "/v1/models/{name}",
    summary="Describe a model",
    tags=["models"],
    dependencies=[Depends(require_api_key)],
    responses=problems(401, 404),
)
async def get_model(name: str, shared: SharedDep) -> ModelInfo:
    """Say what a model finds, on which grid, and how well."""
    return describe_model(shared.engine, name)


@router.post(
    "/v1/models/{name}/reload",
    summary="Load a model again",
    tags=["models"],
    dependencies=[Depends(require_admin_key)],
    responses=problems(401, 404, 500),
)
async def reload_model(name: str, shared: SharedDep) -> ModelInfo:
    """Read a model's folder again; if it is refused, the model that was loaded stays."""
    await shared.engine.reload(name)
    return describe_model(shared.engine, name)


@router.get("/livez", summary="Is the process alive?", tags=["probes"])
async def get_livez() -> AliveAnswer:
    """Answer, which is all that there is to say."""
    return AliveAnswer(alive=True)


@router.get(
    "/readyz",
    summary="May requests be sent here?",
    tags=["probes"],
    response_model=ReadinessAnswer,
    responses={503: {"model": ReadinessAnswer, "description": "Not ready; the reason says why"}},
)
async def get_readyz(request: Request, shared: SharedDep) -> Response:
    """Say whether requests can be answered, and if not, why not."""
    state = shared.engine.readiness()
    if not state.ready:
        record_of(request.scope).code = NotReady.code
    answer = ReadinessAnswer(ready=state.ready, reason=state.reason, models=dict(state.models))
    return Response(answer.model_dump_json(), 200 if state.ready else 503, media_type=JSON)


@router.get(
    "/metrics",
    summary="Prometheus metrics",
    tags=["probes"],
    response_class=Response,
    responses={200: {"content": {"text/plain": {}}}},
)
async def get_metrics(shared: SharedDep) -> Response:
    """Write all metrics in the Prometheus text format."""
    return Response(shared.metrics.render(), media_type=METRICS_MEDIA_TYPE)


def _require_ready(engine: Engine) -> None:
    """Refuse before the body is read, rather than after."""
    state = engine.readiness()
    if not state.ready:
        raise NotReady(f"expected a ready service, got one that is not: {state.reason}")
