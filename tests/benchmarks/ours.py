"""What is measured of ``app``, named here only, so that a new name is changed once.

``Field`` is the exception: it is what both sides start from.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from app.grid import Grid
from app.heatmaps import heatmap_volume, shift_and_sum
from app.landmarks import Landmark, locate
from app.manifest import Manifest
from app.network import Field
from app.readout import Readout, readout_of
from app.votes import Votes, concat_votes, filter_votes, select_votes, vote_rows
from tests.synthetic import make_manifest

__all__ = ["Landmark", "Votes", "filter_votes", "select_votes", "shift_and_sum", "vote_rows"]


@dataclass(frozen=True, slots=True)
class Reading:
    """What ``app`` needs to know besides the votes.

    Attributes:
        grid: Its shape and place.
        manifest: Names and thresholds.
        readout: Where votes are counted.
    """

    grid: Grid
    manifest: Manifest
    readout: Readout


def make_reading(shape: Sequence[int], landmarks: int, radius: float) -> Reading:
    """Say how to read a field of 1 mm voxels whose landmarks vote within a radius."""
    manifest = make_manifest(landmarks)
    voting = manifest.voting.model_copy(update={"radius_mm": radius, "smooth_mm": 1.0})
    manifest = manifest.model_copy(update={"voting": voting})
    # One voxel in memory: only the shape is looked at.
    grid = Grid(torch.zeros(1, 1, 1).expand(*shape), np.eye(4), np.eye(4), (1.0, 1.0, 1.0))
    return Reading(grid, manifest, readout_of(grid, manifest))


def find(field: Field, threshold: float, reading: Reading) -> tuple[Landmark, ...]:
    """Field -> Landmarks: what every scan goes through once per tile, in one go."""
    return find_from_votes(filter_votes(field, threshold), reading)


def find_from_votes(votes: Votes, reading: Reading) -> tuple[Landmark, ...]:
    """Votes -> Landmarks."""
    return locate(votes, reading.grid, reading.manifest, None)


def add_up(
    votes: Votes, landmarks: Sequence[int], reading: Reading
) -> Float[Tensor, "chosen i j k"]:
    """Votes -> dense heatmaps without smoothing: the aggregation of P1."""
    return heatmap_volume(votes, landmarks, replace(reading.readout, smooth_mm=0.0))


def list_all(votes: Votes) -> Float[Tensor, "votes 5"]:
    """List votes as rows of P1, wherever they point."""
    columns = (votes.landmark[:, None].float(), votes.probability[:, None], votes.position)
    return torch.cat(columns, dim=1)


def join(parts: Sequence[Votes]) -> Votes:
    """Put the votes of tiles together."""
    return concat_votes(parts)


def places(found: Sequence[Landmark]) -> Float64[np.ndarray, "landmarks 3"]:
    """List where landmarks were found, in voxels; NaN where they were not."""
    missing = np.full(3, np.nan)
    return np.stack([missing if mark.ijk is None else mark.ijk for mark in found])
