"""``/v1/uploads``: files of jobs that arrive in parts, by tus, over several connections if need be.

Tus 1.0.0 (https://tus.io), the core protocol with the extensions creation, termination and
expiration. What has arrived is on disk; a request holds one block of it in memory.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from email.utils import formatdate
from functools import partial
from typing import Annotated, Final, TypeVar

from fastapi import APIRouter, Depends, Header, Query, Request, Response

from app.api.dependencies import Call, CallDep, JobsDep, SharedDep, require_api_key
from app.api.openapi import UPLOAD_STATE, headers, problems
from app.api.problems import TUS_VERSION
from app.api.scans.jobs import JobQuery, make_order
from app.api.upload.receive import SLOW, allowed_s
from app.api.upload.turns import Turns
from app.errors import (
    ClientLeft,
    Draining,
    RequestError,
    SlowUpload,
    TooLarge,
    UnknownModel,
    UnsupportedMediaType,
    WrongOffset,
    WrongTusVersion,
)
from app.io import (
    FORMATS,
    HEAD_BYTES,
    UploadsAnswer,
    UploadSummary,
    count_scans,
    negotiate_format,
)
from app.jobs import NO_HURRY_S, JobRunner, OpenUpload, Order

T = TypeVar("T")

PART_TYPE: Final = "application/offset+octet-stream"
EXTENSIONS: Final = "creation,termination,expiration"

BLOCK_BYTES: Final = 1 << 20
"""Collected of a part before it is written."""


async def check_version(
    version: Annotated[
        str, Header(alias="Tus-Resumable", json_schema_extra={"enum": [TUS_VERSION]})
    ] = TUS_VERSION,
) -> None:
    """Refuse what another version of the protocol asks for.

    Raises:
        WrongTusVersion: The request names another version.
    """
    if version != TUS_VERSION:
        raise WrongTusVersion(f"expected Tus-Resumable {TUS_VERSION}, got {version[:32]!r}")


Length = Annotated[int, Header(alias="Upload-Length", ge=1, lt=1 << 62)]
Offset = Annotated[int, Header(alias="Upload-Offset", ge=0, lt=1 << 62)]

uploads_router: Final = APIRouter(
    tags=["jobs"], dependencies=[Depends(require_api_key), Depends(check_version)]
)


class Reception:
    """Receives the parts of an upload for one request."""

    def __init__(self, call: Call, jobs: JobRunner) -> None:
        self._call, self._jobs = call, jobs
        self._uploads = jobs.uploads
        self.turns: Turns = call.request.app.state.turns

    async def start(self, query: JobQuery, length: int) -> OpenUpload:
        """Begin an upload, if a job of it could be accepted.

        Raises:
            LandmarkdError: As ``POST /v1/jobs`` before the body, and ``UploadStore.start``.
        """
        form = negotiate_format(FORMATS, query.format or "json", None)
        # The file is on disk, and never in memory as a whole.
        if length > (most := self._call.engine.limits.inflated_bytes):
            raise TooLarge(
                f"expected a file of at most {most} bytes, got {length}; the operator's limit is "
                "LANDMARKD_MAX_INFLATED_BYTES"
            )
        model = self._call.choose_model(query.model)
        order = make_order(self._call, query, model, form)
        return await self._write_files(partial(self._uploads.start, order, length))

    async def look(self, upload: str) -> OpenUpload:
        """Find an upload of the client; raises as ``UploadStore.look``."""
        return await self._read(partial(self._uploads.look, self._call.client, upload))

    async def list_open(self) -> list[OpenUpload]:
        """List the client's uploads that have not become jobs."""
        return await self._read(partial(self._uploads.list_open, self._call.client))

    async def receive(self, upload: OpenUpload, unwanted: asyncio.Event) -> OpenUpload:
        """Write a part as it arrives, and have it survive a power failure.

        Args:
            upload: What has arrived before.
            unwanted: Set when another request goes on with the upload.

        Returns:
            The upload with the part.

        Raises:
            ClientLeft, SlowUpload, Draining: The part ended early; what has arrived is written.
            WrongOffset: It is longer than the rest of the file; what arrived before is written.
            LandmarkdError: As ``UploadStore.append``; or the file is refused by its first bytes,
                and discarded.
        """
        self._call.admitted.count_bytes(BLOCK_BYTES)
        waited_s, received, settings = 0.0, 0, self._call.shared.settings
        block, more = bytearray(), True
        try:
            while more:
                # A part may take long, but not pause long. What a slow disk takes counts for none.
                left_s = max(allowed_s(received, settings) - waited_s, 0.0)
                began = time.monotonic()
                wait_s = min(left_s, settings.body_timeout_s)
                chunk, more = await _next_chunk(self._call.request, unwanted, wait_s)
                waited_s += time.monotonic() - began
                upload.check_next(upload.offset, len(block) + len(chunk))
                block += chunk
                received += len(chunk)
                if len(block) >= BLOCK_BYTES:
                    part, block = block, bytearray()
                    upload = await self._write(upload, part)
        except (ClientLeft, SlowUpload, Draining, WrongOffset):
            await self._end(upload, block)
            raise
        finally:
            self._call.record.bytes = received
        return await self._end(upload, block)

    async def finish(self, upload: OpenUpload) -> OpenUpload:
        """Make a job of an upload if it has arrived whole and is none yet.

        Raises:
            RequestError: It is refused, and discarded.
            QueueFull, NotStored: As ``UploadStore.finish``; it may be tried again.
        """
        if upload.accepted or upload.offset < upload.length:
            return upload
        self._call.admitted.start_work()
        limit = self._call.engine.limits.inflated_bytes

        def count() -> int | None:
            return count_scans(self._uploads.files.open(upload.id, None, 0), limit)

        async with self._or_discard(upload):
            scans = await self._write_files(count)
        finish = partial(self._uploads.finish, upload, scans)
        await self._jobs.accept(self._call.client, finish)
        return replace(upload, accepted=True)

    async def remove(self, upload: OpenUpload) -> None:
        """Remove an upload, or the job that it has become."""
        await self._read(partial(self._uploads.discard, upload))
        self._jobs.cancel(upload.id)

    async def _end(self, upload: OpenUpload, block: bytearray) -> OpenUpload:
        if block:
            upload = await self._write(upload, block)
        await self._write_files(partial(self._uploads.files.sync, upload.id))
        return upload

    async def _write(self, upload: OpenUpload, block: bytearray) -> OpenUpload:
        await self._write_files(partial(self._uploads.append, upload, block))
        longer = replace(upload, offset=upload.offset + len(block))
        needed = min(HEAD_BYTES, upload.length)
        if upload.offset < needed <= longer.offset:
            content = await self._read(partial(self._uploads.files.open, longer.id, None, 0))
            async with self._or_discard(longer):
                self._check_head(longer.order, bytes(content[:HEAD_BYTES]))
        return longer

    async def _read(self, function: Callable[[], T]) -> T:
        return await self._jobs.call(self._call.client, function)

    async def _write_files(self, function: Callable[[], T]) -> T:
        return await self._jobs.write(self._call.client, function)

    def _check_head(self, order: Order, head: bytes) -> None:
        engine = self._call.engine
        try:
            model = engine.registry.get(order.model)
        except UnknownModel:
            return  # It was loaded when this began. What is accepted waits for it, as any job.
        engine.precheck(
            head,
            model,
            selection=order.selection,
            timeout_s=NO_HURRY_S,
            client=order.owner,
        )

    @asynccontextmanager
    async def _or_discard(self, upload: OpenUpload) -> AsyncIterator[None]:
        """Discard an upload if it is refused: its bytes would be again."""
        try:
            yield
        except RequestError:
            await self._read(partial(self._uploads.discard, upload))
            raise


async def get_reception(call: CallDep, jobs: JobsDep) -> Reception:
    """Make it on the event loop: FastAPI makes one of a class on a thread, which may not start."""
    return Reception(call, jobs)


ReceptionDep = Annotated[Reception, Depends(get_reception)]


@uploads_router.options(
    "/v1/uploads",
    summary="How can files be uploaded?",
    status_code=204,
    responses=problems(401, 412, 501)
    | {204: headers("Tus-Version", "Tus-Extension", "Tus-Max-Size")},
)
async def get_upload_options(shared: SharedDep, _: JobsDep) -> Response:
    """Tell which version and extensions of tus there are, and how large a file may be."""
    size = str(shared.engine.limits.inflated_bytes)
    about = {"Tus-Version": TUS_VERSION, "Tus-Extension": EXTENSIONS, "Tus-Max-Size": size}
    return Response(status_code=204, headers=about)


@uploads_router.post(
    "/v1/uploads",
    summary="Begin to upload the file of a job",
    status_code=201,
    response_class=Response,
    responses=problems(401, 404, 406, 412, 413, 422, 429, 501, 503, 507)
    | {201: headers(*UPLOAD_STATE)},
)
async def create_upload(
    reception: ReceptionDep, query: Annotated[JobQuery, Query()], length: Length
) -> Response:
    """Announce a file; its parts go to the path in `Location`. The query is that of a job."""
    upload = await reception.start(query, length)
    headers = _state(upload) | {"Location": f"/v1/uploads/{upload.id}"}
    return Response(status_code=201, headers=headers)


@uploads_router.get(
    "/v1/uploads",
    summary="List your uploads",
    response_model=UploadsAnswer,
    responses=problems(401, 412, 429, 501, 503),
)
async def list_uploads(reception: ReceptionDep) -> UploadsAnswer:
    """List what the caller has begun to upload and not finished."""
    return UploadsAnswer(uploads=[_summary(one) for one in await reception.list_open()])


@uploads_router.get(
    "/v1/uploads/{upload}",
    summary="How much of a file has arrived?",
    response_class=Response,
    responses=problems(400, 401, 404, 412, 413, 422, 429, 501, 503, 507)
    | {200: headers(*UPLOAD_STATE)},
)
async def get_upload(upload: str, reception: ReceptionDep) -> Response:
    """Tell in `Upload-Offset` where the next part begins; use HEAD."""
    async with reception.turns.take(upload):
        # The process may have ended after the last byte.
        found = await reception.finish(await reception.look(upload))
    return Response(headers=_state(found) | {"Cache-Control": "no-store"})


@uploads_router.patch(
    "/v1/uploads/{upload}",
    summary="Upload the next part of a file",
    status_code=204,
    responses=problems(400, 401, 404, 408, 409, 412, 413, 415, 422, 429, 501, 503, 507)
    | {204: headers(*UPLOAD_STATE)},
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {PART_TYPE: {"schema": {"type": "string", "format": "binary"}}},
        }
    },
)
async def append_to_upload(
    request: Request, upload: str, reception: ReceptionDep, offset: Offset
) -> Response:
    """Add a part, which begins at `Upload-Offset`; after the last one there is a job of this id.

    What has arrived of a part stays, however the request ends.
    """
    media_type = request.headers.get("content-type", "")
    if media_type.partition(";")[0].strip().lower() != PART_TYPE:
        raise UnsupportedMediaType(f"expected Content-Type {PART_TYPE}, got {media_type[:64]!r}")
    async with reception.turns.take(upload) as unwanted:
        found = await reception.look(upload)
        found.check_next(offset)
        found = await reception.finish(await reception.receive(found, unwanted))
    return Response(status_code=204, headers=_state(found))


@uploads_router.delete(
    "/v1/uploads/{upload}",
    summary="Give up an upload",
    status_code=204,
    responses=problems(401, 404, 412, 429, 501, 503, 507),
)
async def delete_upload(upload: str, reception: ReceptionDep) -> Response:
    """Remove what has arrived of a file, or the job that it has become."""
    async with reception.turns.take(upload):
        await reception.remove(await reception.look(upload))
    return Response(status_code=204)


async def _next_chunk(
    request: Request, unwanted: asyncio.Event, wait_s: float
) -> tuple[bytes, bool]:
    """Wait for the next chunk of a body; return it, and whether there is more."""
    receiving = asyncio.ensure_future(request.receive())
    superseded = asyncio.ensure_future(unwanted.wait())
    try:
        tasks = receiving, superseded
        await asyncio.wait(tasks, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        if not receiving.done():
            expected = "expected more of the body in time, or on this connection"
            raise SlowUpload(f"{expected}; got none; {SLOW}")
        message = receiving.result()
    finally:
        receiving.cancel()
        superseded.cancel()
    if message["type"] == "http.disconnect":
        raise ClientLeft("expected a whole part, got the first bytes of one")
    return message.get("body", b""), message.get("more_body", False)


def _summary(upload: OpenUpload) -> UploadSummary:
    return UploadSummary(
        id=upload.id,
        model=upload.order.model,
        offset=upload.offset,
        length=upload.length,
        expires=datetime.fromtimestamp(upload.expires_s, UTC),
    )


def _state(upload: OpenUpload) -> dict[str, str]:
    state = {"Upload-Offset": str(upload.offset), "Upload-Length": str(upload.length)}
    if upload.accepted:
        return state | {"Location": f"/v1/jobs/{upload.id}"}
    return state | {"Upload-Expires": formatdate(upload.expires_s, usegmt=True)}
