"""Votes of a scan -> heatmaps on the grid of the uploaded file.

A heatmap's value at a point is the ``mass`` that the point would have if votes counted by a
Gaussian of their distance, so it is near the network's mean probability where votes agree, and 0
where none are. Where the network itself answers heatmaps, the values are its own.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from jaxtyping import Float
from torch import Tensor

from app.geometry import Affine, scaling, translation
from app.inference.forecast import SLAB_VOXELS
from app.inference.scan_state import ScanState
from app.preprocessing import index_grid, sample_at
from app.voting import Readout, Votes, aggregate, kernel_of, make_readout, write_volumes

SMOOTHING: Final = 0.5
"""Sigma of the Gaussian, in the reach of a mode: wider than votes that agree scatter."""

COORDINATE_SMOOTHING: Final = 2.0
"""The same in voxels of the model, where votes have no reach."""


@dataclass(frozen=True, slots=True)
class VoteMap:
    """The votes of a pass over a scan, on the host.

    Attributes:
        readout: The grid that they point into.
        to_volume: Its voxel index -> index of the uploaded array.
    """

    votes: Votes
    readout: Readout
    to_volume: Affine


def keep_votes(state: ScanState) -> VoteMap:
    """Keep what heatmaps are made of from a scan whose tiles have all run."""
    readout = make_readout(state.grid, state.model.manifest)
    return VoteMap(state.merge_votes().cpu(), readout, state.grid.to_volume)


def write_scan_heatmaps(
    vote_map: VoteMap,
    landmarks: Sequence[int] | int,
    shape: tuple[int, ...],
    affine: Affine,
    check_cancelled: Callable[[], None],
) -> bytes:
    """Write heatmaps on the grid of a scan, as gzip NIfTI-1 of float32.

    Args:
        vote_map: Votes of the scan.
        landmarks: Numbers of the landmarks, which become the fourth axis; or one, without it.
        shape: Of the scan.
        affine: Of the scan; the file has the same.
        check_cancelled: Is called between slabs; ends the work by raising.
    """
    chosen = [landmarks] if isinstance(landmarks, int) else landmarks
    axes = shape if isinstance(landmarks, int) else (*shape, len(chosen))
    vote_map = _on_field(vote_map)
    from_volume = np.linalg.inv(vote_map.to_volume)
    planes = max(1, SLAB_VOXELS // (shape[0] * shape[1]))

    def slabs() -> Iterator[Float[Tensor, "i j k"]]:
        for landmark in chosen:
            heatmap = _heatmap(vote_map, landmark)
            for first in range(0, shape[2], planes):
                check_cancelled()
                size = (shape[0], shape[1], min(planes, shape[2] - first))
                index = index_grid(size, from_volume @ translation(np.array([0.0, 0.0, first])))
                yield sample_at(heatmap, index)

    return write_volumes(axes, affine, slabs())


def _on_field(vote_map: VoteMap) -> VoteMap:
    """View votes of a network's heatmaps on the grid of its output, whose voxels they are."""
    stride = vote_map.readout.stride
    if vote_map.readout.heatmap_threshold is None or stride == 1:
        return vote_map
    columns = vote_map.votes.columns.clone()
    columns[3:6] = (columns[3:6] + 0.5) / stride - 0.5
    i, j, k = (-(-size // stride) for size in vote_map.readout.shape)
    to_grid = translation([(stride - 1) / 2] * 3) @ scaling([stride] * 3)
    return VoteMap(
        votes=replace(vote_map.votes, columns=columns),
        readout=replace(vote_map.readout, shape=(i, j, k)),
        to_volume=vote_map.to_volume @ to_grid,
    )


def _heatmap(vote_map: VoteMap, landmark: int) -> Float[Tensor, "i j k"]:
    """Sum the votes of a landmark to its heatmap on the model's grid."""
    readout = vote_map.readout
    if readout.heatmap_threshold is not None:
        return aggregate(vote_map.votes, [landmark], readout)[0].clamp_(max=1.0)
    if readout.votes_each is not None:
        voters: float = readout.votes_each
        sigma_mm = COORDINATE_SMOOTHING * max(readout.spacing_mm)
    else:
        pitch_mm3 = math.prod(readout.spacing_mm) * readout.stride**3
        voters = max(1.0, 4 / 3 * math.pi * readout.radius_mm**3 / pitch_mm3)
        sigma_mm = SMOOTHING * readout.reach_mm
    peak = math.prod(kernel_of(sigma_mm / mm)[0] for mm in readout.spacing_mm)
    heatmap = aggregate(vote_map.votes, [landmark], readout, sigma_mm)[0]
    return heatmap.div_(voters * peak).clamp_(max=1.0)
