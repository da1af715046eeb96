"""The log line that each request leaves.

No line holds a file name, header text, voxel value or exception message: those may identify a
patient.
"""

import logging
from collections.abc import MutableMapping
from dataclasses import asdict, dataclass
from typing import Any, Final, cast

RECORD_KEY: Final = "landmarkd.record"
REQUEST_LOGGER: Final = "app.requests"
# Probed every few seconds, so their lines are logged at debug level and they are not counted.
PROBES: Final = ("/livez", "/readyz", "/metrics")
KEPT_PROBLEM: Final = "kept-problem"
"""Code of a request that reads why a scan of a job failed: no failure anew, however often."""


@dataclass(slots=True)
class RequestRecord:
    """Content of a request's log line, filled in while the request is handled.

    Attributes:
        route: The route's template, never the requested path.
        status: HTTP status; 499 if the client left before it had the answer.
        code: ``ok``, ``KEPT_PROBLEM`` or the problem's code.
        ms: Time from the head of the request to the end of the response.
        bytes: Of the file that was sent, or of the part of one.
        shape: Of its scan, in voxels.
        key: Name of the API key that was sent, or the start of its hash.
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
    key: str | None = None


def record_of(scope: MutableMapping[str, Any]) -> RequestRecord:
    """Return the record of the request that an ASGI scope belongs to."""
    return cast("RequestRecord", scope[RECORD_KEY])


def log_request(record: RequestRecord) -> None:
    """Write the log line of a request."""
    level = logging.INFO
    if record.route in PROBES:
        # Also where the answer is "not ready", with 503: the probe itself worked.
        level = logging.DEBUG
    elif record.status >= 500 and record.code != KEPT_PROBLEM:
        level = logging.WARNING
    fields = {key: value for key, value in asdict(record).items() if value is not None}
    fields["ms"] = round(record.ms, 3)
    logging.getLogger(REQUEST_LOGGER).log(level, "request", extra=fields)
