"""Metrics of outcomes that are made by hand."""

from dataclasses import replace

from app.training.evaluate.metrics import (
    WITHIN_MM,
    errors_mm,
    group,
    measure_coverage,
    measure_presence,
)
from app.training.evaluate.outcomes import summarise_errors
from app.training.evaluate.tables import LENGTHS, WITHIN, format_metrics
from tests.support.outcomes import outcome

SOME = (
    outcome(0.1),
    outcome(0.3),
    outcome(1.1, status="low_confidence"),
    outcome(status="not_found"),
    outcome(present=False, status="not_found"),
    outcome(present=False, status="detected"),
    outcome(present=False, status="out_of_field"),
)


def test_errors_are_of_placed_landmarks_and_rates_count_missed_ones_too() -> None:
    cells = format_metrics(SOME)
    assert len(errors_mm(SOME)) == 3
    assert [cells[name] for name in LENGTHS] == ["0.500", "0.300", "1.020", "1.100", "1.000"]
    assert WITHIN_MM == (0.25, 0.5, 1.0, 2.0, 2.5, 3.0, 4.0)
    assert [cells[name] for name in WITHIN] == ["25.0", "50.0", "50.0", *["75.0"] * 4]


def test_nothing_placed_has_no_errors() -> None:
    assert summarise_errors([outcome(status="not_found")]) == "no landmark found of 1"


def test_missed_is_present_but_not_detected_and_invented_the_reverse() -> None:
    presence = measure_presence(SOME)
    assert (presence.present, presence.missed) == (4, 2)
    assert (presence.absent, presence.invented) == (3, 1)
    assert presence.statuses == {
        "detected": (2, 1),
        "low_confidence": (1, 0),
        "not_found": (1, 1),
        "out_of_field": (0, 1),
    }


def test_landmarks_of_unknown_presence_are_neither_missed_nor_invented() -> None:
    unsure = [outcome(present=False, known=False, status=s) for s in ("detected", "not_found")]
    presence = measure_presence([*SOME, *unsure])
    assert presence.unknown == 2
    assert replace(presence, unknown=0) == measure_presence(SOME)
    assert summarise_errors([*SOME, *unsure]) == summarise_errors(SOME)


def test_coverage_counts_errors_that_have_a_region() -> None:
    output = [outcome(0.2, region95_mm=0.3), outcome(0.4, region95_mm=0.3), outcome(0.1)]
    assert measure_coverage(output) == (1, 2)


def test_groups_keep_the_order_of_first_appearance() -> None:
    mixed = [outcome(scan="b"), outcome(scan="a"), outcome(scan="b")]
    groups = group(mixed, lambda one: one.scan)
    assert {name: len(members) for name, members in groups.items()} == {"b": 2, "a": 1}
    assert list(groups) == ["b", "a"]
