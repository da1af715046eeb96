"""Services with one toy model, in this process or in one of their own."""

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

import nibabel as nib
import numpy as np
from fastapi import FastAPI
from fastapi.testclient import TestClient
from starlette.types import Message, Scope

from app.api.app import create_app
from app.api.dependencies import Shared
from app.io.schemas import Problem
from app.settings import PREFIX, Settings
from tests.support.model_folders import make_model_folder
from tests.support.programs import start_program

if TYPE_CHECKING:
    import httpx
    import httpx2

Response: TypeAlias = "httpx.Response | httpx2.Response"
"""Of a service in a process of its own, or of ``TestClient``."""

MODEL = "toy"
SHAPE = (20, 18, 24)
PATIENCE_S = 60
SERVE = "import sys\nfrom app.cli.main import main\nsys.argv[1:] = ['serve']\nmain()"
"""Runs the command."""

RAW = {"Content-Type": "application/octet-stream"}


def toy_scan(shape: tuple[int, ...] = SHAPE) -> bytes:
    """Make a NIfTI file of seeded noise with an oblique-free, anisotropic affine in mm."""
    voxels = np.random.default_rng(7).normal(100.0, 20.0, shape).astype(np.float32)
    image = nib.Nifti1Image(voxels, np.diag([1.0, 1.25, 0.8, 1.0]))
    image.header.set_xyzt_units("mm")
    content: bytes = image.to_bytes()
    return content


def toy_models(folder: Path) -> Path:
    """Make a models folder with one toy model in it."""
    models = folder / "models"
    models.mkdir(exist_ok=True)
    make_model_folder(models, MODEL)
    return models


def toy_settings(models: Path, **changes: Any) -> Settings:
    """Make settings for a small machine, some of them changed."""
    values: dict[str, Any] = {"models_dir": models, "device": "cpu", "threads": 1, "drain_s": 5}
    return Settings(**(values | changes))


@contextmanager
def running(settings: Settings) -> Iterator[TestClient]:
    """Run an application in this process until the block ends; its models are loaded."""
    app = create_app(settings)
    with TestClient(app, base_url="http://localhost") as client:
        assert client.portal is not None
        client.portal.call(_loaded, app)
        yield client


async def _loaded(app: FastAPI) -> None:
    await asyncio.shield(app.state.starting)


def shared_of(client: TestClient) -> Shared:
    """Return the state of a running application."""
    assert isinstance(client.app, FastAPI)
    return cast("Shared", client.app.state.shared)


@contextmanager
def admitted(client: TestClient, requests: int) -> Iterator[None]:
    """Let a running application have requests in progress, admitted on its event loop."""
    assert client.portal is not None
    admission, stack = shared_of(client).engine.admission, ExitStack()
    for _ in range(requests):
        client.portal.call(stack.enter_context, admission.admit())
    try:
        yield
    finally:
        client.portal.call(stack.close)


def problem_of(response: Response) -> Problem:
    """Parse a response that is a problem."""
    assert response.headers["content-type"] == "application/problem+json"
    problem = Problem.model_validate_json(response.content)
    assert problem.status == response.status_code
    assert problem.request_id == response.headers["x-request-id"]
    return problem


def scope_of(path: str) -> Scope:
    """Make the ASGI scope of a POST, for tests that call the application directly."""
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [],
        "server": ("127.0.0.1", 80),
        "client": ("testclient", 1),  # As that of ``TestClient``.
    }


def run_asgi(
    client: TestClient,
    path: str,
    *messages: Message,
    query: bytes = b"",
    headers: Mapping[str, str] | None = None,
    on_send: Callable[[Message], None] = lambda _: None,
) -> list[Message]:
    """Post to an application by ASGI; after its messages, the client is silent.

    Args:
        client: Of a running service.
        path: Of the request.
        messages: Returned by ``receive``, one after the other.
        query: Of the request.
        headers: Of the request.
        on_send: Called with each message that the application sends.

    Returns:
        The messages that the application sends.
    """
    pending, sent = list(messages), list[Message]()

    async def receive() -> Message:
        if not pending:
            await asyncio.Event().wait()
        return pending.pop(0)

    async def send(message: Message) -> None:
        on_send(message)
        sent.append(message)

    async def call() -> None:
        scope = {**scope_of(path), "query_string": query}
        scope["headers"] = [(k.lower().encode(), v.encode()) for k, v in (headers or {}).items()]
        await client.app(scope, receive, send)

    assert client.portal is not None
    client.portal.call(call)
    return sent


def body_then_disconnect(content: bytes) -> tuple[Message, Message]:
    """Make the ASGI messages of a client that sends a whole body and disconnects."""
    body = {"type": "http.request", "body": content, "more_body": False}
    return body, {"type": "http.disconnect"}


def until(holds: Callable[[], bool]) -> None:
    """Wait for a state that only calls or files tell, by asking again and again."""
    end = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end, f"expected a state within {PATIENCE_S} s"


class ServiceProcess:
    """The service in a process of its own, on a free port; tests wait for its log lines."""

    fresh = False

    def __init__(self, models: Path, before: str = "", **environment: str) -> None:
        """Start it, and wait until its models are loaded.

        Args:
            models: The models folder.
            before: Python to run first, such as what makes a test's own network known.
            environment: Settings.
        """
        chosen = {"MODELS_DIR": str(models), "DEVICE": "cpu", "THREADS": "1", "PORT": "0"}
        chosen |= {"LOG_LEVEL": "debug"} | environment
        self._process, self._errors = start_program(
            f"{before}\n{SERVE}",
            {PREFIX + name: value for name, value in chosen.items()},
            fresh=self.fresh,
        )
        # Read as they come, whether a test waits for them or not.
        self._lines: SimpleQueue[str] = SimpleQueue()
        self._reading = Event()
        self._reading.set()
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()
        port = None
        started = False
        while port is None or not started:
            line = self.next_line()
            port = line["port"] if line["message"] == "listening" else port
            started = started or line["message"] == "started"
        self.port = int(port)
        self.url = f"http://127.0.0.1:{self.port}"

    def _read(self) -> None:
        with self._errors as lines:
            for line in lines:
                self._lines.put(line)
                self._reading.wait()
        self._lines.put("")

    def stop_reading(self) -> None:
        """Read no log lines until it has ended, but those that are buffered."""
        self._reading.clear()

    def next_line(self) -> dict[str, Any]:
        """Wait for the next log line."""
        text = self._lines.get()
        assert text, f"expected a log line, got the end (exit code {self.wait()})"
        line: dict[str, Any] = json.loads(text)
        return line

    def wait_for(self, **fields: object) -> dict[str, Any]:
        """Wait for a log line with these fields."""
        while True:
            line = self.next_line()
            if all(line.get(name) == value for name, value in fields.items()):
                return line

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._process.terminate()

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process.pid is not None
        return self._process.pid

    def wait(self) -> int:
        """Wait for its end, and return its exit code."""
        self._process.join(PATIENCE_S)
        code = self._process.exitcode
        assert code is not None, f"expected an end within {PATIENCE_S} s"
        self._reading.set()
        self._reader.join()
        return code

    def kill(self) -> None:
        """Kill it."""
        self._process.kill()
        self.wait()


class FreshService(ServiceProcess):
    """One that shares no imports, and so no memory, with services of other tests."""

    fresh = True


Service = TypeVar("Service", bound=ServiceProcess)


@contextmanager
def ended(service: Service) -> Iterator[Service]:
    """Kill a service at the end of a block."""
    try:
        yield service
    finally:
        service.kill()
