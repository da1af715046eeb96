"""Progress of one request -> server-sent events, which end with its answer or its problem.

Events are ``progress`` (how far), then ``answer`` or ``problem``: the same JSON that the request
would have got without ``Accept: text/event-stream``. A client that leaves takes its work with it.
"""

import asyncio
import json
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any, Final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from app.api.problems import describe_problem
from app.api.request_log import record_of
from app.api.upload.plan import while_connected
from app.engine import Progress
from app.errors import ClientLeft, LandmarkdError

EVENTS: Final = "text/event-stream"

Work = Callable[[Callable[[Progress], None]], Coroutine[Any, Any, bytes]]
"""Is told whom to tell of progress; gives the answer as JSON."""


def wants_events(accept: str | None) -> bool:
    """Tell whether a client asks to be told of progress: it names the media type itself."""
    ranges = (part.partition(";")[0].strip().lower() for part in (accept or "").split(","))
    return EVENTS in ranges


class EventStream(Response):
    """An answer that begins before its work is done."""

    media_type = EVENTS

    def __init__(self, work: Work, held: ExitStack) -> None:
        """Args: what to do, and what to let go of when it is done."""
        super().__init__(headers={"Cache-Control": "no-store"})
        del self.headers["content-length"]
        self._work = work
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events for as long as the client listens."""
        record = record_of(scope)
        with self._held:
            start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            await send(start)
            try:
                await while_connected(receive, self._talk(scope, send))
            except ClientLeft as error:
                record.status, record.code = error.status, error.code

    async def _talk(self, scope: Scope, send: Send) -> None:
        events: asyncio.Queue[bytes] = asyncio.Queue()
        working = asyncio.create_task(self._answer(scope, events))
        working.add_done_callback(lambda _: events.put_nowait(b""))
        try:
            # The empty piece at the end also ends the answer.
            more = True
            while more:
                event = await events.get()
                more = bool(event)
                await send({"type": "http.response.body", "body": event, "more_body": more})
            await working
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)

    async def _answer(self, scope: Scope, events: "asyncio.Queue[bytes]") -> None:
        def tell(progress: Progress) -> None:
            events.put_nowait(_event("progress", json.dumps(asdict(progress)).encode()))

        try:
            events.put_nowait(_event("answer", await self._work(tell)))
        except LandmarkdError as error:
            record = record_of(scope)
            record.code = error.code
            problem = describe_problem(error, record.request_id)
            events.put_nowait(_event("problem", problem.model_dump_json().encode()))


def _event(name: str, data: bytes) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"
