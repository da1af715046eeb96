"""``/v1/jobs``: scans in, and their landmarks later, whether the client stays or not."""

from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Final

from fastapi import APIRouter, Depends, Query, Response
from pydantic import BaseModel, Field

from app.api.dependencies import (
    Call,
    CallDep,
    JobsDep,
    Number,
    require_api_key,
    warnings_header,
)
from app.api.openapi import LANDMARKS_CONTENT, UPLOAD_BODY, headers, offer, problems
from app.api.problems import PROBLEM_MEDIA_TYPE
from app.api.request_log import KEPT_PROBLEM
from app.api.scans.reception import (
    SCAN_PROBLEMS,
    ReceivedScan,
    ScanQuery,
    receive_scan,
)
from app.errors import NotFinished
from app.io import (
    FORMATS,
    AnswerFormat,
    JobAnswer,
    JobsAnswer,
    JobSummary,
    LandmarksAnswer,
    Problem,
    count_scans,
    negotiate_format,
)
from app.jobs import NO_HURRY_S, JobRunner, KeptJob, Order
from app.model import LoadedModel

MAX_LISTED: Final = 1000
"""Jobs in a part of their list, some 250 KB."""

jobs_router: Final = APIRouter(tags=["jobs"], dependencies=[Depends(require_api_key)])


class JobQuery(ScanQuery):
    """Query of ``POST /v1/jobs``."""

    format: str | None = Field(
        None,
        description="In which landmarks are written. Unset: json.",
        json_schema_extra=offer(form.name for form in FORMATS),
    )
    candidates: bool = Field(False, description="List all modes of each landmark.")


class ResultQuery(BaseModel, extra="forbid"):
    """Query of ``GET /v1/jobs/{id}/scans/{number}``; unknown parameters are refused."""

    format: str | None = Field(
        None,
        description="Unset: the one that the job was sent with.",
        json_schema_extra=offer(form.name for form in FORMATS),
    )


class JobsQuery(BaseModel, extra="forbid"):
    """Query of ``GET /v1/jobs``; unknown parameters are refused."""

    after: str = Field(
        "",
        pattern=r"^(\d{1,12}\.\d{1,9}-[0-9a-f]{32})?$",
        description="`next` of the part of the list before.",
    )
    limit: int = Field(MAX_LISTED, ge=1, le=MAX_LISTED, description="Most jobs to list.")


@jobs_router.post(
    "/v1/jobs",
    summary="Find the landmarks of scans later",
    status_code=202,
    response_model=JobAnswer,
    responses={202: headers("Location"), **problems(*SCAN_PROBLEMS, 406, 501)},
    openapi_extra=UPLOAD_BODY,
)
async def create_job(call: CallDep, jobs: JobsDep, query: Annotated[JobQuery, Query()]) -> Response:
    """Upload a scan, or many in a ZIP archive; what is accepted here is finished.

    An archive with DICOM files in it is one scan; of several series, make an archive of archives.
    """
    form = negotiate_format(FORMATS, query.format or "json", None)
    model = call.choose_model(query.model)
    scan = await receive_scan(call, query, model, timeout_s=NO_HURRY_S)
    return await accept_job(jobs, scan, make_order(call, query, model, form), splits=True)


@jobs_router.get(
    "/v1/jobs",
    summary="List your jobs",
    response_model=JobsAnswer,
    responses=problems(401, 422, 429, 501, 503),
)
async def list_jobs(call: CallDep, jobs: JobsDep, query: Annotated[JobsQuery, Query()]) -> Response:
    """List the jobs of the caller's key, or without keys of its address, a part at a time."""
    seconds, _, before = query.after.partition("-")
    after = (float(seconds or "inf"), before)

    def describe() -> str:
        found = jobs.store.list_jobs(call.client, after, query.limit + 1)
        part = found[: query.limit]
        # With the time in it, as that very job may be removed before the next part is asked for.
        last = f"{part[-1].created_s}-{part[-1].id}" if len(found) > len(part) else None
        return JobsAnswer(jobs=[_summary(jobs, job) for job in part], next=last).model_dump_json()

    # Not on the event loop: there may be a thousand.
    return Response(await jobs.call(call.client, describe), media_type="application/json")


@jobs_router.get(
    "/v1/jobs/{job}",
    summary="How far is a job?",
    response_model=JobAnswer,
    responses=problems(401, 404, 429, 501, 503),
)
async def get_job(call: CallDep, job: str, jobs: JobsDep) -> Response:
    """Tell what has become of each scan of a job, or how far it is."""
    path = _path_of_results(call, job)
    find = partial(jobs.store.find, call.client, job, path, jobs.progress())
    found = await jobs.call(call.client, find)
    return Response(_describe(jobs, found), media_type="application/json")


@jobs_router.get(
    "/v1/jobs/{job}/scans/{number}",
    summary="Get the landmarks of one scan of a job",
    response_model=LandmarksAnswer,
    responses={
        200: {
            "description": "The landmarks",
            "content": LANDMARKS_CONTENT,
            **headers("X-Warnings"),
        },
        **problems(*SCAN_PROBLEMS, 406, 409, 501),
    },
)
async def get_job_result(
    call: CallDep,
    job: str,
    number: Number,
    jobs: JobsDep,
    query: Annotated[ResultQuery, Query()],
) -> Response:
    """Answer what `POST /v1/landmarks` would have answered, landmarks or problem."""
    find = partial(jobs.store.outcome, call.client, job, number)
    state, wanted, outcome = await jobs.call(call.client, find)
    if outcome is None:
        raise NotFinished(f"expected a scan that is done or has failed, got one that is {state}")
    if state == "failed":
        # It was logged and counted when the scan failed: clients may read it again and again.
        call.record.code = KEPT_PROBLEM
        status = Problem.model_validate_json(outcome).status
        return Response(outcome, status, media_type=PROBLEM_MEDIA_TYPE)
    form = negotiate_format(FORMATS, query.format or wanted, None)
    answer = LandmarksAnswer.model_validate_json(outcome)
    headers = warnings_header(answer.warnings)
    return Response(form.write(answer), headers=headers, media_type=form.media_type)


@jobs_router.delete(
    "/v1/jobs/{job}",
    summary="Cancel and remove a job",
    status_code=204,
    response_class=Response,
    responses=problems(401, 404, 429, 501, 503, 507),
)
async def delete_job(call: CallDep, job: str, jobs: JobsDep) -> None:
    """Remove a job with its scans and answers, whether it is finished or not."""
    await jobs.call(call.client, partial(jobs.store.remove, call.client, job))
    jobs.cancel(job)


def make_order(call: Call, query: JobQuery, model: LoadedModel, form: AnswerFormat) -> Order:
    """Say what a job is to find; the model goes by the name that it was asked for by."""
    return Order(
        owner=call.client,
        request_id=call.record.request_id,
        model=query.model or call.shared.settings.default_model or model.manifest.name,
        format=form.name,
        candidates=query.candidates,
        selection=query.selection,
    )


async def accept_job(
    jobs: JobRunner, scan: ReceivedScan, order: Order, *, splits: bool
) -> Response:
    """Keep a scan that has arrived as a job; with ``splits`` it may be an archive of scans.

    Returns:
        202 with the job, and its path in ``Location``.

    Raises:
        LandmarkdError: As ``JobStore.accept`` and ``count_scans``.
    """
    call, content = scan.call, scan.content

    def keep() -> KeptJob:
        limit = call.engine.limits.inflated_bytes
        scans = count_scans(content, limit) if splits else None
        job = jobs.store.accept(order, content, scans)
        return jobs.store.find(call.client, job, _path_of_results(call, job))

    job = await jobs.accept(call.client, keep)
    headers = {"Location": f"/v1/jobs/{job.id}"}
    body = _describe(jobs, job)
    return Response(body, 202, headers=headers, media_type="application/json")


def _path_of_results(call: Call, job: str) -> str:
    return f"{call.request.scope['root_path']}/v1/jobs/{job}/scans/"


def _describe(jobs: JobRunner, job: KeptJob) -> str:
    """Give the JSON of a ``JobAnswer``."""
    return f'{_summary(jobs, job).model_dump_json()[:-1]},"scans":{job.scans}}}'


def _summary(jobs: JobRunner, job: KeptJob) -> JobSummary:
    waiting = job.counts.get("queued", 0)
    total = sum(job.counts.values())
    return JobSummary(
        id=job.id,
        state="finished" if job.finished_s else "queued" if waiting == total else "running",
        model=job.model,
        reason=jobs.why_waits(job),
        created=datetime.fromtimestamp(job.created_s, UTC),
        expires=datetime.fromtimestamp(job.finished_s + jobs.store.folder.ttl_s, UTC)
        if job.finished_s
        else None,
        total=total,
        done=job.counts.get("done", 0),
        failed=job.counts.get("failed", 0),
    )
