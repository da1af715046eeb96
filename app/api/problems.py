"""Errors -> RFC 9457 problem+json answers, whoever raised them."""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from app.api.request_log import record_of
from app.errors import BadParameter, LandmarkdError, QueueFull, Unauthorized
from app.io import Problem

PROBLEM_MEDIA_TYPE: Final = "application/problem+json"
TYPE_PREFIX: Final = "urn:problem-type:landmarkd:"
# A value is quoted back to its sender, but not at any length.
QUOTED_CHARACTERS: Final = 64


def problem_response(
    error: LandmarkdError, request_id: str, headers: Mapping[str, str] | None = None
) -> Response:
    """Write an error of the tree as an answer.

    Args:
        error: The error; its text becomes the detail.
        request_id: Of the request that failed.
        headers: To add to the answer.

    Returns:
        The answer, with ``Retry-After`` or ``WWW-Authenticate`` where they belong.
    """
    extra = dict(headers or {})
    if isinstance(error, QueueFull):
        extra["Retry-After"] = str(error.retry_after_s)
    if isinstance(error, Unauthorized):
        extra["WWW-Authenticate"] = "Bearer"
    problem = describe_problem(error, request_id)
    return Response(
        problem.model_dump_json(), error.status, headers=extra, media_type=PROBLEM_MEDIA_TYPE
    )


def describe_problem(error: LandmarkdError, request_id: str) -> Problem:
    """Say an error of the tree in the words of the wire."""
    return Problem(
        type=TYPE_PREFIX + error.code,
        title=error.title,
        status=error.status,
        detail=str(error),
        code=error.code,
        request_id=request_id,
    )


def install_problem_handlers(app: FastAPI) -> None:
    """Make the application answer every error that it expects as problem+json.

    Args:
        app: The application; ``app.api.middleware`` answers the errors that nobody expects.
    """
    app.add_exception_handler(LandmarkdError, _answer_own)
    app.add_exception_handler(RequestValidationError, _answer_invalid)
    app.add_exception_handler(HTTPException, _answer_http)


async def _answer_own(request: Request, error: Exception) -> Response:
    if not isinstance(error, LandmarkdError):
        raise error
    record = record_of(request.scope)
    record.code = error.code
    return problem_response(error, record.request_id)


async def _answer_invalid(request: Request, error: Exception) -> Response:
    if not isinstance(error, RequestValidationError):
        raise error
    detail = "; ".join(_explain(item) for item in error.errors())
    return await _answer_own(request, BadParameter(detail))


async def _answer_http(request: Request, error: Exception) -> Response:
    """Answer what FastAPI itself raises: no such path, wrong method, unreadable body."""
    if not isinstance(error, HTTPException):
        raise error
    phrase = HTTPStatus(error.status_code).phrase
    record = record_of(request.scope)
    record.code = phrase.lower().replace(" ", "-")
    problem = Problem(
        type=TYPE_PREFIX + record.code,
        title=phrase.capitalize(),
        status=error.status_code,
        detail=_http_detail(request, error),
        code=record.code,
        request_id=record.request_id,
    )
    return Response(
        problem.model_dump_json(),
        error.status_code,
        headers=error.headers,
        media_type=PROBLEM_MEDIA_TYPE,
    )


def _http_detail(request: Request, error: HTTPException) -> str:
    if error.status_code == HTTPStatus.NOT_FOUND:
        return "expected a path that is listed in /docs"
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        allowed = (error.headers or {}).get("Allow", "another method")
        return f"expected {allowed}, got {request.method}"
    return str(error.detail)


def _explain(item: Mapping[str, Any]) -> str:
    where = ".".join(str(part) for part in item["loc"])
    got = repr(item.get("input"))
    if len(got) > QUOTED_CHARACTERS:
        got = got[:QUOTED_CHARACTERS] + "…"
    return f"{where}: {item['msg']}; got {got}"
