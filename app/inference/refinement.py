"""First-stage landmarks -> the same landmarks, more accurate: the second-stage network.

It sees the scan resampled into the pose of the landmarks that the first stage has found (see
``app.preprocessing.posed_grid``).
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from app.geometry import Points, distance_inside, spacing_of, transform
from app.io import Volume
from app.model import LoadedModel, ShapeSpec
from app.preprocessing import Pose
from app.shapes import MIN_LANDMARKS, fit_similarity, measure_stretch, measure_twist
from app.voting import Landmark, Point, Shape, fit_constellation, positions_of

SAME_POSE_RADII: Final = 0.4
"""Two poses count as the same if they place landmarks this close to each other on average, in
voting radii. With this, none of three whole mouse skulls had a further refine pass, and nearly all
of their eighteen halves did."""

MAX_REFINE_PASSES: Final = 3
"""Passes of the second-stage network; one of eighteen half skulls needed the third."""

MAX_EXTRA_VIEWS: Final = 5
"""Orientations the first-stage network sees a scan in, besides its own, while no landmark is
detected. Each costs a first pass and is another chance for a partial subject; a whole one needs
none."""

MAX_VIEW_VOXELS: Final = 1 << 19
"""Largest grid that is tried in other orientations. A pass at this size takes about a second of one
core. A mouse's head has a third of it, a brain of real size twenty times as many."""


SHOWN_MM: Final = 6.0
"""Voxels this near to a place must differ for a scan to show it: along each axis, two voxels of the
grid on which the first network of ``lumbar-mri`` counts levels, the only model with
surroundings."""

MIN_CLEAR: Final = 0.7
"""Least share of the landmarks which a scan should show that the first network must detect for
look-alikes to be told apart. Of 40 spines of ``lumbar-mri`` it detects more of nearly all, also in
other contrasts, cut off and up to 25 degrees oblique. Of such that are turned further, or whose
affine takes the front for the back, it takes many for one level further along, and mostly detects
less; the second network detects what it is shown all the same."""


class Refiner:
    """The second-stage model, and the pose in which its network sees a scan.

    Attributes:
        model: The model.
        shape: Its mean shape.
        tolerance_mm: Largest error of a landmark that the first stage has found.
    """

    def __init__(self, model: LoadedModel, tolerance_mm: float) -> None:
        """Use a second-stage model.

        Args:
            model: The loaded second-stage model; its folder has a mean shape.
            tolerance_mm: Largest error of a landmark that the first stage has found.

        Raises:
            ValueError: The model has no mean shape.
        """
        self.model = model
        self.tolerance_mm = tolerance_mm
        spec, mean = model.manifest.shape, model.shape
        if spec is None or mean is None:
            raise ValueError("expected a model with a shape, got one without")
        self.shape = Shape.of(mean, spec)

    def find_pose(self, coarse: Sequence[Landmark]) -> Pose | None:
        """Estimate the pose from the landmarks of the first stage; None if they show none."""
        return find_pose(coarse, replace(self.shape, tolerance_mm=self.tolerance_mm))

    def improve_pose(self, refined: Sequence[Landmark], pose: Pose) -> Pose | None:
        """Estimate the pose again, from the second stage's own landmarks.

        Where the first stage has seen little, as in half a subject, its pose is further off than
        the second stage was trained to tolerate; but the landmarks that this finds all the same
        give a much better pose.

        Args:
            refined: Landmarks of the second-stage network.
            pose: In which it saw the scan.

        Returns:
            The pose for another pass; None if it is the same, or the landmarks show none.
        """
        improved = find_pose(refined, self.shape)
        if improved is None:
            return None
        points = self.shape.mean[self.shape.known]
        moved = transform(improved.to_world, points) - transform(pose.to_world, points)
        distance = float(np.linalg.norm(moved, axis=1).mean())
        limit = SAME_POSE_RADII * self.model.manifest.voting.radius_mm
        return improved if distance > limit else None


def find_pose(landmarks: Sequence[Landmark], shape: Shape) -> Pose | None:
    """Fit a mean shape to landmarks.

    Args:
        landmarks: In the order of the shape.
        shape: Mean shape, and how far a landmark may be from it to count.

    Returns:
        The pose; None if fewer than four landmarks, or too few of them, agree on one.
    """
    agree = _agreeing(landmarks, shape)
    if agree is None:
        return None
    found = fit_similarity(*agree, np.ones(len(agree[0])))
    return Pose(found.affine, float(found.scale))


def doubt_proportions(
    landmarks: Sequence[Landmark], shape: Shape, spec: ShapeSpec
) -> tuple[str, ...]:
    """Say if a subject is too large, too small or too long for its model, or turned too far.

    Args:
        landmarks: What was found, in the order of the shape.
        shape: Mean shape, and how far a landmark may be from it to count.
        spec: What the manifest says of that shape, such as its limits.
    """
    if spec.max_stretch is None and spec.max_twist_deg is None:
        return ()  # Of most models; to fit the shape takes as long as to find a pose.
    agree = _agreeing(landmarks, shape)
    if agree is None:
        return ()
    doubts = []
    sizes = measure_stretch(*agree, shape.tolerance_mm)
    furthest = max(sizes, key=lambda size: abs(math.log(max(size, 1e-9))), default=1.0)
    most = spec.max_stretch or math.inf
    if not 1 / most <= furthest <= most:
        doubts.append(
            f"along one axis the subject is {furthest:.2f} times as large as usual, expected "
            f"{1 / most:.2f} to {most:g}; are the voxels as large as the file says?"
        )
    turned = measure_twist(agree[0], fit_similarity(*agree, np.ones(len(agree[0]))).rotation)
    # Landmarks that spread along one axis alone, as in a cut scan, do not tell of a twist about it.
    if spec.max_twist_deg is not None and len(sizes) > 1 and turned > spec.max_twist_deg:
        doubts.append(
            f"about its long axis the subject is turned by {turned:.0f} degrees, expected at most "
            f"{spec.max_twist_deg:g}; does it lie as the file says?"
        )
    return tuple(f"All positions are doubtful: {doubt}" for doubt in doubts)


def _agreeing(landmarks: Sequence[Landmark], shape: Shape) -> tuple[Points, Points] | None:
    """Choose the landmarks that agree on a pose.

    Returns:
        Their positions in the mean shape and in mm, RAS; None if fewer than four, or too few, do.
    """
    points = positions_of(landmarks)
    weights = np.array(
        [0.0 if landmark.ras_mm is None else landmark.confidence for landmark in landmarks]
    )
    fit = fit_constellation(points[:, None], weights[:, None], shape)
    if fit is None:
        return None
    agree = fit.choice >= 0
    return shape.mean[agree], points[agree]


def any_detected(landmarks: Sequence[Landmark]) -> bool:
    """Return whether any landmark is detected."""
    return any(landmark.status == "detected" for landmark in landmarks)


def has_enough_votes(landmarks: Sequence[Landmark]) -> bool:
    """Return whether enough landmarks have votes for the scan to show the subject."""
    return sum(landmark.mass > 0 for landmark in landmarks) >= MIN_LANDMARKS


def shows_any(places: Points, landmarks: Sequence[Landmark], shape: Shape, volume: Volume) -> bool:
    """Return whether a scan shows any of some places.

    A place is shown if it lies between the centres of the outermost voxels, and those within
    ``SHOWN_MM`` of it do not all have one value: blank voxels of a scan that was masked or padded
    show nothing.

    Args:
        places: In the frame of the mean shape.
        landmarks: What was found, in the order of the shape.
        shape: Mean shape, and how far a landmark may be from it to count.
        volume: The scan.

    Returns:
        Whether any is shown; False if the landmarks agree on no pose.
    """
    pose = find_pose(landmarks, shape)
    if pose is None:
        return False
    centres = transform(np.linalg.inv(volume.affine) @ pose.to_world, places)
    inside = ((centres >= 0) & (centres <= np.array(volume.voxels.shape) - 1)).all(axis=1)
    reach = SHOWN_MM / spacing_of(volume.affine)
    near = (_box(volume.voxels, centre, reach) for centre in centres[inside])
    return any(box.max() > box.min() for box in near)  # Their difference may overflow.


def count_clear(landmarks: Sequence[Landmark], shape: Shape, volume: Volume) -> tuple[int, int]:
    """Count the landmarks that a scan should show, and how many of them are detected.

    Args:
        landmarks: What was found, in the order of the shape.
        shape: Mean shape, and how far a landmark may be from it to count.
        volume: The scan.

    Returns:
        How many are detected, and how many lie in the scan by the pose of all; none of all if the
        landmarks agree on no pose.
    """
    pose = find_pose(landmarks, shape)
    if pose is None:
        return 0, len(landmarks)
    expected = transform(pose.to_world, shape.mean)
    shown = distance_inside(expected, volume.affine, volume.voxels.shape) >= 0.0
    detected = np.array([landmark.status == "detected" for landmark in landmarks])
    return int((detected & shown).sum()), int(shown.sum())


def compare_upside_down(
    upright: Sequence[Landmark], upside_down: Sequence[Landmark]
) -> tuple[str, ...]:
    """Say if more votes fit together where the first network sees a scan upside down."""
    mass, other = _sum_mass(upright), _sum_mass(upside_down)
    if other <= mass:
        return ()
    share = 100 * other / max(mass, 1e-9)
    return (
        f"upside down, the scan has {share:.0f} % as many votes; does it lie as the file says?",
    )


def _sum_mass(landmarks: Sequence[Landmark]) -> float:
    """Add up the mass of the landmarks that agree with the fitted shape."""
    agree = (one for one in landmarks if one.ras_mm is not None and one.expected_ras_mm is None)
    return sum(one.mass for one in agree)


def _box(voxels: np.ndarray, centre: Point, reach: Point) -> np.ndarray:
    """View what lies within a reach of a position along each axis: one voxel to each side at least.

    Args:
        voxels: Of a scan.
        centre: Position within it, voxels.
        reach: Along each axis, voxels.
    """
    first = np.floor(np.minimum(centre - reach, centre - 1)).clip(0).astype(int)
    last = np.ceil(np.maximum(centre + reach, centre + 1)).astype(int)
    return voxels[tuple(slice(a, b + 1) for a, b in zip(first, last, strict=True))]


def merge_stages(
    coarse: Sequence[Landmark], refined: Sequence[Landmark], tolerance_mm: float
) -> tuple[Landmark, ...]:
    """Combine the landmarks of both stages.

    A landmark that the second stage locates has the second stage's position. One that only the
    first stage locates keeps that position, but with low confidence: the more accurate network did
    not find it. What the second stage reports as detected, or as outside the scan, is final: it
    sees more, and its own constellation agrees. If the second stage has low confidence and the two
    positions are further apart than the tolerance, the more confident of them is returned, with low
    confidence.

    Args:
        coarse: Landmarks of the first stage.
        refined: Landmarks of the second stage, in the same order.
        tolerance_mm: Distance up to which two positions count as the same.

    Returns:
        The landmarks, with the names of the first stage.
    """
    return tuple(
        _merge_landmark(before, after, tolerance_mm)
        for before, after in zip(coarse, refined, strict=True)
    )


def _merge_landmark(coarse: Landmark, refined: Landmark, tolerance_mm: float) -> Landmark:
    """Combine what both stages found of one landmark."""
    if refined.status == "not_found":
        return coarse if coarse.ras_mm is None else with_low_confidence(coarse)
    chosen = refined
    disagree = (
        refined.status == "low_confidence"
        and coarse.ras_mm is not None
        and refined.ras_mm is not None
        and np.linalg.norm(refined.ras_mm - coarse.ras_mm) > tolerance_mm
    )
    if disagree:
        chosen = coarse if coarse.confidence > refined.confidence else refined
        chosen = with_low_confidence(chosen)
    return replace(chosen, name=coarse.name, description=coarse.description)


def with_low_confidence(landmark: Landmark) -> Landmark:
    """Doubt a landmark that has a position."""
    return replace(
        landmark,
        status="low_confidence",
        confidence=landmark.confidence / 2,
        region95_mm=None,
    )
