"""Mean shape -> partners, and mirror images."""

import numpy as np
import pytest
import torch
from scipy.spatial.transform import Rotation

from app.errors import BadParameter
from app.geometry import transform
from app.shapes import find_partners
from app.training.data.mirror import mirror, with_mirror_images
from app.training.data.specimens import Specimen


def symmetric_shape(seed: int) -> np.ndarray:
    """Make six pairs, three points in the plane of symmetry, one without a partner; any pose."""
    random = np.random.default_rng(seed)
    left = random.uniform((1, -12, -4), (7, 12, 4), (6, 3))
    middle = random.uniform((0, -12, -4), (0, 12, 4), (3, 3))
    points = np.concatenate([left, left * (-1, 1, 1), middle, [[6.0, 14.0, 5.0]]])
    points += 0.05 * random.standard_normal(points.shape)
    return np.asarray(points @ Rotation.random(random_state=random).as_matrix().T + (30, -9, 70))


@pytest.mark.parametrize("seed", range(6))
def test_partners_are_found_in_any_pose(seed: int) -> None:
    """Pairs by each other, the middle by itself, and one that has none."""
    partners = find_partners(symmetric_shape(seed))
    assert partners is not None
    assert partners.tolist() == [6, 7, 8, 9, 10, 11, 0, 1, 2, 3, 4, 5, 12, 13, 14, -1]


def test_an_unknown_position_has_no_partner() -> None:
    """Nor has the one that would be its own."""
    shape = symmetric_shape(0)
    shape[2] = np.nan
    partners = find_partners(shape)
    assert partners is not None
    assert partners[2] == partners[8] == -1
    assert partners[7] == 1


def test_a_shape_without_symmetry_has_no_partners() -> None:
    """Random places."""
    assert find_partners(np.random.default_rng(4).uniform(-9, 9, (15, 3))) is None


def test_the_mirror_image_of_a_specimen_shows_its_partners_where_they_are() -> None:
    """Every landmark lies at the voxel where its partner lay; voxels are not copied."""
    random = np.random.default_rng(1)
    affine = np.eye(4)
    affine[:3, :3] = 2 * Rotation.random(random_state=random).as_matrix()
    affine[:3, 3] = (5, 60, -20)
    index = random.uniform(1, 8, (4, 3))
    points, absent = transform(affine, index), frozenset({1})
    specimen = Specimen(torch.zeros(9, 10, 11), affine, points, absent)
    image = mirror(specimen, np.array([1, 0, 2, -1]))
    assert image.voxels is specimen.voxels
    found = transform(np.linalg.inv(image.to_world), image.points)
    np.testing.assert_allclose(found[:3], index[[1, 0, 2]])
    assert np.isnan(found[3]).all()
    assert image.absent == {0}
    assert np.linalg.det(image.to_world) == pytest.approx(-np.linalg.det(affine))


def test_mirror_images_double_the_subjects_of_a_symmetric_shape_only() -> None:
    """Random landmarks have no second side to learn from."""
    shape = symmetric_shape(1)
    specimen = Specimen(torch.zeros(2, 3, 4), np.eye(4), shape)
    one, two = with_mirror_images([specimen], shape)
    assert one is specimen
    assert two.points[0].tolist() == [-shape[6, 0], *shape[6, 1:]]
    with pytest.raises(BadParameter, match="symmetry"):
        with_mirror_images([specimen], np.random.default_rng(4).uniform(-9, 9, (15, 3)))
