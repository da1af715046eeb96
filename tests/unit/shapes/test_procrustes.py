"""A cohort -> shapes, their mean, principal components, and what is unlike the others."""

import csv
import re
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_allclose
from scipy.spatial import procrustes
from scipy.spatial.transform import Rotation

from app.errors import BadParameter
from app.geometry import scaling
from app.io import read_landmarks
from app.shapes import (
    Cohort,
    analyse_shapes,
    estimate_robust_shape,
    find_outliers,
    fit_similarity,
    read_cohort,
    swaps,
    write_shape_report,
)
from app.shapes.robust_shape import fit_to
from app.training.data.check_shapes import check_shapes
from app.training.data.specimens import SpecimenFiles
from app.training.data.summary import SpecimenSummary
from tests.support.synthetic import SHAPE_LANDMARKS, make_shape

NAMES = tuple(f"p{number}" for number in range(SHAPE_LANDMARKS))


def make_cohort(spread: float = 0.0, *, missing: int = 0, specimens: int = 9) -> Cohort:
    """Make specimens of one shape, each with its own pose, size and random change."""
    random = np.random.default_rng(4)
    shape = make_shape(3)
    points = []
    for number in range(specimens):
        own = shape + random.normal(0, spread, shape.shape) if spread else shape
        turned = Rotation.random(random_state=number).apply(random.uniform(0.5, 2) * own)
        turned += random.uniform(-50, 50, 3)
        turned[random.permutation(SHAPE_LANDMARKS)[:missing]] = np.nan
        points.append(turned)
    return Cohort(tuple(f"s{number}" for number in range(specimens)), NAMES, np.array(points))


def full_distance(one: np.ndarray, other: np.ndarray) -> float:
    """Return the square of the full Procrustes distance, as scipy computes it."""
    return float(procrustes(one, other)[2])


def test_specimens_of_one_shape_are_superimposed_exactly_whatever_is_missing() -> None:
    cohort = make_cohort(missing=5)
    space = analyse_shapes(cohort)
    assert_allclose(space.shapes, np.broadcast_to(space.mean, space.shapes.shape), atol=1e-8)
    assert full_distance(space.mean, make_shape(3)) < 1e-12
    assert_allclose(space.distance, 0.0, atol=1e-7)
    assert_allclose(space.size_mm, analyse_shapes(make_cohort()).size_mm, rtol=1e-7)
    assert (~space.known).sum() == 5 * 9


def test_shapes_have_size_one_around_the_origin_and_distances_are_scipys() -> None:
    cohort = make_cohort(2.0)
    space = analyse_shapes(cohort)
    assert_allclose(np.linalg.norm(space.shapes, axis=(1, 2)), 1.0)
    assert_allclose(space.shapes.mean(axis=1), 0.0, atol=1e-12)
    centred = cohort.points - cohort.points.mean(axis=1, keepdims=True)
    assert_allclose(space.size_mm, np.sqrt((centred**2).sum(axis=(1, 2))))
    for points, distance in zip(cohort.points, space.distance, strict=True):
        # Full and partial distance are sin r and 2 sin(r / 2) of the same angle r.
        full = 1 - (1 - distance**2 / 2) ** 2
        assert full_distance(space.mean, points) == pytest.approx(full, rel=1e-6)


def test_no_shape_nearby_is_a_better_mean() -> None:
    cohort = make_cohort(2.0)
    space = analyse_shapes(cohort)

    def cost(mean: np.ndarray) -> float:
        full = np.array([full_distance(mean, points) for points in cohort.points])
        return float((2 - 2 * np.sqrt(1 - full)).sum())

    assert cost(space.mean) == pytest.approx((space.distance**2).sum(), rel=1e-9)
    random = np.random.default_rng(0)
    for step in (1e-2, 1e-3):
        others = [space.mean + step * random.standard_normal(space.mean.shape) for _ in range(20)]
        assert min(map(cost, others)) > cost(space.mean)


def test_order_pose_and_size_of_the_specimens_do_not_matter() -> None:
    cohort = make_cohort(2.0, missing=2)
    turned = Rotation.random(random_state=99).apply(cohort.points[4]) * 3 + 7
    order = [4, 2, 0, 8, 1, 3, 5, 6, 7]
    points = np.array([turned if row == 4 else cohort.points[row] for row in order])
    names = tuple(cohort.specimens[row] for row in order)
    one, other = analyse_shapes(cohort), analyse_shapes(Cohort(names, NAMES, points))
    assert_allclose(other.distance, one.distance[order], atol=1e-7)
    assert_allclose(other.explained, one.explained, atol=1e-6)
    assert_allclose(np.abs(other.scores), np.abs(one.scores[order]), atol=1e-6)


def test_the_one_way_in_which_shapes_vary_is_the_first_component() -> None:
    shape = make_shape(3)
    shape = shape - shape.mean(axis=0)
    change = np.random.default_rng(1).standard_normal(shape.shape)
    change -= change.mean(axis=0)
    amounts = np.linspace(-1, 1, 11)
    points = np.array([shape + 0.05 * amount * change for amount in amounts])
    space = analyse_shapes(Cohort(tuple(map(str, range(11))), NAMES, points))
    assert space.explained[0] > 0.999
    correlation = np.corrcoef(space.scores[:, 0], amounts)[0, 1]
    assert abs(correlation) > 0.9999
    flat = space.components.reshape(len(space.components), -1)
    assert_allclose(flat @ flat.T, np.eye(len(flat)), atol=1e-9)
    assert_allclose(space.scores.mean(axis=0), 0.0, atol=1e-9)
    variance = space.scores.var(axis=0)
    assert_allclose(space.explained, variance / variance.sum(), atol=1e-9)


def test_a_missing_point_is_estimated_near_to_where_it_was() -> None:
    whole = make_cohort(0.5)
    points = whole.points.copy()
    points[2, 7] = np.nan
    space = analyse_shapes(Cohort(whole.specimens, NAMES, points))
    fit = fit_similarity(space.shapes[2], whole.points[2], space.known[2].astype(float))
    assert np.linalg.norm(fit.apply(space.shapes[2])[7] - whole.points[2, 7]) < 3.0
    assert np.linalg.norm(whole.points[2, 7] - whole.points[2].mean(axis=0)) > 6.0


def test_specimens_and_landmarks_that_cannot_be_used_are_left_out() -> None:
    cohort = make_cohort(1.0)
    points = cohort.points.copy()
    points[3, 3:] = np.nan
    points[:, 5] = np.nan
    space = analyse_shapes(Cohort(cohort.specimens, NAMES, points))
    assert "s3" not in space.specimens
    assert len(space.specimens) == 8
    assert "p5" not in space.landmarks
    with pytest.raises(BadParameter, match=r"expected 3 specimens with 4 landmarks .*, got 2"):
        analyse_shapes(Cohort(cohort.specimens[:2], NAMES, points[:2]))


def test_a_specimen_whose_points_are_all_in_one_place_is_left_out(tmp_path: Path) -> None:
    """As files list points that were never placed. The others are compared as without it."""
    cohort = make_cohort(0.5)
    cohort.points[4, 3] += 80.0
    others = np.arange(9) != 2
    without = Cohort(
        tuple(np.array(cohort.specimens)[others]), cohort.landmarks, cohort.points[others].copy()
    )
    cohort.points[2] = 0.0
    cohort.points[2, 6:] = np.nan
    space = write_shape_report(cohort, tmp_path)
    assert space.specimens == without.specimens
    assert_allclose(space.scores, analyse_shapes(without).scores)
    found = find_outliers(cohort)
    assert found == find_outliers(without)
    assert found is not None
    assert [one.specimen for one in found] == ["s4"]
    assert "left out: s2." in (tmp_path / "report.html").read_text()
    cohort.points[:] = cohort.points[:, :1]
    with pytest.raises(BadParameter, match="not all in one place, got 0"):
        analyse_shapes(cohort)


def test_exchanged_and_misplaced_points_are_found_and_reported(tmp_path: Path) -> None:
    cohort = make_cohort(0.3, specimens=14)
    points = cohort.points.copy()
    points[6, [2, 9]] = points[6, [9, 2]]
    points[11, 4] += 12.0 * np.linalg.norm(np.ptp(points[11], axis=0)) / 100 * np.ones(3)
    wrong = Cohort(cohort.specimens, NAMES, points)
    assert find_outliers(cohort) == []
    outliers = find_outliers(wrong)
    assert outliers is not None
    assert [(one.specimen, one.swaps) for one in outliers] == [
        ("s6", ("landmarks p2 and p9 look swapped",)),
        ("s11", ()),
    ]
    assert list(outliers[1].misplaced) == ["p4"]
    write_shape_report(wrong, tmp_path / "report")
    page = (tmp_path / "report" / "report.html").read_text()
    assert "landmarks p2 and p9 look swapped" in page
    assert re.search(r"<td>s11</td><td></td><td>p4 \(", page)
    assert "http" not in re.sub(r"data:image/svg\+xml;base64,[^\"]*", "", page)
    space = analyse_shapes(wrong)
    with (tmp_path / "report" / "scores.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["specimen"] for row in rows] == list(wrong.specimens)
    assert_allclose([float(row["PC2"]) for row in rows], space.scores[:, 1], rtol=1e-6)
    mean = read_landmarks(tmp_path / "report" / "mean_shape.mrk.json")
    assert full_distance(np.array(list(mean.values())), space.mean) < 1e-12


def test_sizes_of_cells_are_not_rounded_to_nothing(tmp_path: Path) -> None:
    """Those of specimens some micrometres across were all 0.00 or 0.01 mm."""
    cohort = make_cohort(0.3)
    small = Cohort(cohort.specimens, NAMES, 1e-4 * cohort.points)
    space = write_shape_report(small, tmp_path)
    page = (tmp_path / "report.html").read_text()
    for name, size_mm in zip(space.specimens, space.size_mm.tolist(), strict=True):
        assert f"<td>{name}</td><td>{size_mm:.5g}</td>" in page


def test_a_misplaced_point_among_exchanged_sides_has_the_name_that_its_file_gives_it() -> None:
    """That of its partner was reported, which lies where it belongs; and likewise of two pairs."""
    random = np.random.default_rng(8)
    right = random.uniform((5, -40, -20), (30, 40, 20), (7, 3))
    shape = np.stack([right, right * (-1, 1, 1)], axis=1).reshape(-1, 3)  # r0 l0 r1 l1 …
    names = tuple(f"{side}{number}" for number in range(7) for side in "rl")
    points = shape + random.normal(0, 0.2, (12, *shape.shape))
    points[6] = points[6].reshape(7, 2, 3)[:, ::-1].reshape(-1, 3)
    points[6, names.index("r2")] += (0, 0, 15.0)
    points[6, [0, 8]] = points[6, [8, 0]]
    found = find_outliers(Cohort(tuple("abcdefghijkl"), names, points))
    assert found is not None
    assert [one.specimen for one in found] == ["g"]
    exchanged = "the names of left and right look exchanged"
    assert found[0].swaps == (exchanged, "landmarks r0 and r4 look swapped")
    assert list(found[0].misplaced) == list(found[0].distance_mm) == ["r2"]
    affine = scaling(np.ones(3))
    files = [SpecimenFiles(name, Path(), Path()) for name in "abcdefghijkl"]
    specimens = [
        SpecimenSummary(one, (9, 8, 7), affine, "", (0, 1), dict(zip(names, own, strict=True)))
        for one, own in zip(files, points, strict=True)
    ]
    messages = [
        issue.message
        for issue in check_shapes(specimens, names, estimate_robust_shape(list(points)))
    ]
    assert messages[:2] == [exchanged, "landmarks r0 and r4 look swapped"]
    assert re.search(r"predict them: r2 \(1[45][^,]*$", messages[2])


def test_copies_of_one_specimen_are_reported_too(tmp_path: Path) -> None:
    points = np.broadcast_to(make_shape(3), (4, SHAPE_LANDMARKS, 3))
    space = write_shape_report(Cohort(tuple("abcd"), NAMES, points), tmp_path)
    assert space.scores.shape == (4, 0)
    assert "same shape" in (tmp_path / "report.html").read_text()


def test_random_points_have_nothing_to_be_compared_with(tmp_path: Path) -> None:
    points = np.random.default_rng(3).uniform(-9, 9, (6, SHAPE_LANDMARKS, 3))
    cohort = Cohort(tuple("abcdef"), NAMES, points)
    assert find_outliers(cohort) is None
    write_shape_report(cohort, tmp_path)
    assert "Not looked for" in (tmp_path / "report.html").read_text()


def test_few_specimens_and_those_that_share_no_landmarks_are_not_compared() -> None:
    points = np.stack([make_shape(3)] * 6)
    apart = np.full_like(points, np.nan)
    for index in range(6):
        apart[index, 7 * index : 7 * (index + 1)] = points[index, 7 * index : 7 * (index + 1)]
    for some in (points[:3], apart):
        assert find_outliers(Cohort(tuple("abcdef")[: len(some)], NAMES, some)) is None


def test_report_on_real_skulls_shows_the_two_points_that_are_exchanged(
    data_dir: Path, tmp_path: Path
) -> None:
    skulls = data_dir / "mouse-skull"
    for folder in (skulls / "landmarks", skulls / "unposed" / "landmarks"):
        for path in folder.iterdir():
            (tmp_path / path.name).symlink_to(path)
    cohort = read_cohort(tmp_path)
    assert cohort.points.shape == (39, 45, 3)
    outliers = find_outliers(cohort)
    assert outliers is not None
    assert [(one.specimen, one.swaps) for one in outliers if one.swaps] == [
        ("SF_CamEiJ", ("landmarks 49 and 50 look swapped",))
    ]
    space = analyse_shapes(cohort)
    assert space.specimens[int(space.distance.argmax())] == "SF_CamEiJ"


def test_of_a_curve_that_was_placed_backwards_few_pairs_are_fitted_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All of its points are misplaced; with 250 of them, fitting all their pairs took minutes."""
    angle = np.linspace(0, 3, 40)
    curve = np.stack([40 * np.cos(angle), 25 * np.sin(angle), 6 * angle**2], axis=1)
    random = np.random.default_rng(2)
    shape = np.concatenate([make_shape(3), curve])
    points = shape + random.normal(0, 0.3, (14, *shape.shape))
    points[6, SHAPE_LANDMARKS:] = points[6, : SHAPE_LANDMARKS - 1 : -1]
    fits: list[np.ndarray] = []

    def fit_and_count(sets: np.ndarray, shape: np.ndarray) -> object:
        fits.append(sets)
        return fit_to(sets, shape)

    monkeypatch.setattr(swaps, "fit_to", fit_and_count)
    names = tuple(f"p{number}" for number in range(len(shape)))
    outliers = find_outliers(Cohort(tuple("abcdefghijklmn"), names, points))
    assert outliers is not None
    assert [one.specimen for one in outliers] == ["g"]
    assert len(outliers[0].misplaced) >= 40
    assert 1 < len(fits) <= 50
