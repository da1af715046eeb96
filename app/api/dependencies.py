"""Request -> what all routes of one application share, and who may call them."""

from dataclasses import dataclass
from typing import Annotated, Any, Final, cast

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from app.api.keys import check_admin_key, check_api_key
from app.engine import Engine, Metrics
from app.errors import BadParameter
from app.io import TimingAnswer
from app.settings import Settings

bearer: Final = HTTPBearer(auto_error=False, description="Only if the service has API keys.")


@dataclass(frozen=True, slots=True)
class Shared:
    """What all routes of one application share."""

    settings: Settings
    metrics: Metrics
    engine: Engine


async def shared_by(request: Request) -> Shared:
    """Return what the routes of the request's application share."""
    return cast("Shared", request.app.state.shared)


SharedDep = Annotated[Shared, Depends(shared_by)]
KeyDep = Annotated[HTTPAuthorizationCredentials | None, Depends(bearer)]


async def require_api_key(shared: SharedDep, key: KeyDep) -> None:
    """Refuse a call without a key, if keys are set."""
    check_api_key(key.credentials if key else None, shared.settings)


async def require_admin_key(shared: SharedDep, key: KeyDep) -> None:
    """Refuse a call without the admin key."""
    check_admin_key(key.credentials if key else None, shared.settings)


def timeout_of(asked: float | None, settings: Settings) -> float:
    """Say how many seconds a request may take: what it asks for, or the service's default.

    Raises:
        BadParameter: It asks for more than it may.
    """
    if asked is None:
        return settings.timeout_s
    if asked > settings.max_timeout_s:
        raise BadParameter(
            f"query.timeout_s: expected at most {settings.max_timeout_s:g}, got {asked:g}"
        )
    return asked


def server_timing(timing: TimingAnswer) -> str:
    """Write stage times as a ``Server-Timing`` header."""
    stages: dict[str, Any] = timing.model_dump()
    return ", ".join(f"{stage};dur={ms:.3f}" for stage, ms in stages.items())
