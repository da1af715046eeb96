"""The benchmarks of serving: whether they run, and whether their clients tell the truth."""

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TextIO

import pytest
import torch

from app.inference.detector import Detector
from app.inference.load import load_checked
from app.io.volume import read_volume
from tests.benchmarks import servers
from tests.benchmarks.__main__ import main
from tests.benchmarks.bars import idling
from tests.benchmarks.harness import DisagreementError, Run, measure_bar
from tests.benchmarks.linux import family_of, is_running
from tests.benchmarks.loads import (
    LEFT,
    LOST,
    Load,
    Message,
    Reply,
    Stream,
    multipart,
    of_kind,
    percentile,
    send,
    send_one,
)
from tests.benchmarks.report import verdict
from tests.benchmarks.rivals import serial_loop
from tests.benchmarks.rivals.plain_answer import answer_of
from tests.benchmarks.rivals.tile_batches import find_together
from tests.benchmarks.scans import PHANTOM, small_scans
from tests.benchmarks.servers import (
    BARE,
    BENTOML,
    BENTOML_BATCHES,
    LITSERVE,
    LITSERVE_BATCHES,
    LOCKED,
    OURS,
    Kind,
    Server,
    check_same,
    serving,
)
from tests.integration.test_benchmarks import SERVING
from tests.support.programs import fork_module


@pytest.fixture(autouse=True)
def _forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers need not import anew what they share; those of others start processes themselves."""

    def start(words: Sequence[str], environment: Mapping[str, str], log: TextIO) -> object:
        known = words[0] in ("app.cli", LOCKED.module, BARE.module)
        return (fork_module if known else start_module)(words, environment, log)

    start_module = servers.start_module
    monkeypatch.setattr(servers, "start_module", start)


@pytest.mark.parametrize("name", SERVING)
def test_fast_run_measures_a_bar_of_serving(name: str, tmp_path: Path) -> None:
    assert main([name, "--fast", "--results", str(tmp_path)]) == 0
    with (tmp_path / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert rows
    for row in rows:
        assert row["ours"] or "no CUDA" in row["note"] or "is not installed" in row["note"], row


def test_rival_that_is_not_installed_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    nobody = Kind("nobody", "nobody.serves", package="no_such_package")
    monkeypatch.setattr(idling, "RIVALS", (nobody,))
    missing, ours = measure_bar(idling.s5_idling, Run(fast=True))
    assert verdict(missing) == "not measured"
    assert "no_such_package is not installed" in missing.note
    assert ours.ours is not None


def test_server_that_cannot_start_is_an_error_with_its_last_words() -> None:
    lost = Kind("lost", "tests.benchmarks.rivals.nobody")
    with pytest.raises(RuntimeError, match="No module named"), serving(lost, PHANTOM):
        pass


def installed(kind: Kind) -> object:
    mark = pytest.mark.skipif(not kind.installed, reason=f"{kind.package} is not installed")
    return pytest.param(kind, marks=mark, id=kind.name)


@pytest.mark.parametrize(
    "kind", [installed(kind) for kind in (LITSERVE, LITSERVE_BATCHES, BENTOML, BENTOML_BATCHES)]
)
def test_rival_answers_and_refuses_as_a_loop_does_and_leaves_nothing_running(kind: Kind) -> None:
    contents = small_scans(3)
    expected = serial_loop.find_all(detector(), contents)
    with serving(kind, PHANTOM) as server:
        family = family_of(server.process)
        messages = tuple(
            server.message(str(number), content, keep=True)
            for number, content in enumerate(contents)
        )
        replies = send(Load(server.port, (Stream(messages, clients=4, count=12),)))
        refused = send_one(server.port, server.message("garbage", b"no scan"))
    for reply in replies:
        assert reply.status == 200
        check_same(expected[int(reply.name)], reply.body, kind.name)
    assert 400 <= refused.status < 500
    assert len(family) > 1
    assert not [number for number in family if is_running(number)]


def test_scans_whose_tiles_share_batches_get_the_landmarks_they_get_alone() -> None:
    contents = small_scans(3)
    together = find_together(detector(), [read_volume(content) for content in contents])
    alone = serial_loop.find_all(detector(), contents)
    for mine, yours in zip(together, alone, strict=True):
        check_same(json.dumps(answer_of(mine)).encode(), yours, "alone")


def detector() -> Detector:
    return Detector(load_checked(PHANTOM, torch.device("cpu")))


@pytest.mark.parametrize(
    ("kind", "target", "media", "field"),
    [
        (OURS, "/v1/landmarks?model=phantom", "application/octet-stream", b""),
        (LOCKED, "/predict", "multipart/form-data", b'name="volume"'),
        (BENTOML, "/predict", "application/octet-stream", b""),
        (BENTOML_BATCHES, "/predict", "multipart/form-data", b'name="volumes"'),
    ],
)
def test_every_server_gets_a_scan_in_the_way_it_reads_it(
    kind: Kind, target: str, media: str, field: bytes
) -> None:
    message = Server(kind, 1, 1, 0.0).message("scan", b"scan", query="?model=phantom")
    assert message.target == target
    assert message.headers is not None
    assert message.headers["Content-Type"].split(";")[0] == media
    assert field in message.body
    assert (message.body == b"scan") == (not field)


def answer(*places: tuple[float, float, float] | None) -> bytes:
    marks = [{"name": str(number), "ras_mm": place} for number, place in enumerate(places)]
    return json.dumps({"landmarks": marks}).encode()


@pytest.mark.parametrize(
    "other",
    [
        answer((1.0, 2.0, 3.0)),
        answer((1.0, 2.0, 3.002), None),
        answer((1.0, 2.0, 3.0), (4.0, 5.0, 6.0)),
        answer(None, None),
    ],
)
def test_answers_with_other_landmarks_are_caught(other: bytes) -> None:
    ours = answer((1.0, 2.0, 3.0), None)
    check_same(ours, answer((1.0, 2.0, 3.0005), None), "theirs")
    check_same(ours, b"[" + ours + b"]", "one of a list")
    with pytest.raises(DisagreementError, match="expected"):
        check_same(ours, other, "theirs")


def test_clients_leave_come_back_and_see_what_breaks() -> None:
    form, headers = multipart(b"x" * 100_000)
    stays = Message("stays", "/", form, headers, keep=True)
    messages = (stays, replace(stays, leave="uploading"), replace(stays, leave="waiting"))
    with serving(BARE, PHANTOM) as server:
        replies = send(Load(server.port, (Stream(messages, count=6),), watch=server.process))
    assert {LEFT, 200} <= {reply.status for reply in replies}
    assert all(reply.memory > 0 for reply in replies)
    (lost,) = send(Load(server.port, (Stream(messages, count=1),)))
    assert lost.status == LOST


def test_endless_stream_ends_with_those_that_count() -> None:
    ping = Message("ping", "/health")
    with serving(LOCKED, PHANTOM) as server:
        streams = Stream((replace(ping, name="endless"),)), Stream((ping,), clients=2, count=20)
        replies = send(Load(server.port, streams))
    assert len(of_kind(replies, "ping")) == 20
    assert of_kind(replies, "endless")


def test_percentiles_are_times_that_were_measured() -> None:
    replies = [Reply("x", 200, 0.0, number / 1000) for number in range(1, 21)]
    found = [percentile(replies, percent) for percent in (50, 95, 99, 100)]
    assert found == pytest.approx([10, 19, 20, 20])
