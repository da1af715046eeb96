"""Who could have voted for a place."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from app.modes import voters_around
from app.readout import Readout
from tests import oracle

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
    readout = Readout(1, SHAPE, SPACING, radius, 0.0, stride)
    expected = [oracle.voters(p, SHAPE, np.array(SPACING), radius, stride) for p in points]
    assert voters_around(points, readout).tolist() == [max(1, n) for n in expected]


def test_around_a_place_outside_at_least_an_octant_of_the_ball_is_counted() -> None:
    """A few voxels at the border prove nothing about a place beyond it."""
    readout = Readout(1, (40, 50, 60), (1.0, 1.0, 1.0), 6.0, 0.0)
    ball = 4 / 3 * np.pi * 6**3
    points = np.array([[-6.0, 20, 20], [-30.0, 20, 20], [-1.0, 20, 20]])
    far, farther, near = voters_around(points, readout)
    assert far == farther == ball / 8
    assert ball / 3 < near < ball / 2


def test_a_place_that_does_not_exist_counts_one() -> None:
    """NaN places can be divided by their count."""
    readout = Readout(1, SHAPE, SPACING, 2.0, 0.0)
    assert voters_around(np.full((2, 3, 3), np.nan), readout).tolist() == [[1.0] * 3] * 2
