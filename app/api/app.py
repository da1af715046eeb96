"""The FastAPI application: builds it from settings, and starts and stops its engine."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from importlib.metadata import version
from typing import Final

from fastapi import FastAPI
from starlette.routing import Route

from app.api.cases import CaseStore, cases_router
from app.api.dependencies import Shared
from app.api.health import health_router
from app.api.middleware import RequestTracking
from app.api.models import models_router
from app.api.openapi import DESCRIPTION, openapi_router
from app.api.origin import make_origin_check
from app.api.problems import describe_problem, install_problem_handlers
from app.api.request_log import PROBES
from app.api.scans.heatmaps import heatmaps_router
from app.api.scans.jobs import jobs_router
from app.api.scans.landmarks import landmarks_router
from app.api.scans.uploads import uploads_router
from app.api.ui.page import page_files, page_router
from app.api.upload.turns import Turns
from app.api.votes import votes_router
from app.engine import CLIENT_SHARE, Engine, Metrics
from app.errors import BadParameter, LandmarkdError, StartupError, UnknownModel
from app.jobs import JobFolder, JobRunner
from app.settings import Settings

ROUTERS: Final = (
    landmarks_router,
    heatmaps_router,
    jobs_router,
    uploads_router,
    models_router,
    health_router,
    votes_router,
    cases_router,
    openapi_router,
    page_router,
)

logger = logging.getLogger(__name__)


def create_app(settings: Settings, on_fatal: Callable[[], None] = lambda: None) -> FastAPI:
    """Build the application.

    From the start of its lifespan, its state holds ``shared`` (settings, metrics, engine) and
    ``starting``, the task that loads the models. ``on_fatal`` is called if the engine cannot start
    or continue, so that the process can end.

    Returns:
        The application. It is live at once, and ready when its models are loaded.
    """
    metrics = Metrics(_counted_routes())
    page_files()  # Here, where no event loop waits for the disk.

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        with _telling_why():
            engine = Engine(settings, metrics, on_fatal)
        _tell_body_limit(settings, engine)
        async with _jobs_of(settings, engine, metrics, on_fatal) as jobs:
            start = _run(partial(_start, engine), "the engine cannot start", on_fatal)
            app.state.starting = asyncio.create_task(start)
            app.state.shared = Shared(settings, metrics, engine, jobs)
            try:
                yield
            finally:
                await engine.stop()
                app.state.starting.cancel()
                await asyncio.gather(app.state.starting, return_exceptions=True)

    app = FastAPI(
        title="landmarkd",
        description=DESCRIPTION,
        version=version("landmarkd"),
        lifespan=lifespan,
        docs_url=None,  # Served by app.api.ui.page, without other hosts where possible.
        openapi_url=None,  # The same, with a key where one is needed; and no redoc.
        servers=[{"url": "."}],  # Where it is described, under whatever path a proxy serves it.
        redirect_slashes=False,  # To http:, whatever a proxy in front speaks.
        generate_unique_id_function=lambda route: route.name,  # As generated clients name calls.
        license_info={"name": "Apache-2.0", "identifier": "Apache-2.0"},
    )
    app.state.turns = Turns()
    app.state.cases = settings.store and CaseStore(
        settings.store, settings.store_max_bytes, CLIENT_SHARE
    )
    app.add_middleware(RequestTracking, metrics=metrics, check_origin=make_origin_check(settings))
    install_problem_handlers(app)
    for router in ROUTERS:
        app.include_router(router)
    return app


def _counted_routes() -> set[str]:
    """List the templates of the routes whose requests are counted."""
    routes = (route for router in ROUTERS for route in router.routes)
    return {route.path for route in routes if isinstance(route, Route)} - {*PROBES}


def _tell_body_limit(settings: Settings, engine: Engine) -> None:
    """Log that bodies may not be as large as an operator has set."""
    limit = {"expected": settings.max_body_bytes, "got": engine.max_body_bytes}
    if "max_body_bytes" in settings.model_fields_set and limit["got"] < limit["expected"]:
        reason = "LANDMARKD_MAX_BODY_BYTES is more than 3/16 of LANDMARKD_MEMORY"
        logger.warning("bodies are limited", extra={"reason": reason, **limit})


@contextmanager
def _telling_why() -> Iterator[None]:
    """Log why a part of the service that is made here cannot start, as its traceback is not."""
    try:
        yield
    except StartupError as error:
        logger.error("cannot start", extra={"reason": str(error)})  # noqa: TRY400 - it says all
        raise


@asynccontextmanager
async def _jobs_of(
    settings: Settings, engine: Engine, metrics: Metrics, on_fatal: Callable[[], None]
) -> AsyncIterator[JobRunner | None]:
    """Run the jobs of the settings' folder, if there is one, while the context lasts."""
    if settings.jobs is None:
        yield None
        return
    with _telling_why():
        folder = JobFolder(  # It blocks, but nobody is served yet.
            settings.jobs,
            max_bytes=settings.jobs_max_bytes,
            ttl_s=settings.jobs_ttl_s,
            max_share=CLIENT_SHARE,
        )
        runner = JobRunner(folder, engine, metrics, describe_problem)
    running = asyncio.create_task(_run(runner.run, "jobs cannot be run", on_fatal))
    try:
        yield runner
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await runner.close()


async def _run(
    work: Callable[[], Awaitable[None]], failure: str, on_fatal: Callable[[], None]
) -> None:
    """Run what the service needs. Errors are logged here, because nothing awaits this task."""
    try:
        await work()
    except Exception as error:
        # What was raised on purpose is said; of anything else, only where it happened.
        reason = {"reason": str(error)} if isinstance(error, LandmarkdError) else {}
        logger.exception(failure, extra=reason)
        on_fatal()
        raise


async def _start(engine: Engine) -> None:
    await engine.start()
    state = engine.readiness()
    logger.info("started", extra={"ready": state.ready, "reason": state.reason})
    try:
        engine.registry.get()
    except UnknownModel as error:
        logger.warning("no default model", extra={"reason": str(error)})
    except BadParameter:  # There are several, and requests name one of them.
        pass
