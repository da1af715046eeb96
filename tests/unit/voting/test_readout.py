"""The grid that votes point into."""

import numpy as np

from app.geometry import translation
from app.voting.readout import Readout, ScanExtent

SHAPE = (9, 14, 21)
SPACING = (0.5, 0.75, 1.25)


def test_points_past_the_end_of_the_scan_lie_outside() -> None:
    """Up to the faces of its outermost voxels; NaN lies nowhere."""
    readout = Readout(1, SHAPE, SPACING, 2.0, scan=ScanExtent(translation((-2.0, 0, 0)), (4, 9, 9)))
    points = np.array(
        [[1.6, 3, 3], [1.4, 3, 3], [5.4, 3, 3], [5.6, 3, 3], [3, 3, 8.6], [np.nan] * 3]
    )
    assert readout.contains(points).tolist() == [True, False, True, False, False, False]
