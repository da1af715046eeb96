"""The scans of ``/page/phantom.nii.gz``: made one at a time, and the latest kept."""

import asyncio
from collections import OrderedDict
from typing import Final

from app.errors import QueueFull
from app.phantom import make_phantom, scan_bytes

MAX_KEPT: Final = 4
"""Scans, of about 1 MB each."""

MAX_WAITING: Final = 4
"""Requests that wait for a scan; each scan takes about 0.1 s of one core."""


class PhantomScans:
    """Makes scans for the page without taking more than one core from other requests."""

    def __init__(self) -> None:
        self._making = asyncio.Lock()
        self._waiting = 0
        self._scans: OrderedDict[int, bytes] = OrderedDict()

    async def get(self, seed: int) -> bytes:
        """Make a scan, a .nii.gz file, or return it if it was made lately.

        Raises:
            QueueFull: Others wait for theirs.
        """
        if seed in self._scans:
            self._scans.move_to_end(seed)
            return self._scans[seed]
        if self._waiting >= MAX_WAITING:
            raise QueueFull(
                f"expected fewer than {MAX_WAITING} requests for a phantom, got {self._waiting}",
                retry_after_s=1,
            )
        self._waiting += 1
        try:
            async with self._making:
                if seed not in self._scans:
                    self._scans[seed] = await asyncio.to_thread(_make, seed)
                scan = self._scans[seed]
        finally:
            self._waiting -= 1
        if len(self._scans) > MAX_KEPT:
            self._scans.popitem(last=False)
        return scan


def _make(seed: int) -> bytes:
    return scan_bytes(make_phantom(seed))
