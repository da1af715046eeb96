"""Outcomes are written and read."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from app.inference import Detector, load_checked
from app.io import Volume
from app.phantom import write_phantoms
from app.training.data.specimens import pair_files
from app.training.evaluate.outcomes import (
    Measurement,
    compare,
    measure,
    read_outcomes,
    write_outcomes,
)
from tests.support.file_reads import count_reads
from tests.support.outcomes import landmark, outcome

PHANTOM = Path(__file__).resolve().parents[3] / "models" / "phantom"


def test_outcomes_are_read_as_they_were_written(tmp_path: Path) -> None:
    some = (
        outcome(0.1 + 0.2, warnings=("blurred", "small")),
        outcome(present=False, known=False),
        outcome(region95_mm=0.3),
    )
    assert read_outcomes(tmp_path) is None
    write_outcomes(tmp_path, Measurement(some, ("two: too large",)))
    measured = read_outcomes(tmp_path)
    assert measured is not None
    assert measured.failures == ("two: too large",)
    assert repr(measured.outcomes) == repr(some)
    assert measured.outcomes[0].error_mm == 0.1 + 0.2
    assert math.isinf(measured.outcomes[1].beyond_mm)


def test_landmark_file_of_a_scan_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_phantoms(tmp_path, count=1, seed=9000)
    (files,) = pair_files(tmp_path / "scans", tmp_path / "landmarks")
    detector = Detector(load_checked(PHANTOM, torch.device("cpu")))
    read = count_reads(monkeypatch)
    measured = measure(detector, [files], Console())
    assert (len(measured.outcomes), measured.failures) == (6, ())
    assert read == [files.landmarks]


def test_a_landmark_is_identified_if_its_own_point_is_the_nearest_of_its_group() -> None:
    """Groups are compared by themselves: a corner lies near a centre all the same."""
    truth = {"L1": np.array([0.0, 0, 36]), "L2": np.zeros(3), "L1 corner": np.array([0.0, 0, 24])}
    groups = {"L1": "centre", "L2": "centre", "L1 corner": "corner"}
    found = (
        landmark("L1", (0.0, 0.0, 23.0)),
        landmark("L2", (0.0, 0.0, 19.0)),
        landmark("L1 corner", (0.0, 0.0, 3.0)),
    )
    volume = Volume(np.zeros((80, 80, 80)), np.eye(4))
    outcomes = compare("one", volume, truth, found, groups=groups)
    assert [one.identified for one in outcomes] == [True, False, False]
    assert [one.group for one in outcomes] == list(groups.values())


def test_landmark_that_a_person_found_absent_is_known_to_be() -> None:
    found = [landmark(name, (0.0, 0.0, 0.0)) for name in ("here", "absent", "unknown")]
    truth = {"here": np.zeros(3), "absent": None}
    outcomes = compare("one", Volume(np.zeros((8, 9, 7)), np.eye(4)), truth, found)
    assert [(one.present, one.known) for one in outcomes] == [
        (True, True), (False, True), (False, False),
    ]  # fmt: skip
