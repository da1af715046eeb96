"""A browser -> the page, its files, and those of NiiVue and Swagger UI where they are installed.

The page asks nothing of any other host, and is told so in its Content-Security-Policy.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Final

from blake3 import blake3
from fastapi import APIRouter, Depends, HTTPException, Query, Request, Response
from fastapi.openapi.docs import get_swagger_ui_html
from pydantic import ValidationError

from app.api.dependencies import require_api_key
from app.errors import BadParameter, TooLarge
from app.io import LandmarksAnswer, choose_format
from app.phantom import make_phantom, scan_bytes

WEB: Final = Path(__file__).with_name("web")
MAX_ANSWER_BYTES: Final = 4 << 20
"""Of JSON that is to be written in another format; 256 landmarks with candidates need 1 MB."""

MEDIA_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS: Final = {
    # NiiVue makes its font and its color maps of data: and blob: images.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self' data: blob:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    # Kept by browsers, but asked for again: the answer is then 304 and short.
    "Cache-Control": "no-cache",
}
DOCS_HEADERS: Final = HEADERS | {
    "Content-Security-Policy": "default-src 'none'; script-src 'self' 'unsafe-inline'; "
    "style-src 'self' 'unsafe-inline'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
}

NIIVUE_CLASS: Final = re.compile(
    rb" = class extends EventTarget \{\s*/\*\*\s*"
    rb"\* @param options +- options object to set modifiable Niivue properties"
)
LONGEST_NAME: Final = 99
"""Of a class in a bundle, in bytes."""

page_router: Final = APIRouter(include_in_schema=False)


@dataclass(frozen=True, slots=True)
class Borrowed:
    """A file that another distribution brings; it is served from where pip has put it.

    Attributes:
        package: Import name; it is looked up and never imported.
        path: Of the file in the package.
        adapt: Makes of its content what is served; None if it cannot.
    """

    package: str
    path: str
    adapt: Callable[[bytes], bytes | None] = bytes

    def read(self) -> bytes | None:
        """Return what to serve, None where the distribution is not installed."""
        spec = find_spec(self.package)
        folders = spec.submodule_search_locations if spec else None
        for folder in folders or ():
            path = Path(folder) / self.path
            if path.is_file():
                return self.adapt(path.read_bytes())
        return None


def export_niivue(module: bytes) -> bytes | None:
    """Let NiiVue's class out of the bundle of an application that keeps it to itself.

    Args:
        module: The JavaScript module of jupyterlab-niivue.

    Returns:
        The same with one more line, which exports ``Niivue``; None if the class is not found.
    """
    # The name is looked for last: a pattern that began with it would take a quarter of a second.
    found = NIIVUE_CLASS.search(module)
    name = found and re.search(rb"[\w$]+\Z", module[: found.start()][-LONGEST_NAME:])
    return name and module + b"\nexport { " + name[0] + b" as Niivue };\n"


BORROWED: Final = {
    "niivue.js": Borrowed(
        "jupyterlab_niivue", "labextension/static/niivue/index.js", export_niivue
    ),
    "swagger-ui.js": Borrowed("fastapi_offline", "static/swagger-ui-bundle.js"),
    "swagger-ui.css": Borrowed("fastapi_offline", "static/swagger-ui.css"),
}


@page_router.get("/")
def get_page(request: Request) -> Response:
    """Serve the page; it is told whether there is a viewer."""
    page = (WEB / "index.html").read_bytes()
    viewer = b"absent" if BORROWED["niivue.js"].read() is None else b"present"
    return _file(request, page.replace(b"{viewer}", viewer), "index.html")


@page_router.get("/docs")
def get_docs(request: Request) -> Response:
    """Show all calls in Swagger UI, from here if it is installed."""
    title = request.app.title
    if BORROWED["swagger-ui.js"].read() is None:
        return get_swagger_ui_html(openapi_url="openapi.json", title=title)
    docs = get_swagger_ui_html(
        openapi_url="openapi.json",
        title=title,
        swagger_js_url="page/swagger-ui.js",
        swagger_css_url="page/swagger-ui.css",
        swagger_favicon_url="page/icon.svg",
    )
    docs.headers.update(DOCS_HEADERS)
    return docs


@page_router.get("/page/phantom.nii.gz", dependencies=[Depends(require_api_key)])
def get_phantom(seed: Annotated[int, Query(ge=0, lt=1 << 32)] = 6) -> Response:
    """Generate a scan for who has none."""
    scan = scan_bytes(make_phantom(seed))
    return Response(scan, headers=HEADERS, media_type="application/gzip")


@page_router.post("/page/landmarks", dependencies=[Depends(require_api_key)])
async def write_landmarks(request: Request, format: str = "json") -> Response:  # noqa: A002
    """Write an answer of ``POST /v1/landmarks`` in another format, without its scan."""
    form = choose_format(format, None)
    content = bytearray()
    async for piece in request.stream():
        content += piece
        if len(content) > MAX_ANSWER_BYTES:
            raise TooLarge(f"expected an answer of at most {MAX_ANSWER_BYTES} bytes, got more")
    try:
        answer = LandmarksAnswer.model_validate_json(bytes(content))
    except ValidationError as error:
        raise BadParameter(
            f"expected an answer of POST /v1/landmarks, got JSON with {error.error_count()} errors"
        ) from error
    return Response(form.write(answer), headers=HEADERS, media_type=form.media_type)


@page_router.get("/page/{name}")
def get_file(request: Request, name: str) -> Response:
    """Serve a file that the page consists of."""
    if name in BORROWED:
        content = BORROWED[name].read()
    else:
        # Names come from the folder, so that no request can name a file elsewhere.
        paths = {path.name: path for path in WEB.iterdir() if path.suffix in MEDIA_TYPES}
        content = paths[name].read_bytes() if name in paths else None
    if content is None:
        raise HTTPException(404)
    return _file(request, content, name)


def _file(request: Request, content: bytes, name: str) -> Response:
    etag = f'"{blake3(content).hexdigest(length=16)}"'
    headers = HEADERS | {"ETag": etag}
    if etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers, media_type=MEDIA_TYPES[Path(name).suffix])
