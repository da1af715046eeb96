"""A request with a scan -> ReceivedScan, unless its head or that of the file rules it out."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from fastapi import APIRouter, Depends, Request
from pydantic import Field

from app.api.dependencies import SelectionQuery, Shared, require_api_key
from app.api.openapi import problems
from app.api.request_log import RequestRecord, record_of
from app.api.upload.plan import plan_upload
from app.api.upload.receive import Upload, read_upload
from app.engine import AdmittedRequest, Engine, Progress, ignore
from app.errors import NotReady
from app.inference import Detection, Forecast
from app.io import Content, Selection
from app.model import LoadedModel

T = TypeVar("T")

SCAN_PROBLEMS: Final = (400, 401, 404, 408, 413, 415, 422, 429, 500, 503, 504, 507)
"""Statuses of errors of any call that takes a scan."""


def scan_router() -> APIRouter:
    """Make a router of a call that takes a scan, and whose client waits for what is found in it."""
    key = Depends(require_api_key)
    return APIRouter(tags=["landmarks"], dependencies=[key], responses=problems(*SCAN_PROBLEMS))


class ScanQuery(SelectionQuery):
    """Query of any call that takes a scan for a model."""

    model: str | None = Field(
        None,
        description="Name of the model, whose newest version is meant, or NAME@VERSION. Unset: the "
        "service's default model.",
    )


@dataclass(frozen=True, slots=True)
class ReceivedScan:
    """A scan that has arrived whole, and what is to be done with it.

    Attributes:
        upload: The file.
        model: The model to use.
        wanted: Name by which it was asked for, perhaps with a version.
        selection: Which scan of the file.
        needs: What it will take; None of DICOM.
        admitted: Its request.
        deadline: Of the answer, on the event loop's clock.
        start_s: When its reception began, by ``time.perf_counter()``.
        record: For the log line of the request.
        engine: What finds the landmarks.
    """

    upload: Upload
    model: LoadedModel
    wanted: str
    selection: Selection
    needs: Forecast | None
    admitted: AdmittedRequest
    deadline: float
    start_s: float
    record: RequestRecord
    engine: Engine

    async def detect(
        self,
        on_progress: Callable[[Progress], None] = ignore,
        *,
        heatmaps: int = 0,
    ) -> Detection:
        """Find the landmarks; see ``Engine.detect``."""
        detection = await self.engine.detect(
            self.upload.content,
            self.model,
            selection=self.selection,
            needs=self.needs,
            timeout_s=self._left_s(),
            client=self.admitted.client,
            on_progress=on_progress,
            heatmaps=heatmaps,
            admitted=self.admitted if heatmaps else None,
        )
        self.record.shape = detection.volume.shape
        return detection

    async def compute(
        self,
        work: Callable[[Callable[[], None]], T],
        memory: int | None,
        result_bytes: Callable[[T], int],
    ) -> T:
        """Do work for the answer in the time that is left; see ``Engine.compute``."""
        return await self.engine.compute(
            work,
            admitted=self.admitted,
            memory=memory,
            result_bytes=result_bytes,
            timeout_s=self._left_s(),
        )

    def _left_s(self) -> float:
        return max(self.deadline - asyncio.get_running_loop().time(), 0.0)


async def receive_scan(
    request: Request,
    shared: Shared,
    admitted: AdmittedRequest,
    query: ScanQuery,
    *,
    timeout_s: float,
    count_heatmaps: Callable[[LoadedModel], int] = lambda _: 0,
) -> ReceivedScan:
    """Receive the scan of a request, whose body has not been read.

    ``timeout_s`` goes from the end of the upload to the answer, which holds as many heatmaps of the
    scan's size as ``count_heatmaps`` says.

    Returns:
        The scan.

    Raises:
        LandmarkdError: As ``plan_upload``, ``Engine.precheck`` and ``read_upload``; or the service
            is not ready, or there is no such model.
    """
    start_s = time.perf_counter()
    record, engine = record_of(request.scope), shared.engine
    plan = plan_upload(request.headers, engine.max_body_bytes)
    model = choose_model(engine, query)
    record.model = model.manifest.name
    heatmaps = count_heatmaps(model)
    needs: Forecast | None = None

    def check_head(head: Content) -> None:
        nonlocal needs
        needs = engine.precheck(
            head, model, selection=query.selection, timeout_s=timeout_s, client=admitted.client,
            heatmaps=heatmaps,
        )  # fmt: skip

    upload = await read_upload(request, plan, shared.settings, admitted, check_head)
    record.bytes = len(upload.content)
    shared.metrics.stages.labels("receive").observe(upload.receive_ms / 1e3)
    return ReceivedScan(
        upload, model, name_wanted(query, shared, model), query.selection, needs, admitted,
        deadline=asyncio.get_running_loop().time() + timeout_s,
        start_s=start_s, record=record, engine=engine,
    )  # fmt: skip


def choose_model(engine: Engine, query: ScanQuery) -> LoadedModel:
    """Return the model that a request asks for.

    Raises:
        NotReady: The service answers nothing now.
        UnknownModel: There is no such model.
    """
    state = engine.readiness()
    if not state.ready:
        raise NotReady(f"expected a ready service, got one that is not: {state.reason}")
    return engine.registry.get(query.model)


def name_wanted(query: ScanQuery, shared: Shared, model: LoadedModel) -> str:
    """Return the name by which a model was asked for, perhaps with a version."""
    return query.model or shared.settings.default_model or model.manifest.name
