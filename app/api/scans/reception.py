"""A request with a scan -> ReceivedScan, unless its head or that of the file rules it out."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from fastapi import APIRouter, Depends
from pydantic import Field

from app.api.dependencies import Call, SelectionQuery, require_api_key
from app.api.openapi import problems
from app.api.upload.kinds import SCAN
from app.api.upload.receive import read_upload
from app.engine import Progress, ignore
from app.inference import Detection, Forecast
from app.io import Content
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
        call: Its request.
        content: The file.
        query: Which scan of the file.
        model: The model to use.
        needs: What it will take; None of DICOM.
        heatmaps: How many are made of what is found.
        deadline: Of the answer, on the event loop's clock.
    """

    call: Call
    content: Content
    query: ScanQuery
    model: LoadedModel
    needs: Forecast | None
    heatmaps: int
    deadline: float

    async def detect(self, on_progress: Callable[[Progress], None] = ignore) -> Detection:
        """Find the landmarks; see ``Engine.detect``."""
        detection = await self.call.engine.detect(
            self.content,
            self.model,
            selection=self.query.selection,
            needs=self.needs,
            timeout_s=self._left_s(),
            client=self.call.client,
            on_progress=on_progress,
            heatmaps=self.heatmaps,
            admitted=self.call.admitted if self.heatmaps else None,
        )
        self.call.record.shape = detection.volume.shape
        return detection

    async def compute(
        self,
        work: Callable[[Callable[[], None]], T],
        memory: int | None,
        result_bytes: Callable[[T], int],
    ) -> T:
        """Do work for the answer in the time that is left; see ``Engine.compute``."""
        return await self.call.engine.compute(
            work,
            admitted=self.call.admitted,
            memory=memory,
            result_bytes=result_bytes,
            timeout_s=self._left_s(),
        )

    def _left_s(self) -> float:
        return max(self.deadline - asyncio.get_running_loop().time(), 0.0)


async def receive_scan(
    call: Call, query: ScanQuery, model: LoadedModel, *, timeout_s: float, heatmaps: int = 0
) -> ReceivedScan:
    """Receive the scan of a call, whose body has not been read.

    ``timeout_s`` goes from the end of the upload to the answer, which holds so many heatmaps of the
    scan's size.

    Returns:
        The scan.

    Raises:
        LandmarkdError: As ``read_upload`` and ``Engine.precheck``.
    """
    needs: Forecast | None = None

    def check_head(head: Content) -> None:
        nonlocal needs
        needs = call.engine.precheck(
            head, model, selection=query.selection, timeout_s=timeout_s, client=call.client,
            heatmaps=heatmaps,
        )  # fmt: skip

    (content,) = await read_upload(call, SCAN, check_head)
    call.shared.metrics.stages.labels("receive").observe(call.receive_ms / 1e3)
    deadline = asyncio.get_running_loop().time() + timeout_s
    return ReceivedScan(call, content, query, model, needs, heatmaps, deadline)
