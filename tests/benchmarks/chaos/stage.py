"""Groups of clients -> entries of a ledger, while a service comes and goes on one port."""

import asyncio
import contextlib
import time
import zlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from tests.benchmarks.chaos.attempt import REFUSED, Answer, Attempt, make, post
from tests.benchmarks.chaos.clients import Chaos, Group, Kind
from tests.benchmarks.chaos.ledger import Ledger

SEED: Final = 14
BACK_OFF_S: Final = 0.5
"""Until a client that was not served tries again."""

CALM_S: Final = 100
"""Time for a scan before the chaos, whatever the setting."""

CALM: Final = Kind("alone", lambda *_: Attempt(b""), frozenset({200}), frozenset())


ACCEPTED, UNFINISHED = 202, 409

FETCHES: Final = 120
"""Times that a job is asked for, with BACK_OFF_S between; then it has to be finished."""

FETCH: Final = Kind(
    "answer of a job", lambda *_: Attempt(b""), frozenset({200}), frozenset({UNFINISHED})
)


@dataclass(frozen=True, slots=True)
class _Job:
    """A job that was accepted: where its answer will be, to what scan, and of which client."""

    path: str
    known: str
    address: str


@dataclass(eq=False, slots=True)
class Stage:
    """All clients of a chaos.

    Attributes:
        port: Where the service listens, whenever it does.
        chaos: What is sent.
        ledger: Where it is entered.
        jobs: That were accepted, and whose answers have not been fetched.
    """

    port: int
    chaos: Chaos
    ledger: Ledger = field(default_factory=Ledger)
    jobs: list["_Job"] = field(default_factory=list)
    _going: asyncio.Event = field(default_factory=asyncio.Event)
    _resting: asyncio.Event = field(default_factory=asyncio.Event)
    _idle: asyncio.Event = field(default_factory=asyncio.Event)
    _sent: int = 0
    _open: int = 0

    @contextlib.asynccontextmanager
    async def clients(self) -> AsyncIterator[None]:
        """Have all clients at hand; they send nothing before ``go``."""
        self._idle.set()
        tasks = [
            asyncio.create_task(self._send_all(group, number))
            for group in self.chaos.groups
            for number in range(group.clients)
        ]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
        for error in ended:
            if isinstance(error, Exception):
                raise error

    async def learn(self) -> None:
        """Ask for all answers that are known later, one by one."""
        for name, scan in self.chaos.known.items():
            request_id = f"alone-{name.replace(' ', '-')}"
            target = f"{scan.target}{'&' if '?' in scan.target else '?'}timeout_s={CALM_S}"
            attempt = Attempt(post(target, scan.body, request_id))
            answer = await self._make(CALM, attempt, request_id)
            self.ledger.expected[name] = answer.body

    def go(self) -> None:
        """Let the clients send."""
        self._resting.clear()
        self._going.set()

    async def rest(self) -> None:
        """Let the clients send no more, and wait until all requests have ended."""
        self._going.clear()
        self._resting.set()
        await self._idle.wait()

    async def fetch(self) -> None:
        """Fetch the answers of all jobs, each of which has to have one."""
        jobs, self.jobs = self.jobs, []
        for job in jobs:
            for left in reversed(range(FETCHES)):
                self._sent += 1
                request_id = f"fetch-{self._sent}"
                attempt = Attempt(post(f"{job.path}/scans/0", b"", request_id), known=job.known)
                kind = FETCH if left else replace(FETCH, others=frozenset())
                answer = await self._make(kind, attempt, request_id, job.address)
                if answer.status != UNFINISHED:
                    break
                await asyncio.sleep(BACK_OFF_S)

    async def _send_all(self, group: Group, number: int) -> None:
        random = np.random.default_rng((SEED, zlib.crc32(group.name.encode()), number))
        weights = np.array([kind.weight for kind in group.kinds], dtype=float)
        while True:
            await self._going.wait()
            kind = group.kinds[random.choice(len(weights), p=weights / weights.sum())]
            self._sent += 1
            request_id = f"chaos-{self._sent}"
            attempt = kind.make(request_id, random)
            answer = await self._make(kind, attempt, request_id, group.address)
            if answer.status == ACCEPTED:
                path = answer.headers["location"]
                self.jobs.append(_Job(path, attempt.known, group.address))
            turned_away = answer.status in {REFUSED, 429, 503}
            await self._pause(max(group.pause_s, BACK_OFF_S * turned_away))

    async def _pause(self, seconds: float) -> None:
        # Not wait_for: until Python 3.12 that loses a cancellation at the moment of the event.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._resting.wait()

    async def _make(
        self, kind: Kind, attempt: Attempt, request_id: str, address: str = "127.0.0.1"
    ) -> Answer:
        self._open += 1
        self._idle.clear()
        start_s = time.monotonic()
        try:
            answer = await make(self.port, address, attempt, self._resting)
        finally:
            self._open -= 1
            if not self._open:
                self._idle.set()
        self.ledger.add(request_id, kind, answer, attempt.known, start_s, time.monotonic())
        return answer
