"""Landmarks -> what makes them doubtful, in NumPy float64: part of the reference of the whole path.

Written from ``models/README.md``. A doubt has a name and the numbers that its warning tells.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from app.model.manifest import Manifest
from app.model.sections import ShapeSpec
from tests.support.oracle import Array
from tests.support.reference import ReferenceLandmark
from tests.support.reference_grid import find_padding
from tests.support.reference_modes import Extent
from tests.support.reference_pose import ReferenceScan, find_pose, move
from tests.support.reference_shape import ShapeOpinion, choose_by_shape, fit_similarity

NEAR_MM = 6.0
"""Of a place, within which voxels must differ for it to be shown."""

CLEAR, RIVAL, RIVAL_COUNT = 0.7, 0.4, 0.5
"""Least shares: of landmarks that the first network detects; of the votes, and the landmarks, of
another arrangement that is one."""

Doubts = dict[str, tuple[float, ...]]


@dataclass(frozen=True, slots=True)
class ReferenceRival:
    """Another arrangement: its share of the votes, and how far away it is on average."""

    share: float
    distance_mm: float


def find_rival(
    opinions: Sequence[ShapeOpinion],
    places: Sequence[Array],
    masses: Sequence[Array],
    mean: Array,
    tolerance_mm: float,
) -> ReferenceRival | None:
    """Fit the shape again, to the modes that are not where the first fit has them."""
    expected = [one.expected_mm for one in opinions if one.expected_mm is not None]
    if len(expected) < len(mean):
        return None
    total = sum(
        m[one.chosen] for m, one in zip(masses, opinions, strict=True) if one.chosen is not None
    )
    away = [
        np.linalg.norm(p - at, axis=1) > tolerance_mm
        for p, at in zip(places, expected, strict=True)
    ]
    rest = [p[far] for p, far in zip(places, away, strict=True)]
    left = [m[far] for m, far in zip(masses, away, strict=True)]
    most = max((float(m.max(initial=0.0)) for m in left), default=0.0)
    if most == 0.0:
        return None
    others = choose_by_shape(rest, [m / most for m in left], mean, tolerance_mm)
    agree = [(m[one.chosen]) for m, one in zip(left, others, strict=True) if one.chosen is not None]
    count = sum(one.chosen is not None for one in opinions)
    if not agree or len(agree) < RIVAL_COUNT * count or sum(agree) < RIVAL * total:
        return None
    moved = [
        float(np.linalg.norm(other.expected_mm - at))
        for other, at in zip(others, expected, strict=True)
        if other.expected_mm is not None
    ]
    return ReferenceRival(float(sum(agree) / total), float(np.mean(moved)))


def find_doubts(
    landmarks: Sequence[ReferenceLandmark],
    first: Sequence[ReferenceLandmark],
    shown: ReferenceScan,
    manifest: Manifest,
    mean: Array,
) -> Doubts:
    """List what the shape of the first network's model makes doubtful of an answer.

    Args:
        landmarks: The answer.
        first: What the first network has found.
        shown: What the model sees of the scan.
        manifest: Of the model of the first network.
        mean: Its mean shape.
    """
    spec, doubts = manifest.shape, Doubts()
    assert spec is not None
    if spec.surroundings:
        if not _shows_surroundings(landmarks, shown, manifest, mean):
            doubts["surroundings"] = ()
        pose = find_pose(first, mean, spec.tolerance_mm)
        inside = (
            [False] * len(mean) if pose is None else list(_holds(shown, move(pose.to_world, mean)))
        )
        detected = sum(
            is_in and one.status == "detected" for is_in, one in zip(inside, first, strict=True)
        )
        should = len(mean) if pose is None else sum(inside)
        if detected < CLEAR * should:
            doubts["unclear"] = (float(detected), float(should))
    if spec.min_extent_mm is not None:
        thick = 1 / np.linalg.norm(np.linalg.inv(shown.affine[:3, :3]), axis=1)
        _, box = find_padding(shown.voxels)
        part = shown.voxels[box].shape if shown.voxels[box].size else shown.voxels.shape
        if min(thick * part) < spec.min_extent_mm:
            doubts["extent"] = (float(min(thick * part)),)
    return doubts | _proportions(landmarks, spec, mean)


def _holds(scan: ReferenceScan, points: Array) -> np.ndarray:
    """Say which points in mm lie in a scan, up to the faces of its voxels."""
    to_voxels = np.linalg.inv(scan.affine).astype(np.float64)
    inside: np.ndarray = Extent(to_voxels, scan.voxels.shape).holds(points)
    return inside


def _shows_surroundings(
    landmarks: Sequence[ReferenceLandmark], shown: ReferenceScan, manifest: Manifest, mean: Array
) -> bool:
    assert manifest.shape is not None
    pose = find_pose(landmarks, mean, manifest.shape.tolerance_mm)
    if pose is None:
        return False
    names = [one.name for one in manifest.landmarks]
    last = np.array(shown.voxels.shape) - 1
    for place in manifest.shape.surroundings:
        end, start = mean[names.index(place.beyond)], mean[names.index(place.seen_from)]
        at = end + place.mm * (end - start) / np.linalg.norm(end - start)
        index = move(np.linalg.inv(shown.affine) @ pose.to_world, at)
        if (index < 0).any() or (index > last).any():
            continue
        reach = np.maximum(NEAR_MM / np.linalg.norm(shown.affine[:3, :3], axis=0), 1)
        low, high = np.floor(index - reach), np.ceil(index + reach)
        part = [slice(max(int(a), 0), int(b) + 1) for a, b in zip(low, high, strict=True)]
        if np.ptp(shown.voxels[tuple(part)]) > 0:
            return True
    return False


def _proportions(landmarks: Sequence[ReferenceLandmark], spec: ShapeSpec, mean: Array) -> Doubts:
    """Measure how a subject is stretched, and turned about the longest axis of the mean shape."""
    pose = find_pose(landmarks, mean, spec.tolerance_mm)
    if pose is None:
        return {}
    rows = [
        row for row, one in enumerate(landmarks) if row in pose.agree or one.status == "detected"
    ]
    source, target = mean[rows], np.array([landmarks[row].ras_mm for row in rows])
    off, onto = source - source.mean(axis=0), target - target.mean(axis=0)
    variances, axes = np.linalg.eigh(off.T @ off / len(rows))
    wide = axes[:, variances >= spec.tolerance_mm**2]
    doubts: Doubts = {}
    if wide.size:
        flat = off @ wide
        sizes = np.sqrt(np.linalg.eigvalsh(_gram(np.linalg.solve(flat.T @ flat, flat.T @ onto))))
        furthest = float(max(sizes, key=lambda size: abs(np.log(size))))
        if spec.max_stretch is not None and abs(np.log(furthest)) > np.log(spec.max_stretch):
            doubts["stretch"] = (furthest,)
    turn = fit_similarity(source, target, np.ones(len(rows)))[:3, :3]
    turn = turn / np.cbrt(np.linalg.det(turn))
    twist = _twist_deg(turn, axes[:, variances.argmax()])
    if spec.max_twist_deg is not None and wide.shape[1] > 1 and twist > spec.max_twist_deg:
        doubts["twist"] = (twist,)
    return doubts


def _gram(matrix: Array) -> Array:
    return np.asarray(matrix @ matrix.T)


def _twist_deg(turn: Array, axis: Array) -> float:
    """Take from a rotation the least one that moves an axis as far; measure what is left."""
    moved = turn @ axis
    cross, cosine = np.cross(axis, moved), float(axis @ moved)
    skew = np.cross(cross, np.eye(3)).T
    swing = np.eye(3) + skew + skew @ skew / (1 + cosine)
    left = np.linalg.inv(swing) @ turn
    return float(np.degrees(np.arccos(np.clip((np.trace(left) - 1) / 2, -1, 1))))
