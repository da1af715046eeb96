"""The FastAPI application: builds it from settings, and starts and stops its engine."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.metadata import PackageNotFoundError, version

from fastapi import FastAPI

from app.api.cases import CaseStore, cases_router
from app.api.dependencies import Shared
from app.api.health import health_router
from app.api.landmarks import landmarks_router
from app.api.middleware import RequestTracking
from app.api.models import models_router
from app.api.openapi import DESCRIPTION
from app.api.origin import make_origin_check
from app.api.problems import install_problem_handlers
from app.api.ui.page import page_router
from app.api.ui.phantoms import PhantomScans
from app.api.votes import votes_router
from app.engine import Engine, Metrics
from app.settings import Settings

logger = logging.getLogger(__name__)


def create_app(
    settings: Settings | None = None, on_fatal: Callable[[], None] | None = None
) -> FastAPI:
    """Build the application.

    From the start of its lifespan, its state holds ``shared`` (settings, metrics, engine) and
    ``starting``, the task that loads the models.

    Args:
        settings: The settings; None reads them from the environment.
        on_fatal: Called if the engine cannot start or continue, so that the process can end.

    Returns:
        The application. It is live at once, and ready when its models are loaded.
    """
    chosen = Settings() if settings is None else settings
    metrics = Metrics()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        engine = Engine(chosen, metrics, on_fatal)
        metrics.watch(engine.gauges())
        app.state.shared = Shared(chosen, metrics, engine)
        app.state.starting = asyncio.create_task(_start(engine, on_fatal))
        try:
            yield
        finally:
            await engine.stop()
            app.state.starting.cancel()
            await asyncio.gather(app.state.starting, return_exceptions=True)

    app = FastAPI(
        title="landmarkd",
        description=DESCRIPTION,
        version=_version(),
        lifespan=lifespan,
        docs_url=None,  # Served by app.api.ui.page, without other hosts where possible.
        openapi_url=None,  # The same, with a key where one is needed.
        redoc_url=None,
        license_info={"name": "Apache-2.0", "identifier": "Apache-2.0"},
    )
    app.state.phantoms = PhantomScans()
    app.state.cases = None if chosen.store is None else CaseStore(chosen.store, chosen.store_quota)
    app.add_middleware(RequestTracking, metrics=metrics, check_origin=make_origin_check(chosen))
    install_problem_handlers(app)
    for router in (landmarks_router, models_router, health_router, votes_router, cases_router):
        app.include_router(router)
    app.include_router(page_router)
    return app


async def _start(engine: Engine, on_fatal: Callable[[], None] | None) -> None:
    """Start the engine. Errors are logged here, because nothing awaits this task."""
    try:
        await engine.start()
    except Exception:
        logger.exception("the engine cannot start")
        if on_fatal is not None:
            on_fatal()
        raise
    state = engine.readiness()
    logger.info("started", extra={"ready": state.ready, "reason": state.reason})


def _version() -> str:
    try:
        return version("landmarkd")
    except PackageNotFoundError:
        return "0"
