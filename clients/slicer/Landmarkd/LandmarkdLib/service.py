"""Requests to a landmarkd service, and one of them in a thread."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import uuid
from concurrent.futures import CancelledError, ThreadPoolExecutor, wait
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Callable, Iterator, TypeVar
from urllib.parse import urlencode, urlsplit

PIECE_BYTES = 1 << 18
"""Sent between two looks at whether the request was cancelled."""

CONNECT_S = 10.0
SILENCE_S = 600.0
"""How long the service may say nothing at all, in s."""

T = TypeVar("T")
OnProgress = Callable[[str, float], None]
"""Takes what is going on, and the done share of it from 0 to 1; negative if unknown."""


class ServiceError(Exception):
    """The service refused, or there is none; the message is for people."""


class Service:
    """One landmarkd service; an instance serves one request at a time.

    Args:
        address: Such as ``http://127.0.0.1:8000``; without a scheme it is taken for ``http``.
        key: Sent with every request; empty if the service needs none.

    Raises:
        ServiceError: The address is none, or the key has several lines.
    """

    def __init__(self, address: str, key: str = "") -> None:
        address = address.strip().rstrip("/")
        try:
            parts = urlsplit(address if "://" in address else f"http://{address}")
            self._host, self._port = parts.hostname or "", parts.port
        except ValueError as error:
            raise ServiceError(f"expected an address, got {address!r}: {error}") from None
        if parts.scheme not in {"http", "https"} or not self._host:
            raise ServiceError(f"expected an address like http://127.0.0.1:8000, got {address!r}")
        secure = parts.scheme == "https"
        self._kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        self._address, self._path = address, parts.path
        key = key.strip()  # A file of a key ends in a line break.
        if len(key.splitlines()) > 1:  # http.client, which does not send it, would quote it.
            raise ServiceError("expected a key of one line, got one with a line break inside")
        # In UTF-8: http.client encodes text as Latin-1.
        token = key.encode().decode("latin-1")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._cancelled = threading.Event()
        self._socket: socket.socket | None = None

    def models(self) -> list[str]:
        """List the models that can be used, as far as the service answers soon.

        Raises:
            ServiceError: There is no service, or it refused.
        """
        # Slicer's window stands still meanwhile, which a silent service must not keep for long.
        with self._connection(CONNECT_S) as connection:
            connection.request("GET", f"{self._path}/v1/models", headers=self._headers)
            listed = _json(_accepted(connection).read())["models"]
        return [model["name"] for model in listed if model["status"] == "ready"]

    def detect(self, scan: Path, model: str, on_progress: OnProgress) -> dict[str, Any]:
        """Find the landmarks of a scan.

        Args:
            scan: A file of any format that the service reads.
            model: Name of the model.
            on_progress: Called now and then, in this thread.

        Returns:
            The JSON of the answer.

        Raises:
            ServiceError: There is no service, or it refused.
            CancelledError: ``cancel`` was called.
        """
        with self._connection() as connection:
            target = f"/v1/landmarks?{urlencode({'model': model})}"
            headers = {"Content-Type": "application/octet-stream", "Accept": "text/event-stream"}
            self._post(connection, target, headers, _Body(scan), on_progress)
            for event, data in _events(_accepted(connection)):
                self._check()
                if event == "answer":
                    return _json(data)
                if event == "problem":
                    raise ServiceError(_describe(data))
                _tell(_json(data), on_progress)
            self._check()
        raise ServiceError(f"expected an answer of {self._address}, got half of one")

    def keep(self, scan: Path, answer: dict[str, Any], on_progress: OnProgress) -> dict[str, Any]:
        """Keep a scan with its corrected landmarks in the service's store.

        Args:
            scan: The file of which ``detect`` found the landmarks, or the same written again.
            answer: Its answer, corrected.
            on_progress: Called now and then, in this thread.

        Returns:
            The JSON that describes the case.

        Raises:
            ServiceError: There is no service, it refused, or it keeps no cases.
            CancelledError: ``cancel`` was called.
        """
        boundary = uuid.uuid4().hex
        field = f'--{boundary}\r\nContent-Disposition: form-data; name="%s"; filename="%s"\r\n\r\n'
        document = field % ("answer", "answer") + json.dumps(answer) + f"\r\n--{boundary}--\r\n"
        before, after = field % ("volume", "volume"), "\r\n" + document
        with self._connection() as connection:
            headers = {"Content-Type": f"multipart/form-data; boundary={boundary}"}
            body = _Body(scan, before.encode(), after.encode())
            self._post(connection, "/v1/cases", headers, body, on_progress)
            kept = _json(_accepted(connection).read())
            self._check()
            return kept

    def cancel(self) -> None:
        """Cancel the request, from any thread; the service stops working on it."""
        self._cancelled.set()
        connected = self._socket  # The request's thread may end it meanwhile.
        if connected is not None:
            with contextlib.suppress(OSError):
                connected.shutdown(socket.SHUT_RDWR)

    def _check(self) -> None:
        if self._cancelled.is_set():
            raise CancelledError

    @contextlib.contextmanager
    def _connection(self, silence_s: float = SILENCE_S) -> Iterator[http.client.HTTPConnection]:
        """Connect, and say of whatever fails what it means to people."""
        connection = self._kind(self._host, self._port, timeout=CONNECT_S)
        try:
            connection.connect()
            self._socket = connection.sock
            self._socket.settimeout(silence_s)
            self._check()
            yield connection
        except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as error:
            self._check()
            raise ServiceError(f"expected a service at {self._address}, got {error!r}") from error
        finally:
            self._socket = None
            connection.close()

    def _post(
        self,
        connection: http.client.HTTPConnection,
        target: str,
        headers: dict[str, str],
        body: _Body,
        tell: OnProgress,
    ) -> None:
        connection.putrequest("POST", self._path + target)
        length = {"Content-Length": str(body.size)}
        for name, value in {**headers, **length, **self._headers}.items():
            connection.putheader(name, value)
        connection.endheaders()
        sent = 0
        # Refused in mid-upload: the answer says why, if it can still be read.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for piece in body.pieces():
                self._check()
                connection.send(piece)
                sent += len(piece)
                tell("sending the scan", sent / body.size)


class _Body:
    """The body of a request: a file, and what stands around it."""

    def __init__(self, scan: Path, before: bytes = b"", after: bytes = b"") -> None:
        self._scan, self._before, self._after = scan, before, after
        self.size = len(before) + scan.stat().st_size + len(after)

    def pieces(self) -> Iterator[bytes]:
        yield self._before
        with self._scan.open("rb") as file:
            yield from iter(lambda: file.read(PIECE_BYTES), b"")
        yield self._after


def _accepted(connection: http.client.HTTPConnection) -> http.client.HTTPResponse:
    response = connection.getresponse()
    if response.status not in {http.HTTPStatus.OK, http.HTTPStatus.CREATED}:
        raise ServiceError(_describe(response.read()) or f"HTTP status {response.status}")
    return response


def _describe(problem: bytes) -> str:
    """Put a problem+json into words; a proxy's error page is none."""
    try:
        found = _json(problem)
        return f"{found['title']}: {found['detail']}"
    except (ValueError, LookupError, TypeError):
        return ""


def _json(data: bytes) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(data)
    return found


def _events(response: http.client.HTTPResponse) -> Iterator[tuple[str, bytes]]:
    """Read server-sent events as they come, each of one line of data."""
    event = ""
    for line in response:
        name, _, value = line.rstrip(b"\r\n").partition(b": ")
        if name == b"event":
            event = value.decode()
        elif name == b"data":
            yield event, value


def _tell(progress: dict[str, Any], on_progress: OnProgress) -> None:
    if progress["tiles"]:
        done, tiles = progress["tile"], progress["tiles"]
        on_progress(f"part {done} of {tiles}", done / tiles)
    else:
        ahead = progress["ahead"]
        on_progress(f"waiting for {ahead} other scans" if ahead else "preparing the scan", -1.0)


class BackgroundRequest:
    """A request in a thread of its own, so that Slicer's window stays alive.

    Args:
        service: Where; of this request alone.
        ask: The method of it that sends a scan.
        scan: The file of the scan.
        argument: What the method takes besides.
    """

    def __init__(
        self,
        service: Service,
        ask: Callable[[Service, Path, T, OnProgress], dict[str, Any]],
        scan: Path,
        argument: T,
    ) -> None:
        self._service = service
        self._progress: SimpleQueue[tuple[str, float]] = SimpleQueue()
        executor = ThreadPoolExecutor(max_workers=1)
        self._future = executor.submit(ask, service, scan, argument, self._tell)
        executor.shutdown(wait=False)

    def progress(self) -> tuple[str, float] | None:
        """Return the latest progress since the last call; None if there is none."""
        latest = None
        while not self._progress.empty():
            latest = self._progress.get()
        return latest

    def is_done(self, wait_s: float) -> bool:
        """Wait at most so long for the result, and return whether there is one.

        The thread runs in that time at least: Slicer's event loop may keep Python's lock else.
        """
        wait([self._future], wait_s)
        return self._future.done()

    def result(self) -> dict[str, Any]:
        """Wait for the end; returns or raises as the method does."""
        return self._future.result()

    def cancel(self) -> None:
        """Stop it."""
        self._service.cancel()

    def _tell(self, text: str, share: float) -> None:
        self._progress.put((text, share))
