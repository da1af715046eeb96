"""What the options leave open, chosen from the data."""

import numpy as np

from app.training.fit.suggest import suggest_spacing
from app.training.recipe import Recipe


def test_landmarks_fit_the_image_at_the_suggested_spacing() -> None:
    points = np.array([[0.0, 0, 0], [10, 0, 0], [0, 20, 0], [np.nan] * 3])
    spacing = suggest_spacing([points, points])
    assert spacing * 64 >= np.hypot(10, 20)
    assert spacing == 0.36


def test_whole_grid_network_is_trained_on_shapes_that_its_divisor_divides() -> None:
    recipe = Recipe(spacing_mm=1.0, radius_mm=5.0)
    for shape in recipe.image_shapes():
        assert all(edge % recipe.divisor == 0 for edge in shape)
        assert abs(np.prod(shape) / 64**3 - 1) < 0.2
