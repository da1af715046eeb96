"""Outcomes are written and read."""

import math
from pathlib import Path

from app.training.evaluate.outcomes import Measurement, read_outcomes, write_outcomes
from tests.support.outcomes import outcome


def test_outcomes_are_read_as_they_were_written(tmp_path: Path) -> None:
    some = (outcome(0.1 + 0.2), outcome(present=False, known=False), outcome(region95_mm=0.3))
    assert read_outcomes(tmp_path) is None
    write_outcomes(tmp_path, Measurement(some, ("two: too large",)))
    measured = read_outcomes(tmp_path)
    assert measured is not None
    assert measured.failures == ("two: too large",)
    assert repr(measured.outcomes) == repr(some)
    assert measured.outcomes[0].error_mm == 0.1 + 0.2
    assert math.isinf(measured.outcomes[1].beyond_mm)
