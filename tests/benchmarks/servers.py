"""model folder -> a server that is ready, ours or a rival's: a process of its own on loopback."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from http.client import HTTPConnection, HTTPException
from importlib.util import find_spec
from pathlib import Path
from typing import Final, TextIO

import numpy as np

from tests.benchmarks.harness import DisagreementError, Limit, Row
from tests.benchmarks.linux import family_of, is_running, title_of
from tests.benchmarks.loads import Load, Message, Stream, multipart, send
from tests.benchmarks.surroundings import ROOT

START_S: Final = 300.0
"""BentoML imports torch in two processes, one after the other; on a busy machine it is slow."""

STOP_S: Final = 30.0
"""Ray stops its processes one after the other."""

POLL_S: Final = 0.005

REPLICA: Final = re.compile(rb'replica="(\w+)"')

SAME_MM: Final = 1e-3
"""Two servers with one model may differ by this: batches are summed in another order."""

OTHER_BATCHES_MM: Final = 5e-3
"""A whole skull in a batch of 8 rounds otherwise than alone. A vote at the edge of what counts is
then in or out, and one of some hundred moves a landmark by thousandths of a mm."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Who serves.

    Attributes:
        name: As in the table.
        module: Is run; empty: our command.
        words: Follow folder, port and device on its command line.
        package: Must be installed.
        form: Field of the form in which it gets a scan; empty: it gets the bare file.
        ready: Answers 200 when it is.
        target: Path that takes scans.
        same_mm: Farthest that its landmarks may lie from ours.
    """

    name: str
    module: str = ""
    words: tuple[str, ...] = ()
    package: str = "fastapi"
    form: str = "volume"
    ready: str = "/health"
    target: str = "/predict"
    same_mm: float = SAME_MM

    @property
    def installed(self) -> bool:
        """Whether it can be run here."""
        return find_spec(self.package) is not None


OURS: Final = Kind("landmarkd", form="", ready="/readyz", target="/v1/landmarks")
LOCKED: Final = Kind("FastAPI with a lock", "tests.benchmarks.rivals.fastapi_lock")
LITSERVE: Final = Kind("LitServe", "tests.benchmarks.rivals.litserve_app", ("1",), "litserve")
LITSERVE_BATCHES: Final = replace(
    LITSERVE, name="LitServe, batches of 8", words=("8",), same_mm=OTHER_BATCHES_MM
)
BENTOML: Final = Kind(
    "BentoML", "tests.benchmarks.rivals.bentoml_app", ("1",), "bentoml", "", "/readyz"
)
BENTOML_BATCHES: Final = Kind(
    "BentoML, batches of 8",
    "tests.benchmarks.rivals.bentoml_app",
    ("8",),
    "bentoml",
    "volumes",
    "/readyz",
    same_mm=OTHER_BATCHES_MM,
)
BARE: Final = Kind("bare socket", "tests.benchmarks.rivals.bare_socket")
ONE_REPLICA: Final = replace(
    OURS, name="1 replica", module="tests.benchmarks.ray_replicas", words=("1",), package="ray"
)
TWO_REPLICAS: Final = replace(ONE_REPLICA, name="2 replicas", words=("2",))
RIVALS: Final = (LOCKED, LITSERVE, LITSERVE_BATCHES, BENTOML, BENTOML_BATCHES)


@dataclass(frozen=True, slots=True)
class Server:
    """A server that answers.

    Attributes:
        kind: Who serves.
        port: On loopback.
        process: Its number; its children may be more.
        start_s: From its start until it said that it was ready.
        log: What it writes, until it has ended.
    """

    kind: Kind
    port: int
    process: int
    start_s: float
    log: Path = Path()

    def message(self, name: str, content: bytes, *, keep: bool = False, query: str = "") -> Message:
        """Make the request that brings a scan to this server."""
        target = self.kind.target + ("" if self.kind.target == "/predict" else query)
        body, headers = content, {"Content-Type": "application/octet-stream"}
        if self.kind.form:
            body, headers = multipart(content, self.kind.form)
        return Message(name, target, body, headers, keep=keep)


@contextmanager
def serving(kind: Kind, model: Path, **settings: str) -> Iterator[Server]:
    """Run a server with one model until the block ends.

    Args:
        kind: Who serves.
        model: The model folder.
        settings: Of ours, such as ``MAX_BODY_BYTES``; all heed ``DEVICE`` and ``PORT``.

    Yields:
        The server, ready.
    """
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "log").open("w+") as log:
        models = Path(folder) / "models"
        models.mkdir()
        (models / model.name).symlink_to(model.resolve(), target_is_directory=True)
        port = int(settings.get("PORT", "0")) or free_port()
        start = time.perf_counter()
        process = start_module(
            _words(kind, model, port, settings.get("DEVICE", "cpu")),
            os.environ | _environment(kind, models, port, settings),
            log,
        )
        try:
            _wait(process, port, kind.ready, log.name)
            start_s = time.perf_counter() - start
            yield Server(kind, port, process.pid, start_s, Path(log.name))
        finally:
            _stop(process)


def check_same(ours: bytes, theirs: bytes, whose: str, same_mm: float = SAME_MM) -> None:
    """Compare the landmarks of two answers.

    Raises:
        DisagreementError: A landmark is there in one only, or lies elsewhere.
    """
    mine, yours = places_of(ours), places_of(theirs)
    if list(mine) != list(yours):
        raise DisagreementError(f"expected landmarks {list(yours)}, got {list(mine)}")
    for name, place in yours.items():
        # NaN stands for "not found", which both must say.
        apart = np.linalg.norm(np.nan_to_num(mine[name] - place))
        if np.isnan(mine[name]).any() != np.isnan(place).any() or not apart <= same_mm:
            raise DisagreementError(f"{name}: expected {place} as {whose}, got {mine[name]}")


def places_of(answer: bytes) -> dict[str, np.ndarray]:
    """Read names and places in mm, RAS, off an answer; NaN where nothing was found."""
    missing = (np.nan,) * 3
    found = json.loads(answer)
    if isinstance(found, list):  # One scan was sent, in a list that may be joined with others.
        (found,) = found
    return {
        mark["name"]: np.array(mark["ras_mm"] or missing, dtype=np.float64)
        for mark in found["landmarks"]
    }


def answers(server: Server, contents: Sequence[bytes]) -> list[bytes]:
    """Get the answers to some scans, one after the other."""
    messages = tuple(server.message("check", content, keep=True) for content in contents)
    replies = send(Load(server.port, (Stream(messages, count=len(messages)),)))
    for reply in replies:
        if reply.status != 200:
            raise DisagreementError(
                f"{server.kind.name}: expected status 200, got {reply.status} {reply.body[:200]!r}"
            )
    return [reply.body for reply in replies]


def replicas_of(server: Server, headers: Mapping[str, str] | None = None) -> set[str]:
    """Ask which replicas answer; each answer is that of one of them."""
    probe = Message("probe", "/metrics", headers=headers, keep=True)
    probes = Stream((probe,), clients=4, count=16)
    replies = send(Load(server.port, (probes,)))
    return {name.decode() for reply in replies for name in REPLICA.findall(reply.body)}


def replica_processes(server: Server) -> list[int]:
    """List the processes of replicas."""
    members = family_of(server.process)
    return [member for member in members if title_of(member).startswith("ray::ServeReplica")]


def absent(kind: Kind, what: str, limit: Limit | None = None) -> Row:
    """Say that a rival is not here."""
    return Row(what, None, rival=kind.name, limit=limit, note=f"{kind.package} is not installed")


def start_module(
    words: Sequence[str], environment: Mapping[str, str], log: TextIO
) -> "subprocess.Popen[bytes]":
    """Run a module, named by the first word, in a session of its own; a file gets all it says."""
    return subprocess.Popen(
        [sys.executable, "-m", *words],
        cwd=ROOT,
        env=environment,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )


def _words(kind: Kind, model: Path, port: int, device: str) -> list[str]:
    if not kind.module:
        return ["app.cli", "serve"]
    return [kind.module, str(model), str(port), device, *kind.words]


def _environment(kind: Kind, models: Path, port: int, settings: dict[str, str]) -> dict[str, str]:
    chosen = {"MODELS_DIR": str(models), "PORT": str(port), "DEVICE": "cpu"} | settings
    ours = {f"LANDMARKD_{name}": value for name, value in chosen.items()}
    if not kind.module:
        return ours
    # What others put into these folders goes with them, even if they are killed.
    home = str(models.parent / "bentoml")
    return ours | {
        "TMPDIR": str(models.parent),
        "BENTOML_HOME": home,
        "BENTOML_DO_NOT_TRACK": "True",
    }


def free_port() -> int:
    """Find a TCP port on loopback that nobody listens on, for a program that takes no 0."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def _wait(process: "subprocess.Popen[bytes]", port: int, path: str, log: str) -> None:
    """Ask until it is ready; no server of others says so by itself."""
    end = time.perf_counter() + START_S
    while time.perf_counter() < end:
        connection = HTTPConnection("127.0.0.1", port, timeout=START_S)
        try:
            connection.request("GET", path)
            if connection.getresponse().status == 200:
                return
        except (OSError, HTTPException):
            if process.poll() is not None:
                break
        finally:
            connection.close()
        time.sleep(POLL_S)
    raise RuntimeError(f"expected a server that is ready, got: {Path(log).read_text()[-2000:]}")


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """Ask it to stop, and end what is left of it and its children."""
    family = family_of(process.pid)
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for child in family:
        try:
            os.kill(child, signal.SIGKILL)
        except ProcessLookupError:
            continue
    # A server that still ends would take part in whatever is measured next.
    end = time.perf_counter() + STOP_S
    while any(is_running(child) for child in family) and time.perf_counter() < end:
        time.sleep(POLL_S)
