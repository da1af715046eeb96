"""The frame of a second network: the mean shape with its principal axes along i, j and k.

Specimens are brought into it by their own landmarks; in service, by those of the first network. The
augmentation then moves them by no more than a first network may be wrong about a pose. So what is
left to learn is small, and is learned at a finer spacing.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

from app.geometry import Points, transform
from app.model import load_shape, read_manifest
from app.shapes import MIN_COMMON, MIN_LANDMARKS, Similarity, fit_similarity
from app.training.data.specimens import Specimen, rows_of

MIN_WIDTH: Final = 0.02
"""Of landmarks that show a pose, across over along the line that they lie nearest to: about a line,
a subject may be turned by any angle."""


def upright(mean: Points) -> Points:
    """Rotate a mean shape so that its principal axes are i, j, k and its bounding box is small."""
    known = mean[np.isfinite(mean).all(axis=1)]
    _, _, axes = np.linalg.svd(known - known.mean(axis=0), full_matrices=False)
    return np.asarray(mean @ (axes * np.sign(np.linalg.det(axes))).T)


def rotate_like(mean: Points, names: Sequence[str], start: Path) -> Points:
    """Rotate a mean shape into the pose of the second network whose weights a training starts from.

    Those weights know the subject in one pose only. Principal axes have two directions each, and
    which of them ``upright`` takes depends on the specimens.

    Args:
        mean: The mean shape, around the origin.
        names: Of its landmarks.
        start: Folder of the network; for one without such a pose, nothing is rotated.

    Raises:
        ModelRefused: There is no such model.
    """
    manifest = read_manifest(start)
    shape = load_shape(start, manifest)
    if shape is None or manifest.input.tile_shape == "whole":
        return mean
    known = (landmark.name for landmark in manifest.landmarks)
    target = rows_of(dict(zip(known, shape.mean, strict=True)), names)
    if _in_both(mean, target).sum() < MIN_LANDMARKS:
        return mean
    return np.asarray(mean @ fit_pose(target, mean).rotation.T)


def has_pose(points: Points, mean: Points) -> bool:
    """Say whether enough landmarks of a specimen are known to bring it into the frame of a mean."""
    known = mean[_in_both(points, mean)]
    if len(known) < MIN_COMMON:
        return False
    along, across, *_ = np.linalg.svd(known - known.mean(axis=0), compute_uv=False)
    return bool(across > MIN_WIDTH * along)


def fit_pose(points: Points, mean: Points) -> Similarity:
    """Fit the mean shape to the landmarks that a specimen has of it."""
    known = _in_both(points, mean)
    return fit_similarity(mean[known], points[known], np.ones(int(known.sum())))


def _in_both(points: Points, mean: Points) -> np.ndarray:
    return np.asarray(np.isfinite(points).all(axis=1) & np.isfinite(mean).all(axis=1))


def pose_specimen(specimen: Specimen, mean: Points) -> Specimen:
    """Bring a specimen into the frame of the mean shape, by its own landmarks.

    Its images are centred, as in service, on the middle of the whole shape: landmarks that the
    specimen lacks count where the shape has them.
    """
    in_shape = np.isfinite(mean).all(axis=1)
    to_frame = np.linalg.inv(fit_pose(specimen.points, mean).affine)
    points = transform(to_frame, specimen.points)
    whole = np.where(np.isfinite(points), points, mean)[in_shape]
    return replace(
        specimen,
        to_world=to_frame @ specimen.to_world,
        points=points,
        middle=np.asarray(whole.mean(axis=0)),
    )
