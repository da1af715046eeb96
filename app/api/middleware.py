"""Middleware: the id, log line and metrics of every request, and an answer to unexpected errors.

It is pure ASGI and does not wrap ``receive``, so that routes notice clients that disconnect.
"""

import asyncio
import re
import time
import uuid
from collections import Counter
from collections.abc import Mapping
from typing import Final
from urllib.parse import parse_qsl

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api.origin import OriginCheck
from app.api.problems import METHODS, TUS_VERSION, problem_response, quote, unexpected_error
from app.api.request_log import PROBES, RECORD_KEY, RequestRecord, log_request
from app.engine import Metrics
from app.errors import BadParameter, ClientLeft, Draining, HeadTooLarge, LandmarkdError

ID_HEADER: Final = "X-Request-ID"
METHOD_HEADER: Final = "X-HTTP-Method-Override"
SAFE_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")

REFUSAL_EXTENSION: Final = "landmarkd.refusal"
"""ASGI extension: the ``LandmarkdError`` for which the server refuses a request; it is answered."""

LEFT_EXTENSION: Final = "landmarkd.left"
"""ASGI extension: a function that tells whether the client left before it was sent all."""

LISTS: Final = ("accept", "content-type")
MAX_PARTS: Final = 100
"""Of a query, or of a header that is a list: each is parsed on the event loop, in microseconds."""

UPLOADS_PATH: Final = "/v1/uploads"
"""Below which every response, whatever refuses the request, names its version of tus."""

SEND_BYTES: Final = 64 << 10
"""Sent at a time of a body: the server copies no more, and waits until the client has read it."""


class RequestTracking:
    """The outermost of the application's own middlewares."""

    def __init__(
        self, app: ASGIApp, metrics: Metrics, check_origin: OriginCheck = lambda _: None
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._check_origin = check_origin

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, then log and count it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start = time.perf_counter()
        method = _method(scope)
        record = RequestRecord(_request_id(scope), method if method in METHODS else "other")
        # HEAD: as RFC 9110, 9.3.2 has it; the server leaves the body out.
        inner = {**scope, RECORD_KEY: record, "method": "GET" if method == "HEAD" else method}
        # What a proxy has taken off the path. Whoever forges it gets other links, no more.
        prefix = f"/{Headers(scope=scope).get('X-Forwarded-Prefix', '').strip('/')}".rstrip("/")
        inner |= {name: prefix + scope.get(name, "") for name in ("root_path", "path")}
        headers = {ID_HEADER: record.request_id, "X-Content-Type-Options": "nosniff"}
        if scope["path"].startswith(UPLOADS_PATH):
            headers["Tus-Resumable"] = TUS_VERSION
        response = _TrackedResponse(send, record, headers, prefix)
        try:
            await self._answer(inner, receive, response.send)
        except (Exception, asyncio.CancelledError) as error:
            problem = _problem_of(error, record)
            record.status, record.code = problem.status, problem.code
            if response.started:
                # Too late for a problem: the server closes the connection.
                raise
            await problem_response(problem, record.request_id)(scope, receive, response.send)
        finally:
            self._finish(inner, record, time.perf_counter() - start)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse a request, if it is to be, or pass it on."""
        error: LandmarkdError | None = scope.get("extensions", {}).get(REFUSAL_EXTENSION)
        error = error or _check_lists(scope) or _check_once(scope) or self._check_origin(scope)
        if error is None:
            await self._app(scope, receive, send)
        else:
            record: RequestRecord = scope[RECORD_KEY]
            record.code = error.code
            await problem_response(error, record.request_id)(scope, receive, send)

    def _finish(self, scope: Scope, record: RequestRecord, seconds: float) -> None:
        record.route = getattr(scope.get("route"), "path", record.route)
        record.ms = 1e3 * seconds
        has_left = scope.get("extensions", {}).get(LEFT_EXTENSION)
        if record.code == "ok" and has_left is not None and has_left():
            record.status, record.code = ClientLeft.status, ClientLeft.code
        log_request(record)
        if record.route not in PROBES:
            self._metrics.observe_request(record.route, record.code, seconds)


class _TrackedResponse:
    """Adds headers to a response, a prefix to its link, and its status to the record."""

    def __init__(
        self, send: Send, record: RequestRecord, headers: Mapping[str, str], prefix: str
    ) -> None:
        self._send = send
        self._record = record
        self._headers = headers
        self._prefix = prefix
        self.started = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            self._record.status = message["status"]
            if message["status"] < 400:
                self._record.code = "ok"
            headers = MutableHeaders(scope=message)
            headers.update(self._headers)
            if "location" in headers:
                headers["location"] = self._prefix + headers["location"]
        body = message.get("body", b"")
        last = max(len(body) - 1, 0) // SEND_BYTES * SEND_BYTES
        for start in range(0, last, SEND_BYTES):
            part = body[start : start + SEND_BYTES]
            await self._send({"type": message["type"], "body": part, "more_body": True})
        await self._send({**message, "body": body[last:]} if last else message)


def _problem_of(error: BaseException, record: RequestRecord) -> LandmarkdError:
    """Say what a client is told of an error that no handler has answered."""
    if isinstance(error, asyncio.CancelledError):  # By the server, whose time to stop is over.
        return Draining("expected an answer before the service stopped, got none; try another")
    return unexpected_error(error, record.request_id)


def _check_lists(scope: Scope) -> HeadTooLarge | None:
    """Refuse a head whose lists take long to parse: 64 KiB may have tens of thousands of parts."""
    headers = Headers(scope=scope)
    lists = [",".join(headers.getlist(name)) for name in LISTS]
    separators = (values.count(mark) for values in lists for mark in ",;")
    if max(scope["query_string"].count(b"&"), *separators) < MAX_PARTS:
        return None
    return HeadTooLarge(
        f"expected at most {MAX_PARTS} parts in a query, Accept or Content-Type, got more"
    )


def _check_once(scope: Scope) -> BadParameter | None:
    """Refuse a query that names a parameter twice, of which only the last one would count."""
    query = scope["query_string"].decode("latin-1")  # Of bytes, only ASCII would be parsed.
    names = [name for name, _ in parse_qsl(query, keep_blank_values=True)]
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is None:
        return None
    return BadParameter(f"query.{quote(twice)}: expected once, got it again")


def _method(scope: Scope) -> str:
    """Return the method of a request; tus has it in a header from clients that only post."""
    method: str = scope["method"]
    if not scope["path"].startswith(UPLOADS_PATH):
        return method
    return Headers(scope=scope).get(METHOD_HEADER, method).upper()


def _request_id(scope: Scope) -> str:
    """Return the client's id if it is safe to log, else a new one."""
    given = Headers(scope=scope).get(ID_HEADER, "")
    return given if SAFE_ID.fullmatch(given) else uuid.uuid4().hex
