"""Memory that bodies are received into: never shared, and freed with the request that needed it."""

import asyncio
import gc

import pytest
import uvloop
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from app.server.http_protocol import DirectBodyProtocol
from tests.support.body_services import BODY, LIVE, OTHER, Client, Play, Talk, play_on, post


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def play(request: pytest.FixtureRequest) -> Play:
    return play_on(request.param)


def test_bodies_received_side_by_side_do_not_mix(play: Play) -> None:
    async def client(talk: Talk) -> None:
        await talk.send(post("/fill") + BODY[:1_500_000])
        other = await talk.again()
        await other.send(post("/other") + OTHER)
        assert await other.status() == 200
        other.writer.close()
        await talk.send(BODY[1_500_000:])
        assert await talk.status() == 200
        assert len(talk.service.buffers) == 2

    play(client)


def test_answered_body_is_freed(play: Play) -> None:
    async def client(talk: Talk) -> None:
        await talk.send(post("/fill") + BODY)
        assert await talk.status() == 200
        assert talk.service.buffers_alive() == 0

    without_garbage_collection(play, client)


def test_body_given_up_is_freed_while_its_rest_still_arrives(play: Play) -> None:
    async def client(talk: Talk) -> None:
        await talk.send(post("/impatient") + BODY[:400_000])
        assert await talk.status() == 408
        assert talk.service.buffers_alive() == 0
        await talk.send(BODY[400_000:] + LIVE)
        assert await talk.status() == 200

    without_garbage_collection(play, client)


@pytest.mark.parametrize("sent", [1, 1_300_000])
def test_body_of_a_client_that_left_is_freed(sent: int, play: Play) -> None:
    async def client(talk: Talk) -> None:
        leaver = await talk.again()
        await leaver.send(post("/fill") + BODY[:sent])
        leaver.writer.close()
        await talk.service.left.wait()
        await talk.send(LIVE)
        assert await talk.status() == 200
        assert talk.service.buffers_alive() == 0

    without_garbage_collection(play, client)


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

    without_garbage_collection(play, client)


def without_garbage_collection(play: Play, client: Client) -> None:
    gc.collect()
    gc.disable()
    try:
        play(client)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
