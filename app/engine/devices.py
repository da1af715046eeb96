"""Volumes of many requests -> Detections: all devices of a process, and which of them does what.

::

    scan ─► the device where the same scan is in work already
            else the sound one that is free first ─► its loop

Every device has a loop, a thread and batch sizes of its own, and a copy of every model. One that is
in trouble gets nothing until it has recovered; the others go on.
"""

import asyncio
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch

from app.compute import NamedDevice, memory_headroom
from app.engine.batch_sizes import BatchSizes, BatchTiming
from app.engine.device_loop import DeviceLoop
from app.engine.jobs import Progress, question
from app.engine.metrics import Metrics
from app.errors import ModelRefused, NotReady
from app.inference import Detection, Detector
from app.io import Volume
from app.model import LoadedModel

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class DeviceState:
    """What there is to say about a device.

    Attributes:
        name: As the setting has it.
        trouble: Why it does not work; None if it does.
        model: The copy of a model that is there.
        timings: What was measured of that model's batches there.
    """

    name: str
    trouble: str | None
    model: LoadedModel
    timings: tuple[BatchTiming, ...]


class Devices:
    """The devices of a process, each with its own loop."""

    def __init__(
        self,
        named: tuple[NamedDevice, ...],
        batch_size: int,
        metrics: Metrics,
        check: Callable[[int], None],
        on_lost: Callable[[], None],
    ) -> None:
        """Make a loop for each device, none of which has started.

        Args:
            named: The devices; a device's place among them stands for it.
            batch_size: Most tiles in a batch; 0: as measured, on each device by itself.
            metrics: Where to count.
            check: Raises if the device of a place does not answer as it should; called on its
                thread.
            on_lost: Is called if no device can be used any more.
        """
        self._on_lost = on_lost
        self._loops = tuple(
            DeviceLoop(
                BatchSizes(batch_size, partial(memory_headroom, one.device)),
                metrics,
                partial(check, place),
                self._note_lost,
                one,
            )
            for place, one in enumerate(named)
        )

    def start(self) -> None:
        """Begin to take volumes."""
        for loop in self._loops:
            loop.start()

    async def stop(self) -> None:
        """End all threads; whoever still waits is told."""
        await asyncio.gather(*(loop.stop() for loop in self._loops))

    def load(self, load_on: Callable[[torch.device], LoadedModel]) -> LoadedModel:
        """Load a model on every device that is not lost, each on its own thread, side by side.

        Args:
            load_on: Loads it on one device.

        Returns:
            The model, with its copies.

        Raises:
            ModelRefused: It is refused on one of them.
            NotReady: All are lost.
        """
        asked = {
            place: loop.submit(partial(load_on, loop.where.device))
            for place, loop in enumerate(self._loops)
            if not loop.lost
        }
        copies = {place: self._loaded(place, answer) for place, answer in asked.items()}
        if not copies:
            raise NotReady("expected a working device, but all are lost")
        first = next(iter(copies.values()))
        return first if len(self._loops) == 1 else replace(first, copies=copies)

    def _loaded(self, place: int, answer: Future[LoadedModel]) -> LoadedModel:
        try:
            return answer.result()
        except ModelRefused as refusal:
            if len(self._loops) == 1:
                raise
            raise ModelRefused(f"{refusal} (on {self._loops[place].where.name})") from refusal

    async def detect(
        self,
        model: LoadedModel,
        volume: Volume,
        *,
        deadline: float,
        frame: int,
        on_prepared: Callable[[], None],
        watch: Callable[[Progress], None] | None,
    ) -> Detection:
        """Find the landmarks of a volume on the device that is best placed to do so.

        Args:
            model: With its copies.
            volume: The scan.
            deadline: As for ``DeviceLoop.detect``, like all that follow.
            frame: Of its file.
            on_prepared: Is called once the volume need not be kept any more.
            watch: Is told of progress.

        Returns:
            The landmarks and what belongs to them.

        Raises:
            NotReady: No device works, or the one that was chosen failed.
            LandmarkdError: As ``DeviceLoop.detect``.
        """
        place = self._choose(question(model, volume, frame))
        return await self._loops[place].detect(
            Detector(model.on(place)),
            volume,
            deadline=deadline,
            frame=frame,
            on_prepared=on_prepared,
            watch=watch,
        )

    def _choose(self, asked: Hashable) -> int:
        """Choose the device that answers the same already, else the one that is free first."""
        sound = self._sound
        if not sound:
            raise NotReady(f"expected a working device, but {self.trouble}")
        same = [place for place in sound if self._loops[place].answers(asked)]
        return min(same or sound, key=lambda place: self._loops[place].load)

    def foresee_s(self, lane: Hashable, tiles: int) -> float:
        """Estimate how long a new scan would take; 0 where tiles like its were never timed."""
        loops = (self._loops[place] for place in self._sound)
        return min((loop.foresee_s(lane, tiles) for loop in loops), default=0.0)

    @property
    def working(self) -> int:
        """Count the devices that work."""
        return len(self._sound)

    @property
    def backlog_s(self) -> float:
        """Estimate when the first device will be free of the tiles that wait now."""
        return min((self._loops[place].backlog_s for place in self._sound), default=0.0)

    @property
    def depth(self) -> int:
        """Count the volumes that wait to be prepared and the tiles that no batch holds yet."""
        return sum(loop.depth for loop in self._loops)

    @property
    def oldest_s(self) -> float:
        """Say how long the oldest job has been without an answer; 0 if there is none."""
        return max(loop.oldest_s for loop in self._loops)

    @property
    def trouble(self) -> str | None:
        """Say why nothing can be answered; None if at least one device works."""
        return None if self._sound else self.complaint

    @property
    def complaint(self) -> str | None:
        """Say which devices do not work, and why; None if all do."""
        out = [loop for loop in self._loops if loop.trouble is not None]
        if len(self._loops) == 1:
            return self._loops[0].trouble
        return "; ".join(f"{loop.where.name}: {loop.trouble}" for loop in out) or None

    def batch_sizes(self) -> dict[str, Callable[[], float]]:
        """Say of each device, by name, how to read the tiles of its largest batch."""
        return {loop.where.name: partial(_largest, loop.sizes) for loop in self._loops}

    def states(self, model: LoadedModel) -> tuple[DeviceState, ...]:
        """Say of each device how it is, and what was measured of a model there."""
        return tuple(
            DeviceState(
                loop.where.name, loop.trouble, model.on(place), loop.sizes.timings(model.digest)
            )
            for place, loop in enumerate(self._loops)
        )

    @property
    def _sound(self) -> list[int]:
        return [place for place, loop in enumerate(self._loops) if loop.trouble is None]

    def _note_lost(self) -> None:
        if all(loop.lost for loop in self._loops):
            self._on_lost()


async def call_apart(function: Callable[[], Result]) -> Result:
    """Call a function that waits for devices, on a thread that keeps no process alive.

    Args:
        function: What to call.

    Returns:
        What it returns.
    """
    answer: Future[Result] = Future()

    def work() -> None:
        try:
            answer.set_result(function())
        except BaseException as error:  # noqa: BLE001 - handed to who waits
            answer.set_exception(error)

    threading.Thread(target=work, name="apart", daemon=True).start()
    return await asyncio.shield(asyncio.wrap_future(answer))


def _largest(sizes: BatchSizes) -> float:
    return sizes.largest
