"""The benchmarks of serving: whether they run, and whether their clients tell the truth."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.benchmarks.__main__ import main
from tests.benchmarks.bars import idling
from tests.benchmarks.harness import DisagreementError, Run, measure_bar
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
)
from tests.benchmarks.report import verdict
from tests.benchmarks.scans import PHANTOM
from tests.benchmarks.servers import BARE, LOCKED, Kind, check_same, serving
from tests.test_benchmarks import SERVING


@pytest.mark.parametrize("name", SERVING)
def test_fast_run_measures_a_bar_of_serving(name: str, tmp_path: Path) -> None:
    assert main([name, "--fast", "--results", str(tmp_path)]) == 0
    with (tmp_path / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert rows
    assert all(row["ours"] or "no CUDA" in row["note"] or row["rival"] for row in rows)


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
