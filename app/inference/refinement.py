"""First-stage landmarks -> the same landmarks, more accurate: the second-stage network.

It sees the scan resampled into the pose of the landmarks that the first stage has found (see
``app.preprocessing.posed_grid``).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from jaxtyping import Bool

from app.geometry import transform
from app.io import Volume
from app.model import LoadedModel, Shape
from app.preprocessing import Grid, Pose, make_posed_grid
from app.shapes import MIN_LANDMARKS, fit_similarity
from app.voting import Landmark, fit_constellation, positions_of

SAME_POSE_RADII: Final = 0.4
"""Two poses count as the same if they place landmarks this close to each other on average, in
voting radii of the subject's size. With this, none of three whole mouse skulls had a further refine
pass, and nearly all of their eighteen halves did."""


class Refiner:
    """The second-stage model, and the pose in which its network sees a scan.

    Attributes:
        tolerance_mm: Largest error of a landmark that the first stage has found.

    Raises:
        ValueError: The model has no mean shape.
    """

    def __init__(self, model: LoadedModel, tolerance_mm: float) -> None:
        self.model = model
        self.tolerance_mm = tolerance_mm
        if model.shape is None:
            raise ValueError("expected a model with a shape, got one without")
        self.shape = model.shape

    def find_pose(self, coarse: Sequence[Landmark]) -> Pose | None:
        """Estimate the pose from the landmarks of the first stage; None if they show none."""
        return find_pose(coarse, replace(self.shape, tolerance_mm=self.tolerance_mm))

    def resample(
        self,
        volume: Volume,
        pose: Pose,
        window: tuple[float, float] | None,
        shown: Volume,
    ) -> Grid:
        """Resample a scan into a pose, for the network; see ``make_posed_grid``."""
        spec, device = self.model.manifest.input, self.model.network.device
        window = window or (0.0, 1.0)
        return make_posed_grid(volume, pose, spec, window, device, shown)

    def improve_pose(self, refined: Sequence[Landmark], pose: Pose) -> Pose | None:
        """Estimate the pose again, from what the second stage itself has found in this pose.

        Where the first stage has seen little, as in half a subject, its pose is further off than
        the second stage was trained to tolerate; but the landmarks that this finds all the same
        give a much better pose.

        Returns:
            The pose for another pass; None if it is the same, or the landmarks show none.
        """
        improved = find_pose(refined, self.shape)
        if improved is None:
            return None
        points = self.shape.mean[self.shape.known]
        moved = transform(improved.to_world, points) - transform(pose.to_world, points)
        distance = float(np.linalg.norm(moved, axis=1).mean())
        limit = SAME_POSE_RADII * pose.scale * self.model.manifest.voting.radius_mm
        return improved if distance > limit else None


def find_pose(landmarks: Sequence[Landmark], shape: Shape) -> Pose | None:
    """Fit a mean shape to landmarks.

    Args:
        landmarks: In the order of the shape.
        shape: Mean shape, and how far a landmark may be from it to count.

    Returns:
        The pose; None if fewer than four landmarks, or too few of them, agree on one.
    """
    agree = find_agreeing(landmarks, shape)
    if agree is None:
        return None
    found = fit_similarity(
        shape.mean[agree], positions_of(landmarks)[agree], np.ones(int(agree.sum()))
    )
    return Pose(found.affine, float(found.scale))


def find_agreeing(
    landmarks: Sequence[Landmark], shape: Shape
) -> Bool[np.ndarray, " landmarks"] | None:
    """Choose the landmarks that agree on a pose; None if fewer than four, or too few, do.

    Half of the confidence of all must agree, wherever the scan ends: that of false ones, such as of
    what was cut away, is half or a quarter already, as they did not agree when they were located.
    """
    points = positions_of(landmarks)
    weights = np.array([landmark.confidence for landmark in landmarks])
    fit = fit_constellation(points[:, None], weights[:, None], shape)
    if fit is None:
        return None
    agree: Bool[np.ndarray, " landmarks"] = fit.choice >= 0
    return agree


def any_detected(landmarks: Sequence[Landmark]) -> bool:
    """Return whether any landmark is detected."""
    return any(landmark.status == "detected" for landmark in landmarks)


def has_enough_votes(landmarks: Sequence[Landmark]) -> bool:
    """Return whether enough landmarks have votes for the scan to show the subject."""
    return sum(landmark.mass > 0 for landmark in landmarks) >= MIN_LANDMARKS


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
