"""Compiles all numba loops into numba's cache, so that no request waits for the compiler.

    python -m app.inference.precompile

is run once where the service is installed. It takes some seconds, or none if all are there.
"""

import numpy as np
import torch

from app.model import Field, LandmarkSpec
from app.voting import GridFrame, Readout, aggregate, filter_rows, filter_votes, locate

SHAPE = (4, 5, 6)


def compile_loops() -> None:
    """Turn a small field into landmarks, once for each type that the scores of a field can have."""
    readout = Readout(1, SHAPE, (1.0, 1.0, 1.0), radius_mm=3.0)
    frame = GridFrame(np.eye(4), np.eye(4))
    for dtype in (torch.float32, torch.float16):
        scores = torch.full((1, *SHAPE), 0.9, dtype=dtype)
        field = Field(scores, torch.zeros(3, 1, *SHAPE, dtype=dtype), "none", background=False)
        votes = filter_votes(field, 0.5)
        filter_rows(field, 0.5, SHAPE)
        aggregate(votes, [0], readout)
        locate(votes, readout, frame, [LandmarkSpec(name="any")])


if __name__ == "__main__":
    compile_loops()
