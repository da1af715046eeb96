"""``POST /v1/landmarks``: a scan in, its landmarks or a DICOM report of them out."""

import json
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Annotated, Final

from fastapi import Query, Response
from pydantic import Field
from starlette.datastructures import Headers

from app.api.dependencies import (
    CallDep,
    TimeLimit,
    accept_of,
    request_timeout_s,
    timed_response,
)
from app.api.openapi import (
    EVENTS_CONTENT,
    LANDMARKS_CONTENT,
    REPORT_CONTENT,
    UPLOAD_BODY,
    headers,
    offer,
    problems,
)
from app.api.scans.jobs import JobQuery, accept_job, make_order
from app.api.scans.reception import (
    SCAN_PROBLEMS,
    ReceivedScan,
    receive_scan,
    scan_router,
)
from app.api.sse import EventStream, wants_events
from app.api.upload.receive import cancel_on_disconnect
from app.engine import Progress, ignore
from app.inference import answer_scan
from app.io import (
    FORMATS,
    SCAN_FORMATS,
    SEARCH_BYTES,
    AnswerFormat,
    Evidence,
    JobAnswer,
    LandmarksAnswer,
    find_evidence,
    load_report_writer,
    negotiate_format,
)
from app.jobs import NO_HURRY_S

landmarks_router: Final = scan_router()

RESPOND_ASYNC: Final = "respond-async"


class LandmarksQuery(JobQuery):
    """Query of ``POST /v1/landmarks``."""

    format: str | None = Field(
        None,
        description="Takes precedence over Accept; dcm is for DICOM only.",
        json_schema_extra=offer(form.name for form in SCAN_FORMATS),
    )
    timeout_s: TimeLimit = None


@landmarks_router.post(
    "/v1/landmarks",
    summary="Find the landmarks of a scan",
    response_model=LandmarksAnswer,
    responses={
        200: {
            "description": "The landmarks",
            "content": LANDMARKS_CONTENT | EVENTS_CONTENT | REPORT_CONTENT,
            **headers("Server-Timing", "X-Warnings"),
        },
        202: {
            "description": "With Prefer: respond-async, a job",
            "model": JobAnswer,
            **headers("Location", "Preference-Applied"),
        },
        **problems(*SCAN_PROBLEMS, 406),
    },
    openapi_extra=UPLOAD_BODY,
)
async def find_landmarks(call: CallDep, query: Annotated[LandmarksQuery, Query()]) -> Response:
    """Upload a scan (NIfTI, NRRD, MetaImage, MGH, or DICOM in a ZIP archive) and get its landmarks.

    Whatever the request's headers or the file's header rule out is refused before the rest of the
    body is read. The work is cancelled when the client disconnects; with `Prefer: respond-async`
    the answer is 202 and a job, if the service keeps jobs.
    """
    request, shared = call.request, call.shared
    accept = accept_of(request.headers)
    streams = wants_events(accept)
    formats = FORMATS if streams else SCAN_FORMATS
    form = negotiate_format(formats, query.format or ("json" if streams else None), accept)
    may_wait = isinstance(form, AnswerFormat) and not streams and _prefers_async(request.headers)
    jobs = shared.jobs if may_wait else None
    limit_s = NO_HURRY_S if jobs else request_timeout_s(query.timeout_s, shared.settings)
    model = call.choose_model(query.model)
    scan = await receive_scan(call, query, model, timeout_s=limit_s)
    find = partial(_find, scan, candidates=query.candidates)
    if not isinstance(form, AnswerFormat):
        answer, content = await cancel_on_disconnect(request.receive, _report(scan, find))
        return timed_response(content, answer.timing_ms, form.media_type, answer.warnings)
    if jobs:
        order = make_order(call, query, model, form)
        kept = await accept_job(jobs, scan, order, splits=False)
        kept.headers["Preference-Applied"] = RESPOND_ASYNC
        return kept
    if streams:
        return EventStream(partial(_write_event, find, form))
    answer = await cancel_on_disconnect(request.receive, find())
    content = form.write(answer)
    return timed_response(content, answer.timing_ms, form.media_type, answer.warnings)


def _prefers_async(headers: Headers) -> bool:
    """Say whether the client would rather have a job (RFC 7240)."""
    preferences = ",".join(headers.getlist("prefer")).split(",")
    return RESPOND_ASYNC in {one.partition(";")[0].strip().lower() for one in preferences}


async def _find(
    scan: ReceivedScan,
    on_progress: Callable[[Progress], None] = ignore,
    *,
    candidates: bool,
) -> LandmarksAnswer:
    """Find the landmarks of a scan."""
    detection = await scan.detect(on_progress)
    return answer_scan(
        detection,
        scan.model,
        request_id=scan.call.record.request_id,
        receive_ms=scan.call.receive_ms,
        start_s=scan.call.start_s,
        candidates=candidates,
    )


async def _report(
    scan: ReceivedScan, find: Callable[[], Awaitable[LandmarksAnswer]]
) -> tuple[LandmarksAnswer, bytes]:
    """Find the landmarks of a DICOM scan, and report on them without a word about the patient.

    Where no report can be written, they are not looked for.
    """

    def prepare(
        check_cancelled: Callable[[], None],
    ) -> tuple[Callable[[LandmarksAnswer, Evidence], bytes], Evidence]:
        limit, series = scan.call.engine.limits.inflated_bytes, scan.query.series
        write = load_report_writer()
        return write, find_evidence(scan.content, limit, series, check_cancelled)

    # Nothing of it is kept: who holds memory may not have all of it, which the scan may need.
    write, evidence = await scan.compute(prepare, SEARCH_BYTES, lambda _: 0)
    answer = await find()
    memory = evidence.report_bytes(len(answer.landmarks) + len(answer.measurements))
    return answer, await scan.compute(lambda _: write(answer, evidence), memory, len)


async def _write_event(
    find: Callable[[Callable[[Progress], None]], Awaitable[LandmarksAnswer]],
    form: AnswerFormat,
    on_progress: Callable[[Progress], None],
) -> bytes:
    """Write the data of an ``answer`` event: JSON as it is, other formats as a JSON string."""
    content = form.write(await find(on_progress))
    return content if form.name == "json" else json.dumps(content.decode()).encode()
