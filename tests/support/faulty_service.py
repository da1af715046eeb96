"""A real service with a network that misbehaves on command, for tests."""

import json
import os
import re
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from tests.support import faulty_network as commands
from tests.support.faulty_network import command_scan
from tests.support.model_folders import TILE
from tests.support.services import RAW, ServiceProcess, until

TILES = 8
"""Of a command scan of the default shape."""
ONE_TILE = command_scan(commands.HOLD, shape=TILE)


class Faulty(ServiceProcess):
    """A service whose network waits, for a command to hold, until the gate is opened."""

    def __init__(self, models: Path, *, hold_loading: bool = False, **environment: str) -> None:
        """Start it, with a batch size of 4 unless told otherwise.

        Args:
            models: The models folder.
            hold_loading: Whether its first model waits for the gate while it is loaded.
            environment: Settings.
        """
        self.gate = models.parent / f"gate {time.monotonic_ns()}"
        os.mkfifo(self.gate)
        before = (
            "from pathlib import Path\nfrom tests.support.faulty_network import install\n"
            f"install(Path({str(self.gate)!r}), hold_loading={hold_loading})"
        )
        super().__init__(models, before, **({"BATCH_SIZE": "4"} | environment))
        self._clients = ThreadPoolExecutor(16)
        self.client = httpx.Client(base_url=self.url, timeout=60)

    def send(self, scan: bytes, **headers: str) -> Future[httpx.Response]:
        """Send a scan without waiting for its answer."""
        return self._clients.submit(self.ask, scan, **headers)

    def ask(self, scan: bytes, **headers: str) -> httpx.Response:
        """Send a scan and wait for its answer."""
        return self.client.post("/v1/landmarks", content=scan, headers=RAW | headers)

    def kill(self) -> None:
        """End it and its clients."""
        super().kill()
        self._clients.shutdown()
        self.client.close()

    @contextmanager
    def held(self, scan: bytes = ONE_TILE) -> Iterator[Future[httpx.Response]]:
        """Keep a device busy with a scan, whose command is to hold, until the block ends."""
        blocker = self.send(scan)
        # The pipe opens when the network does: from then on the device is held.
        with self.gate.open("wb"):
            yield blocker

    def metric(self, name: str) -> float:
        """Read a metric."""
        text = self.client.get("/metrics").text
        found = re.search(rf"^landmarkd_{name} (.*)$", text, re.MULTILINE)
        return float(found[1]) if found else 0.0

    def queued(self, tiles: int) -> None:
        """Wait until so many tiles wait, which all scans together have once each is prepared."""
        until(lambda: self.metric("queue_tiles") >= tiles)


def positions(response: httpx.Response) -> list[Any]:
    assert response.status_code == 200, response.text
    return [mark["ijk"] for mark in response.json()["landmarks"]]


def assert_same(first: httpx.Response, second: httpx.Response) -> None:
    """Compare two answers, to a thousandth of a voxel."""
    one, other = positions(first), positions(second)
    assert [ijk is None for ijk in one] == [ijk is None for ijk in other]
    assert any(ijk is not None for ijk in one), "expected some landmark to compare"
    for a, b in zip(one, other, strict=True):
        if a is not None:
            np.testing.assert_allclose(a, b, atol=1e-3)


def code_of(response: httpx.Response) -> str:
    code: str = json.loads(response.content)["code"]
    return code
