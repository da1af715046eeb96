"""Who could have voted for a place."""

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.transform import Rotation

from app.geometry import scaling, translation
from app.voting.modes import voters_around
from app.voting.readout import Readout, ScanExtent
from tests.support import oracle

SHAPE = (9, 14, 21)
SPACING = (0.5, 0.75, 1.25)


@given(seed=st.integers(0, 2**16), stride=st.sampled_from([1, 2, 3]), radius=st.floats(0.4, 6.0))
@settings(max_examples=50, deadline=None)
def test_voters_are_counted_as_the_oracle_counts_them(
    seed: int, stride: int, radius: float
) -> None:
    """Spheres cut by borders, anisotropic spacing, strides that do not divide the grid."""
    random = np.random.default_rng(seed)
    points = random.uniform(-0.5, np.array(SHAPE) - 0.5, (5, 3))
    readout = Readout(1, SHAPE, SPACING, radius, stride)
    expected = [oracle.voters(p, SHAPE, np.array(SPACING), radius, stride) for p in points]
    assert voters_around(points, readout).tolist() == [max(1, n) for n in expected]


def test_around_a_place_outside_at_least_an_octant_of_the_ball_is_counted() -> None:
    """A few voxels at the border prove nothing about a place beyond it."""
    readout = Readout(1, (40, 50, 60), (1.0, 1.0, 1.0), 6.0)
    ball = 4 / 3 * np.pi * 6**3
    points = np.array([[-6.0, 20, 20], [-30.0, 20, 20], [-1.0, 20, 20]])
    far, farther, near = voters_around(points, readout)
    assert far == farther == ball / 8
    assert ball / 3 < near < ball / 2


def test_a_place_that_does_not_exist_counts_one() -> None:
    """NaN places can be divided by their count."""
    readout = Readout(1, SHAPE, SPACING, 2.0)
    assert voters_around(np.full((2, 3, 3), np.nan), readout).tolist() == [[1.0] * 3] * 2


def test_voxels_where_there_is_no_scan_are_no_voters() -> None:
    """A grid that reaches past its scan on one side, by an oblique and scaled map."""
    turn = Rotation.from_euler("xyz", (0.2, 0.1, -0.3)).as_matrix()
    to_volume = translation((-3.0, 1.0, 2.0)) @ np.pad(turn, (0, 1)) @ scaling([2.0, 2.0, 2.0])
    to_volume[3, 3] = 1.0
    scan = ScanExtent(to_volume, (16, 25, 60))
    readout = Readout(1, SHAPE, SPACING, 3.0, 2, scan)
    points = np.array([[4.0, 6, 10], [1.0, 2, 3], [8.0, 13, 20]])
    index = np.stack(np.meshgrid(*[np.arange(-(-n // 2)) for n in SHAPE], indexing="ij"), axis=-1)
    centres = (index.reshape(-1, 3) + 0.5) * 2 - 0.5
    centres = centres[(centres <= np.array(SHAPE) - 0.5).all(axis=1) & scan.contains(centres)]
    away = np.linalg.norm((points[:, None] - centres) * SPACING, axis=2)
    octant = np.pi / 6 * 3.0**3 / (8 * np.prod(SPACING))
    least = np.where(scan.contains(points), 1.0, octant)
    expected = np.maximum((away <= 3.0).sum(axis=1), least)
    np.testing.assert_allclose(voters_around(points, readout), expected)
    assert 0 < expected[0] < voters_around(points, replace(readout, scan=None))[0]


def test_places_past_the_end_of_the_scan_lie_outside() -> None:
    """Up to the faces of its outermost voxels; what does not exist lies nowhere."""
    readout = Readout(1, SHAPE, SPACING, 2.0, scan=ScanExtent(translation((-2.0, 0, 0)), (4, 9, 9)))
    points = np.array(
        [[1.6, 3, 3], [1.4, 3, 3], [5.4, 3, 3], [5.6, 3, 3], [3, 3, 8.6], [np.nan] * 3]
    )
    assert readout.contains(points).tolist() == [True, False, True, False, False, False]
