"""Compiled similarities of the mean shape are those of ``app.shapes.fit_similarity``."""

import numpy as np
import pytest

from app.geometry import transform
from app.shapes import SCALE_BOUNDS, fit_similarity
from app.voting.cpu.constellation import fit_subsets


@pytest.mark.parametrize("points", [3, 4, 45])
@pytest.mark.parametrize("noise_mm", [0.0, 0.1, 5.0])
@pytest.mark.parametrize("reflected", [False, True])
def test_fits_are_those_of_the_decomposition(
    points: int, noise_mm: float, *, reflected: bool
) -> None:
    """Also where the best fit is a reflection or too large a scale, which are not allowed."""
    random = np.random.default_rng(points)
    count, modes = 200, 4
    mean = 5 * random.standard_normal((points, 3))
    rotation = np.linalg.qr(random.standard_normal((3, 3)))[0]
    rotation *= np.sign(np.linalg.det(rotation)) * (-1 if reflected else 1)
    scale = random.uniform(0.3, 3.0)
    cloud = (scale * mean @ rotation.T + 2)[:, None].repeat(modes, axis=1)
    cloud += noise_mm * random.standard_normal(cloud.shape)
    landmark = np.arange(points)[None].repeat(count, axis=0)
    mode = random.integers(0, modes, landmark.shape)
    weight = random.uniform(0.1, 1.0, landmark.shape)
    fits = fit_subsets(mean, cloud, landmark, mode, weight, SCALE_BOUNDS)
    expected = fit_similarity(mean[landmark], cloud[landmark, mode], weight, SCALE_BOUNDS)
    moved = np.stack([transform(fit, mean) for fit in fits])
    np.testing.assert_allclose(moved, expected.apply(mean), atol=1e-8)
    np.testing.assert_allclose(np.linalg.det(fits[:, :3, :3]) ** (1 / 3), expected.scale)
