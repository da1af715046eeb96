"""The grid that votes point into."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from app.errors import BadParameter
from app.geometry import translation
from app.preprocessing.grid import ScanExtent
from app.voting.readout import GridFrame, Readout

SHAPE = (9, 14, 21)
SPACING = (0.5, 0.75, 1.25)


def test_points_past_the_end_of_the_scan_lie_outside() -> None:
    """Up to the faces of its outermost voxels; NaN lies nowhere."""
    readout = Readout(1, SHAPE, SPACING, 2.0, scan=ScanExtent(translation((-2.0, 0, 0)), (4, 9, 9)))
    points = np.array(
        [[1.6, 3, 3], [1.4, 3, 3], [5.4, 3, 3], [5.6, 3, 3], [3, 3, 8.6], [np.nan] * 3]
    )
    assert readout.contains(points).tolist() == [True, False, True, False, False, False]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"landmarks": 0}, "landmarks: expected a whole number from 1, got 0"),
        ({"stride": -1}, "stride: expected a whole number from 1, got -1"),
        ({"votes_each": 0}, "votes_each: expected a whole number from 1, got 0"),
        ({"shape": (9, 14, 0)}, r"shape: expected three whole numbers .* got \(9, 14, 0\)"),
        ({"spacing_mm": (0.5, -0.75, 1.25)}, "spacing_mm: expected three lengths in mm, above 0"),
        ({"spacing_mm": (0.5, math.nan, 1.25)}, "spacing_mm: expected three lengths in mm"),
        ({"radius_mm": -2.0}, "radius_mm: expected a length in mm, above 0 and finite; got -2"),
        (
            {"radius_mm": math.inf},
            "radius_mm: expected a length in mm, above 0 and finite; got inf",
        ),
        ({"radius_mm": 0.49}, "radius_mm: expected 0.5 mm, the shortest edge of a voxel, or more"),
        ({"heatmap_threshold": 1.0}, "heatmap_threshold: expected a share between 0 and 1, got 1"),
    ],
)
def test_numbers_by_which_nothing_can_be_read_out_are_refused(
    change: dict[str, Any], expected: str
) -> None:
    readout = Readout(1, SHAPE, SPACING, 2.0)
    with pytest.raises(BadParameter, match=expected):
        replace(readout, **change)


def test_frame_that_is_none_is_refused() -> None:
    """Transposed, as where points are rows, an affine lost its translation without an error."""
    transposed = translation((10.0, 20.0, 30.0)).T
    with pytest.raises(BadParameter, match=r"to_world: expected 0 0 0 1 as last row, got .*10"):
        GridFrame(np.eye(4), transposed)
    with pytest.raises(BadParameter, match=r"to_volume: expected a NumPy array .* got array.*nan"):
        GridFrame(np.full((4, 4), np.nan), np.eye(4))
