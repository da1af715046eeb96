"""``POST /v1/heatmaps``: a scan in, heatmaps of its landmarks out."""

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Final

from fastapi import Query, Response
from pydantic import Field

from app.api.dependencies import CallDep, TimeLimit, request_timeout_s, timed_response
from app.api.openapi import HEATMAPS_CONTENT, UPLOAD_BODY, headers
from app.api.scans.reception import ReceivedScan, ScanQuery, receive_scan, scan_router
from app.api.upload.receive import cancel_on_disconnect
from app.errors import BadParameter
from app.inference import timing_of, write_scan_heatmaps
from app.model import LoadedModel

heatmaps_router: Final = scan_router()


class HeatmapsQuery(ScanQuery):
    """Query of ``POST /v1/heatmaps``."""

    landmark: str | None = Field(None, description="Name of a landmark. Unset: all of them.")
    timeout_s: TimeLimit = None


@heatmaps_router.post(
    "/v1/heatmaps",
    summary="Get heatmaps of a scan's landmarks",
    response_class=Response,
    responses={
        200: {
            "description": "The heatmaps",
            "content": HEATMAPS_CONTENT,
            **headers("Server-Timing", "X-Warnings"),
        }
    },
    openapi_extra=UPLOAD_BODY,
)
async def make_heatmaps(call: CallDep, query: Annotated[HeatmapsQuery, Query()]) -> Response:
    """Upload a volume and get heatmaps on its own grid, as gzip NIfTI-1 of float32.

    A value is near the network's probability where its votes agree, and 0 where there are none. One
    landmark is an array of three axes; all of them are the fourth, in the order of the model's.
    """
    model = call.choose_model(query.model)
    chosen = _choose(query.landmark, model)
    timeout_s = request_timeout_s(query.timeout_s, call.shared.settings)
    heatmaps = 1 if isinstance(chosen, int) else len(chosen)
    scan = await receive_scan(call, query, model, timeout_s=timeout_s, heatmaps=heatmaps)
    return await cancel_on_disconnect(call.request.receive, _draw(scan, chosen))


def _choose(landmark: str | None, model: LoadedModel) -> Sequence[int] | int:
    """Number the landmarks whose heatmaps are wanted, or the one."""
    names = [landmark.name for landmark in model.manifest.landmarks]
    if landmark is None:
        return range(len(names))
    if landmark not in names:
        raise BadParameter(
            f"query.landmark: expected a landmark of {model.manifest.name}, which "
            f"GET /v1/models/{model.manifest.name} lists, got {landmark!r}"
        )
    return names.index(landmark)


async def _draw(scan: ReceivedScan, chosen: Sequence[int] | int) -> Response:
    """Find the landmarks' votes, and make heatmaps of them in the time that is left."""
    detection = await scan.detect()
    volume, votes = detection.volume, detection.votes
    if votes is None:
        raise ValueError("expected a detection with votes, as was asked for, got none")
    write = partial(write_scan_heatmaps, votes, chosen, volume.shape, volume.affine)
    file = await scan.compute(write, None, len)
    timing = timing_of(detection, receive_ms=scan.call.receive_ms, start_s=scan.call.start_s)
    return timed_response(file, timing, "application/gzip", detection.warnings)
