"""Admits or refuses requests before their bodies are read."""

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from app.errors import Draining, QueueFull, TooLarge

SMOOTHING: Final = 0.8
"""Weight of the past in the running mean of a request's cost: about the last five count."""

MIB: Final = 1 << 20

CLIENT_SHARE: Final = 0.75
"""Of the places, and of what else is shared, that one client may hold."""


@dataclass(slots=True)
class Admission:
    """Bounds the requests in flight, in number and in bytes of their bodies.

    Attributes:
        max_requests: Maximum number of requests in flight.
        max_bytes: Maximum bytes of all their bodies together.
        max_body_bytes: Maximum bytes of one body; a body of unknown length counts as this.
        backlog_s: Returns the estimated time until a device has run the tiles that wait now.
        devices: Returns the number of devices that work side by side.
        open: False once the service is draining.
        idle: Set while nothing is in flight.
        requests: Number of requests in flight.
        clients: Likewise, by client.
        bytes: Bytes of their bodies.
    """

    max_requests: int
    max_bytes: int
    max_body_bytes: int
    backlog_s: Callable[[], float] = lambda: 0.0
    devices: Callable[[], int] = lambda: 1
    open: bool = True
    idle: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    requests: int = field(default=0, init=False)
    clients: Counter[str] = field(default_factory=Counter, init=False)
    bytes: int = field(default=0, init=False)
    _cost_s: float = field(default=1.0, init=False)

    def __post_init__(self) -> None:
        """Start with nothing in flight."""
        self.idle.set()

    @contextmanager
    def admit(self, content_length: int | None, client: str = "") -> Iterator[None]:
        """Count one request as in flight while the context lasts.

        Args:
            content_length: Bytes of the body; None if unknown.
            client: Who sends it: one client leaves some of the places to others.

        Raises:
            Draining: The service is stopping.
            TooLarge: The body is over the limit.
            QueueFull: Too much is in flight; carries after how many seconds to try again.
        """
        if not self.open:
            raise Draining("expected a running service, got one that is stopping; try another")
        if content_length is not None and content_length > self.max_body_bytes:
            raise TooLarge(
                f"expected a body of at most {self.max_body_bytes} bytes, got {content_length}"
            )
        size = self.max_body_bytes if content_length is None else content_length
        # A single request is always admitted: its body is within the limit of a body.
        full = self.requests > 0 and self.bytes + size > self.max_bytes
        if self.requests >= self.max_requests or full:
            raise QueueFull(
                f"expected fewer than {self.max_requests} requests and "
                f"{self.max_bytes // MIB} MiB in flight, got {self.requests} and "
                f"{self.bytes // MIB} MiB",
                retry_after_s=self.retry_after_s(),
            )
        share = math.ceil(CLIENT_SHARE * self.max_requests)
        if self.clients[client] >= share:
            raise QueueFull(
                f"expected fewer than {share} requests of one client in flight, got {share}",
                retry_after_s=self.retry_after_s(),
            )
        self.requests += 1
        self.clients[client] += 1
        self.bytes += size
        self.idle.clear()
        try:
            yield
        finally:
            self.requests -= 1
            self.clients[client] -= 1
            self.clients += Counter()  # Drops clients without requests.
            self.bytes -= size
            if not self.requests:
                self.idle.set()

    def observe_cost(self, busy_s: float) -> None:
        """Record the device time that an answered request took."""
        self._cost_s = SMOOTHING * self._cost_s + (1 - SMOOTHING) * busy_s

    def retry_after_s(self) -> int:
        """Estimate after how many seconds half of what is in flight will have been answered."""
        # Tiles predict better than requests, but scans that are not prepared have none yet.
        busy_s = max(self._cost_s * self.requests / max(1, self.devices()), self.backlog_s())
        return max(1, math.ceil(busy_s / 2))
