"""chaos: ten minutes of everything at once, and a ledger that must balance."""

import asyncio
import json
import os
import re
import shutil
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from app.api.dependencies import hash_key
from app.compute.heap_trim import DELAY_S
from tests.benchmarks.chaos.clients import ADMIN_KEY, BODY_LIMIT, make_chaos
from tests.benchmarks.chaos.ledger import Ledger
from tests.benchmarks.chaos.stage import Stage
from tests.benchmarks.harness import DisagreementError, Limit, Row, Run
from tests.benchmarks.linux import resident_bytes
from tests.benchmarks.loads import HANG_S, Message, send_one
from tests.benchmarks.scans import PHANTOM, SKULL
from tests.benchmarks.servers import OURS, Server, free_port, serving
from tests.support.faulty_network import faulty_models

CHAOTIC: Final = replace(OURS, name="chaos", module="tests.benchmarks.chaos.service")

SETTINGS: Final = {
    "ADMIN_KEY_HASH": hash_key(ADMIN_KEY),
    "BODY_TIMEOUT_S": "20",
    "HEADER_TIMEOUT_S": "3",
    "MAX_BODY_BYTES": str(BODY_LIMIT),
    "MEMORY": "1GiB",  # Two huge scans.
    "TIMEOUT_S": "20",
}
SHORT: Final = {"DRAIN_S": "5", "TIMEOUT_S": "5"}
"""Besides, for a short chaos: no rest waits for long, however slow the machine."""

BROKEN: Final = "broken"
"""Name of a model that is never served."""

LIVES: Final = (0.2, 0.6, 0.2)
"""Shares of the time that the service runs before it is stopped, under load, and started again."""

WARM: Final = 1 / 3
"""Share of a life before its memory is first looked at."""

FAST_S: Final = 20.0
STOPPING_S: Final = 2.0
"""Of load before the service is told to stop, which goes on until it has."""

SETTLE_S: Final = 10.0
HALF_COPIED_S: Final = 4.0

NONE: Final = Limit(0, "figure")
GROWTH: Final = Limit(1.05, "figure")


@dataclass(frozen=True, slots=True)
class Life:
    """What is seen of the service between start and stop.

    Attributes:
        warm: Bytes that it holds when it rests, after the warm-up,
        end: and at the end.
        left: Requests in flight and tiles in its queue, at the end.
        exit_code: Of the process.
        stop_s: From SIGTERM to its end.
    """

    warm: int
    end: int
    left: float
    exit_code: int
    stop_s: float


def chaos(run: Run) -> Iterator[Row]:
    """Good, bad, huge, cancelled, slow and unread requests, reloads, faults and restarts."""
    seconds = FAST_S if run.fast else 60 * run.minutes
    with tempfile.TemporaryDirectory() as folder:
        ledger, lives = asyncio.run(_play(Path(folder), seconds, fast=run.fast))
    count = len(ledger.entries)
    note = ", ".join(f"{number} x {what}" for what, number in sorted(ledger.outcomes().items()))
    yield _count(f"outcomes of {count} requests that are not allowed", ledger.odd_outcomes(), note)
    yield _count("answers above 500 but 503, 504 and 507", ledger.undocumented())
    yield _count(f"wrong answers among {count}", ledger.mistakes())
    yield _count(
        "requests that clients and the service's log tell differently", ledger.imbalances()
    )
    missing = [] if run.fast else ledger.missing()
    yield _count("kinds of requests that never had their own outcome", missing)
    yield from _rows_of(lives, fast=run.fast)
    alive = [entry for entry in ledger.entries if entry.kind.name == "/livez"]
    slowest = max(entry.seconds for entry in alive if entry.status == 200)
    yield Row("slowest answer of /livez", 1e3 * slowest, "ms", note=f"{len(alive)} times")
    for name in ("small", "huge"):
        tried = [entry.status for entry in ledger.entries if entry.kind.name == name]
        share = 100 * tried.count(200) / len(tried)
        yield Row(f"{name} scans answered with landmarks", share, "%", note=f"{len(tried)} scans")


def _count(what: str, found: Sequence[str], note: str = "") -> Row:
    worst = "; ".join(f"{number} x {one}" for one, number in Counter(found).most_common(8))
    return Row(what, len(found), "", limit=NONE, note="; ".join(filter(None, (note, worst))))


def _rows_of(lives: Sequence[Life], *, fast: bool) -> Iterator[Row]:
    for number, life in enumerate(lives, 1):
        note = f"{life.warm >> 20} to {life.end >> 20} MiB"
        limit = Limit(None if fast else GROWTH.value, "figure")
        what = f"life {number}: memory at its end over that after its warm-up"
        yield Row(what, life.end / life.warm, "x", limit=limit, note=note)
    left = sum(life.left for life in lives)
    yield Row("requests in flight and tiles in the queue afterwards", left, "", limit=NONE)
    codes = [life.exit_code for life in lives]
    yield Row("stops under load that did not end with 0", sum(map(bool, codes)), "", limit=NONE)
    yield Row("longest stop under load", max(life.stop_s for life in lives), "s")


async def _play(folder: Path, seconds: float, *, fast: bool) -> tuple[Ledger, list[Life]]:
    models = _copy_models(folder)
    stage = Stage(free_port(), make_chaos(fast=fast))
    async with stage.clients():
        lives = [await _live(stage, models, share * seconds, fast=fast) for share in LIVES]
        await stage.rest()
    return stage.ledger, lives


def _copy_models(folder: Path) -> Path:
    """Make the models folder: two real models, one that misbehaves, and one that is broken."""
    models = faulty_models(folder)
    for model in (PHANTOM, SKULL):
        shutil.copytree(model, models / model.name)
    (models / BROKEN).mkdir()
    (models / BROKEN / "model.toml").write_text("name = [[[[")
    return models


async def _live(stage: Stage, models: Path, seconds: float, *, fast: bool) -> Life:
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(_serving(stage, models, fast=fast))
        await asyncio.to_thread(_require_models, server)
        if stage.ledger.stops:
            # Its clients have been waiting for it.
            last_start, _ = stage.ledger.stops[-1]
            stage.ledger.stops[-1] = last_start, time.monotonic()
        else:
            await stage.learn()
        rest_s = 0.0 if fast else DELAY_S + 2  # It tidies up after its work.
        async with _half_copied(models / SKULL.name):
            stage.go()
            await asyncio.sleep(WARM * seconds)
            warm, _ = await _rest(stage, server, rest_s)
            stage.go()
            await asyncio.sleep((1 - WARM) * seconds)
        end, left = await _rest(stage, server, rest_s)
        await stage.fetch()
        stage.go()
        await asyncio.sleep(STOPPING_S)
        start = time.monotonic()
        stage.ledger.stops.append((start, float("inf")))
        code = await asyncio.to_thread(_stop, server.process)
        stop_s = time.monotonic() - start
        stage.ledger.log += _requests_of(server.log)
    return Life(warm, end, left, code, stop_s)


@asynccontextmanager
async def _serving(stage: Stage, models: Path, *, fast: bool) -> AsyncIterator[Server]:
    settings = SETTINGS | {"MODELS_DIR": str(models), "PORT": str(stage.port)}
    settings["JOBS"] = str(models.parent / "jobs")  # The same in all lives.
    if fast:
        settings |= SHORT
    service = serving(CHAOTIC, PHANTOM, **settings)
    server = await asyncio.to_thread(service.__enter__)
    try:
        yield server
    finally:
        await asyncio.to_thread(service.__exit__, None, None, None)


def _require_models(server: Server) -> None:
    """Refuse to go on where a sound model is not served: every request for it would be an odd 404.

    Raises:
        DisagreementError: With the reasons, such as a library that was installed meanwhile.
    """
    listed = json.loads(send_one(server.port, Message("models", "/v1/models")).body)["models"]
    reasons = {one["name"]: one["status"] for one in listed if one["status"] != "ready"}
    if reasons.keys() != {BROKEN}:
        raise DisagreementError(f"expected all models but {BROKEN} to be served, got {reasons}")


async def _rest(stage: Stage, server: Server, rest_s: float) -> tuple[int, float]:
    """Wait until the service rests; gives the bytes that it holds, and what is left of its work."""
    await stage.rest()
    left = await asyncio.to_thread(_settle, server)
    await asyncio.sleep(rest_s)
    return resident_bytes(server.process), left


def _settle(server: Server) -> float:
    """Wait for what clients have left behind; gives what is there after SETTLE_S."""
    end = time.monotonic() + SETTLE_S
    while (left := _left(server)) and time.monotonic() < end:
        time.sleep(0.2)
    return left


def _stop(process: int) -> int:
    """Tell a process to stop; gives its exit code, or that of SIGKILL if it did not stop."""
    os.kill(process, signal.SIGTERM)
    killer = threading.Timer(HANG_S, os.kill, (process, signal.SIGKILL))
    killer.start()
    ended = os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)
    killer.cancel()
    assert ended is not None
    return ended.si_status


def _left(server: Server) -> float:
    metrics = send_one(server.port, Message("metrics", "/metrics")).body.decode()
    names = ("requests_in_flight", "queue_tiles", "scans_preparing", "job_scans_queued")
    found = [re.search(rf"^landmarkd_{name} (\S+)", metrics, re.MULTILINE) for name in names]
    return sum(float(one[1]) if one else float("nan") for one in found)


def _requests_of(log: Path) -> list[dict[str, object]]:
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    return [line for line in lines if line.get("message") == "request"]


@asynccontextmanager
async def _half_copied(folder: Path) -> AsyncIterator[None]:
    """Leave a model folder half-copied, again and again, as a slow update of it would."""
    paths = [folder / name for name in ("weights.safetensors", "selfcheck.safetensors")]
    whole = {path: path.read_bytes() for path in paths}

    def write(parts: int) -> None:
        for path, content in whole.items():
            path.write_bytes(content[: len(content) // parts])

    async def copy() -> None:
        while True:
            await asyncio.sleep(2 * HALF_COPIED_S)
            write(2)
            await asyncio.sleep(HALF_COPIED_S)
            write(1)

    copying = asyncio.create_task(copy())
    try:
        yield
    finally:
        copying.cancel()
        await asyncio.gather(copying, return_exceptions=True)
        write(1)
