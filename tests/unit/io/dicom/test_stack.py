"""Stacks: positions that are rounded, images that are missing, doubled, or beside the others."""

from itertools import product

import numpy as np
import pytest
from numpy.testing import assert_allclose
from scipy.spatial.transform import Rotation

from app.errors import BadGeometry
from app.geometry import LPS_FROM_RAS, Affine, transform
from app.io.dicom.image import PixelType, Plane
from app.io.dicom.stack import stack_planes
from app.io.volume import check_header
from tests.support.dicom_files import as_dicom, zipped

PIXELS = PixelType("1.2.840.10008.1.2.1", rows=6, columns=5, dtype=np.dtype("<i2"), bits=16)
AXIAL = (1.0, 0.0, 0.0, 0.0, 1.0, 0.0)
START_MM = -500.123


def places(count: int, step_mm: float, decimals: int = 1, start_mm: float = START_MM) -> np.ndarray:
    """Positions of axial images, as they are written with so many decimals."""
    heights = np.round(start_mm + step_mm * np.arange(count), decimals)
    return np.stack([np.full(count, -100.0), np.full(count, -80.0), heights], axis=1)


def oblique_places(
    rng: np.random.Generator, count: int, step_mm: float, decimals: int = 1
) -> tuple[np.ndarray, tuple[float, ...]]:
    """Positions of images that lie anyhow, with so many decimals, and their orientation."""
    directions = Rotation.random(random_state=rng).as_matrix()
    lines = rng.uniform(-100, 100, 3) + step_mm * np.arange(count)[:, None] * directions[2]
    return np.round(lines, decimals), tuple(directions[:2].ravel())


def stack(
    positions: np.ndarray, pixel_mm: float = 0.35, orientation: tuple[float, ...] = AXIAL
) -> Affine:
    """Stack images at positions in mm, LPS; returns the affine."""
    planes = [
        Plane(file, 0, PIXELS, orientation, (pixel_mm, pixel_mm), tuple(place), None, (1.0, 0.0))
        for file, place in enumerate(positions.tolist())
    ]
    _, affine, warnings = stack_planes(planes)
    assert not warnings  # Nothing is tilted here but by rounding.
    return affine


STEPS_MM = (0.4375, 0.625, 0.75, 1.25, 3.85, 5.0)


@pytest.mark.parametrize("count", [2, 3, 4, 9, 40, 300])
@pytest.mark.parametrize("step_mm", STEPS_MM)
def test_rounded_positions_shift_no_image_by_more_than_they_are_rounded(
    step_mm: float, count: int
) -> None:
    ends = np.array([[0, 0, k] for k in range(count)], float)
    found = transform(stack(places(count, step_mm)), ends)[:, 2]
    assert_allclose(found, START_MM + step_mm * np.arange(count), rtol=0, atol=0.0501)


@pytest.mark.no_cover
@pytest.mark.parametrize("decimals", [1, 6])
@pytest.mark.parametrize("step_mm", STEPS_MM)
@pytest.mark.parametrize("count", [3, 4, 5, 6, 9, 40, 300])
def test_a_missing_image_is_noticed_wherever_it_is(
    count: int, step_mm: float, decimals: int
) -> None:
    gaps = {*range(1, min(count, 9)), count // 2, count - 1}
    starts = START_MM + 0.01 * np.arange(10)  # Each rounds the positions otherwise.
    for gap, start_mm in product(gaps, starts):
        whole = places(count + 1, step_mm, decimals, start_mm)
        with pytest.raises(BadGeometry, match=r"is one missing\?"):
            stack(np.delete(whole, gap, axis=0))


@pytest.mark.parametrize("decimals", [1, 6])
@pytest.mark.parametrize("step_mm", STEPS_MM)
@pytest.mark.parametrize("count", [2, 3, 4, 9, 40, 300])
def test_an_image_at_the_place_of_another_is_noticed(
    count: int, step_mm: float, decimals: int
) -> None:
    whole = places(count, step_mm, decimals)
    for twice in {0, count // 2, count - 1}:
        with pytest.raises(BadGeometry, match="expected one image at each place, got 2 or more"):
            stack(np.insert(whole, twice, whole[twice], axis=0))


@pytest.mark.parametrize("count", [3, 5, 40, 300])
@pytest.mark.parametrize("step_mm", [1.1, 2.5, 5.0])
@pytest.mark.parametrize("decimals", [1, 2])
def test_rounded_positions_of_oblique_images_are_an_even_stack(
    decimals: int, step_mm: float, count: int
) -> None:
    rng = np.random.default_rng(count)
    ends = np.array([[0, 0, k] for k in range(count)], float)
    for _ in range(50):
        positions, orientation = oblique_places(rng, count, step_mm, decimals)
        affine = stack(positions, 0.02, orientation)
        found = transform(LPS_FROM_RAS @ affine, ends)
        assert_allclose(found, positions, rtol=0, atol=1.01 * 10**-decimals)


@pytest.mark.parametrize("count", [3, 4, 5, 6, 9, 40])
@pytest.mark.parametrize("step_mm", [0.6, 0.75, 1.1, 2.5, 5.0])
def test_a_missing_image_does_not_hide_in_the_rounding_of_oblique_ones(
    step_mm: float, count: int
) -> None:
    rng = np.random.default_rng(count)
    for _ in range(50):
        whole, orientation = oblique_places(rng, count + 1, step_mm)
        gap = rng.integers(1, count)
        with pytest.raises(BadGeometry, match=r"is one missing\?"):
            stack(np.delete(whole, gap, axis=0), orientation=orientation)


def test_oblique_images_may_be_off_by_no_more_than_their_decimals_explain() -> None:
    rng = np.random.default_rng(3)
    positions, orientation = oblique_places(rng, 40, 2.0)
    stack(positions, 0.35, orientation)
    positions[20] += 0.2 * np.array(orientation[:3]).round()
    with pytest.raises(BadGeometry, match=r"image 21 of 40 0\.\d+ mm beside its place"):
        stack(positions, 0.35, orientation)
    finer, orientation = oblique_places(rng, 40, 2.0, 4)
    finer[20] += 0.05 * np.array(orientation[:3])
    with pytest.raises(BadGeometry, match=r"image 21 of 40 0\.05 mm beside its place"):
        stack(finer, 0.35, orientation)


@pytest.mark.parametrize(
    ("step_mm", "fine_mm", "too_much_mm"), [(0.2, 0.04, 0.06), (1.0, 0.1, 0.12), (5.0, 0.24, 0.26)]
)
def test_an_image_may_be_off_along_the_normal_by_rounding_or_a_share_of_the_step(
    step_mm: float, fine_mm: float, too_much_mm: float
) -> None:
    positions = places(9, step_mm, 6)
    positions[4, 2] += fine_mm
    stack(positions)
    positions[4, 2] += too_much_mm - fine_mm
    with pytest.raises(BadGeometry, match="expected equal steps between images"):
        stack(positions)


def test_an_image_may_be_off_beside_the_stack_by_a_share_of_the_pixels_alone() -> None:
    positions = places(9, 5.0)
    positions[4, 0] += 0.04 * 0.35
    stack(positions)
    positions[4, 0] += 0.02 * 0.35
    with pytest.raises(BadGeometry, match=r"image 5 of 9 0\.021 mm beside its place"):
        stack(positions)


def test_steps_that_grow_are_no_stack_though_each_is_near_the_one_before() -> None:
    positions = places(40, 1.0)
    positions[:, 2] = START_MM + np.cumsum(np.linspace(0.95, 1.05, 40))
    with pytest.raises(BadGeometry, match=r"image \d+ of 40 0\.4\d* mm beside its place"):
        stack(positions)


@pytest.mark.parametrize("orientation", [[0, 0, 0, 0, 0, 0], [1, 0, 0, 1, 0, 0]])
def test_images_whose_directions_span_no_plane_are_listed_as_in_none(
    orientation: list[int],
) -> None:
    none = as_dicom(ImageOrientationPatient=orientation)
    with pytest.raises(BadGeometry, match=r"mm, in no plane[;)]"):
        check_header(zipped([*as_dicom(), *none]))
