"""What the routes share: state, API keys, admitted calls, time limits and timings.

Settings hold SHA-256 hashes of the API keys. Keys are meant to be long and random
(``openssl rand -hex 32``), so a fast hash is enough: there is nothing to guess.
"""

import hashlib
import hmac
import json
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, cast

from fastapi import Depends, Request, Response
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import BaseModel, Field
from starlette.datastructures import Headers

from app.api.request_log import RequestRecord, record_of
from app.engine import AdmittedRequest, Engine, Metrics
from app.errors import BadParameter, NotConfigured, Unauthorized
from app.io import Selection, TimingAnswer
from app.jobs import JobRunner
from app.model import LoadedModel
from app.settings import Settings

api_key: Final = HTTPBearer(
    scheme_name="api_key",
    auto_error=False,
    description="One of LANDMARKD_API_KEYS.",
)
admin_key: Final = HTTPBearer(
    scheme_name="admin_key", auto_error=False, description="That of LANDMARKD_ADMIN_KEY_HASH."
)

TimeLimit = Annotated[
    float | None,
    Field(
        gt=0,
        allow_inf_nan=False,
        description="Seconds from the end of the upload to the answer, at most "
        "LANDMARKD_MAX_TIMEOUT_S. Unset: LANDMARKD_TIMEOUT_S.",
    ),
]

Number = Annotated[int, Field(ge=0, lt=1 << 31)]
"""Of one among several; a longer one is none, and no database takes it."""

WARNINGS_BYTES: Final = 2048
"""Of ``X-Warnings``: nginx takes heads of 4 KiB from a service, unless it is told otherwise."""

KEY_DIGITS: Final = 8
"""Of a key's hash, that stand for a key without a name."""


class SelectionQuery(BaseModel, extra="forbid"):
    """Which scan of an uploaded file is meant; unknown parameters are refused."""

    frame: Number | None = Field(
        None, description="Frame of a 4D file, from 0. Required if it has more than one."
    )
    series: Number | None = Field(
        None,
        description="Series of a DICOM archive, from 0, those of most images first. Required if it "
        "has more than one.",
    )

    @property
    def selection(self) -> Selection:
        """Which scan of the file is meant."""
        return Selection(self.frame, self.series)


@dataclass(frozen=True, slots=True)
class Shared:
    """State of one application; ``jobs`` is None if the settings name no folder for them."""

    settings: Settings
    metrics: Metrics
    engine: Engine
    jobs: JobRunner | None = None


async def get_shared(request: Request) -> Shared:
    """Return the state of the request's application."""
    return cast("Shared", request.app.state.shared)


SharedDep = Annotated[Shared, Depends(get_shared)]


async def get_job_runner(shared: SharedDep) -> JobRunner:
    """Return the jobs of the application.

    Raises:
        NotConfigured: There are none.
    """
    if shared.jobs is None:
        raise NotConfigured("expected a service that keeps jobs, but LANDMARKD_JOBS is not set")
    return shared.jobs


JobsDep = Annotated[JobRunner, Depends(get_job_runner)]
KeyDep = Annotated[HTTPAuthorizationCredentials | None, Depends(api_key)]
AdminKeyDep = Annotated[HTTPAuthorizationCredentials | None, Depends(admin_key)]


async def require_api_key(request: Request, shared: SharedDep, key: KeyDep) -> None:
    """Refuse a call without a valid key; without API keys in the settings, every call is allowed.

    Its log line names the key.

    Raises:
        Unauthorized: The key is missing or wrong.
    """
    settings = shared.settings
    if settings.api_keys:
        admin = (settings.admin_key_hash,) if settings.admin_key_hash else ()
        _check_key(key, (*_hashes(settings), *admin), "an API key")
        record_of(request.scope).key = name_key(settings, key)


async def has_api_key(request: Request, shared: SharedDep, key: KeyDep) -> bool:
    """Return whether a call may see more than whether the service is ready."""
    try:
        await require_api_key(request, shared, key)
    except Unauthorized:
        return False
    return True


async def require_admin_key(shared: SharedDep, key: AdminKeyDep) -> None:
    """Refuse a call without the admin key; without one in the settings, no call is allowed.

    Raises:
        Unauthorized: The key is missing or wrong, or the service has none.
    """
    admin = shared.settings.admin_key_hash
    if admin is None:
        raise Unauthorized("expected the admin key, but LANDMARKD_ADMIN_KEY_HASH is not set")
    _check_key(key, (admin,), "the admin key")


def name_key(settings: Settings, key: HTTPAuthorizationCredentials | None) -> str | None:
    """Name the key of a call; of one without a name, the start of its hash; None without keys."""
    if key is None or not settings.api_keys:
        return None
    digest = hash_key(key.credentials)
    names = dict(zip(_hashes(settings), settings.api_keys, strict=True))
    name, _, _ = names.get(digest, "admin:").rpartition(":")
    return name or digest[:KEY_DIGITS]


def _hashes(settings: Settings) -> tuple[str, ...]:
    return tuple(key.rpartition(":")[2] for key in settings.api_keys)


def hash_key(key: str) -> str:
    """Hash a key as the settings expect it: SHA-256, hex.

    Args:
        key: As a header has it, where each character stands for a byte.
    """
    return hashlib.sha256(key.encode("latin-1")).hexdigest()


def _check_key(
    key: HTTPAuthorizationCredentials | None, hashes: Iterable[str], expected: str
) -> None:
    header = "in the header 'Authorization: Bearer <key>'"
    if key is None:
        raise Unauthorized(f"expected {expected} {header}, got none")
    # All hashes are compared, so that the time taken does not tell which one matched.
    digest = hash_key(key.credentials)
    matches = [hmac.compare_digest(digest, known) for known in hashes]
    if not any(matches):
        raise Unauthorized(f"expected {expected} {header}, got another")


@dataclass(slots=True)
class Call:
    """A request that was admitted, until it is answered.

    Attributes:
        request: What the client sends.
        shared: State of the application.
        admitted: What it holds of that which clients share.
        start_s: When it was admitted, by ``time.perf_counter()``.
        receive_ms: Time that its body took to arrive; 0 until it has.
    """

    request: Request
    shared: Shared
    admitted: AdmittedRequest
    start_s: float = field(default_factory=time.perf_counter)
    receive_ms: float = 0.0

    @property
    def engine(self) -> Engine:
        """What finds landmarks."""
        return self.shared.engine

    @property
    def client(self) -> str:
        """Who sends it."""
        return self.admitted.client

    @property
    def record(self) -> RequestRecord:
        """For its log line."""
        return record_of(self.request.scope)

    def choose_model(self, name: str | None) -> LoadedModel:
        """Find the model that it asks for, and note it for the log; see ``Engine.choose_model``."""
        model = self.engine.choose_model(name)
        self.record.model = model.manifest.name
        return model


async def admit(request: Request, shared: SharedDep, key: KeyDep) -> AsyncIterator[Call]:
    """Admit a request until its answer has been sent, or its client has left.

    Clients share the service evenly. They are told apart by their API keys, else by their
    addresses; behind a proxy, all of them without keys count as one.
    """
    client = request.client.host if request.client is not None else ""
    if shared.settings.api_keys and key is not None:
        client = hash_key(key.credentials)
    with shared.engine.admission.admit(client) as admitted:
        yield Call(request, shared, admitted)


CallDep = Annotated[Call, Depends(admit)]


def request_timeout_s(requested: float | None, settings: Settings) -> float:
    """Return the time limit of a request: the one it asks for, or the default.

    Raises:
        BadParameter: The request asks for more than the service allows.
    """
    if requested is None:
        return settings.timeout_s
    if requested > settings.max_timeout_s:
        raise BadParameter(
            f"query.timeout_s: expected at most {settings.max_timeout_s:g}, got {requested:g}"
        )
    return requested


def accept_of(headers: Headers) -> str | None:
    """Return what a client accepts, which it may say in several lines (RFC 9110, 5.3)."""
    return ", ".join(headers.getlist("accept")) or None


def timed_response(
    content: bytes | None, timing: TimingAnswer, media_type: str, warnings: Sequence[str]
) -> Response:
    """Respond with a file, the times of the stages in ``Server-Timing``, and with warnings."""
    stages: dict[str, Any] = timing.model_dump()
    times = ", ".join(f"{stage};dur={ms:.3f}" for stage, ms in stages.items())
    headers = {"Server-Timing": times} | warnings_header(warnings)
    return Response(content, headers=headers, media_type=media_type)


def warnings_header(warnings: Sequence[str]) -> dict[str, str]:
    """List warnings in a header, as most formats have no place for them: a JSON array in ASCII."""
    if not warnings:
        return {}
    text = json.dumps(warnings)
    if len(text) > WARNINGS_BYTES:
        # Of heatmaps, too, which no JSON comes with.
        told = f"{len(warnings)} warnings too long for a header; landmarks in JSON have them"
        text = json.dumps([told])
    return {"X-Warnings": text}
