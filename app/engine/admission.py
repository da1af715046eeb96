"""request at the door -> admitted or refused, before its body is read."""

import asyncio
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from app.errors import Draining, QueueFull, TooLarge

COST_MEMORY: Final = 0.8
"""Weight of the past in the running mean of a request's cost: about the last five count."""

MIB: Final = 1 << 20


@dataclass(slots=True)
class Admission:
    """Bounds what is accepted at once, in requests and in bytes of bodies.

    Attributes:
        max_requests: Requests in flight at most.
        max_bytes: Bytes of all their bodies together at most.
        max_body_bytes: Bytes of one body at most; also what a body of unknown length counts.
        backlog_s: Estimates when a device will be free of the tiles that wait now.
        devices: Counts the devices that work side by side.
        open: False once the service is draining.
        idle: Set while nothing is in flight.
    """

    max_requests: int
    max_bytes: int
    max_body_bytes: int
    backlog_s: Callable[[], float] = lambda: 0.0
    devices: Callable[[], int] = lambda: 1
    open: bool = True
    idle: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    requests: int = field(default=0, init=False)
    bytes: int = field(default=0, init=False)
    _cost_s: float = field(default=1.0, init=False)

    def __post_init__(self) -> None:
        """Begin with nothing in flight."""
        self.idle.set()

    @contextmanager
    def admit(self, content_length: int | None) -> Iterator[None]:
        """Hold a place for one request for as long as the context lasts.

        Args:
            content_length: Bytes of the body, if the client said.

        Raises:
            Draining: The service is stopping.
            TooLarge: The body is over the limit.
            QueueFull: There is no place; carries after how many seconds one is likely.
        """
        if not self.open:
            raise Draining("expected a running service, got one that is stopping; try another")
        if content_length is not None and content_length > self.max_body_bytes:
            raise TooLarge(
                f"expected a body of at most {self.max_body_bytes} bytes, got {content_length}"
            )
        size = self.max_body_bytes if content_length is None else content_length
        # One request alone is always let in: its body is within the limit of a body.
        full = self.requests > 0 and self.bytes + size > self.max_bytes
        if self.requests >= self.max_requests or full:
            raise QueueFull(
                f"expected fewer than {self.max_requests} requests and "
                f"{self.max_bytes // MIB} MiB in flight, got {self.requests} and "
                f"{self.bytes // MIB} MiB",
                retry_after_s=self.retry_after_s(),
            )
        self.requests += 1
        self.bytes += size
        self.idle.clear()
        try:
            yield
        finally:
            self.requests -= 1
            self.bytes -= size
            if not self.requests:
                self.idle.set()

    def learn(self, busy_s: float) -> None:
        """Note the device time that an answered request took."""
        self._cost_s = COST_MEMORY * self._cost_s + (1 - COST_MEMORY) * busy_s

    def retry_after_s(self) -> int:
        """Estimate after how many seconds half of what is in flight will have been answered."""
        # Tiles tell more than requests, but scans that are not prepared have none yet.
        busy_s = max(self._cost_s * self.requests / max(1, self.devices()), self.backlog_s())
        return max(1, math.ceil(busy_s / 2))
