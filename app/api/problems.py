"""Errors as RFC 9457 problem details: expected ones, FastAPI's own, and unexpected ones."""

import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match

from app.api.request_log import record_of
from app.compute import HOST, describe_out_of_memory, is_out_of_memory
from app.errors import (
    BadParameter,
    InsufficientMemory,
    LandmarkdError,
    QueueFull,
    Unauthorized,
    WrongTusVersion,
    describe_unknown,
)
from app.io import Problem

PROBLEM_MEDIA_TYPE: Final = "application/problem+json"
TYPE_PREFIX: Final = "urn:problem-type:landmarkd:"

METHODS: Final = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")

TUS_VERSION: Final = "1.0.0"
"""Of tus, the protocol of uploads."""

MAX_QUOTED_CHARACTERS: Final = 64
"""Of an invalid parameter's name or value that is quoted back to its sender."""

logger = logging.getLogger(__name__)


def problem_response(
    error: LandmarkdError, request_id: str, headers: Mapping[str, str] | None = None
) -> Response:
    """Turn an error into a response, with the headers that belong to such an error."""
    extra = dict(headers or {})
    if isinstance(error, QueueFull):
        extra["Retry-After"] = str(error.retry_after_s)
    if isinstance(error, Unauthorized):
        extra["WWW-Authenticate"] = "Bearer"
    if isinstance(error, WrongTusVersion):
        extra["Tus-Version"] = TUS_VERSION
    problem = describe_problem(error, request_id)
    return Response(
        problem.model_dump_json(), error.status, headers=extra, media_type=PROBLEM_MEDIA_TYPE
    )


def describe_problem(error: BaseException, request_id: str) -> Problem:
    """Turn an error, expected or not, into problem details."""
    if not isinstance(error, LandmarkdError):
        error = unexpected_error(error, request_id)
    return Problem(
        type=TYPE_PREFIX + error.code,
        title=error.title,
        status=error.status,
        detail=str(error),
        code=error.code,
        request_id=request_id,
    )


def unexpected_error(error: BaseException, request_id: str) -> LandmarkdError:
    """Log an error that nobody has named, and return what its client is told.

    It is a defect of the service, unless memory ran out, which may happen anywhere.
    """
    if is_out_of_memory(error):
        logger.warning("out of memory", extra={"request_id": request_id})
        shortage = describe_out_of_memory(error, HOST.device)
        return InsufficientMemory(f"expected a request that fits the memory: {shortage}")
    logger.error("unexpected error", exc_info=error, extra={"request_id": request_id})
    return LandmarkdError(f"unexpected; the log has it under request id {request_id}")


def install_problem_handlers(app: FastAPI) -> None:
    """Make an application answer expected errors as problem+json.

    ``app.api.middleware`` handles unexpected ones.
    """
    for kind in (LandmarkdError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, _handle)


async def _handle(request: Request, error: Exception) -> Response:
    record = record_of(request.scope)
    headers: Mapping[str, str] | None = None
    if isinstance(error, RequestValidationError):
        error = BadParameter("; ".join(_explain(request, item) for item in error.errors()))
    elif isinstance(error, HTTPException):
        error, headers = _http_error(request, error)
    if not isinstance(error, LandmarkdError):
        raise error
    record.code = error.code
    return problem_response(error, record.request_id, headers)


def _http_error(
    request: Request, error: HTTPException
) -> tuple[LandmarkdError, Mapping[str, str] | None]:
    """Describe what FastAPI itself raises: no such path, wrong method, unreadable body."""
    detail, headers = error.detail, error.headers
    if detail == HTTPStatus.NOT_FOUND.phrase:  # As the router says it, of any other path.
        detail = "expected a path that is listed in /docs, with no slash at its end"
    elif error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        allowed = _allowed_methods(request)
        detail, headers = f"expected {allowed}; got {request.method}", {"Allow": allowed}
    described = LandmarkdError(detail)
    described.status = error.status_code
    described.code = HTTPStatus(error.status_code).phrase.lower().replace(" ", "-")
    return described, headers


def _allowed_methods(request: Request) -> str:
    """List the methods of a path: it has a route for each, of which the router names the first."""

    def is_allowed(method: str) -> bool:
        # HEAD is answered as GET, see app.api.middleware.
        scope = {**request.scope, "method": "GET" if method == "HEAD" else method}
        return any(route.matches(scope)[0] is Match.FULL for route in request.app.routes)

    return ", ".join(filter(is_allowed, METHODS))


def _explain(request: Request, item: Mapping[str, Any]) -> str:
    if item["type"] == "extra_forbidden":
        queries = request.scope["route"].dependant.query_params
        known = [name for query in queries for name in query.field_info.annotation.model_fields]
        return describe_unknown("parameter", item["loc"][-1], known)
    where = ".".join(quote(str(part)) for part in item["loc"])
    got = "none" if item["type"] == "missing" else quote(repr(item.get("input")))
    return f"{where}: {item['msg']}; got {got}"


def quote(text: str) -> str:
    """Cut what a client sent, which may be of any length, to be named in an error."""
    return text if len(text) <= MAX_QUOTED_CHARACTERS else text[:MAX_QUOTED_CHARACTERS] + "…"
