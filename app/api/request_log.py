"""What became of each request, as one log line.

No line holds a file name, header text, voxel value or exception message: those may identify a
patient.
"""

import logging
from collections.abc import MutableMapping
from dataclasses import asdict, dataclass
from typing import Any, Final, cast

RECORD_KEY: Final = "landmarkd.record"
REQUEST_LOGGER: Final = "app.requests"
# Probes come every few seconds; their lines are wanted only when something is wrong.
PROBES: Final = ("/livez", "/readyz", "/metrics")


@dataclass(slots=True)
class RequestRecord:
    """What the log line of one request says; filled in on the way through the application.

    Attributes:
        request_id: As in the answer.
        method: HTTP method.
        route: The route's template, never the path that came.
        status: HTTP status; 499 if the client left before the answer.
        code: ``ok`` or the problem's code.
        ms: From the head of the request to the end of the answer.
        model: The model that was asked.
        bytes: Size of the uploaded file.
        shape: Shape of its volume.
    """

    request_id: str
    method: str
    route: str = "unmatched"
    status: int = 500
    code: str = "internal"
    ms: float = 0.0
    model: str | None = None
    bytes: int | None = None
    shape: tuple[int, ...] | None = None


def record_of(scope: MutableMapping[str, Any]) -> RequestRecord:
    """Return the record that ``RequestTracking`` keeps for the request of an ASGI scope."""
    return cast("RequestRecord", scope[RECORD_KEY])


def log_request(record: RequestRecord) -> None:
    """Write the line of a request that was answered."""
    level = logging.INFO
    if record.route in PROBES:
        # A probe that hears "not ready" got its answer; that is no fault of anyone's.
        level = logging.DEBUG
    elif record.status >= 500:
        level = logging.WARNING
    fields = {key: value for key, value in asdict(record).items() if value is not None}
    fields["ms"] = round(record.ms, 3)
    logging.getLogger(REQUEST_LOGGER).log(level, "request", extra=fields)
