"""Landmarks found roughly -> the same landmarks, closer: the second model of a model.

It sees the scan in the pose that the first one has found (see ``app.inference.pose``).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from app.geometry import transform
from app.inference.pose import Pose, find_pose, make_posed_grid
from app.io import Volume
from app.model import LoadedModel
from app.preprocessing import Grid
from app.voting import LEAST_LANDMARKS, GridFrame, Landmark, Shape, Votes, locate, readout_of

SAME_POSE: Final = 0.4
"""Poses are the same if they put landmarks this near to each other on average, in voting radii. Of
three whole mouse skulls none was looked at again, of their eighteen halves nearly all were."""

MOST_LOOKS: Final = 3
"""Looks of the second model; of eighteen half skulls one took the third."""

MOST_TURNS: Final = 5
"""Further sides that a scan is looked at from, if the landmarks make no sense together. Each is a
chance of its own for the first network, and another first look; a whole subject needs none."""

MOST_TURNED: Final = 1 << 19
"""Voxels of a grid that is turned: each turn costs as much as the first look, about a second of a
core at this size. A mouse's head has a third of it, a brain of real size twenty times as many."""

PLACED: Final = ("detected", "low_confidence")
"""What a landmark with a position is."""


class SecondLook:
    """The second model of a model: looks again in the pose that the first one has found."""

    def __init__(self, model: LoadedModel, tolerance_mm: float) -> None:
        """Prepare to look again.

        Args:
            model: The loaded second model; its folder has a shape.
            tolerance_mm: How far off the first model may be about a place and still mean it.
        """
        self.model = model
        self._tolerance_mm = tolerance_mm
        spec, mean = model.manifest.shape, model.shape
        if spec is None or mean is None:
            raise ValueError("expected a model with a shape, got one without")
        self._shape = Shape(mean, spec.tolerance_mm, spec.modes)

    def find_pose(self, found: Sequence[Landmark]) -> Pose | None:
        """Say which pose the landmarks of the first model show; None if they show none."""
        return find_pose(found, replace(self._shape, tolerance_mm=self._tolerance_mm))

    def better_pose(self, refined: Sequence[Landmark], pose: Pose) -> Pose | None:
        """Say which pose the second model's own landmarks show, if it is another one.

        Where the first model has seen little, as in half a subject, its pose is off by more than
        the second one has learned to bear; but what that finds there tells the pose far better.

        Args:
            refined: Landmarks of the second model.
            pose: In which it looked.

        Returns:
            The pose to look again in; None if it is the same, or they show none.
        """
        better = find_pose(refined, self._shape)
        if better is None:
            return None
        places = self._shape.mean[self._shape.knows()]
        moved = transform(better.to_world, places) - transform(pose.to_world, places)
        off = float(np.linalg.norm(moved, axis=1).mean())
        return better if off > SAME_POSE * self.model.manifest.voting.radius_mm else None

    def prepare(self, volume: Volume, pose: Pose, window: tuple[float, float]) -> Grid:
        """Sample a scan in a pose.

        Args:
            volume: The scan.
            pose: Of its landmarks.
            window: Voxel values that become 0 and 1.

        Returns:
            The grid of the second model.
        """
        device = self.model.network.device
        return make_posed_grid(volume, pose, self.model.manifest.input, window, device)

    def merge(self, found: Sequence[Landmark], refined: Sequence[Landmark]) -> tuple[Landmark, ...]:
        """Choose between what both models say of each landmark; see ``merge``."""
        return merge(found, refined, self._tolerance_mm)

    def locate_alone(self, votes: Votes, grid: Grid) -> tuple[Landmark, ...]:
        """Read the landmarks off the votes of the second model, for its only tile."""
        manifest = self.model.manifest
        # The grid's spacing is in mm of the subject; the radius was learned in mm of the frame.
        scale = grid.spacing_mm[0] / manifest.input.spacing_mm[0]
        readout = readout_of(grid, manifest)
        readout = replace(readout, radius_mm=scale * readout.radius_mm)
        frame = GridFrame(grid.to_volume, grid.to_world)
        return locate(votes, readout, frame, manifest.landmarks, self._shape)


def is_believed(landmarks: Sequence[Landmark]) -> bool:
    """Say whether any landmark is."""
    return any(mark.status == "detected" for mark in landmarks)


def is_worth_a_turn(landmarks: Sequence[Landmark]) -> bool:
    """Say whether so many landmarks have any vote that the scan may show the subject."""
    return sum(mark.mass > 0 for mark in landmarks) >= LEAST_LANDMARKS


def merge(
    rough: Sequence[Landmark], refined: Sequence[Landmark], tolerance_mm: float
) -> tuple[Landmark, ...]:
    """Choose between what both networks say of each landmark.

    The second one answers where it places a landmark, and the first where the second does not, but
    then with low confidence: the one that looked closer did not find it. What the second one
    detects, or says to lie outside the scan, is believed: it sees more, and its own constellation
    agrees. If it is in doubt, two places further apart than the tolerance are two opinions, and the
    more confident is told, with low confidence.

    Args:
        rough: Landmarks of the first model.
        refined: Landmarks of the second, in the same order.
        tolerance_mm: Distance up to which both mean the same place.

    Returns:
        One answer for each, with the names of the first model.
    """
    return tuple(
        _choose(before, after, tolerance_mm) for before, after in zip(rough, refined, strict=True)
    )


def _choose(before: Landmark, after: Landmark, tolerance_mm: float) -> Landmark:
    """Choose between two answers for one landmark."""
    if after.status == "out_of_field":
        return replace(after, name=before.name, description=before.description)
    if after.status not in PLACED:
        if before.status not in PLACED:
            return before
        return replace(
            before, status="low_confidence", confidence=before.confidence / 2, region95_mm=None
        )
    apart = (
        after.status != "detected"
        and before.ras_mm is not None
        and after.ras_mm is not None
        and np.linalg.norm(after.ras_mm - before.ras_mm) > tolerance_mm
    )
    chosen = before if apart and before.confidence > after.confidence else after
    if apart:
        chosen = replace(
            chosen, status="low_confidence", confidence=chosen.confidence / 2, region95_mm=None
        )
    return replace(chosen, name=before.name, description=before.description)
