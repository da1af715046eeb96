"""Server-sent events: the progress of one request, and at the end its answer or its problem.

The events are any number of ``progress``, then one ``answer`` or one ``problem``, whose data is the
JSON that the request would have got without ``Accept: text/event-stream``. The work is cancelled
when the client disconnects.
"""

import asyncio
import json
from collections.abc import Callable, Coroutine
from dataclasses import asdict
from typing import Any, Final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from app.api.problems import describe_problem
from app.api.request_log import RequestRecord, record_of
from app.api.upload.receive import cancel_on_disconnect
from app.engine import Progress
from app.errors import ClientLeft, UnknownFormat
from app.io import SCAN_FORMATS, Format, negotiate_format

EVENT_STREAM: Final = "text/event-stream"
EVENTS: Final = Format("events", EVENT_STREAM)

SILENCE_S: Final = 15.0
"""After which a comment is sent: a proxy closes a connection that is silent for 60 s, say."""

Work = Callable[[Callable[[Progress], None]], Coroutine[Any, Any, bytes]]
"""Takes a callback for progress; returns the data of the ``answer`` event."""


def wants_events(accept: str | None) -> bool:
    """Return whether an Accept header prefers event streams; wildcards do not count.

    Clients that are generated from the API's description name all that it may answer, JSON first.
    """
    try:
        return negotiate_format((*SCAN_FORMATS, EVENTS), None, accept) is EVENTS
    except UnknownFormat:
        return False


class EventStream(Response):
    """A response that starts before its work is done."""

    media_type = EVENT_STREAM

    def __init__(self, work: Work) -> None:
        super().__init__(headers={"Cache-Control": "no-store"})
        del self.headers["content-length"]
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events for as long as the client is connected."""
        record = record_of(scope)
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            await cancel_on_disconnect(receive, self._send_events(record, send))
        except ClientLeft as error:
            record.status, record.code = error.status, error.code

    async def _send_events(self, record: RequestRecord, send: Send) -> None:
        events: asyncio.Queue[bytes | None] = asyncio.Queue()

        def on_progress(progress: Progress) -> None:
            events.put_nowait(_event("progress", json.dumps(asdict(progress)).encode()))

        working = asyncio.create_task(self._work(on_progress))
        working.add_done_callback(lambda _: events.put_nowait(None))
        try:
            while (event := await _next(events)) is not None:
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": _last_event(working, record)})
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)


async def _next(events: "asyncio.Queue[bytes | None]") -> bytes | None:
    try:
        async with asyncio.timeout(SILENCE_S):
            return await events.get()
    except TimeoutError:
        return b":\n\n"


def _last_event(working: "asyncio.Task[bytes]", record: RequestRecord) -> bytes:
    """Write the answer, or the problem that took its place."""
    error = working.exception()
    if error is None:
        return _event("answer", working.result())
    problem = describe_problem(error, record.request_id)
    record.code = problem.code
    return _event("problem", problem.model_dump_json().encode())


def _event(name: str, data: bytes) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"
