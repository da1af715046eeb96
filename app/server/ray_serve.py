"""The application on Ray Serve: one replica per device, as many as the load needs.

``serve run app.server.ray_serve:application`` on one machine, ``deploy/ray/`` for a cluster. A
replica is the same application as in a single process, with its own scheduler, engine and models.
Serve starts replicas, routes each request to one of them, replaces those that are not ready, and
stops them when they have answered::

    client ─► Serve's proxy ─► replica: create_app(settings) ─► its device

Settings are the ``LANDMARKD_*`` variables of the process that builds the application: those of
``serve run``, or ``env_vars`` of a config file. Address, port and header timeout are the proxy's.

A probe or scrape is answered by one replica, named in ``X-Replica``. Serve routes nothing to a
replica that is not ready, so ``/readyz`` says whether any replica is. In ``/metrics`` every sample
has the label ``replica``: each scrape shows the replica that Serve chose, and over time all of
them, as separate series that can be summed.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Final, cast

import ray
import torch
from fastapi import FastAPI
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.registry import Collector
from pydantic import BaseModel, Field
from ray import serve
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api import ID_HEADER, create_app
from app.engine import DECODE_SLOTS
from app.errors import NotReady, StartupError
from app.server.log_format import configure_logging
from app.settings import Settings

NAME: Final = "landmarkd"
REPLICA_HEADER: Final = "X-Replica"

SHUTDOWN_S: Final = 10.0
"""Time between the end of the drain and the moment when Serve kills a replica."""

CANCEL_S: Final = 5.0
"""Time for a request whose client has left to cancel its work."""


class Scale(BaseModel, extra="forbid"):
    """Bounds on the number of replicas; ``args`` in a config file.

    Serve adds a replica when the existing ones have more requests than keep their devices busy.
    """

    min_replicas: int = Field(1, ge=1)
    max_replicas: int = Field(2, ge=1)


class Replica:
    """The health check of a replica."""

    app: FastAPI  # Set by Serve's ingress class.

    async def check_health(self) -> None:
        """Report whether this replica is ready; Serve replaces it if not.

        Raises:
            NotReady: It is not; the message says why.
        """
        state = self.app.state.shared.engine.readiness()
        if not state.ready:
            raise NotReady(f"expected a ready replica, got {state.reason}: {state.models}")


def application(scale: Scale) -> serve.Application:
    """Build the application for Serve.

    Returns:
        The argument of ``serve run`` and ``serve deploy``; a config file may override every option.

    Raises:
        StartupError: The settings do not suit several replicas.
    """
    settings = Settings()
    if settings.jobs is not None:
        raise StartupError("expected LANDMARKD_JOBS unset, as replicas cannot share a folder")
    on_cuda = settings.device.startswith(("cuda", "all")) or (
        settings.device == "auto" and torch.cuda.is_available()
    )

    # Called in the replica.
    def build() -> FastAPI:
        return _create_replica(settings)

    deployment = serve.deployment(
        name=NAME,
        # Ray limits torch to as many threads as the replica has CPUs.
        ray_actor_options={"num_cpus": max(settings.threads, 1), "num_gpus": int(on_cuda)},
        autoscaling_config={
            "min_replicas": scale.min_replicas,
            "max_replicas": scale.max_replicas,
            "target_ongoing_requests": DECODE_SLOTS,
        },
        # More than a replica admits, so that the application refuses requests, with its 429.
        max_ongoing_requests=2 * settings.max_in_flight,
        graceful_shutdown_timeout_s=settings.drain_s + SHUTDOWN_S,
        graceful_shutdown_wait_loop_s=0.5,
    )
    return cast("serve.Application", deployment(serve.ingress(build)(Replica)).bind())


def _create_replica(settings: Settings) -> FastAPI:
    """Build the application of this replica, on the device that Ray assigned to it."""
    log = configure_logging(settings.log_level, settings.log_format)
    device = "cuda:0" if ray.get_gpu_ids() else "cpu"
    # The address is the proxy's, so that of the settings does not tell which hosts are allowed.
    hosts = settings.allowed_hosts or ("localhost",)
    app = create_app(settings.model_copy(update={"device": device, "allowed_hosts": hosts}))
    replica = serve.get_replica_context().replica_tag
    lifespan = app.router.lifespan_context

    # Serve routes requests to a replica once it has started, so here that includes its models.
    @asynccontextmanager
    async def wait_for_models(app: FastAPI) -> AsyncIterator[None]:
        async with lifespan(app):
            metrics = app.state.shared.metrics
            metrics.registry.register(log)
            metrics.shown = LabelledMetrics(metrics.registry, replica)
            await asyncio.shield(app.state.starting)
            yield

    app.router.lifespan_context = wait_for_models
    app.add_middleware(ReplicaMiddleware, replica=replica)
    return app


class LabelledMetrics(Collector):
    """The metrics of one replica, with its name as a label."""

    def __init__(self, registry: CollectorRegistry, replica: str) -> None:
        self._registry = registry
        self._replica = replica

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics."""
        for metric in self._registry.collect():
            metric.samples = [
                sample._replace(labels={**sample.labels, "replica": self._replica})
                for sample in metric.samples
            ]
            yield metric


class ReplicaMiddleware:
    """ASGI middleware between Serve's proxy and the application.

    It adds the replica's name to responses, and removes the request's id where the proxy adds it.
    Serve cancels the call of a client that disconnects; the application learns of that by
    ``receive``, and gets the time to cancel its work and to log and count the request.
    """

    def __init__(self, app: ASGIApp, replica: str) -> None:
        self._app = app
        self._replica = replica

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers[REPLICA_HEADER] = self._replica
                if headers.get(ID_HEADER) == Headers(scope=scope).get(ID_HEADER):
                    del headers[ID_HEADER]
            await send(message)

        handling = asyncio.ensure_future(self._app(scope, receive, send_named))
        try:
            await asyncio.shield(handling)
        except asyncio.CancelledError:
            with suppress(TimeoutError):
                await asyncio.wait_for(handling, CANCEL_S)
            raise
