"""Settings -> the application on Ray Serve: one replica for each device, as many as are needed.

``serve run app.server.ray_serve:application`` on a laptop, ``deploy/ray/`` for a cluster. A replica
is the same application as that of one process, with its own scheduler, engine and models; Serve
starts replicas, sends each request to one of them, replaces those that are not ready, and stops
them when
they have answered::

    client ─► Serve's proxy ─► replica: create_app(settings) ─► its device

Settings are those of whoever builds the application: the variables ``LANDMARKD_*`` of
``serve run``, or ``env_vars`` of a config file. Address, port and the time for a head are the
proxy's own.

What a probe or a scrape hears is one replica's word, whose name stands in ``X-Replica``. Serve
sends nothing to a replica that is not ready, so ``/readyz`` says that some replica is. ``/metrics``
has the label ``replica`` on every sample: a scrape shows one replica, chosen by Serve, and over
time all of them, each as series of its own that can be summed.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Final, cast

import ray
import torch
from fastapi import FastAPI, Response
from fastapi.routing import APIRoute
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.registry import Collector
from pydantic import BaseModel, ConfigDict, Field
from ray import serve
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api import ID_HEADER, SharedDep, create_app
from app.engine import METRICS_MEDIA_TYPE, QUEUED_VOLUMES
from app.errors import NotReady
from app.server.log_format import configure_logging
from app.settings import Settings

NAME: Final = "landmarkd"
REPLICA_HEADER: Final = "X-Replica"

SPARE_S: Final = 10.0
"""After the drain Serve gives a replica so much longer before it kills it."""

LEAVING_S: Final = 5.0
"""A request whose client has left may take so long to let go of its work."""


class Scale(BaseModel):
    """How many replicas there may be; ``args`` of a config file.

    Their number follows the requests that are being answered: a replica that has more than fill its
    device is joined by another.
    """

    model_config = ConfigDict(extra="forbid")

    min_replicas: int = Field(1, ge=1)
    max_replicas: int = Field(2, ge=1)


class Replica:
    """What Serve asks of a replica besides answers."""

    app: FastAPI  # Of Serve's own class, which stands above this one.

    async def check_health(self) -> None:
        """Tell Serve to replace this replica if it is not ready.

        Raises:
            NotReady: It is not; the message says why.
        """
        state = self.app.state.shared.engine.readiness()
        if not state.ready:
            raise NotReady(f"expected a ready replica, got {state.reason}: {state.models}")


def application(scale: Scale) -> serve.Application:
    """Build the application for Serve.

    Args:
        scale: How many replicas there may be.

    Returns:
        What ``serve run`` and ``serve deploy`` take; a config file may override every option.
    """
    settings = Settings()
    on_cuda = settings.device.startswith(("cuda", "all")) or (
        settings.device == "auto" and torch.cuda.is_available()
    )

    # Serve calls a function of no arguments, in the replica.
    def build() -> FastAPI:
        return _create_replica(settings)

    deployment = serve.deployment(
        name=NAME,
        # Ray lets torch have as many threads as a replica has CPUs.
        ray_actor_options={"num_cpus": max(settings.threads, 1), "num_gpus": int(on_cuda)},
        autoscaling_config={
            "min_replicas": scale.min_replicas,
            "max_replicas": scale.max_replicas,
            "target_ongoing_requests": QUEUED_VOLUMES,
        },
        # More than a replica accepts, so that it is the application that refuses, with its 429.
        max_ongoing_requests=2 * settings.max_in_flight,
        graceful_shutdown_timeout_s=settings.drain_s + SPARE_S,
        graceful_shutdown_wait_loop_s=0.5,
    )
    return cast("serve.Application", deployment(serve.ingress(build)(Replica)).bind())


def _create_replica(settings: Settings) -> FastAPI:
    """Make the application of this replica, on the one device that Ray gave it."""
    configure_logging(settings.log_level, settings.log_format)
    device = "cuda:0" if ray.get_gpu_ids() else "cpu"
    app = create_app(settings.model_copy(update={"device": device}))
    replica = serve.get_replica_context().replica_tag
    lifespan = app.router.lifespan_context

    # Serve sends requests to whatever has started, so here that includes the models.
    @asynccontextmanager
    async def until_ready(app: FastAPI) -> AsyncIterator[None]:
        async with lifespan(app):
            await asyncio.shield(app.state.starting)
            yield

    async def get_metrics(shared: SharedDep) -> Response:
        labelled = LabelledMetrics(shared.metrics.registry, replica)
        return Response(generate_latest(labelled), media_type=METRICS_MEDIA_TYPE)

    app.router.lifespan_context = until_ready
    # The first route that fits is taken.
    app.router.routes.insert(0, APIRoute("/metrics", get_metrics, include_in_schema=False))
    app.add_middleware(ReplicaAnswers, replica=replica)
    return app


class LabelledMetrics(Collector):
    """The metrics of one replica, each with the replica's name."""

    def __init__(self, registry: CollectorRegistry, replica: str) -> None:
        """Args: what to label, and with what."""
        self._registry = registry
        self._replica = replica

    def collect(self) -> Iterator[Metric]:
        """Read all metrics."""
        for metric in self._registry.collect():
            metric.samples = [
                sample._replace(labels={**sample.labels, "replica": self._replica})
                for sample in metric.samples
            ]
            yield metric


class ReplicaAnswers:
    """ASGI middleware: what passes between Serve's proxy and the application.

    Answers get the replica's name, and lose the request's id where the proxy adds it. Serve cancels
    the call of a client that leaves; the application hears of it by ``receive``, and is given the
    time to say so in its log and metrics.
    """

    def __init__(self, app: ASGIApp, replica: str) -> None:
        """Args: the application inside, and the name of its replica."""
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

        answering = asyncio.ensure_future(self._app(scope, receive, send_named))
        try:
            await asyncio.shield(answering)
        except asyncio.CancelledError:
            with suppress(TimeoutError):
                await asyncio.wait_for(answering, LEAVING_S)
            raise
