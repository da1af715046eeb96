"""Limits of uploads: time, rate, and the work that small chunks make."""

import asyncio
import gc
import time
import tracemalloc
import weakref
from collections.abc import Iterator
from dataclasses import replace

import pytest
from pydantic import ByteSize
from starlette.requests import Request
from starlette.types import Message

from app.api.dependencies import Call, Shared
from app.api.request_log import RECORD_KEY, RequestRecord
from app.api.upload import receive as receive_module
from app.api.upload.kinds import ARRAYS, CASE, SCAN, UploadKind
from app.api.upload.receive import cancel_on_disconnect, read_upload
from app.api.upload.sinks import MultipartSink
from app.engine import Engine, Metrics
from app.engine.admission import Admission
from app.errors import LandmarkdError, QueueFull, RequestError, SlowUpload, TooLarge
from app.io import HEAD_BYTES, Content
from app.settings import Settings
from tests.support.services import scope_of

FORM = (b"content-type", b"multipart/form-data; boundary=b")
GRACE_S = 0.2
RATE = ByteSize(1000)
SETTINGS = Settings(body_timeout_s=60, min_upload_rate=RATE)
MANY = HEAD_BYTES + 1000


def upload(
    chunks: Iterator[tuple[float, bytes]],
    settings: Settings = SETTINGS,
    kind: UploadKind = SCAN,
    header: tuple[bytes, bytes] | None = None,
    *,
    max_bytes: int = 1 << 20,
    all_bytes: int = 1 << 20,
) -> tuple[bytes, list[int]]:
    """Receive chunks, each after a pause; return the file, and the size of its checked head."""
    heads = []

    def check_head(head: Content) -> None:
        heads.append(len(head))

    async def receive() -> Message:
        pause_s, chunk = next(chunks, (0.0, None))
        await asyncio.sleep(pause_s)
        return {"type": "http.request", "body": chunk or b"", "more_body": chunk is not None}

    async def read() -> bytes:
        scope = {**scope_of("/"), "headers": [header] if header else []}
        record = scope[RECORD_KEY] = RequestRecord("upload", "POST")
        metrics = Metrics()
        engine = Engine(settings, metrics)
        try:
            with Admission(1, all_bytes).admit() as admitted:
                call = Call(Request(scope, receive), Shared(settings, metrics, engine), admitted)
                bounded = replace(kind, max_bytes=max_bytes)
                content, *_ = await read_upload(call, bounded, check_head)
        finally:
            await engine.stop()
        assert record.bytes == len(content)
        return bytes(content)

    return asyncio.run(read()), heads


@pytest.mark.no_cover
@pytest.mark.parametrize("kind", [SCAN, ARRAYS])
@pytest.mark.parametrize("form", [False, True])
def test_work_grows_no_faster_than_the_number_of_chunks(kind: UploadKind, form: bool) -> None:
    content = bytes(range(256)) * (MANY // 256)
    start, end = b"", b""
    if form:
        name = kind.fields[0].encode()
        start = b'--b\r\nContent-Disposition: form-data; name="%b"\r\n\r\n' % name
        end = b"\r\n--b--\r\n"
    body = start + content + end
    began = time.monotonic()
    chunks = ((0.0, body[i : i + 4]) for i in range(0, len(body), 4))
    received, heads = upload(chunks, SETTINGS, kind, FORM if form else None)
    assert (received, heads) == (content, [HEAD_BYTES])
    # It takes a second; with a walk over all chunks for each, it took a minute.
    assert time.monotonic() - began < 15


def test_headers_of_a_form_field_are_limited() -> None:
    start = b'--b\r\nContent-Disposition: form-data; name="volume"\r\nX: '
    chunks = iter([(0.0, start), *[(0.0, b"x" * 100)] * 100])
    with pytest.raises(RequestError, match="well-formed"):
        upload(chunks, header=FORM)


def test_second_field_of_a_form_is_not_copied_before_its_size_is_checked() -> None:
    sink = MultipartSink(b"b", CASE)
    for field in CASE.fields:
        sink.write(b'--b\r\nContent-Disposition: form-data; name="%b"\r\n\r\n' % field.encode())
        sink.write(bytes(1 << 20) + b"\r\n")
    sink.write(b"--b--\r\n")
    tracemalloc.start()
    try:
        first, second = sink.close()
        assert tracemalloc.get_traced_memory()[1] < 1 << 16
    finally:
        tracemalloc.stop()
    assert (bytes(second), len(first)) == (bytes(1 << 20), 1 << 20)


def slow(chunks: Iterator[tuple[float, bytes]], settings: Settings) -> float:
    """Upload too slowly; return after how long that was refused."""
    began = time.monotonic()
    with pytest.raises(SlowUpload):
        upload(chunks, settings)
    return time.monotonic() - began


@pytest.fixture
def _short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receive_module, "GRACE_S", GRACE_S)


@pytest.mark.usefixtures("_short_grace")
def test_body_has_to_arrive_at_a_rate_after_some_time() -> None:
    trickle = ((0.05, b"x" * (RATE // 40)) for _ in range(10_000))
    assert GRACE_S <= slow(trickle, SETTINGS) < 10
    stopped = iter([(0.0, b"x" * RATE), (60.0, b"x")])
    # The bytes that came at once are worth a second.
    assert 1 <= slow(stopped, SETTINGS) < 10
    told = f"within 60 s, and {RATE} bytes/s after 0.2 s; got 1000 bytes; .*MIN_UPLOAD_RATE"
    with pytest.raises(SlowUpload, match=told):
        upload(iter([(0.0, b"x" * RATE), (60.0, b"x")]))


@pytest.mark.usefixtures("_short_grace")
def test_body_that_arrives_at_the_rate_is_received() -> None:
    chunks = [(0.05, b"x" * (RATE // 4)) for _ in range(10)]
    received, _ = upload(iter(chunks))
    assert len(received) == 10 * (RATE // 4)


@pytest.mark.usefixtures("_short_grace")
def test_rate_is_no_limit_if_it_is_0() -> None:
    received, _ = upload(iter([(0.3, b"x"), (0.3, b"y")]), Settings(min_upload_rate=ByteSize(0)))
    assert received == b"xy"


@pytest.mark.usefixtures("_short_grace")
def test_rate_extends_no_time_limit() -> None:
    assert (
        slow(
            iter([(0.0, b"x" * 100 * RATE), (60.0, b"x")]),
            Settings(body_timeout_s=0.5, min_upload_rate=RATE),
        )
        < 10
    )


@pytest.mark.parametrize("length", ["5", " 5 ", "5\t"])
def test_spaces_around_a_length_are_no_part_of_it(length: str) -> None:
    header = (b"content-length", length.encode())
    assert upload(iter([(0.0, b"12345")]), header=header)[0] == b"12345"
    with pytest.raises(LandmarkdError):
        upload(iter([]), header=(b"content-length", b"5 5"))


def test_body_of_unknown_length_is_refused_once_it_is_over_a_limit() -> None:
    def chunks() -> Iterator[tuple[float, bytes]]:
        return iter([(0.0, b"x" * 600)] * 2)

    assert len(upload(chunks(), max_bytes=1200)[0]) == 1200
    with pytest.raises(TooLarge, match="at most 1199 bytes, got 1200"):
        upload(chunks(), max_bytes=1199)
    with pytest.raises(QueueFull, match="at most 1199 bytes of bodies, got 1200"):
        upload(chunks(), all_bytes=1199)


class Work:
    """What a request holds while it is worked on."""


def test_what_fails_lets_go_of_its_work_without_garbage_collection() -> None:
    """Memory is counted until then. Newer versions of Starlette hide it, as they cut tracebacks."""
    left: list[weakref.ref[Work]] = []

    async def fail(work: Work) -> None:
        left.append(weakref.ref(work))
        raise TooLarge("expected less")

    async def wait() -> Message:
        return await asyncio.Future()

    async def answer() -> str:
        try:
            await cancel_on_disconnect(wait, fail(Work()))
        except TooLarge as error:
            return str(error)
        return ""

    gc.disable()
    try:
        assert asyncio.run(answer()) == "expected less"
        assert left[0]() is None
    finally:
        gc.enable()
