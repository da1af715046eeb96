"""The benchmarks: whether they run, and whether they catch what they must."""

import csv
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.benchmarks import agreement
from tests.benchmarks.__main__ import main
from tests.benchmarks.bars import BARS, landmarks
from tests.benchmarks.fields import make_known_case, make_scene
from tests.benchmarks.harness import (
    Case,
    DisagreementError,
    Limit,
    Rival,
    Row,
    Run,
    measure_bar,
    measure_case,
)
from tests.benchmarks.report import verdict
from tests.benchmarks.rivals import plain_torch
from tests.benchmarks.rivals.shifts import by_convolution, by_scatter_add, by_slices

ROOT = Path(__file__).resolve().parents[2]
SHAPE = (40, 36, 44)
SERVING = [name for name in BARS if name.startswith("S") or name in {"load", "R1", "R2"}]
"""Measured in tests/integration/test_serving_benchmarks.py, chaos in test_chaos.py."""


VOTING = [name for name in BARS if name not in (*SERVING, "chaos")]


@pytest.mark.timeout(900)  # With rivals that are installed for make bench it takes minutes.
def test_fast_run_measures_every_bar_of_voting_and_keeps_its_figures(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks", *VOTING, "--fast", "--results", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert {path.stem for path in tmp_path.iterdir()} == set(VOTING)
    for path in tmp_path.iterdir():
        with path.open(newline="", encoding="utf-8") as file:
            first = next(csv.DictReader(file))
        assert {"date", "commit", "dirty", "device", "cores", "torch_threads"} <= first.keys()
        assert first["torch"].split("+")[0] == torch.__version__.split("+")[0]
        if path.stem == "V1":
            ours, theirs = float(first["ours"]), float(first["theirs"])
            assert ours > 0
            assert float(first["ratio"]) == pytest.approx(theirs / ours, 1e-3)


def fewer_votes(answer: plain_torch.Answer) -> plain_torch.Answer:
    return replace(answer, rows=answer.rows[1:])


def other_votes(answer: plain_torch.Answer) -> plain_torch.Answer:
    return replace(answer, rows=answer.rows + torch.tensor([0.0, 0.0, 0.0, 0.01, 0.0]))


def heavier_heatmaps(answer: plain_torch.Answer) -> plain_torch.Answer:
    return replace(answer, heatmaps=answer.heatmaps * 1.01)


def broken_heatmaps(answer: plain_torch.Answer) -> plain_torch.Answer:
    return replace(answer, heatmaps=answer.heatmaps * float("nan"))


def other_peaks(answer: plain_torch.Answer) -> plain_torch.Answer:
    return replace(answer, peaks=answer.peaks + 3)


@pytest.mark.parametrize(
    "spoil", [fewer_votes, other_votes, heavier_heatmaps, broken_heatmaps, other_peaks]
)
def test_wrong_rival_is_caught_before_anything_is_timed(
    spoil: Callable[[plain_torch.Answer], plain_torch.Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = plain_torch.find
    monkeypatch.setattr(plain_torch, "find", lambda *given: spoil(right(*given)))
    with pytest.raises(DisagreementError, match="ours and plain torch: expected"):
        next(measure_bar(landmarks.v1_landmarks, Run(fast=True)))


def test_disagreement_ends_the_command_with_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def disagree(_run: Run) -> Iterator[Case]:
        yield case(ours=1.0, theirs=2.0)

    monkeypatch.setitem(BARS, "V1", disagree)
    assert main(["V1", "--fast", "--results", str(tmp_path)]) == 1
    assert "V1: the two sides differ. a number, ours and another" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_missed_bar_is_reported_and_no_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def miss(_run: Run) -> Iterator[Case]:
        yield case(ours=1.0, theirs=1.0, limit=Limit(1e9))

    monkeypatch.setitem(BARS, "V1", miss)
    assert main(["V1", "--fast"]) == 0
    assert "NOT met" in capsys.readouterr().out


def test_command_refuses_bars_that_do_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["V99"])
    assert "got V99" in capsys.readouterr().err


def case(*, ours: float, theirs: float, limit: Limit | None = None) -> Case:
    def agree(mine: float, yours: float) -> None:
        agreement.same_numbers(torch.tensor([mine]), torch.tensor([yours]), 1e-6)

    return Case("a number", lambda: ours, (Rival("another", lambda: theirs, agree, limit),))


def test_every_round_of_a_case_times_both_sides_in_turn() -> None:
    calls: list[str] = []

    def side(name: str) -> Callable[[], None]:
        def run() -> None:
            if not calls or calls[-1] != name:
                calls.append(name)
            torch.zeros(200_000).exp()

        return run

    rival = Rival("theirs", side("theirs"), lambda *_: None)
    (row,) = measure_case(Case("turns", side("ours"), (rival,)), rounds=3)
    assert calls == ["ours", "theirs"] * 5  # The check, the warm-up, three rounds.
    assert row.rounds == 3


def test_rounds_of_a_short_case_go_on_for_a_while() -> None:
    (row,) = measure_case(case(ours=1.0, theirs=1.0), rounds=1, case_s=0.5)
    assert row.rounds > 3


@pytest.mark.parametrize(
    ("limit", "ours", "theirs", "word", "ratio"),
    [
        (Limit(10.0), 1.0, 10.0, "met", 10.0),
        (Limit(10.0), 1.0, 9.0, "NOT met", 9.0),
        (Limit(4.0, "cost"), 4.0, 1.0, "met", 4.0),
        (Limit(4.0, "cost"), 5.0, 1.0, "NOT met", 5.0),
        (Limit(1.5, "figure"), 1.5, 19.5, "met", 13.0),
        (Limit(1.5, "figure"), 1.6, None, "NOT met", None),
        (Limit(None, "cost"), 6.0, 2.0, "", 3.0),
        (Limit(0, "figure"), 0.0, None, "met", None),
        (Limit(0, "figure"), float("nan"), None, "NOT met", None),
        (Limit(5.0), None, None, "not measured", None),
        (None, 1.0, 2.0, "", 2.0),
    ],
)
def test_verdict_follows_from_the_figures(
    limit: Limit | None, ours: float | None, theirs: float | None, word: str, ratio: float | None
) -> None:
    row = Row("something", ours, theirs=theirs, limit=limit)
    assert verdict(row) == word
    assert row.ratio == (None if ratio is None else pytest.approx(ratio))


def test_votes_that_the_last_bit_decides_are_no_disagreement() -> None:
    rows = torch.tensor([[0.0, 0.5, 1.0, 2.0, 3.0], [1.0, 0.7, 4.0, 5.0, 6.0]])
    agreement.same_rows(rows, rows[1:], 0.5)
    with pytest.raises(DisagreementError, match="expected 1 rows, got 2"):
        agreement.same_rows(rows, rows[1:], 0.4)


@pytest.mark.parametrize(
    ("dtype", "shared"),
    [(torch.float32, False), (torch.float32, True), (torch.bfloat16, False)],
)
def test_scene_has_a_ball_of_votes_around_every_landmark(dtype: torch.dtype, shared: bool) -> None:
    scene = make_scene(SHAPE, 3, dtype=dtype, shared_offsets=shared)
    votes = plain_torch.find(scene.field, scene.threshold).rows
    for landmark, centre in enumerate(scene.centres):
        rows = votes[votes[:, 0] == landmark]
        volume = 4 / 3 * np.pi * scene.radius**3
        assert len(rows) == pytest.approx(volume, rel=0.1)
        assert rows[:, 1].median() == pytest.approx(0.83, abs=0.05)
        assert np.linalg.norm(rows[:, 2:].median(0).values.numpy() - centre) < 0.3


def test_known_case_is_axis_major_and_its_field_a_view() -> None:
    known = make_known_case((5, 6, 7), 3, (5, 6, 7), 0.9)
    field = known.field()
    assert field.offsets[1, 2, 3, 4, 5] == known.offsets[3, 4, 5, 2 + 3]
    assert field.scores.data_ptr() == known.probs.ctypes.data


def test_three_ways_to_shift_and_sum_agree_with_a_sum_by_hand() -> None:
    x = torch.tensor([[[[1.0, 2.0]], [[10.0, 20.0]], [[100.0, 200.0]]]])
    mask = torch.tensor([[1.0, 0.0]])
    for way in (by_slices, by_convolution, by_scatter_add):
        assert way(x, mask, 1).tolist() == [[[[1.0, 10.0, 100.0, 0.0]]]]
