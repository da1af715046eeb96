"""The FastAPI application: routes, uploads, problems, and the page.

app           builds the application; starts and stops its engine
scans         calls that take a scan: /v1/landmarks, /v1/heatmaps, /v1/jobs, /v1/uploads
cases         /v1/cases: scans and landmarks as a person corrected them
corrections   an answer as a person corrected it -> the same, checked, and measured again
votes         POST /v1/votes
models        /v1/models
health        /livez, /readyz, /metrics
ui            the page
upload        how bodies are received
sse           progress as server-sent events
dependencies  state of the application, API keys, admitted calls, time limits
middleware    request ids, log lines and metrics of all requests
request_log   the log line of a request
origin        which web pages may use a service that needs no key
problems      errors as RFC 9457 problem details
openapi       documentation beyond the types
"""

from app.api.app import create_app
from app.api.dependencies import Shared
from app.api.middleware import ID_HEADER, LEFT_EXTENSION, REFUSAL_EXTENSION

__all__ = ["ID_HEADER", "LEFT_EXTENSION", "REFUSAL_EXTENSION", "Shared", "create_app"]
