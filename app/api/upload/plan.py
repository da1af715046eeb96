"""Request -> bytes of the uploaded file, bounded and timed; and word of a client that leaves.

The media type decides how the body is framed (raw or multipart), never what is in it: that is told
by the bytes.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from python_multipart.multipart import parse_options_header
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from app.api.upload.direct import fill_body_of
from app.api.upload.raw import RawFile, SizedFile
from app.api.upload.sinks import MultipartFile
from app.errors import (
    ClientLeft,
    NotAnArchive,
    NotAVolume,
    RequestError,
    SlowUpload,
    TooLarge,
    UnsupportedMediaType,
)
from app.io import HEAD_BYTES, Content

MULTIPART: Final = "multipart/form-data"
# What curl --data-binary says unless it is told otherwise.
CURL_TYPE: Final = "application/x-www-form-urlencoded"

DIRECT_BYTES: Final = 1 << 20
"""A rest of a body that is shorter comes in so few pieces that their copies cost little."""

T = TypeVar("T")
_Sink = MultipartFile | RawFile | SizedFile


@dataclass(frozen=True, slots=True)
class UploadKind:
    """What a route expects to be sent.

    Attributes:
        name: In words, for errors.
        field: Of a multipart form.
        media_types: Of a body that is the file itself, those that errors name first; a missing
            Content-Type is taken as one of them, too.
        encodings: Content-Encodings that the reader of the file undoes.
        in_place: Whether the reader takes a memoryview without a copy.
        missing: Error where there is no file.
    """

    name: str
    field: str
    media_types: tuple[str, ...]
    encodings: tuple[str, ...]
    in_place: bool
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
    in_place=True,
    missing=NotAVolume,
)
ARRAYS: Final = UploadKind(
    name="a safetensors or npz file",
    field="votes",
    media_types=("application/octet-stream", "application/zip", "application/x-npz"),
    encodings=("identity",),
    in_place=False,  # The library of safetensors takes bytes only.
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
        content: Its bytes; of a raw body of known length the memory that they were received into.
        receive_ms: Time it took.
    """

    content: Content
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
    request: Request,
    plan: UploadPlan,
    *,
    max_bytes: int,
    timeout_s: float,
    look: Callable[[Content], None] | None = None,
) -> Upload:
    """Read a request's body, at most so many bytes for at most so long.

    Args:
        request: Whose body has not been touched.
        plan: Made from its head.
        max_bytes: Size that the body may have, framing included.
        timeout_s: Seconds for all of it to arrive.
        look: Is given the first HEAD_BYTES of the file, or all of it, and raises to refuse it.

    Returns:
        The uploaded file.

    Raises:
        TooLarge, SlowUpload: The body is over the limit, or did not arrive in time.
        BadParameter: A multipart body has another field than the kind's, or none.
        NotAVolume, NotAnArchive: The file is empty.
        RequestError: A multipart body is malformed, or what ``look`` raises.
        ClientLeft: The client closed the connection.
    """
    start = time.perf_counter()
    sink = _sink_of(plan)
    meter = _Meter(max_bytes)
    try:
        async with asyncio.timeout(timeout_s):
            looked = await _receive(request, sink, meter, look)
    except TimeoutError:
        wanted = f"expected the whole body within {timeout_s:g} s"
        raise SlowUpload(f"{wanted}, got {meter.size} bytes") from None
    except ClientDisconnect:
        raise ClientLeft(f"expected a whole body, got {meter.size} bytes") from None
    content = sink.close()
    if not content:
        raise plan.kind.missing(f"expected {plan.kind.name}, got 0 bytes")
    if look is not None and not looked:
        look(content)
    return Upload(content, 1e3 * (time.perf_counter() - start))


async def _receive(
    request: Request, sink: _Sink, meter: "_Meter", look: Callable[[Content], None] | None
) -> bool:
    """Fill a sink; return whether the file was long enough to be looked at on the way."""
    more, looked = True, False
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        chunk, more = message.get("body", b""), message.get("more_body", False)
        meter.count(len(chunk))
        sink.write(chunk)
        if look is not None and not looked:
            head = sink.head(HEAD_BYTES)
            if head is None:
                continue
            look(head)
            looked = True
        more = more and not await _fill(request, sink, meter)
    return looked


async def _fill(request: Request, sink: _Sink, meter: "_Meter") -> bool:
    """Receive a large rest in one go, if server and sink can."""
    fill = fill_body_of(request.scope)
    if fill is None or not isinstance(sink, SizedFile) or len(sink.rest) < DIRECT_BYTES:
        return False
    await fill(sink.rest, meter.count)
    sink.rest = sink.rest[:0]
    return True


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


class _Meter:
    """Counts the bytes of a body, and refuses those over the limit."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.size = 0

    def count(self, size: int) -> None:
        self.size += size
        if self.size > self._most:
            raise TooLarge(
                f"expected a body of at most {self._most} bytes, got {self.size} and more"
            )


def _sink_of(plan: UploadPlan) -> _Sink:
    if plan.boundary is not None:
        return MultipartFile(plan.boundary, plan.kind.field)
    if plan.length is not None and plan.kind.in_place:
        return SizedFile(plan.length)
    return RawFile()
