"""Heatmaps -> Modes: where the Gaussians peak, and how much of them is there."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from app.model.outputs import Field
from app.model.sections import LandmarkSpec
from app.voting.landmarks import Landmark, locate
from app.voting.modes import Modes, find_modes
from app.voting.readout import GridFrame, Readout
from app.voting.reference import Placement
from app.voting.votes import concat_votes, filter_votes
from tests.support.synthetic import gaussian_field, shuffled

THRESHOLD = 0.2
RADII = math.sqrt(-2 * math.log(THRESHOLD))
SHAPE = (36, 32, 40)
COUNT = 24


def readout_of(sigma: float, stride: int = 1, landmarks: int = COUNT) -> Readout:
    return Readout(
        landmarks, SHAPE, (1.0, 1.0, 1.0), RADII * sigma, stride, heatmap_threshold=THRESHOLD
    )


def centres_of(seed: int, *, at_border: bool = False) -> NDArray[np.float64]:
    random = np.random.default_rng(seed)
    centres = np.array(SHAPE) / 2 - 0.5 + random.uniform(-4, 4, (COUNT, 3))
    if at_border:
        centres[:, 1] = random.uniform(-0.5, 3.0, COUNT)
    return centres


def errors_of(modes: Modes, centres: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(np.linalg.norm(modes.position[:, 0] - centres, axis=1))


@pytest.mark.parametrize("at_border", [False, True])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("sigma", [1.0, 2.0, 4.0])
def test_gaussians_are_read_without_error_wherever_they_lie(
    sigma: float, stride: int, at_border: bool
) -> None:
    """The bound is 1/500 of a voxel, where the highest voxel errs by a half (V9)."""
    sigma *= stride
    centres = centres_of(1, at_border=at_border)
    field = gaussian_field(centres, SHAPE, sigma, stride=stride)
    votes = filter_votes(field, THRESHOLD, Placement(stride=stride))
    modes = find_modes(votes, readout_of(sigma, stride), 4)
    assert errors_of(modes, centres).max() < 0.002 * stride


@pytest.mark.parametrize("at_border", [False, True])
@pytest.mark.parametrize("spacing_mm", [(1.0, 1.0, 3.0), (4.0, 0.5, 0.5)])
def test_gaussians_that_are_round_in_voxels_are_read_without_error(
    spacing_mm: tuple[float, float, float], at_border: bool
) -> None:
    """They were up to 0.3 voxel off, and 1.6 at a border, as if they were round in mm."""
    centres = centres_of(1, at_border=at_border)
    votes = filter_votes(gaussian_field(centres, SHAPE, 2.0), THRESHOLD)
    radius_mm = RADII * 2.0 * np.cbrt(np.prod(spacing_mm))
    readout = replace(readout_of(2.0), spacing_mm=spacing_mm, radius_mm=radius_mm)
    modes = find_modes(votes, replace(readout, round_in_voxels=True), 4)
    assert errors_of(modes, centres).max() < 0.002
    plain = find_modes(votes, readout_of(2.0), 4)
    np.testing.assert_allclose(modes.mass[:, 0], plain.mass[:, 0], rtol=0.01)
    width = np.sqrt(np.diagonal(modes.covariance_mm2[:, 0], axis1=1, axis2=2))
    expected = np.sqrt(np.diagonal(plain.covariance_mm2[:, 0], axis1=1, axis2=2))
    np.testing.assert_allclose(width, expected * spacing_mm, rtol=0.01)


@pytest.mark.parametrize("at_border", [False, True])
@pytest.mark.parametrize("sigma", [1.0, 2.0, 4.0])
def test_noise_moves_a_peak_by_less_than_a_tenth_of_a_voxel(sigma: float, at_border: bool) -> None:
    centres = centres_of(2, at_border=at_border)
    field = gaussian_field(centres, SHAPE, sigma, noise=0.05)
    modes = find_modes(filter_votes(field, THRESHOLD), readout_of(sigma), 4)
    assert errors_of(modes, centres).mean() < 0.08


@pytest.mark.parametrize("width", [0.7, 1.5])
def test_heatmaps_of_another_width_than_promised_are_read_nearly_as_well(width: float) -> None:
    centres = centres_of(3, at_border=True)
    votes = filter_votes(gaussian_field(centres, SHAPE, width * 2.0), THRESHOLD)
    assert errors_of(find_modes(votes, readout_of(2.0), 4), centres).mean() < 0.05


def test_flat_heatmaps_are_read_at_their_centre() -> None:
    """As of a segmentation: nothing says where in it the landmark is, and no fit may guess."""
    centre = np.array([[17.3, 15.0, 20.6]])
    field = gaussian_field(centre, SHAPE, 2.0)
    flat = replace(field, scores=(field.scores >= THRESHOLD).float())
    modes = find_modes(filter_votes(flat, THRESHOLD), readout_of(2.0, landmarks=1), 4)
    assert errors_of(modes, centre).max() < 0.2


def test_heatmap_of_one_plane_stays_in_it_and_in_the_scan() -> None:
    """What its fit rounded moved it by 0.01 voxel along the normal; it lies on the scan's face."""
    readout = Readout(1, (12, 1, 6), (0.8, 1.3, 1.6), 5.6, stride=2, heatmap_threshold=THRESHOLD)
    heatmap = torch.full((1, 6, 1, 3), 1.7)
    field = Field(
        heatmap, torch.zeros(1).expand(3, *heatmap.shape), "none", background=False, peak=1.0
    )
    votes = filter_votes(field, THRESHOLD, Placement(stride=2))
    position = find_modes(votes, readout, 4).position[:, 0]
    np.testing.assert_allclose(position, [[5.5, 0.5, 2.5]], atol=1e-6)
    assert readout.contains(position).all()


@pytest.mark.parametrize("height", [0.3, 1.0])
def test_slices_of_a_coarse_network_have_all_their_landmarks(height: float) -> None:
    """Half were out of the field: the one plane of such heatmaps lies on the face of the scan."""
    shape, random = (36, 1, 34), np.random.default_rng(7)
    centres = np.column_stack([random.uniform(5, 28, COUNT), np.full(COUNT, 0.5)])
    centres = np.insert(centres, 2, random.uniform(5, 28, COUNT), axis=1)
    field = gaussian_field(centres, (36, 2, 34), 3.0, stride=2)
    field = replace(field, scores=height * field.scores)
    votes = filter_votes(field, THRESHOLD, Placement(stride=2))
    readout = replace(readout_of(3.0, 2), shape=shape)
    assert readout.contains(find_modes(votes, readout, 4).position[:, 0]).all()


def test_order_of_votes_changes_no_bit_of_a_fit() -> None:
    field = gaussian_field(centres_of(4, at_border=True), SHAPE, 2.0, noise=0.05)
    votes = filter_votes(field, THRESHOLD)
    one, other = (find_modes(some, readout_of(2.0), 4) for some in (votes, shuffled(votes, seed=4)))
    for name in Modes.__slots__:
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)


def test_heatmaps_of_tiles_add_up_to_those_of_the_whole() -> None:
    centres = centres_of(5)
    field = gaussian_field(centres, SHAPE, 2.0, noise=0.02)
    whole = find_modes(filter_votes(field, THRESHOLD), readout_of(2.0), 4)
    ramp = torch.linspace(1, 0, 12)
    tiles = []
    for start, end, share in ((0, 24, slice(12, 24)), (12, 36, slice(0, 12))):
        weights = torch.ones(24)
        weights[share] = ramp if start == 0 else 1 - ramp
        part = replace(
            field, scores=field.scores[:, start:end], offsets=field.offsets[:, :, start:end]
        )
        importance = (weights, torch.ones(SHAPE[1]), torch.ones(SHAPE[2]))
        placement = Placement((start, 0, 0), 1, importance)
        tiles.append(filter_votes(part, THRESHOLD, placement))
    modes = find_modes(concat_votes(tiles), readout_of(2.0), 4)
    np.testing.assert_allclose(modes.position[:, 0], whole.position[:, 0], atol=1e-4)
    np.testing.assert_allclose(modes.mass[:, 0], whole.mass[:, 0], rtol=1e-4)


def found(height: float, *, at_border: bool = False) -> tuple[Landmark, ...]:
    field = gaussian_field(centres_of(6, at_border=at_border), SHAPE, 2.0, noise=0.02)
    field = replace(field, scores=height * field.scores)
    specs = [LandmarkSpec(name=str(index)) for index in range(COUNT)]
    frame = GridFrame(np.eye(4), np.eye(4))
    return locate(filter_votes(field, THRESHOLD), readout_of(2.0), frame, specs)


@pytest.mark.parametrize("at_border", [False, True])
def test_mass_of_an_ideal_heatmap_is_one_also_where_a_border_cuts_it(at_border: bool) -> None:
    landmarks = found(1.0, at_border=at_border)
    assert np.mean([landmark.mass for landmark in landmarks]) == pytest.approx(1.0, abs=0.1)
    assert min(landmark.confidence for landmark in landmarks) > 0.8
    inside = [landmark for landmark in landmarks if landmark.status != "out_of_field"]
    assert {landmark.status for landmark in inside} == {"detected"}
    assert len(inside) > COUNT / 2


def test_low_heatmaps_are_of_low_confidence_and_none_is_not_found() -> None:
    assert {landmark.status for landmark in found(0.3)} == {"low_confidence"}
    assert {landmark.status for landmark in found(0.1)} == {"not_found"}
