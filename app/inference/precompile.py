"""Compiles all numba loops into numba's cache, so that no request waits for the compiler.

Loading a model does so once in each process. It takes half a minute, or half a second if all are
in the cache.
"""

from dataclasses import replace
from functools import cache

import numpy as np
import torch

from app.model import Field, LandmarkSpec, Shape, norm_groups
from app.preprocessing import index_grid, resample, sample_at, smooth_for
from app.voting import (
    GridFrame,
    Readout,
    aggregate,
    concat_votes,
    filter_rows,
    filter_votes,
    fit_constellation,
    locate,
)

SHAPE = (4, 5, 6)


@cache
def compile_loops() -> None:
    """Norm a tile, and find landmarks in a small field, once for each type that scores can have.

    Smoothed scans are sampled, and heatmaps. Of votes there are those of a field, and those of
    several together, in another memory order; of landmarks there are one and several, as arrays of
    one count as contiguous in any order.
    """
    for dtype in (torch.float32, torch.bfloat16):
        tile = torch.zeros(1, 2, *SHAPE, dtype=dtype).to(memory_format=torch.channels_last_3d)
        norm_groups(tile, 1, None, None, 1e-5)
    voxels = np.zeros(SHAPE, np.float32)
    resample(voxels, (2.0, 2.0, 2.0), torch.device("cpu"))
    smooth = smooth_for(voxels, 2.0, np.eye(4), torch.device("cpu"), (0.0, 1.0))
    for sampled in (smooth, torch.from_numpy(voxels)):
        sample_at(sampled, index_grid(SHAPE, np.eye(4)))
    frame = GridFrame(np.eye(4), np.eye(4))
    for landmarks in (1, 2):
        readout = Readout(landmarks, SHAPE, (1.0, 1.0, 1.0), radius_mm=3.0)
        specs = [LandmarkSpec(name=str(index)) for index in range(landmarks)]
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            scores = torch.full((landmarks, *SHAPE), 0.9, dtype=dtype)
            offsets = torch.zeros(3, landmarks, *SHAPE, dtype=dtype)
            field = Field(scores, offsets, "none", background=False)
            votes = filter_votes(field, 0.5)
            filter_rows(field, 0.5, SHAPE)
            aggregate(votes, [0], readout)
            for each in (votes, concat_votes([votes, votes])):
                locate(each, readout, frame, specs)
                locate(each, replace(readout, heatmap_threshold=0.5), frame, specs)
    # Nothing agrees with this shape, so that all ways to fit it are tried.
    modes = np.arange(24.0).reshape(4, 2, 3)
    fit_constellation(modes, np.ones((4, 2)), Shape(np.eye(4, 3), tolerance_mm=0.1))
