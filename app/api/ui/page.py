"""The page: its routes and files, and those of NiiVue and Swagger UI where they are installed.

The page loads nothing from other hosts; its Content-Security-Policy enforces that. Files are read
once per process.
"""

import logging
import math
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from importlib import metadata
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Annotated, Final

import numpy as np
from blake3 import blake3
from fastapi import APIRouter, Depends, HTTPException, Query, Request, Response

from app.api.corrections import CORRECTIONS_BYTES, MAX_ANSWER_BYTES, read_corrections
from app.api.dependencies import CallDep, SelectionQuery, require_api_key
from app.api.upload.kinds import SCAN, UploadKind
from app.api.upload.receive import cancel_on_disconnect, read_upload
from app.errors import BadParameter
from app.io import (
    FORMATS,
    SEARCH_BYTES,
    check_header,
    negotiate_format,
    pack_scan,
    read_volume,
    write_gzip,
)
from app.phantom import make_phantom, scan_bytes

WEB: Final = Path(__file__).with_name("web")
ANSWER: Final = UploadKind(
    name="an answer of POST /v1/landmarks",
    fields=("answer",),
    media_types=("application/json", "text/plain"),  # The latter is what fetch sends of a string.
    encodings=("identity",),
    empty_error=BadParameter,
    max_bytes=MAX_ANSWER_BYTES,
)

MEDIA_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS: Final = {
    # NiiVue loads its font and color maps from data: and blob: images.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self' data: blob:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    # Browsers keep a copy, but ask each time whether it is current; mostly the answer is 304.
    "Cache-Control": "no-cache",
}
PHANTOM_BYTES: Final = 64 << 20
"""That making a scan takes at most."""
WIDEST: Final = 2
"""Bytes of a value that NiiVue reads whatever its type; of wider integers, not all."""

PACKAGE_FILES: Final = {
    "niivue.js": ("jupyterlab-niivue", "jupyterlab_niivue/labextension/static/niivue/index.js"),
    "swagger-ui.js": ("fastapi-offline", "fastapi_offline/static/swagger-ui-bundle.js"),
    "swagger-ui.css": ("fastapi-offline", "fastapi_offline/static/swagger-ui.css"),
}
"""Files of other distributions, which are read but never imported."""

NIIVUE_CLASS: Final = re.compile(
    rb" = class extends EventTarget \{\s*/\*\*\s*"
    rb"\* @param options +- options object to set modifiable Niivue properties"
)
MAX_CLASS_NAME_BYTES: Final = 99

TAKES_GZIP: Final = re.compile(r"\bgzip\b(?!\s*;\s*q=0(\.0*)?\s*(,|$))", re.IGNORECASE)
"""Found in an Accept-Encoding by which gzip is acceptable (RFC 9110, 12.5.3)."""

logger = logging.getLogger(__name__)
page_router: Final = APIRouter(include_in_schema=False)


@dataclass(frozen=True, slots=True)
class PageFile:
    """A file as it is served.

    Attributes:
        content: Its bytes.
        packed: These as gzip: NiiVue would take minutes on a slow line.
        media_type: Its Content-Type.
        etag: Digest of the content, as in the header of that name; weak, as it is of both.
    """

    content: bytes
    packed: bytes
    media_type: str
    etag: str


def export_niivue(module: bytes) -> bytes | None:
    """Export NiiVue's class from the bundle of jupyterlab-niivue, which does not.

    Returns:
        The module with one more line, which exports ``Niivue``; None if the class is not found.
    """
    # The name is matched last: a pattern that starts with it would take a quarter of a second.
    found = NIIVUE_CLASS.search(module)
    name = found and re.search(rb"[\w$]+\Z", module[: found.start()][-MAX_CLASS_NAME_BYTES:])
    if not name:
        logger.warning("no NiiVue class in the bundle of jupyterlab-niivue; scans are not drawn")
        return None
    return module + b"\nexport { " + name[0] + b" as Niivue };\n"


@cache
def page_files() -> Mapping[str, PageFile]:
    """Read all files of the page, by name; those of packages that are not installed are missing."""
    contents = {
        path.name: path.read_bytes() for path in WEB.iterdir() if path.suffix in MEDIA_TYPES
    }
    for name, (distribution, path) in PACKAGE_FILES.items():
        with suppress(PackageNotFoundError, FileNotFoundError):
            located = metadata.distribution(distribution).locate_file(path)
            contents[name] = Path(str(located)).read_bytes()
    niivue = contents.pop("niivue.js", None)
    if niivue is not None and (exported := export_niivue(niivue)) is not None:
        contents["niivue.js"] = exported
    viewer = b"present" if "niivue.js" in contents else b"absent"
    contents["index.html"] = contents["index.html"].replace(b"{viewer}", viewer)
    return {
        name: PageFile(
            content,
            write_gzip([content]),
            MEDIA_TYPES[Path(name).suffix],
            f'W/"{blake3(content).hexdigest(length=16)}"',
        )
        for name, content in contents.items()
    }


@page_router.get("/")
async def get_page(request: Request) -> Response:
    """Serve the page."""
    return await get_file(request, "index.html")


@page_router.get("/docs")
async def get_docs(request: Request) -> Response:
    """Show all calls in Swagger UI, if it is installed: nothing is loaded from other hosts.

    What it shows, ``/openapi.json``, may need a key, for which it asks.
    """
    if "swagger-ui.js" not in page_files():
        raise HTTPException(
            404,
            "expected Swagger UI, which pip install 'landmarkd[page]' brings; /openapi.json lists "
            "every call, and the page docs/http.md explains them",
        )
    return await get_file(request, "docs.html")


@page_router.get("/page/phantom.nii.gz", dependencies=[Depends(require_api_key)])
async def get_phantom(call: CallDep, seed: Annotated[int, Query(ge=0, lt=1 << 32)] = 6) -> Response:
    """Generate a scan, for users who have none at hand."""
    call.admitted.start_work()
    scan = await call.engine.compute(
        lambda _: scan_bytes(make_phantom(seed)),
        admitted=call.admitted,
        memory=PHANTOM_BYTES,
        result_bytes=len,
    )
    return Response(scan, headers=HEADERS, media_type="application/gzip")


@page_router.post("/page/landmarks", dependencies=[Depends(require_api_key)])
async def convert_landmarks(
    call: CallDep, name: Annotated[str, Query(alias="format")] = "json"
) -> Response:
    """Write an answer of ``POST /v1/landmarks`` in another format, as the page corrected it."""
    form = negotiate_format(FORMATS, name, None)
    (content,) = await read_upload(call, ANSWER)
    converted = await call.engine.compute(
        lambda _: form.write(read_corrections(content, call.engine)),
        admitted=call.admitted,
        memory=CORRECTIONS_BYTES,
        result_bytes=len,
    )
    return Response(converted, headers=HEADERS, media_type=form.media_type)


@page_router.post("/page/scan", dependencies=[Depends(require_api_key)])
async def convert_scan(call: CallDep, query: Annotated[SelectionQuery, Query()]) -> Response:
    """Write a scan that NiiVue does not read, such as DICOM, as NIfTI: voxels and affine alone."""
    (content,) = await read_upload(call, SCAN)
    scan = (content, call.engine.limits, query.selection)

    def write(check_cancelled: Callable[[], None]) -> bytes:
        volume = read_volume(*scan, check_cancelled)
        dtype = np.float32 if volume.voxels.itemsize > WIDEST else None
        pack = partial(pack_scan, content, volume, check_cancelled)
        return bytes(pack(as_uploaded=False, dtype=dtype))

    async def convert() -> bytes:
        compute = partial(call.engine.compute, admitted=call.admitted)
        header = await compute(partial(check_header, *scan), memory=SEARCH_BYTES)
        # As stored, scaled, and without what is not finite, which a mask finds; as packed is less.
        voxel_bytes = header.dtype.itemsize + 2 * header.value_dtype.itemsize + 1
        memory = SEARCH_BYTES + voxel_bytes * math.prod(header.shape)
        return await compute(write, memory=memory, result_bytes=len)

    shown = await cancel_on_disconnect(call.request.receive, convert())
    return Response(shown, headers=HEADERS, media_type="application/gzip")


@page_router.get("/page/{name}")
async def get_file(request: Request, name: str) -> Response:
    """Serve a file of the page."""
    # A lookup, not a path: no request can name a file elsewhere.
    file = page_files().get(name)
    if file is None:
        raise HTTPException(404)
    headers = HEADERS | {"ETag": file.etag, "Vary": "Accept-Encoding"}
    copies = request.headers.get("if-none-match", "")
    # A proxy may have made the tag strong; that counts as equal (RFC 9110, 13.1.2).
    if copies == "*" or file.etag.removeprefix("W/") in copies:
        return Response(status_code=304, headers=headers)
    if not TAKES_GZIP.search(request.headers.get("accept-encoding", "")):
        return Response(file.content, headers=headers, media_type=file.media_type)
    headers["Content-Encoding"] = "gzip"
    return Response(file.packed, headers=headers, media_type=file.media_type)
