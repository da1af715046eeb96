"""Turns at an upload."""

import asyncio

from app.api.upload.turns import Turns


def test_latest_of_many_gets_the_turn_once_the_one_before_has_ended() -> None:
    log: list[str] = []

    async def request(turns: Turns, name: str) -> None:
        async with turns.take("upload") as wanted:
            log.append(f"{name} begins")
            await wanted.wait()
            await asyncio.sleep(0)  # What it has received is written.
            log.append(f"{name} ends")

    async def run() -> None:
        turns = Turns()
        tasks = [asyncio.create_task(request(turns, name)) for name in "abc"]
        async with turns.take("another"):
            pass
        await asyncio.wait(tasks[:2])
        tasks[2].cancel()
        await asyncio.wait(tasks)
        async with asyncio.timeout(60), turns.take("upload"):
            log.append("free")

    asyncio.run(run())
    assert log == ["a begins", "a ends", "b begins", "b ends", "c begins", "free"]
