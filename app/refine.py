"""Landmarks found roughly -> the same landmarks, closer: the second model of a model.

It sees the scan in the pose that the first one has found (see ``app.posed``).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from app.constellation import Shape
from app.grid import Grid
from app.landmarks import Landmark, locate
from app.posed import find_pose, make_posed_grid
from app.readout import GridFrame, readout_of
from app.registry import LoadedModel
from app.volume import Volume
from app.votes import Votes

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

    def prepare(
        self, volume: Volume, found: Sequence[Landmark], window: tuple[float, float]
    ) -> Grid | None:
        """Sample a scan in the pose that its landmarks show.

        Args:
            volume: The scan.
            found: Its landmarks, of the first model.
            window: Voxel values that become 0 and 1.

        Returns:
            The grid of the second model; None if the landmarks show no pose.
        """
        pose = find_pose(found, self._shape)
        if pose is None:
            return None
        device = self.model.network.device
        return make_posed_grid(volume, pose, self.model.manifest.input, window, device)

    def locate(self, votes: Votes, grid: Grid, found: Sequence[Landmark]) -> tuple[Landmark, ...]:
        """Read the landmarks off the votes of the second model, and choose between both models.

        Args:
            votes: Votes of the grid's only tile.
            grid: As ``prepare`` has made it.
            found: Landmarks of the first model.

        Returns:
            The landmarks of both models, as ``merge`` chooses.
        """
        return merge(found, self.locate_alone(votes, grid), self._tolerance_mm)

    def locate_alone(self, votes: Votes, grid: Grid) -> tuple[Landmark, ...]:
        """Read the landmarks off the votes of the second model; see ``locate``."""
        manifest = self.model.manifest
        # The grid's spacing is in mm of the subject; the radius was learned in mm of the frame.
        scale = grid.spacing_mm[0] / manifest.input.spacing_mm[0]
        readout = readout_of(grid, manifest)
        readout = replace(readout, radius_mm=scale * readout.radius_mm)
        frame = GridFrame(grid.to_volume, grid.to_world)
        return locate(votes, readout, frame, manifest.landmarks, self._shape)


def merge(
    rough: Sequence[Landmark], refined: Sequence[Landmark], tolerance_mm: float
) -> tuple[Landmark, ...]:
    """Choose between what both networks say of each landmark.

    The second one answers where it places a landmark, and the first where the second does not, but
    then with low confidence: the one that looked closer did not find it. What the second one
    detects is believed: it sees more, and its own constellation agrees. If it is in doubt, two
    places further apart than the tolerance are two opinions, and the more confident is told, with
    low confidence.

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
