"""Landmarks of two scans -> the transform between them, and its file."""

from inspect import unwrap
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_allclose
from scipy.optimize import minimize
from scipy.spatial.transform import Rotation
from SimpleITK import GetArrayFromImage, GetImageFromArray, Image, ReadTransform, Resample

from app.errors import BadParameter
from app.geometry import LPS_FROM_RAS, Affine, transform
from app.measurements import REGION95_SIGMAS
from app.shapes import register
from app.shapes.registration import TRANSFORM_SUFFIXES, Kind
from tests.support.answers import make_answer

NAMES = ("a", "b", "c", "d", "e", "f", "g")
FIXED = np.random.default_rng(5).uniform(-20, 30, (len(NAMES), 3))
KINDS: tuple[Kind, ...] = ("rigid", "similarity", "affine")


def move(kind: Kind) -> Affine:
    """Make a transform that no simpler kind has."""
    affine = np.eye(4)
    affine[:3, :3] = Rotation.random(random_state=3).as_matrix()
    if kind == "similarity":
        affine[:3, :3] *= 1.3
    if kind == "affine":
        affine[:3, :3] = affine[:3, :3] @ np.array([[1.2, 0.1, 0], [0, 0.9, 0.2], [0, 0, 1.0]])
    affine[:3, 3] = 5.0, -70.0, 12.0
    return affine


def named(points: np.ndarray) -> dict[str, np.ndarray]:
    return dict(zip(NAMES, points, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_transform_is_recovered_exactly_by_its_own_kind_alone(kind: Kind) -> None:
    moving = transform(move(kind), FIXED)
    for other in KINDS:
        fit = register(named(moving), named(FIXED), other)
        if KINDS.index(other) >= KINDS.index(kind):
            assert_allclose(fit.fixed_to_moving, move(kind), atol=1e-9)
            assert max(fit.residual_mm.values()) < 1e-9
        else:
            assert fit.rms_mm > 0.5
        assert fit.left_out_mm >= fit.rms_mm - 1e-9


@pytest.mark.parametrize("suffix", TRANSFORM_SUFFIXES)
@pytest.mark.parametrize("kind", KINDS)
def test_itk_reads_the_file_as_the_map_from_fixed_to_moving(
    kind: Kind, suffix: str, tmp_path: Path
) -> None:
    moving = transform(move(kind), FIXED)
    path = tmp_path / f"fit{suffix}"
    register(named(moving), named(FIXED), kind).write(path)
    read = ReadTransform(str(path))
    for here, there in zip(FIXED, moving, strict=True):
        mapped = read.TransformPoint(transform(LPS_FROM_RAS, here).tolist())
        assert_allclose(mapped, transform(LPS_FROM_RAS, there), atol=1e-9)


def test_a_name_by_which_itk_would_not_know_the_format_is_refused(tmp_path: Path) -> None:
    fit = register(named(FIXED), named(FIXED))
    with pytest.raises(BadParameter, match=r"one of \.tfm, \.txt, \.mat, got fit\.h5"):
        fit.write(tmp_path / "fit.h5")
    assert not list(tmp_path.iterdir())


def test_itk_resamples_the_moving_scan_onto_the_fixed_one(tmp_path: Path) -> None:
    """A bright blob at each landmark of the moving scan comes to lie at that of the fixed one."""
    inside = FIXED[:4] / 2
    moving_points = transform(move("rigid"), inside)
    moved, fixed_points = (dict(zip(NAMES, p, strict=False)) for p in (moving_points, inside))
    register(moved, fixed_points).write(tmp_path / "fit.tfm")

    def scan(points: np.ndarray) -> Image:
        lps = transform(LPS_FROM_RAS, points)
        origin = lps.min(axis=0) - 15
        shape = np.ceil(lps.max(axis=0) + 15 - origin).astype(int)
        grid = np.stack(np.meshgrid(*map(np.arange, shape), indexing="ij"), axis=-1) + origin
        square = ((grid[..., None, :] - lps) ** 2).sum(axis=-1)
        image = GetImageFromArray(np.exp(-square / 18).sum(axis=-1).T.astype(np.float32))
        image.SetOrigin(origin.tolist())
        return image

    fixed, moving = scan(inside), scan(moving_points)
    resampled = Resample(moving, fixed, ReadTransform(str(tmp_path / "fit.tfm")))
    difference = GetArrayFromImage(resampled) - GetArrayFromImage(fixed)
    assert np.abs(difference).max() < 0.05
    unmoved = GetArrayFromImage(Resample(moving, fixed)) - GetArrayFromImage(fixed)
    assert np.abs(unmoved).max() > 0.5


@pytest.mark.parametrize("kind", KINDS)
def test_landmarks_count_by_their_calibrated_regions(kind: Kind) -> None:
    """The fit has the least sum of squares in standard deviations, of all transforms nearby."""
    random = np.random.default_rng(8)
    regions: list[list[float | None]] = [
        [0.3, 0.5, 4.0, 0.4, 0.6, 0.5, None],
        [1.0, 0.2, 0.3, 9.0, 0.4, 0.5, 0.6],
    ]
    moving = transform(move(kind), FIXED) + random.normal(0, 1.0, FIXED.shape)
    fit = register(
        make_answer(NAMES, moving, regions[0]), make_answer(NAMES, FIXED, regions[1]), kind
    )
    filled = np.array([[0.3, 0.5, 4.0, 0.4, 0.6, 0.5, 0.5], regions[1]], dtype=float)
    variance = ((filled / REGION95_SIGMAS) ** 2).sum(axis=0)

    def cost(affine: Affine) -> float:
        square = ((transform(affine, FIXED) - moving) ** 2).sum(axis=1)
        return float((square / variance).sum())

    def nearby(change: np.ndarray) -> Affine:
        affine = np.eye(4)
        affine[:3, :3] = Rotation.from_rotvec(change[:3]).as_matrix()
        if kind == "similarity":
            affine[:3, :3] *= np.exp(change[6])
        if kind == "affine":
            affine[:3, :3] += change[6:].reshape(3, 3)
        affine[:3, 3] = change[3:6]
        return np.asarray(affine @ fit.fixed_to_moving)

    best = minimize(lambda change: cost(nearby(change)), np.zeros(15), method="BFGS")
    assert cost(fit.fixed_to_moving) == pytest.approx(best.fun, rel=1e-6)
    square = np.array(list(fit.residual_mm.values())) ** 2
    expected = np.sqrt((square / variance).sum() / (1 / variance).sum())
    assert fit.rms_mm == pytest.approx(expected)


def test_regions_of_one_scan_count_alone_where_the_other_has_none() -> None:
    random = np.random.default_rng(9)
    moving = transform(move("rigid"), FIXED) + random.normal(0, 1.0, FIXED.shape)
    regions: list[float | None] = [0.3, 0.5, 4.0, 0.4, 0.6, 0.5, 2.0]
    known, unknown = make_answer(NAMES, moving, regions), make_answer(NAMES, FIXED, [None] * 7)
    both = register(known, make_answer(NAMES, FIXED, regions))
    for fixed in (unknown, named(FIXED)):
        fit = register(known, fixed)
        assert_allclose(fit.fixed_to_moving, both.fixed_to_moving, atol=1e-9)


def test_missing_landmarks_are_left_out() -> None:
    moving = transform(move("rigid"), FIXED)
    half = {name: moving[NAMES.index(name)] for name in "fceb"}
    fit = register(half | {"other": np.zeros(3)}, named(FIXED))
    assert list(fit.residual_mm) == ["b", "c", "e", "f"]
    assert_allclose(fit.fixed_to_moving, move("rigid"), atol=1e-9)
    undefined = register(half | {"a": np.full(3, np.nan)}, named(FIXED))
    assert list(undefined.residual_mm) == ["b", "c", "e", "f"]
    absent = register(half | {"a": None}, named(FIXED))
    assert list(absent.residual_mm) == ["b", "c", "e", "f"]
    few = {name: half[name] for name in "fce"}
    assert register(few, named(FIXED)).left_out_mm == np.inf


@pytest.mark.parametrize(
    ("kind", "rest"),
    [("rigid", (1, 0, 0)), ("similarity", (0, 1, 0)), ("affine", (1, 1, 0))],
)
def test_nothing_is_expected_of_a_point_without_which_the_others_are_flat(
    kind: Kind, rest: tuple[float, ...]
) -> None:
    """A fit to these is any of many, and depends on where the frame has its origin."""
    fixed = np.r_[FIXED[:6] * rest, FIXED[6:]]
    fit = register(named(fixed + 1.0), named(fixed), kind)
    assert fit.rms_mm == pytest.approx(0.0, abs=1e-9)
    for moving, still in ((fixed + 1.0, fixed), (fixed, FIXED), (FIXED, fixed)):
        assert register(named(moving), named(still), kind).left_out_mm == np.inf


@pytest.mark.parametrize("kind", KINDS)
def test_what_to_expect_of_other_points_is_told_by_fits_without_each_landmark(kind: Kind) -> None:
    moving = transform(move(kind), FIXED) + np.random.default_rng(8).normal(0, 1.0, FIXED.shape)
    squares = []
    for name in NAMES:
        rest = named(moving)
        point = rest.pop(name)
        affine = register(rest, named(FIXED), kind).fixed_to_moving
        squares.append(((transform(affine, named(FIXED)[name]) - point) ** 2).sum())
    fit = register(named(moving), named(FIXED), kind)
    assert fit.left_out_mm == pytest.approx(np.sqrt(np.mean(squares)))


@pytest.mark.parametrize(
    ("kind", "points", "message"),
    [
        ("rigid", FIXED[:2], "expected 3 common landmarks, got 2"),
        ("affine", FIXED[:3], "expected 4 common landmarks, got 3"),
        ("rigid", np.outer(np.arange(5.0), (1, 2, 3)), "do not lie on a line, got 5 that do"),
        ("rigid", np.ones((5, 3)), "do not lie on a line"),
        ("affine", FIXED[:6] * (1, 1, 0), "do not lie in a plane"),
    ],
)
def test_landmarks_that_do_not_tell_the_transform_are_refused(
    kind: Kind, points: np.ndarray, message: str
) -> None:
    some = dict(zip(NAMES, points, strict=False))
    for moving, fixed in ((some, some), (some, named(FIXED)), (named(FIXED), some)):
        with pytest.raises(BadParameter, match=message):
            register(moving, fixed, kind)


def test_points_may_be_those_of_an_answer_or_lists() -> None:
    """As the answer of a service and JSON have them: type checkers took arrays alone."""
    found = {one.name: one.ras_mm for one in make_answer(NAMES, FIXED).landmarks}
    lists = {name: point.tolist() for name, point in named(FIXED + 1.0).items()}
    assert_allclose(register(lists, found).fixed_to_moving[:3, 3], 1.0)
    assert_allclose(register({"a": None, **lists}, found).fixed_to_moving[:3, 3], 1.0)


@pytest.mark.parametrize("point", [[1.0, 2.0], [[1.0, 2.0, 3.0]], 4.0])
def test_a_position_that_is_none_is_named(point: object) -> None:
    unchecked = unwrap(register)
    with pytest.raises(BadParameter, match="c: expected x, y, z in mm, RAS, or None; got"):
        unchecked(named(FIXED) | {"c": point}, named(FIXED))


def test_a_kind_that_there_is_not_is_refused() -> None:
    some = dict(zip(NAMES, FIXED, strict=False))
    unchecked = unwrap(register)  # Types are checked at each call while tests run only.
    with pytest.raises(BadParameter, match="one of rigid, similarity, affine; got 'rigdi'"):
        unchecked(some, some, "rigdi")
