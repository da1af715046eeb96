"""``/livez``, ``/readyz`` and ``/metrics``: probes, which need no key, and metrics."""

from typing import Annotated, Final

from fastapi import APIRouter, Depends, Request, Response

from app.api.dependencies import SharedDep, has_api_key, require_api_key
from app.api.openapi import problems
from app.api.request_log import record_of
from app.engine import METRICS_MEDIA_TYPE
from app.errors import NotReady
from app.io import AliveAnswer, ReadinessAnswer

health_router: Final = APIRouter(tags=["probes"])


@health_router.get("/livez", summary="Is the process alive?")
async def get_livez() -> AliveAnswer:
    """Answer; a process that does not is to be restarted."""
    return AliveAnswer(alive=True)


@health_router.get(
    "/readyz",
    summary="May requests be sent here?",
    response_model=ReadinessAnswer,
    responses={503: {"model": ReadinessAnswer, "description": "Not ready; the reason says why"}},
    openapi_extra={"security": [{}]},  # Without a key it says less.
)
async def get_readyz(
    request: Request, shared: SharedDep, may_know_why: Annotated[bool, Depends(has_api_key)]
) -> Response:
    """Report whether requests can be answered, and to those who have a key why not."""
    state = shared.engine.readiness()
    if not state.ready:
        record_of(request.scope).code = NotReady.code
    if not may_know_why:
        reason = "ready" if state.ready else "not ready"
        state = ReadinessAnswer(ready=state.ready, reason=reason, models={})
    status = 200 if state.ready else 503
    return Response(state.model_dump_json(), status, media_type="application/json")


@health_router.get(
    "/metrics",
    summary="Prometheus metrics",
    dependencies=[Depends(require_api_key)],
    response_class=Response,
    responses={200: {"content": {"text/plain": {}}}, **problems(401)},
)
async def get_metrics(shared: SharedDep) -> Response:
    """Return all metrics in the Prometheus text format."""
    return Response(shared.metrics.render(), media_type=METRICS_MEDIA_TYPE)
