"""Memory of bodies received in place: used again, never by two, and let go of at once."""

import asyncio
import gc

import pytest
import uvloop
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from app.server.http_protocol import DirectBodyProtocol
from tests.support.body_services import BODY, LIVE, OTHER, Play, Talk, play_on, post


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def play(request: pytest.FixtureRequest) -> Play:
    return play_on(request.param)


def test_memory_of_one_body_is_used_for_the_next_which_comes_whole(play: Play) -> None:
    async def client(talk: Talk) -> None:
        for path, body in (("/fill", BODY), ("/other", OTHER)) * 2:
            await talk.send(post(path) + body)
            assert await talk.status() == 200
        assert len(talk.service.places) == 4
        assert len(set(talk.service.places)) == 1

    play(client)


def test_bodies_side_by_side_do_not_meet(play: Play) -> None:
    async def client(talk: Talk) -> None:
        for _ in range(2):
            await talk.send(post("/fill") + BODY[:1_500_000])
            other = await talk.again()
            await other.send(post("/other") + OTHER)
            assert await other.status() == 200
            other.writer.close()
            await talk.send(BODY[1_500_000:])
            assert await talk.status() == 200
        assert len(set(talk.service.places)) == 2

    play(client)


def test_memory_of_a_body_given_up_is_used_only_when_nothing_comes_into_it(play: Play) -> None:
    async def client(talk: Talk) -> None:
        await talk.send(post("/impatient") + BODY[:400_000])
        assert await talk.status() == 408
        other = await talk.again()
        await other.send(post("/other") + OTHER[:1_000_000])
        await talk.send(BODY[400_000:] + LIVE)
        assert await talk.status() == 200
        await other.send(OTHER[1_000_000:])
        assert await other.status() == 200
        other.writer.close()
        assert len(set(talk.service.places)) == 1

    play(client)


def test_requests_leave_nothing_to_the_garbage_collector(play: Play) -> None:
    async def client(talk: Talk) -> None:
        for path, status in (("/fill", 200), ("/refuse", 422)) * 2:
            await talk.send(post(path) + BODY)
            assert await talk.status() == status
        leaver = await talk.again()
        await leaver.send(post("/fill") + BODY[:400_000])
        leaver.writer.close()
        await talk.service.left.wait()
        await talk.send(LIVE)
        assert await talk.status() == 200
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        kinds = (RequestResponseCycle, DirectBodyProtocol, memoryview)
        assert [held for held in gc.garbage if isinstance(held, kinds)] == []

    gc.collect()
    gc.disable()
    try:
        play(client)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.mark.parametrize("sent", [1, 1_300_000])
def test_memory_of_a_client_that_left_is_used_again(sent: int, play: Play) -> None:
    async def client(talk: Talk) -> None:
        leaver = await talk.again()
        await leaver.send(post("/fill") + BODY[:sent])
        leaver.writer.close()
        await talk.service.left.wait()
        await talk.send(post("/other") + OTHER)
        assert await talk.status() == 200
        assert len(set(talk.service.places)) == 1

    play(client)
