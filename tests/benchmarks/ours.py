"""What is measured of ``app``, named here only, so that a new name is changed once.

``Field`` is the exception: it is what both sides start from.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from app.model.outputs import Field
from app.model.sections import LandmarkSpec
from app.voting.heatmaps import aggregate
from app.voting.landmarks import Landmark, locate
from app.voting.readout import GridFrame, Readout
from app.voting.reference import Placement, filter_columns
from app.voting.votes import (
    WHOLE_GRID,
    Votes,
    concat_votes,
    filter_rows,
    filter_votes,
    launch_filter,
)

__all__ = [
    "Landmark",
    "Placement",
    "Votes",
    "filter_rows",
    "filter_votes",
]


@dataclass(frozen=True, slots=True)
class Reading:
    """What ``app`` needs to know besides the votes.

    Attributes:
        readout: Where votes are counted.
        specs: Names and thresholds of the landmarks.
    """

    readout: Readout
    specs: tuple[LandmarkSpec, ...]


def make_reading(shape: tuple[int, int, int], landmarks: int, radius: float) -> Reading:
    """Say how to read a field of 1 mm voxels whose landmarks vote within a radius."""
    readout = Readout(landmarks, shape, (1.0, 1.0, 1.0), radius)
    return Reading(readout, tuple(LandmarkSpec(name=str(c)) for c in range(landmarks)))


def make_heatmap_reading(
    shape: tuple[int, int, int], landmarks: int, radius: float, threshold: float, stride: int
) -> Reading:
    """Say how to read heatmaps of 1 mm voxels that fall to the threshold at a radius."""
    reading = make_reading(shape, landmarks, radius)
    readout = replace(reading.readout, stride=stride, heatmap_threshold=threshold)
    return replace(reading, readout=readout)


def find(field: Field, threshold: float, reading: Reading) -> tuple[Landmark, ...]:
    """Field -> Landmarks: what every scan goes through once per tile, in one go."""
    placement = Placement(stride=reading.readout.stride)
    return find_from_votes(launch_filter(field, threshold, placement)(), reading)


def find_from_votes(votes: Votes, reading: Reading) -> tuple[Landmark, ...]:
    """Votes -> Landmarks."""
    return locate(votes, reading.readout, GridFrame(np.eye(4), np.eye(4)), reading.specs)


def add_up(
    votes: Votes, landmarks: Sequence[int], reading: Reading
) -> Float[Tensor, "chosen i j k"]:
    """Votes -> dense heatmaps without smoothing: the aggregation of P1."""
    return aggregate(votes.cpu(), landmarks, reading.readout)


def filter_votes_by_torch(field: Field, threshold: float) -> Votes:
    """Field -> Votes by the definition in plain torch."""
    return Votes(*filter_columns(field, threshold, WHOLE_GRID))


def collect(field: Field, threshold: float) -> Votes:
    """Field -> Votes in any order, as the service has them."""
    return launch_filter(field, threshold)()


def scan(field: Field, threshold: float) -> Callable[[], object]:
    """Prepare the kernel that filters votes on CUDA, by itself, without waiting for it."""
    from app.voting.cuda import votes as votes_triton  # noqa: PLC0415 - Triton is not there for every platform

    walk = votes_triton.plan_memory_order(field)
    places = votes_triton.plan_geometry(field, walk.axes, WHOLE_GRID)
    return partial(votes_triton.append, field, threshold, walk, places, votes_triton.CAPACITY)


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
