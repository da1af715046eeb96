"""Request -> bytes of the uploaded file, bounded and timed; and word of a client that leaves.

The media type decides how the body is framed (raw or multipart), never what is in it: that is told
by the bytes.
"""

import asyncio
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from python_multipart.multipart import parse_options_header
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from app.errors import (
    ClientLeft,
    NotAnArchive,
    NotAVolume,
    RequestError,
    SlowUpload,
    TooLarge,
    UnsupportedMediaType,
)
from app.multipart import MultipartFile

MULTIPART: Final = "multipart/form-data"
# What curl --data-binary says unless it is told otherwise.
CURL_TYPE: Final = "application/x-www-form-urlencoded"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class UploadKind:
    """What a route expects to be sent.

    Attributes:
        name: In words, for errors.
        field: Of a multipart form.
        media_types: Of a body that is the file itself, those that errors name first; a missing
            Content-Type is taken as one of them, too.
        encodings: Content-Encodings that the reader of the file undoes.
        missing: Error where there is no file.
    """

    name: str
    field: str
    media_types: tuple[str, ...]
    encodings: tuple[str, ...]
    missing: type[RequestError]


SCAN: Final = UploadKind(
    name="a NIfTI file",
    field="volume",
    media_types=(
        "application/octet-stream",
        "application/gzip",
        "application/x-gzip",
        "application/x-nifti",
        "application/nifti",
    ),
    # gzip here is the same bytes as a .nii.gz; the decoder tells by their magic number.
    encodings=("identity", "gzip", "x-gzip"),
    missing=NotAVolume,
)
ARRAYS: Final = UploadKind(
    name="a safetensors or npz file",
    field="votes",
    media_types=("application/octet-stream", "application/zip", "application/x-npz"),
    encodings=("identity",),
    missing=NotAnArchive,
)


@dataclass(frozen=True, slots=True)
class UploadPlan:
    """How to read a body, as far as its head tells.

    Attributes:
        kind: What is expected.
        length: Content-Length, None if the body is chunked.
        boundary: Of the multipart parts, None if the body is the file itself.
    """

    kind: UploadKind
    length: int | None
    boundary: bytes | None


@dataclass(frozen=True, slots=True)
class Upload:
    """A file that has arrived.

    Attributes:
        content: Its bytes.
        receive_ms: Time it took.
    """

    content: bytes
    receive_ms: float


def plan_upload(headers: Headers, max_bytes: int, kind: UploadKind = SCAN) -> UploadPlan:
    """Decide from a request's head how to read its body, before any of it is read.

    Args:
        headers: The request's.
        max_bytes: Size that a body may have.
        kind: What is expected to be sent.

    Returns:
        The plan.

    Raises:
        UnsupportedMediaType: The media type or content encoding is none of those accepted.
        TooLarge: Content-Length is over the limit.
    """
    length = headers.get("content-length")
    if length is not None and not (length.isascii() and length.isdigit()):
        raise RequestError(f"expected Content-Length to be a number, got {length[:32]!r}")
    if length is not None and int(length) > max_bytes:
        raise TooLarge(f"expected a body of at most {max_bytes} bytes, got {int(length)}")
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding not in kind.encodings:
        expected = "gzip or none" if "gzip" in kind.encodings else "none"
        raise UnsupportedMediaType(f"expected Content-Encoding {expected}, got {encoding[:64]!r}")
    return UploadPlan(kind, None if length is None else int(length), _boundary(headers, kind))


def _boundary(headers: Headers, kind: UploadKind) -> bytes | None:
    given = headers.get("content-type")
    if given is None:
        return None
    name, options = parse_options_header(given)
    media_type = name.decode("latin-1").strip().lower()
    if media_type == MULTIPART:
        if not options.get(b"boundary"):
            raise UnsupportedMediaType("expected a boundary in Content-Type, got none")
        return options[b"boundary"]
    if media_type in (*kind.media_types, CURL_TYPE):
        return None
    raise UnsupportedMediaType(
        f"expected Content-Type {kind.media_types[0]}, {kind.media_types[1]} or {MULTIPART}; "
        f"got {media_type[:64]!r}"
    )


async def read_upload(
    request: Request, plan: UploadPlan, *, max_bytes: int, timeout_s: float
) -> Upload:
    """Read a request's body, at most so many bytes for at most so long.

    Args:
        request: Whose body has not been touched.
        plan: Made from its head.
        max_bytes: Size that the body may have, framing included.
        timeout_s: Seconds for all of it to arrive.

    Returns:
        The uploaded file.

    Raises:
        TooLarge: The body is over the limit.
        SlowUpload: It did not arrive in time.
        BadParameter: A multipart body has another field than the kind's, or none.
        NotAVolume: The file is empty and should be a scan.
        NotAnArchive: The file is empty and should hold arrays.
        RequestError: A multipart body is malformed.
        ClientLeft: The client closed the connection.
    """
    start = time.perf_counter()
    kind = plan.kind
    sink = _RawFile() if plan.boundary is None else MultipartFile(plan.boundary, kind.field)
    size = 0
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in request.stream():
                size += len(chunk)
                if size > max_bytes:
                    raise TooLarge(
                        f"expected a body of at most {max_bytes} bytes, got {size} and more"
                    )
                sink.write(chunk)
    except TimeoutError:
        raise SlowUpload(
            f"expected the whole body within {timeout_s:g} s, got {size} bytes"
        ) from None
    except ClientDisconnect:
        raise ClientLeft(f"expected a whole body, got {size} bytes") from None
    content = sink.close()
    if not content:
        raise kind.missing(f"expected {kind.name}, got 0 bytes")
    return Upload(content, 1e3 * (time.perf_counter() - start))


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Do some work for as long as the client waits for it.

    Args:
        receive: Of the request, whose body has been read to its end.
        work: Is cancelled, and its end awaited, when the client leaves.

    Returns:
        What the work returns.

    Raises:
        ClientLeft: The client closed the connection before the work was done.
    """
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_until_left(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientLeft("expected the client to wait for its answer, but it left")
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _until_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class _RawFile:
    """A body that is the file."""

    def __init__(self) -> None:
        self._chunks: list[bytes] = []

    def write(self, chunk: bytes) -> None:
        self._chunks.append(chunk)

    def close(self) -> bytes:
        return b"".join(self._chunks)
