"""Admits or refuses requests, by their number and by the bytes of their bodies.

Requests that are being received and requests in work are counted apart, so that slow uploads do not
take the places of work. Bytes count as they arrive: what a client announces reserves nothing. Of
all this, one client may have a share only.
"""

import asyncio
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Final

from app.engine.fair_budget import FairBudget, Reservation
from app.errors import Draining, QueueFull

SMOOTHING: Final = 0.8
"""Weight of the past in the running mean of a request's cost: about the last five count."""

CLIENT_SHARE: Final = 0.75
"""Of the places, and of what else is shared, that one client may hold."""


@dataclass(slots=True)
class Admission:
    """Bounds the requests in progress.

    Attributes:
        max_requests: How many may be in work when another is admitted, and how many may be received
            at once; once all of these have arrived, up to twice as many are in work. Those that one
            client sends count among its own in work.
        max_body_bytes: Maximum bytes of all their bodies together.
        backlog_s: Returns the estimated time until a device has run the tiles that wait now.
        devices: Returns the number of devices that work side by side.
        on_end: Called after every request.
        open: False once the service is draining.
        idle: Set while nothing is in progress.
        receiving: Requests whose bodies arrive.
        working: Requests that have arrived and are not answered.
        body_bytes: Bytes of the bodies of all of these.
    """

    max_requests: int
    max_body_bytes: int
    backlog_s: Callable[[], float] = lambda: 0.0
    devices: Callable[[], int] = lambda: 1
    on_end: Callable[[], None] = lambda: None
    open: bool = True
    idle: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    receiving: FairBudget = field(init=False)
    working: FairBudget = field(init=False)
    body_bytes: FairBudget = field(init=False)
    _cost_s: float = field(default=1.0, init=False)

    def __post_init__(self) -> None:
        """Start with nothing in progress."""
        self.receiving = FairBudget(self.max_requests, CLIENT_SHARE)
        self.working = FairBudget(self.max_requests, CLIENT_SHARE)
        self.body_bytes = FairBudget(self.max_body_bytes, CLIENT_SHARE)
        self.idle.set()

    @property
    def requests(self) -> int:
        """Number of requests in progress."""
        return self.receiving.used + self.working.used

    @contextmanager
    def admit(self, client: str = "") -> Iterator["AdmittedRequest"]:
        """Count a client's request as in progress while the context lasts.

        Raises:
            Draining: The service is stopping.
            QueueFull: Too many are in progress.
        """
        if not self.open:
            raise Draining("expected a running service, got one that is stopping; try another")
        self.require(self.receiving, 1, client, "requests that are received")
        # What it sends now will be in work, too.
        self.require(self.working, 1 + self.receiving.held[client], client, "requests in work")
        self.idle.clear()
        request = AdmittedRequest(self, client)
        try:
            with request.resources:
                yield request
        finally:
            if not self.requests:
                self.idle.set()
            self.on_end()

    def require(self, budget: FairBudget, amount: int, client: str, what: str) -> None:
        """Check that a client may have more of something.

        Raises:
            QueueFull: It may not; carries after how many seconds to try again.
        """
        if budget.fits(amount, client):
            return
        limit, held, whose = budget.limit, budget.used, ""
        if held + amount <= limit:
            limit, held, whose = budget.share, budget.held[client], " of one client"
        setting = "MEMORY" if budget is self.body_bytes else "MAX_IN_FLIGHT"
        raise QueueFull(
            f"expected at most {limit} {what}{whose}, got {held + amount}; the operator's limit is "
            f"LANDMARKD_{setting}",
            self.retry_after_s(),
        )

    def observe_cost(self, busy_s: float) -> None:
        """Record the device time that an answered request took."""
        self._cost_s = SMOOTHING * self._cost_s + (1 - SMOOTHING) * busy_s

    def retry_after_s(self) -> int:
        """Estimate after how many seconds half of what is in progress will have been answered."""
        # Tiles predict better than requests, but scans that are not prepared have none yet.
        busy_s = max(self._cost_s * self.requests / max(1, self.devices()), self.backlog_s())
        return max(1, math.ceil(busy_s / 2))


class AdmittedRequest:
    """A request in progress, first received, then in work.

    Attributes:
        client: Who sends it.
        bytes: Of its body that have arrived.
        memory: What it has held last; None: nothing.
        resources: Closed when it is not in progress any more.
    """

    def __init__(self, admission: Admission, client: str) -> None:
        self.client = client
        self.bytes = 0
        self.memory: Reservation | None = None
        self.resources = ExitStack()
        self._admission = admission
        self._stage = admission.receiving
        self._stage.add(1, client)
        self.resources.callback(self._end)

    def check_bytes(self, count: int) -> None:
        """Check whether so many more bytes of the body could arrive now.

        Raises:
            QueueFull: They are too many, of all requests or of this client's.
        """
        self._admission.require(self._admission.body_bytes, count, self.client, "bytes of bodies")

    def count_bytes(self, count: int) -> None:
        """Count bytes of the body that have arrived; raises as ``check_bytes``."""
        self.check_bytes(count)
        self._admission.body_bytes.add(count, self.client)
        self.bytes += count

    def start_work(self) -> None:
        """Count the request as in work: all of its body has arrived."""
        self._stage.add(-1, self.client)
        self._stage = self._admission.working
        self._stage.add(1, self.client)

    async def hold(self, budget: FairBudget, amount: int, deadline: float) -> Reservation:
        """Wait for some of a budget, to hold it as long as the request is in progress."""
        self.memory = await budget.reserve(amount, self.client, deadline)
        self.resources.callback(budget.release, self.memory)
        return self.memory

    def _end(self) -> None:
        self._stage.add(-1, self.client)
        self._admission.body_bytes.add(-self.bytes, self.client)
