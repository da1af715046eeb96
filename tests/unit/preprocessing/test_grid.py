"""The model grid: axes, spacing, intensities, and the float64 way back."""

from itertools import permutations, product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.transform import Rotation

from app.geometry import Affine, axis_codes, spacing_of, transform, translation
from app.io.volume import Volume
from app.model.sections import InputSpec, IntensitySpec
from app.preprocessing.grid import grid_shape, make_grid, orient
from app.preprocessing.intensity import normalise_
from app.preprocessing.resampling import resample

CPU = torch.device("cpu")
PLAIN = IntensitySpec(method="none")


def make_volume(voxels: np.ndarray, affine: Affine) -> Volume:
    return Volume(voxels=voxels, affine=affine)


def make_spec(
    spacing: tuple[float, float, float], orientation: str = "RAS", intensity: IntensitySpec = PLAIN
) -> InputSpec:
    return InputSpec(
        orientation=orientation,
        spacing_mm=spacing,
        tile_shape="whole",
        intensity=intensity,
    )


def oblique_affine(seed: int, *, left_handed: bool = False, shear: float = 0.0) -> Affine:
    rng = np.random.default_rng(seed)
    affine = np.eye(4)
    affine[:3, :3] = Rotation.random(random_state=seed).as_matrix() @ np.diag(
        rng.uniform(0.3, 3, 3)
    )
    affine[:3, :3] = affine[:3, :3] @ (np.eye(3) + shear * np.triu(rng.uniform(-1, 1, (3, 3)), 1))
    if left_handed:
        affine[:3, 0] *= -1
    affine[:3, 3] = rng.uniform(-200, 200, 3)
    return affine


def all_axis_orders() -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    flips = [tuple(a for a in range(3) if bits[a]) for bits in product((0, 1), repeat=3)]
    return [(order, flip) for order in permutations(range(3)) for flip in flips]


def reorder(volume: Volume, order: tuple[int, ...], flip: tuple[int, ...]) -> Volume:
    """Store the same scan with other array axes."""
    shape = np.asarray(volume.voxels.shape)[list(order)]
    old_from_new = np.zeros((4, 4))
    old_from_new[3, 3] = 1
    for new, old in enumerate(order):
        old_from_new[old, new] = -1 if new in flip else 1
        old_from_new[old, 3] = shape[new] - 1 if new in flip else 0
    voxels = np.flip(volume.voxels.transpose(order), flip)
    return make_volume(voxels, volume.affine @ old_from_new)


@given(
    seed=st.integers(0, 10_000),
    left_handed=st.booleans(),
    shear=st.sampled_from([0.0, 0.4]),
    orientation=st.sampled_from(["RAS", "LPS", "PIR", "SAL"]),
)
@settings(max_examples=40)
def test_point_comes_back_through_any_affine(
    seed: int, left_handed: bool, shear: float, orientation: str
) -> None:
    rng = np.random.default_rng(seed)
    shape = tuple(int(n) for n in rng.integers(5, 30, 3))
    volume = make_volume(
        np.zeros(shape, dtype=np.int16), oblique_affine(seed, left_handed=left_handed, shear=shear)
    )
    grid = make_grid(volume, make_spec((1.1, 0.7, 1.9), orientation), CPU)
    world = transform(volume.affine, rng.uniform(0, 20, (50, 3)))
    in_grid = transform(np.linalg.inv(grid.to_world), world)
    np.testing.assert_allclose(transform(grid.to_world, in_grid), world, atol=1e-6)
    through_array = transform(volume.affine, transform(grid.to_volume, in_grid))
    np.testing.assert_allclose(through_array, world, atol=1e-6)


def test_all_axis_orders_give_the_same_grid() -> None:
    rng = np.random.default_rng(3)
    original = make_volume(rng.normal(size=(21, 17, 26)).astype(np.float32), oblique_affine(5))
    spec = make_spec((1.3, 1.7, 0.9), intensity=IntensitySpec(method="zscore"))
    expected = make_grid(original, spec, CPU)
    for order, flip in all_axis_orders():
        grid = make_grid(reorder(original, order, flip), spec, CPU)
        torch.testing.assert_close(grid.voxels, expected.voxels, rtol=0, atol=1e-5)
        np.testing.assert_allclose(grid.to_world, expected.to_world, atol=1e-9)


def test_grid_axes_point_where_the_model_wants() -> None:
    volume = make_volume(np.zeros((4, 5, 6)), np.diag([-1.0, -1.0, 1.0, 1.0]))
    grid = make_grid(volume, make_spec((1, 1, 1), "PIR"), CPU)
    directions = grid.to_world[:3, :3]
    np.testing.assert_allclose(directions, [[0, 0, 1], [-1, 0, 0], [0, -1, 0]], atol=1e-12)
    np.testing.assert_allclose(spacing_of(grid.to_world), 1)


def test_grid_for_nnunet_is_that_of_what_is_not_zero() -> None:
    """However the scan is stored; and its points stay where they were."""
    rng = np.random.default_rng(4)
    inner = rng.integers(1, 9, (11, 8, 14)).astype(np.int16)
    inner[:, 3, :] = 0  # Between what is not zero, zeros stay.
    whole = make_volume(np.pad(inner, ((5, 2), (0, 9), (3, 0))), oblique_affine(6))
    cut = make_volume(inner, whole.affine @ translation([5.0, 0.0, 3.0]))
    plain = make_spec((1.3, 0.7, 1.9), "PIR", IntensitySpec(method="zscore"))
    spec = plain.model_copy(update={"tile_layout": "nnunet"})
    expected = make_grid(cut, spec, CPU)
    for order, flip in all_axis_orders():
        grid = make_grid(reorder(whole, order, flip), spec, CPU)
        torch.testing.assert_close(grid.voxels, expected.voxels, rtol=0, atol=1e-5)
        np.testing.assert_allclose(grid.to_world, expected.to_world, atol=1e-9)
    np.testing.assert_allclose(whole.affine @ make_grid(whole, spec, CPU).to_volume, grid.to_world)
    assert grid_shape(whole.voxels.shape, whole.affine, spec) > grid.voxels.shape


def test_intensities_for_nnunet_are_those_of_the_scan_as_it_is_stored() -> None:
    stripes = np.ones((8, 6, 10), np.int16)
    stripes[::2] = 9
    volume = make_volume(stripes, np.eye(4))
    rule = IntensitySpec(method="clip", lower=2, upper=6, mean=0, deviation=1)
    spec = make_spec((2, 1, 1), intensity=rule)
    grid = make_grid(volume, spec.model_copy(update={"tile_layout": "nnunet"}), CPU)
    # Between 2 and 6, and not between 1 and 9.
    assert grid.voxels[2].mean() == pytest.approx(4, abs=0.05)
    assert make_grid(volume, spec, CPU).voxels[2].mean() == pytest.approx(5, abs=0.05)


def test_scan_of_zeros_is_not_cropped() -> None:
    spec = make_spec((1, 1, 1)).model_copy(update={"tile_layout": "nnunet"})
    assert make_grid(make_volume(np.zeros((4, 5, 6)), np.eye(4)), spec, CPU).voxels.shape == (
        4,
        5,
        6,
    )


def test_orient_copies_nothing() -> None:
    array = np.zeros((4, 5, 6))
    view, _ = orient(array, np.diag([-1.0, 2.0, 3.0, 1.0]), "SPL")
    assert view.shape == (6, 5, 4)
    assert np.shares_memory(view, array)


@given(seed=st.integers(0, 10_000), orientation=st.sampled_from(["RAS", "LPS", "SAL"]))
@settings(max_examples=100)
def test_no_scan_is_seen_as_its_mirror_image(seed: int, orientation: str) -> None:
    """Not even where shear takes an axis nearer to the opposite of the world axis left for it."""
    affine = np.eye(4)
    affine[:3, :3] = np.random.default_rng(seed).normal(size=(3, 3))
    _, array_from_view = orient(np.empty((2, 3, 4)), affine, orientation)
    wanted = np.linalg.det([np.eye(3)["RLAPSI".index(code) // 2] for code in orientation])
    wanted *= (-1) ** sum(code in "LPI" for code in orientation)
    assert np.linalg.det((affine @ array_from_view)[:3, :3]) * wanted > 0


@pytest.mark.parametrize("sense", [1.0, -1.0])
def test_the_axes_that_a_scan_is_said_to_have_are_those_it_is_seen_in(sense: float) -> None:
    """Also where an axis is perpendicular to the world axis left for it, or between two of them."""
    perpendicular = np.array([[1.0, 0.995, 0.0], [0.0, 0.0, sense * 0.1], [0.0, 0.1, 0.995]])
    between = np.array([[1.0, sense, 0.0], [1.0, -sense, 0.0], [0.0, 0.0, 1.0]])
    for columns in (perpendicular, between):
        affine = np.eye(4)
        affine[:3, :3] = columns
        _, array_from_view = orient(np.empty((2, 3, 4)), affine, axis_codes(affine))
        np.testing.assert_array_equal(array_from_view, np.eye(4))


def test_resampling_keeps_a_linear_ramp_in_place() -> None:
    i, j, k = np.meshgrid(np.arange(31.0), np.arange(24.0), np.arange(18.0), indexing="ij")
    ramp = 2 * i - 3 * j + 0.5 * k
    step = np.array([1.6, 0.7, 2.4])
    coarse, old_from_new = resample(ramp, step, CPU)
    index = np.stack(np.meshgrid(*[np.arange(n) for n in coarse.shape], indexing="ij"), axis=-1)
    place = transform(old_from_new, index.astype(np.float64))
    expected = place @ [2, -3, 0.5]
    inner = (slice(4, -4), slice(8, -8), slice(3, -3))
    np.testing.assert_allclose(coarse.numpy()[inner], expected[inner], atol=1e-4)


def test_shrinking_removes_what_the_coarse_grid_cannot_hold() -> None:
    stripes = np.broadcast_to((np.arange(64) % 2)[:, None, None], (64, 3, 5))
    coarse, _ = resample(stripes, [4.0, 1.0, 1.0], CPU)
    assert (coarse[2:-2] - 0.5).abs().max() < 0.01


def test_centre_of_a_blob_survives_resampling() -> None:
    middle = np.array([12.3, 9.8, 14.1])
    index = np.stack(np.meshgrid(*[np.arange(n) for n in (25, 21, 29)], indexing="ij"), axis=-1)
    blob = np.exp(-0.5 * ((index - middle) ** 2).sum(-1) / 2.5**2)
    coarse, old_from_new = resample(blob, [1.5, 1.2, 0.8], CPU)
    place = np.stack(np.meshgrid(*[np.arange(n) for n in coarse.shape], indexing="ij"), axis=-1)
    weights = coarse.numpy()
    found = (place * weights[..., None]).sum((0, 1, 2)) / weights.sum()
    np.testing.assert_allclose(transform(old_from_new, found), middle, atol=0.02)


@pytest.mark.parametrize("step", [(1.0, 1.0, 1.0), (1.7, 0.6, 2.3)])
def test_constant_volume_is_normalised_to_zeros(step: tuple[float, float, float]) -> None:
    """Also where resampling has rounded its voxels to numbers that differ in the last bits."""
    values, _ = resample(np.full((31, 29, 23), 123.4, np.float32), step, CPU)
    assert (values.min() < values.max()) == (step != (1.0, 1.0, 1.0))
    for spec in (
        IntensitySpec(method="percentile", lower=1.0, upper=99.0),
        IntensitySpec(method="percentile", lower=0.0, upper=100.0),
        IntensitySpec(method="zscore"),
    ):
        assert not normalise_(values.clone(), spec).any()


def test_neighbouring_numbers_of_16_bits_are_told_apart() -> None:
    values = 60_000.0 + torch.arange(60.0).reshape(3, 4, 5) % 2
    spec = IntensitySpec(method="percentile", lower=0.0, upper=100.0)
    assert normalise_(values.clone(), spec).flatten()[:3].tolist() == [0.0, 1.0, 0.0]
    for region in ("all", "nonzero"):
        standard = normalise_(values.clone(), IntensitySpec(method="zscore", region=region))
        torch.testing.assert_close(standard.flatten()[:3], torch.tensor([-1.0, 1.0, -1.0]))


def test_percentile_and_window_clip_to_the_unit_interval() -> None:
    values = torch.arange(1001.0).reshape(7, 11, 13)
    by_percentile = normalise_(
        values.clone(), IntensitySpec(method="percentile", lower=10, upper=90)
    )
    by_window = normalise_(values.clone(), IntensitySpec(method="window", lower=100, upper=900))
    torch.testing.assert_close(by_percentile, by_window)
    assert float(by_window.min()) == 0.0
    assert float(by_window.max()) == 1.0


@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint16", "int32", "uint32", "float64"])
def test_every_stored_type_reaches_the_device(dtype: str) -> None:
    voxels = np.arange(60, dtype=dtype).reshape(3, 4, 5)
    grid = make_grid(make_volume(voxels, np.eye(4)), make_spec((1, 1, 1)), CPU)
    np.testing.assert_array_equal(grid.voxels.numpy(), voxels.astype(np.float32))


@pytest.mark.parametrize("method", ["percentile", "window", "zscore"])
def test_voxels_as_far_apart_as_float32_holds_are_normalised(method: str) -> None:
    bounds = {"percentile": (0.0, 100.0), "window": (-3e38, 3e38), "zscore": ()}
    given = dict(zip(("lower", "upper"), bounds[method], strict=False))
    spec = IntensitySpec.model_validate({"method": method, **given})
    small = torch.linspace(-1.0, 1.0, 60).reshape(3, 4, 5)
    found = normalise_(small * 3e38, spec)
    same = IntensitySpec(method="window", lower=-1.0, upper=1.0) if method == "window" else spec
    torch.testing.assert_close(found, normalise_(small, same))


def padded(volume: Volume, widths: tuple[tuple[int, int], ...], value: float) -> Volume:
    """Surround a scan with one value."""
    voxels = np.pad(volume.voxels, widths, constant_values=value)
    first = [-float(before) for before, _ in widths]
    return make_volume(voxels, volume.affine @ translation(first))


def with_zeros(shape: tuple[int, int, int]) -> np.ndarray:
    """Make noise in which a tenth is 0, as the air of many scans is."""
    random = np.random.default_rng(2)
    voxels = random.uniform(1.0, 200.0, shape)
    return np.where(random.uniform(size=shape) < 0.1, 0.0, voxels).astype(np.float32)


@pytest.mark.parametrize(
    ("widths", "value"),
    [
        (((20, 14), (9, 17), (12, 12)), 0.0),  # A tenth is left.
        (((40, 0), (0, 9), (30, 0)), 0.0),
        (((2, 3), (0, 1), (0, 0)), -3000.0),
        (((1, 1), (4, 0), (0, 2)), 900.0),
        (((0, 5), (0, 0), (0, 0)), -3000.0),  # On one side, whichever it is.
        (((5, 0), (0, 0), (0, 0)), -3000.0),
        (((0, 0), (0, 9), (0, 0)), 150.0),
        (((0, 0), (9, 0), (0, 0)), 150.0),
        (((8, 8), (3, 9), (4, 10)), 150.0),  # Brighter than the border of what is shown.
        (((0, 0), (0, 4), (0, 0)), 0.0),  # As dark as a tenth of it.
    ],
)
def test_padding_that_is_no_part_of_a_scan_is_not_seen(
    widths: tuple[tuple[int, int], ...], value: float
) -> None:
    volume = make_volume(with_zeros((22, 17, 19)), oblique_affine(5))
    intensity = IntensitySpec(method="percentile", lower=1.0, upper=99.5)
    spec = make_spec((1.0, 1.5, 2.0), intensity=intensity).model_copy(update={"trim": True})
    plain, other = make_grid(volume, spec, CPU), make_grid(padded(volume, widths, value), spec, CPU)
    assert torch.equal(plain.voxels, other.voxels)
    assert plain.window == other.window
    np.testing.assert_allclose(plain.to_world, other.to_world, atol=1e-9)
    before = translation([float(width) for width, _ in widths])
    np.testing.assert_allclose(before @ plain.to_volume, other.to_volume, atol=1e-9)


@pytest.mark.parametrize(
    "paddings",
    [
        ((((3, 2), (1, 4), (2, 2)), -1000.0), (((9, 9), (6, 9), (7, 5)), 150.0)),
        ((((4, 0), (3, 0), (5, 0)), -1000.0), (((0, 4), (0, 5), (0, 3)), -2000.0)),
        ((((4, 0), (3, 0), (5, 0)), -1000.0), (((0, 4), (0, 5), (0, 3)), 150.0)),
        ((((2, 2), (0, 0), (1, 1)), -9.0), (((0, 4), (3, 3), (0, 0)), -5.0), (((1, 0),) * 3, 400)),
    ],
)
def test_paddings_of_several_values_are_not_seen(
    paddings: tuple[tuple[tuple[tuple[int, int], ...], float], ...],
) -> None:
    """One around the other, or on opposite sides, as a scanner and other programs add them."""
    volume = wide = make_volume(with_zeros((22, 17, 19)), oblique_affine(5))
    for widths, value in paddings:
        wide = padded(wide, widths, value)
    spec = make_spec((1.0, 1.5, 2.0)).model_copy(update={"trim": True})
    plain, other = make_grid(volume, spec, CPU), make_grid(wide, spec, CPU)
    assert torch.equal(plain.voxels, other.voxels)
    np.testing.assert_allclose(plain.to_world, other.to_world, atol=1e-9)


def test_padding_is_not_seen_though_a_few_voxels_are_as_dark() -> None:
    """As of unsigned CT whose air is 1000: dead pixels, and shadows of metal, are 0."""
    voxels = with_zeros((22, 17, 19)) + 1000
    voxels[3:6, 4, 5:9] = 0.0
    volume = make_volume(voxels, oblique_affine(5))
    wide = padded(volume, ((8, 8), (3, 9), (4, 10)), 0.0)
    spec = make_spec((1.0, 1.5, 2.0)).model_copy(update={"trim": True})
    plain, other = make_grid(volume, spec, CPU), make_grid(wide, spec, CPU)
    assert torch.equal(plain.voxels, other.voxels)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_padding_that_may_be_part_of_a_scan_is_seen(value: float) -> None:
    """As of scans whose air was masked, next to which there is more: up to five sixths of them."""
    voxels = np.full((22, 17, 19), value, np.float32)
    voxels[1:-1, 1:-1, 1:-1] = with_zeros((20, 15, 17))
    voxels[[0, -1], 5:8, 6:9] = voxels[5:8, [0, -1], 6:9] = voxels[5:8, 6:9, [0, -1]] = 50.0
    volume = make_volume(voxels, oblique_affine(5))
    wide = padded(volume, ((8, 8), (3, 9), (4, 10)), value)
    spec = make_spec((1.0, 1.5, 2.0))
    trimmed = spec.model_copy(update={"trim": True})
    assert torch.equal(make_grid(wide, trimmed, CPU).voxels, make_grid(wide, spec, CPU).voxels)
    far = padded(volume, ((20, 14), (9, 17), (12, 12)), value)
    assert make_grid(far, spec, CPU).voxels.numel() > make_grid(far, trimmed, CPU).voxels.numel()
    blank = make_volume(np.full((5, 6, 7), value, np.float32), oblique_affine(5))
    assert torch.equal(make_grid(blank, trimmed, CPU).voxels, make_grid(blank, spec, CPU).voxels)
