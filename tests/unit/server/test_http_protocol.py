"""Bodies received in place: over real sockets, on both event loops, whatever the client does."""

import asyncio

import pytest
import uvloop

from tests.support.body_services import BODY, LIVE, Play, Talk, play_on, post


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def play(request: pytest.FixtureRequest) -> Play:
    return play_on(request.param)


def test_body_is_received_in_place_and_the_connection_used_again(play: Play) -> None:
    async def client(talk: Talk) -> None:
        for turn in range(1, 4):
            await talk.send(post("/fill") + BODY)
            assert await talk.status() == 200
            assert talk.service.counted > 0.8 * turn * len(BODY)

    play(client)


def test_requests_right_behind_a_body_are_answered_in_turn(play: Play) -> None:
    async def client(talk: Talk) -> None:
        talk.writer.write((post("/fill") + BODY) * 2 + LIVE + post("/fill") + BODY)
        assert [await talk.status() for _ in range(4)] == [200] * 4

    play(client)


def test_body_that_comes_in_many_pieces_is_received_whole(play: Play) -> None:
    async def client(talk: Talk) -> None:
        await talk.send(post("/fill"))
        for start in range(0, len(BODY), 100_003):
            await talk.send(BODY[start : start + 100_003])
        assert await talk.status() == 200

    play(client)


@pytest.mark.parametrize("sent", [1, 70_000, len(BODY) - 1])
def test_client_that_leaves_in_the_middle_is_noticed(sent: int, play: Play) -> None:
    async def client(talk: Talk) -> None:
        await talk.send(post("/fill") + BODY[:sent])
        talk.writer.close()
        await talk.service.left.wait()

    play(client)


@pytest.mark.parametrize("header", ["Connection: keep-alive", "Connection: close"])
def test_client_that_leaves_after_its_body_is_noticed(header: str, play: Play) -> None:
    async def client(talk: Talk) -> None:
        await talk.send(post("/wait", header) + BODY)
        talk.writer.close()
        await talk.service.left.wait()

    play(client)


def test_body_that_nobody_waits_for_any_more_is_passed_over(play: Play) -> None:
    async def client(talk: Talk) -> None:
        await talk.send(post("/impatient") + BODY[:400_000])
        assert await talk.status() == 408
        await talk.send(BODY[400_000:] + LIVE + post("/fill") + BODY)
        assert [await talk.status() for _ in range(2)] == [200] * 2

    play(client)


def test_body_refused_by_its_first_bytes_is_passed_over(play: Play) -> None:
    async def client(talk: Talk) -> None:
        await talk.send(post("/refuse") + BODY + post("/fill") + BODY)
        assert await talk.status() == 422
        assert await talk.status() == 200

    play(client)


def test_client_that_expects_100_is_told_to_send(play: Play) -> None:
    async def client(talk: Talk) -> None:
        await talk.send(post("/fill", "Expect: 100-continue"))
        assert await talk.status() == 100
        await talk.send(BODY)
        assert await talk.status() == 200

    play(client)


def test_bytes_behind_the_last_request_are_no_request(play: Play) -> None:
    async def client(talk: Talk) -> None:
        await talk.send(post("/wait", "Connection: close") + BODY + b"\r\n\0nothing")
        talk.writer.write_eof()
        await talk.service.left.wait()
        assert await talk.reader.read() == b""

    play(client)


def test_room_that_does_not_fit_is_refused_and_the_body_passed_over(play: Play) -> None:
    async def client(talk: Talk) -> None:
        await talk.send(post("/fill", length=len(BODY) + 1) + BODY + b"x" + LIVE)
        assert [await talk.status() for _ in range(2)] == [406, 200]

    play(client)


def test_body_of_unknown_length_is_not_offered(play: Play) -> None:
    async def client(talk: Talk) -> None:
        head = b"POST /fill HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        await talk.send(head + b"3\r\nabc\r\n0\r\n\r\n")
        assert await talk.status() == 500

    play(client)
