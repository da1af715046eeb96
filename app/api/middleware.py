"""Every HTTP request -> its id, its log line, its metrics; and an answer if nobody else gave one.

Pure ASGI: a middleware that wraps ``receive`` would hide from the routes that a client has left.
"""

import logging
import re
import time
import uuid
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api.problems import problem_response
from app.api.request_log import PROBES, RECORD_KEY, RequestRecord, log_request
from app.engine import Metrics
from app.errors import LandmarkdError

ID_HEADER: Final = "X-Request-ID"
SANE_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class RequestTracking:
    """ASGI middleware, outermost of the application's own."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        """Args: the application inside, and where requests are counted."""
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and note what became of it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start = time.perf_counter()
        method = scope["method"] if scope["method"] in METHODS else "other"
        record = RequestRecord(_request_id(scope), method)
        scope[RECORD_KEY] = record
        answer = _TrackedAnswer(send, record)
        try:
            await self._app(scope, receive, answer.send)
        except Exception as error:
            record.status, record.code = 500, "internal"
            _log_unexpected(error, record)
            if answer.started:
                # Too late for a problem: the server breaks the connection off.
                raise
            detail = f"unexpected; the log has it under request id {record.request_id}"
            response = problem_response(LandmarkdError(detail), record.request_id)
            await response(scope, receive, answer.send)
        finally:
            self._note(scope, record, time.perf_counter() - start)

    def _note(self, scope: Scope, record: RequestRecord, seconds: float) -> None:
        record.route = getattr(scope.get("route"), "path", record.route)
        record.ms = 1e3 * seconds
        log_request(record)
        if record.route not in PROBES:
            self._metrics.observe_request(record.route, record.code, seconds)


class _TrackedAnswer:
    """Passes an answer on, with the request's id in it and its status in the record."""

    def __init__(self, send: Send, record: RequestRecord) -> None:
        self._send = send
        self._record = record
        self.started = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            self._record.status = message["status"]
            if message["status"] < 400:
                self._record.code = "ok"
            MutableHeaders(scope=message)[ID_HEADER] = self._record.request_id
        await self._send(message)


def _request_id(scope: Scope) -> str:
    """Take the client's id if it is fit for a log, else make one."""
    given = Headers(scope=scope).get(ID_HEADER, "")
    return given if SANE_ID.fullmatch(given) else uuid.uuid4().hex


def _log_unexpected(error: Exception, record: RequestRecord) -> None:
    logging.getLogger(__name__).error(
        "unexpected error", exc_info=error, extra={"request_id": record.request_id}
    )
