"""Distances from the border of a scan."""

import numpy as np

from app.geometry import ON_FACE, distance_beyond, distance_inside, is_inside, transform

SHAPE = (7, 9, 5)
SHEARED = np.array([[1.0, 0.9, 0, 5], [0, 1.2, -0.8, 2], [0.3, 0, 2, -9], [0, 0, 0, 1]])


def test_a_point_lies_as_far_inside_as_the_nearest_point_of_the_outer_faces() -> None:
    """Of a sheared scan, too, whose faces are nearer to each other than its edges are long."""
    random = np.random.default_rng(1)
    index = random.uniform(-0.5, np.array(SHAPE) - 0.5, (20, 3))
    points = transform(SHEARED, index)
    face = np.array(SHAPE) * np.linspace(0, 1, 121)[:, None] - 0.5
    nearest = np.full(len(points), np.inf)
    for axis in range(3):
        spans = [face[:, other] if other != axis else face[[0, -1], axis] for other in range(3)]
        border = transform(SHEARED, np.stack(np.meshgrid(*spans), axis=-1).reshape(-1, 3))
        for number, point in enumerate(points):
            found = np.linalg.norm(border - point, axis=1).min()
            nearest[number] = min(nearest[number], found)
    inside = distance_inside(points, SHEARED, SHAPE)
    np.testing.assert_allclose(inside, nearest, atol=0.02)
    assert (distance_beyond(points, SHEARED, SHAPE) < 1e-9).all()


def test_a_point_outside_lies_at_a_negative_distance_inside() -> None:
    corner = transform(SHEARED, np.array([[-0.5, 3.0, 2.0], [-0.6, 3.0, 2.0], [np.nan] * 3]))
    on_face, outside, nowhere = distance_inside(corner, SHEARED, SHAPE)
    assert abs(on_face) < 1e-9
    assert outside < 0
    assert np.isnan(nowhere)


def test_a_point_on_a_face_lies_in_the_array_whatever_is_rounded() -> None:
    faces = np.array([[-0.5, 3.0, 2.0], [6.5, 3.0, 4.5]])
    outwards = np.array([[-1.0, 0.0, 0.0], [1.0, 0.0, 1.0]])
    assert is_inside(faces + 0.9 * ON_FACE * outwards, SHAPE).all()
    assert not is_inside(faces + 1.1 * ON_FACE * outwards, SHAPE).any()
    assert not is_inside((np.nan, 3.0, 2.0), SHAPE)
    on, off = (transform(SHEARED, faces + by * ON_FACE * outwards) for by in (0.9, 1.1))
    assert (distance_beyond(on, SHEARED, SHAPE) == 0).all()
    assert (distance_beyond(off, SHEARED, SHAPE) > 0).all()
