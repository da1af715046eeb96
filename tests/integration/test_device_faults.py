"""A real service with two devices, one of which fails: the other goes on."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import faulty_network as commands
from tests.support.faulty_network import command_scan, faulty_models
from tests.support.faulty_service import TILES, Faulty, assert_same, code_of
from tests.support.model_folders import TILE
from tests.support.services import until


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return faulty_models(tmp_path_factory.mktemp("faults"))


@pytest.fixture
def pair(models: Path) -> Iterator[Faulty]:
    process = Faulty(models, DEVICE="cpu:0,cpu:1")
    yield process
    process.kill()


def test_lost_device_leaves_the_other_answering_until_that_is_lost_too(pair: Faulty) -> None:
    assert pair.client.get("/readyz").json()["reason"] == "ready"
    assert code_of(pair.ask(command_scan(commands.BREAK_AND_DIE))) == "not-ready"
    until(lambda: "but not on" in pair.client.get("/readyz").json()["reason"])
    ready = pair.client.get("/readyz")
    assert ready.status_code == 200
    assert ready.json()["reason"] == "ready, but not on cpu:0: the device's thread has ended"
    for seed in (1, 2):
        assert pair.ask(command_scan(seed=seed)).status_code == 200
    statuses = [one["status"] for one in pair.client.get("/v1/models/faulty").json()["devices"]]
    assert statuses == ["the device's thread has ended", "ready"]
    assert code_of(pair.ask(command_scan(commands.BREAK_AND_DIE))) == "not-ready"
    assert pair.wait() == 1


def test_device_that_fails_its_self_check_leaves_the_other_answering(pair: Faulty) -> None:
    answers = [pair.ask(command_scan(commands.BREAK, shape=TILE)) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [507] * 3
    until(lambda: "self-check" in pair.client.get("/readyz").json()["reason"])
    assert pair.client.get("/readyz").status_code == 200
    assert pair.ask(command_scan()).status_code == 200
    pair.terminate()
    assert pair.wait() == 0


def test_identical_scans_in_flight_run_once_on_any_device(pair: Faulty) -> None:
    # One that an idle device runs may be over before the next has come.
    scan = command_scan(commands.HOLD)
    with pair.held(scan) as first:
        same = [first, pair.send(scan), pair.send(scan)]
        until(lambda: pair.metric("shared_total") >= 2)
    for answer in same:
        assert_same(answer.result(), same[0].result())
    assert pair.metric("tiles_total") == TILES
