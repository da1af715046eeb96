"""Landmarks that are doubted where the scan is unlike what the model was made for."""

from typing import Any

import numpy as np
import pytest
from scipy.spatial.transform import Rotation

from app.geometry import Points, transform, translation
from app.inference.doubts import (
    compare_upside_down,
    doubt_extent,
    doubt_proportions,
    shows_any,
)
from app.io.volume import Volume
from app.model import LandmarkSpec, Shape, ShapeSpec
from app.voting import GridFrame, Landmark, Layout, Readout, filter_votes, locate, make_field
from tests.unit.inference.test_refinement import landmark, noise

KEYS: dict[str, Any] = {"mean": "shape.safetensors", "sha256": "0" * 64, "tolerance_mm": 8.0}


def test_a_place_is_shown_where_the_pose_of_the_landmarks_brings_it_into_the_scan() -> None:
    corners = np.array([[0.0, 0, 0], [8, 0, 0], [0, 8, 0], [0, 0, 8], [8, 8, 0]])
    shape = Shape(corners, tolerance_mm=1.0)
    beyond = np.array([[19.5, 1.0, 1.0]])
    pose = translation((100.0, 50.0, -30.0))
    found = [landmark(place) for place in transform(pose, corners)]
    for columns, shown in ((21, True), (20, False)):
        volume = Volume(noise((columns, 9, 9)), pose)
        assert shows_any(beyond, found, shape, volume) == shown
        assert shows_any(np.vstack([beyond, [[1.0, 1.0, 1.0]]]), found, shape, volume)
    assert not shows_any(corners, [landmark(None, "not_found", 0.0)] * 5, shape, volume)


def test_blank_voxels_do_not_show_a_place_but_one_near_to_the_subject_is_shown() -> None:
    corners = np.array([[0.0, 0, 0], [8, 0, 0], [0, 8, 0], [0, 0, 8], [8, 8, 0]])
    shape = Shape(corners, tolerance_mm=1.0)
    found = [landmark(place) for place in corners]
    for blank in (0.0, -1024.0):
        voxels = noise((40, 9, 9))
        voxels[21:] = blank
        volume = Volume(voxels, np.eye(4))
        for place, shown in ((26.0, True), (28.5, False), (39.0, False)):
            assert shows_any(np.array([[place, 1, 1]]), found, shape, volume) == shown
    thick = Volume(noise((40, 9, 9)), np.diag([10.0, 10, 10, 1]))
    assert shows_any(np.array([[25.0, 1, 1]]), found, shape, thick)


@pytest.mark.parametrize(("kind", "low", "high"), [(np.int8, -100, 100), (np.int16, -32768, 400)])
def test_a_place_is_shown_however_far_stored_values_lie_apart(
    kind: type[np.signedinteger[Any]], low: int, high: int
) -> None:
    corners = np.array([[0.0, 0, 0], [8, 0, 0], [0, 8, 0], [0, 0, 8], [8, 8, 0]])
    voxels = np.full((9, 9, 9), low, kind)
    voxels[4] = high
    volume = Volume(voxels, np.eye(4))
    found = [landmark(place) for place in corners]
    assert shows_any(np.ones((1, 3)), found, Shape(corners, tolerance_mm=1.0), volume)


@pytest.mark.parametrize(
    ("stretch", "turn_deg", "told"),
    [
        ((1.0, 1.0, 1.0), 8.0, []),
        ((1.0, 1.1, 1.25), 0.0, []),
        ((1.6, 1.6, 1.6), 0.0, ["1.60 times as large as usual, expected 0.77 to 1.3"]),
        ((1.0, 1.0, 0.5), 0.0, ["0.50 times as large"]),
        ((1.0, 1.0, 1.0), 25.0, ["turned by 25 degrees, expected at most 9"]),
        ((1.0, 1.0, 1.5), 25.0, ["1.50 times as large", "turned by 25 degrees"]),
    ],
)
def test_subject_of_another_size_or_turned_is_doubted(
    stretch: tuple[float, float, float], turn_deg: float, told: list[str]
) -> None:
    mean = np.array(
        [(x, y, z) for x in (-45.0, 45.0) for y in (-55.0, 55.0) for z in (-90.0, 0.0, 90.0)]
    )
    turn = Rotation.from_euler("z", turn_deg, degrees=True).as_matrix()
    found = [landmark(place) for place in mean * stretch @ turn.T + 30.0]
    limits = {"max_stretch": 1.3, "max_twist_deg": 9.0}
    shape = Shape(mean, tolerance_mm=40.0)
    doubts = doubt_proportions(found, shape, ShapeSpec(**KEYS, **limits))
    assert len(doubts) == len(told)
    for doubt, words in zip(doubts, told, strict=True):
        assert words in doubt
    assert doubt_proportions(found, shape, ShapeSpec(**KEYS)) == ()
    lost = [landmark(None, "not_found", 0.0)] * len(mean)
    assert doubt_proportions(lost, shape, ShapeSpec(**KEYS, **limits)) == ()


def test_a_stretched_subject_is_doubted_where_only_what_hides_it_agrees() -> None:
    """The landmarks of one plane agree with the mean shape; those beside it show the stretch."""
    plane = [(x, y, 0.0) for x in (-40.0, 0.0, 40.0) for y in (-60.0, -20.0, 20.0, 60.0)]
    mean = np.array([*plane, (-30.0, 0.0, 30.0), (30.0, 0.0, 30.0), (0.0, 30.0, -30.0)])
    shape = Shape(mean, tolerance_mm=6.0)
    limits = ShapeSpec(**KEYS, max_stretch=1.3)
    stretched = mean * (1.0, 1.0, 1.6)
    sure = [landmark(place) for place in stretched]
    assert "1.60 times as large" in " ".join(doubt_proportions(sure, shape, limits))
    unsure = [landmark(place, "low_confidence") for place in stretched]
    assert doubt_proportions(unsure, shape, limits) == ()


@pytest.mark.parametrize(
    ("spacing_mm", "padding", "told"),
    [
        (1.0, 0, "the scan is 20 mm thick, expected at least 30 mm"),
        (1.0, 30, "the scan is 20 mm thick"),
        (1.5, 0, None),
        (1.49, 30, "the scan is 29.8 mm thick"),
    ],
)
def test_a_thin_slab_is_doubted_however_much_is_blank_around_it(
    spacing_mm: float, padding: int, told: str | None
) -> None:
    for sides in ((padding, padding), (padding, 0), (0, padding)):
        voxels = np.pad(noise((20, 60, 60)), (sides, (0, 0), (0, 0)))
        volume = Volume(voxels, np.diag([spacing_mm, 1.0, 1.0, 1.0]))
        doubts = doubt_extent(volume, ShapeSpec(**KEYS, min_extent_mm=30.0))
        assert len(doubts) == (told is not None)
        assert told is None or told in doubts[0]
    assert doubt_extent(volume, ShapeSpec(**KEYS)) == ()


def test_a_slab_of_a_tilted_gantry_is_as_thick_as_its_faces_are_apart() -> None:
    """Its slices are shifted against each other: its edges, of 33 mm, stand oblique on them."""
    tilted = np.eye(4)
    tilted[1:3, 2] = 1.5 * np.array([np.sin(np.pi / 6), np.cos(np.pi / 6)])
    volume = Volume(noise((60, 60, 22)), tilted)
    (doubt,) = doubt_extent(volume, ShapeSpec(**KEYS, min_extent_mm=30.0))
    assert "the scan is 28.6 mm thick" in doubt


def located(places: Points, shape: Shape) -> tuple[Landmark, ...]:
    """Locate landmarks of which each has one mode; those outside the grid have none."""
    grid, count = (24, 24, 40), len(places)
    voxels = np.moveaxis(np.indices(grid), 0, -1)
    away = places[:, None, None, None] - voxels
    inside = np.all((places >= 2.0) & (places <= np.array(grid) - 3.0), axis=1)
    near = (np.linalg.norm(away, axis=-1) <= 3.0) & inside[:, None, None, None]
    offsets = np.moveaxis(away, -1, 0).reshape(-1, *grid)
    field = make_field(
        probs=(0.6 * near).astype(np.float32),
        offsets=offsets.astype(np.float32),
        layout=Layout(channels="first"),
    )
    specs = [LandmarkSpec(name=str(number)) for number in range(count)]
    readout = Readout(count, grid, (1.0, 1.0, 1.0), 3.0)
    frame = GridFrame(np.eye(4), np.eye(4))
    return locate(filter_votes(field, 0.5), readout, frame, specs, shape)


def test_a_scan_is_upside_down_where_more_votes_fit_together_so_and_not_where_there_are_more() -> (
    None
):
    random = np.random.default_rng(3)
    mean = random.uniform(-1.0, 1.0, (10, 3)) * [8.0, 8.0, 16.0]
    shape, middle = Shape(mean, tolerance_mm=2.0), np.array([11.5, 11.5, 19.5])
    whole, cut = (located(mean + middle + [0.0, 0.0, up], shape) for up in (0.0, 15.0))
    anyhow = located(random.uniform([3, 3, 3], [20, 20, 36], (10, 3)), shape)
    assert sum(one.status == "detected" for one in cut) in range(4, 9)
    assert sum(one.mass for one in anyhow) > sum(one.mass for one in cut)
    assert compare_upside_down(cut, anyhow) == ()
    assert "% as many votes" in " ".join(compare_upside_down(cut, whole))
    assert "has more votes" in " ".join(compare_upside_down(anyhow, cut))
