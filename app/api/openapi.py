"""OpenAPI documentation beyond the types: bodies, examples, choices, the errors of each call."""

from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Any, Final

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse

from app.api.dependencies import SharedDep, api_key, require_api_key
from app.api.problems import PROBLEM_MEDIA_TYPE, TYPE_PREFIX
from app.api.sse import EVENT_STREAM
from app.api.upload.kinds import ARRAYS, CASE, MULTIPART, SCAN, UploadKind
from app.io import FORMATS, REPORT, Problem
from app.model import newest_first
from app.voting import VOTES_FORMATS

openapi_router: Final = APIRouter(include_in_schema=False)

ADDRESS: Final = "http://127.0.0.1:8000/"
MODEL: Final = "mouse-skull"
"""Stand in the description of all calls for the service's address and one of its models."""

DESCRIPTION: Final = f"""
Send a 3D scan (NIfTI, NRRD, MetaImage, MGH, or a DICOM series in a ZIP archive), get anatomical
landmarks.

```sh
curl --data-binary @scan.nii.gz '{ADDRESS}v1/landmarks?model={MODEL}'
```

```python
from landmarkd import Client

with Client("{ADDRESS}") as client:
    answer = client.detect("scan.nii.gz", model="{MODEL}")
```

`GET /v1/models` lists the models. [The page](.) of this service draws scans with their landmarks.

Every coordinate names its frame: `ijk` in voxels of the uploaded array, `ras_mm`, `lps_mm` in mm.
Every error is an RFC 9457 problem; its `code` is stable. Besides those that a call names, any may
answer 400 (malformed HTTP), 403 (another site's page, or an unknown `Host`), 431 (headers over a
limit), 500 (a bug) and 507 (memory ran out). Every answer has `X-Request-ID`, and 429
`Retry-After`.
"""

HEADERS: Final = {
    "Location": "Path of the job, or of the upload.",
    "Preference-Applied": "`respond-async`.",
    "Server-Timing": "Time per stage, in ms.",
    "Tus-Extension": "Extensions of tus that there are.",
    "Tus-Max-Size": "Largest file, in bytes.",
    "Tus-Version": "Version of tus.",
    "Upload-Expires": "When the upload is removed, unless more of it arrives.",
    "Upload-Length": "Bytes of the whole file.",
    "Upload-Offset": "Bytes that have arrived; the next part begins there.",
    "X-Warnings": "The warnings, where there are any: a JSON array in ASCII. Of more than 2 KiB, "
    "how many there are.",
}
"""Of answers of some calls."""

UPLOAD_STATE: Final = ("Upload-Offset", "Upload-Length", "Upload-Expires", "Location")
"""Tell how far an upload is: `Upload-Expires` until it is a job, then `Location`."""

_BINARY: Final = {"type": "string", "format": "binary"}


def _body(kind: UploadKind, description: str) -> dict[str, Any]:
    fields = dict.fromkeys(kind.fields, _BINARY)
    form = {"type": "object", "required": [*fields], "properties": fields}
    return {
        "requestBody": {
            "required": True,
            "description": description,
            "content": {
                **{media_type: {"schema": _BINARY} for media_type in kind.media_types},
                MULTIPART: {"schema": form},
            },
        }
    }


UPLOAD_BODY: Final = _body(SCAN, "The file as it is (fastest), or as the form field `volume`.")

VOTES_BODY: Final = _body(
    ARRAYS,
    "A safetensors or npz file (`np.savez`, `np.savez_compressed`), as it is or as the form field "
    "`votes`. It holds `offsets`, in voxels, 3 channels per landmark; either `probs`, in [0, 1], "
    "or `scores`, one channel per landmark and one more if channel 0 is the background; and, if "
    "voxels are not 1 mm cubes, `affine`, 4 x 4, voxel index → mm, RAS. Numbers are float16, "
    "float32, float64 or, in safetensors, bfloat16.",
)

CASE_BODY: Final = _body(
    CASE,
    "A form: the scan, and the answer of `POST /v1/landmarks` to it, as JSON, in which each "
    "landmark says who decided it (`decided_by`).",
)

_EXAMPLE_PLACE: Final[dict[str, Any]] = {
    "ijk": [41.5, 77.25, 60.0],
    "ras_mm": [-1.38, 31.63, 8.3],
    "lps_mm": [1.38, -31.63, 8.3],
}

# Without nulls, which FastAPI would leave out.
EXAMPLE_LANDMARK: Final[dict[str, Any]] = {
    "name": "nasion",
    "description": "Where the frontal and nasal bones meet",
    "status": "detected",
    **_EXAMPLE_PLACE,
    "confidence": 0.94,
    "mass": 0.81,
    "coherence": 0.97,
    "spread_mm": 0.31,
    "region95_mm": 0.6,
    "disagreement_mm": 0.12,
    "expected_ras_mm": [-1.6, 31.2, 8.5],
    "candidates": [{**_EXAMPLE_PLACE, "mass": 0.81}],
}

EXAMPLE_ANSWER: Final[dict[str, Any]] = {
    "request_id": "5a2e8b9c1d3f4a6e8b0c2d4f6a8e0b1c",
    "model": {"name": "mouse-skull", "version": "1.0.0", "digest": "9f86d081884c7d65"},
    "volume": {
        "shape": [96, 160, 128],
        "spacing_mm": [0.28, 0.28, 0.28],
        "orientation": "RAS",
        "affine": [[0.28, 0, 0, -13], [0, 0.28, 0, 10], [0, 0, 0.28, -8.5], [0, 0, 0, 1]],
        "digest": "60303ae22b998861bce3b28f33eec1be",
    },
    "landmarks": [EXAMPLE_LANDMARK],
    "warnings": [],
    "timing_ms": {
        "receive": 4.1,
        "decode": 22.5,
        "prepare": 9.8,
        "queue": 1.2,
        "network": 140.0,
        "vote": 6.3,
        "locate": 3.9,
        "total": 188.2,
    },
}

LANDMARKS_CONTENT: Final[dict[str, Any]] = {
    form.media_type: {"schema": _BINARY} for form in FORMATS
} | {
    "application/json": {"example": EXAMPLE_ANSWER},
    "application/vnd.slicer.markups+json": {"schema": {"type": "object"}},
}

EVENTS_CONTENT: Final[dict[str, Any]] = {
    EVENT_STREAM: {
        "schema": {"type": "string"},
        "example": 'event: progress\ndata: {"stage": "tile", "ahead": 0, "tile": 4, "tiles": 9}\n\n'
        "event: answer\ndata: {…}\n\n",
    }
}

REPORT_CONTENT: Final[dict[str, Any]] = {REPORT.media_type: {"schema": _BINARY}}

VOTES_CONTENT: Final[dict[str, Any]] = LANDMARKS_CONTENT | {
    form.media_type: {"schema": _BINARY} for form in VOTES_FORMATS
}


HEATMAPS_CONTENT: Final[dict[str, Any]] = {"application/gzip": {"schema": _BINARY}}


def offer(names: Iterable[str]) -> Callable[[dict[str, Any]], None]:
    """Describe an optional parameter of a query as a choice, for its ``json_schema_extra``."""
    choices = [*names]

    def change(schema: dict[str, Any]) -> None:
        schema.pop("anyOf", None)  # Or null, which no query can hold.
        schema.update(type="string", enum=choices)

    return change


@openapi_router.get("/openapi.json", dependencies=[Depends(require_api_key)])
async def get_openapi(request: Request, shared: SharedDep) -> Response:
    """Describe all calls, for programs: with this service's address, and the models it has now."""
    document = request.app.openapi()
    loaded = [model.manifest for model in shared.engine.registry.models.values()]
    versions = newest_first(f"{one.name}@{one.version}" for one in loaded)
    names = sorted({one.name for one in loaded}) + versions
    info = document["info"]
    address = request.base_url
    if request.headers.get("x-forwarded-proto") == "https":
        # Whoever forges it sees another text, no more.
        address = address.replace(scheme="https")
    text = info["description"].replace(ADDRESS, str(address))
    if names and MODEL not in names:
        text = text.replace(MODEL, names[0])
    needs_key = bool(shared.settings.api_keys)
    paths = {
        path: {method: _as_served(call, names, needs_key) for method, call in calls.items()}
        for path, calls in document["paths"].items()
    }
    return JSONResponse(document | {"info": info | {"description": text}, "paths": paths})


def _as_served(call: dict[str, Any], names: list[str], needs_key: bool) -> dict[str, Any]:
    """Offer models where a call may be given one, and say whether it needs a key here.

    A kept case's model may be gone by now.
    """
    parameters = []
    for parameter in call.get("parameters", []):
        schema = dict(parameter["schema"])
        if names and parameter["name"] == "model" and not parameter["required"]:
            offer(names)(schema)
        parameters.append(parameter | {"schema": schema})
    keys = [key for key in call.get("security", []) if needs_key or api_key.scheme_name not in key]
    return call | {"parameters": parameters, "security": keys}


def headers(*names: str) -> dict[str, Any]:
    """Document headers of an answer, for an entry of the ``responses`` of its route."""
    schema = {"type": "string"}
    return {"headers": {name: {"description": HEADERS[name], "schema": schema} for name in names}}


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Document the errors that a call may return, for the ``responses`` of its route.

    They are one entry, which names them all: a dozen that are alike would hide all else.
    """
    known = [HTTPStatus(status) for status in sorted(statuses)]
    code = known[0].phrase.lower().replace(" ", "-")
    example = {
        "type": TYPE_PREFIX + code,
        "title": known[0].phrase.capitalize(),
        "status": known[0].value,
        "detail": "expected this, got that",
        "code": code,
        "request_id": EXAMPLE_ANSWER["request_id"],
    }
    schema = {"$ref": f"#/components/schemas/{Problem.__name__}"}
    content = {PROBLEM_MEDIA_TYPE: {"schema": schema, "example": example}}
    names = ", ".join(f"{status.value} {status.phrase}" for status in known)
    return {"default": {"description": f"A problem: {names}.", "content": content}}
