"""Single flight: equal requests at the same time are computed once."""

import asyncio
import math
from dataclasses import replace

import pytest

from app.engine.active_scans import DetectRequest
from app.engine.device_loop import DeviceLoop
from app.engine.scheduler import BACKGROUND
from app.errors import DeadlineExceeded, NetworkFailed
from app.inference.detector import Detection, Detector
from app.model.registry import LoadedModel
from tests.support.device_loops import (
    POISON,
    Faulty,
    ask,
    assert_same_landmarks,
    running,
    scan,
    wait_for,
    with_network,
)


async def held(loop: DeviceLoop, faulty: Faulty, model: LoadedModel) -> "asyncio.Task[Detection]":
    """Keep the device busy with another scan until the gate opens."""
    faulty.gate.clear()
    task = asyncio.create_task(ask(loop, model, scan(9, (20, 20, 20))))
    await wait_for(faulty.entered)
    return task


async def asked(*tasks: "asyncio.Task[Detection]") -> None:
    """Let tasks run until they wait for the device."""
    for _ in tasks:
        await asyncio.sleep(0)


def tiles_of(model: LoadedModel) -> int:
    return len(Detector(model).prepare(scan(1)).plan)


def test_identical_scans_in_flight_are_computed_once(model: LoadedModel, faulty: Faulty) -> None:
    async def scenario() -> list[Detection]:
        async with running(batch_size=4) as loop:
            blocker = await held(loop, faulty, with_network(model, faulty))
            # Each request has a model object of its own; the digest counts.
            same = [
                asyncio.create_task(ask(loop, with_network(model, faulty), scan(1)))
                for _ in range(5)
            ]
            await asked(*same)
            faulty.gate.set()
            await blocker
            return await asyncio.gather(*same)

    answers = asyncio.run(scenario())
    assert sum(faulty.batches) == 1 + tiles_of(model)
    for answer in answers:
        assert_same_landmarks(answer, Detector(model).detect(scan(1)))


def test_other_frames_and_other_models_are_other_scans(model: LoadedModel, faulty: Faulty) -> None:
    async def scenario() -> None:
        async with running(batch_size=4) as loop:
            blocker = await held(loop, faulty, with_network(model, faulty))
            other = with_network(replace(model, digest="another"), faulty)
            mine = with_network(model, faulty)
            tasks = [
                asyncio.create_task(ask(loop, mine, scan(1))),
                asyncio.create_task(ask(loop, mine, scan(1), frame=1)),
                asyncio.create_task(ask(loop, other, scan(1))),
            ]
            await asked(*tasks)
            faulty.gate.set()
            await asyncio.gather(blocker, *tasks)

    asyncio.run(scenario())
    assert sum(faulty.batches) == 1 + 3 * tiles_of(model)


def test_request_for_the_scan_of_a_job_does_not_wait_for_it(model: LoadedModel) -> None:
    asked, ordered = (
        DetectRequest(model, scan(1), math.inf, client=client).key for client in ("a", BACKGROUND)
    )
    assert asked != ordered
    assert asked == DetectRequest(model, scan(1), math.inf, client="b").key


def test_cancelled_waiter_does_not_cancel_the_others(model: LoadedModel, faulty: Faulty) -> None:
    async def scenario() -> Detection:
        async with running(batch_size=4) as loop:
            gated = with_network(model, faulty)
            blocker = await held(loop, faulty, gated)
            first, second = (asyncio.create_task(ask(loop, gated, scan(1))) for _ in range(2))
            await asked(first, second)
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            assert loop.queue.unprepared + loop.queue.waiting_tiles > 0
            faulty.gate.set()
            await blocker
            assert first.cancelled()
            return await second

    assert_same_landmarks(asyncio.run(scenario()), Detector(model).detect(scan(1)))


@pytest.mark.parametrize("first", ["patient", "hurried"])
def test_expired_waiter_does_not_cancel_the_others(
    model: LoadedModel, faulty: Faulty, first: str
) -> None:
    async def scenario() -> Detection:
        async with running(batch_size=4) as loop:
            gated = with_network(model, faulty)
            blocker = await held(loop, faulty, gated)
            now = asyncio.get_running_loop().time()
            limits_s = {"patient": 20.0, "hurried": 0.1}
            tasks = {
                name: asyncio.create_task(ask(loop, gated, scan(1), now + limits_s[name]))
                for name in sorted(limits_s, key=lambda name: name != first)
            }
            await asked(*tasks.values())
            with pytest.raises(DeadlineExceeded):
                await tasks["hurried"]
            faulty.gate.set()
            await blocker
            return await tasks["patient"]

    assert_same_landmarks(asyncio.run(scenario()), Detector(model).detect(scan(1)))


def test_scan_is_dropped_when_its_last_waiter_is_cancelled(
    model: LoadedModel, faulty: Faulty
) -> None:
    async def scenario() -> None:
        async with running(batch_size=4) as loop:
            gated = with_network(model, faulty)
            blocker = await held(loop, faulty, gated)
            both = [asyncio.create_task(ask(loop, gated, scan(1))) for _ in range(2)]
            await asked(*both)
            for task in both:
                task.cancel()
            await asyncio.gather(*both, return_exceptions=True)
            assert loop.queue.unprepared == loop.queue.waiting_tiles == 0
            faulty.gate.set()
            await blocker

    asyncio.run(scenario())
    assert sum(faulty.batches) == 1


def test_scan_that_fails_fails_for_all_waiters_and_can_be_requested_again(
    model: LoadedModel, faulty: Faulty
) -> None:
    async def scenario() -> None:
        async with running(batch_size=4) as loop:
            gated = with_network(model, faulty)
            blocker = await held(loop, faulty, gated)
            bad = scan(1, peak=2 * POISON)
            same = [asyncio.create_task(ask(loop, gated, bad)) for _ in range(3)]
            await asked(*same)
            faulty.gate.set()
            await blocker
            answers = await asyncio.gather(*same, return_exceptions=True)
            assert [type(answer) for answer in answers] == [NetworkFailed] * 3
            with pytest.raises(NetworkFailed):
                await ask(loop, gated, bad)

    asyncio.run(scenario())
