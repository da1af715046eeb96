"""two results -> nothing, or a DisagreementError that says what differs and by how much."""

from typing import Final

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from tests.benchmarks.harness import DisagreementError

AT_THRESHOLD: Final = 1e-6
"""Two ways to compute a float32 softmax may differ by this; a vote that near may go either way."""

ROW_TOLERANCE: Final = 1e-4
"""Positions up to 512 in float32 have steps of 3e-5, and one addition is rounded."""

SUM_TOLERANCE: Final = 1e-5
"""Of sums, absolute below 1 and relative above: thousands of float32 additions in any order."""


def same_rows(ours: Float[Tensor, "n 5"], theirs: Float[Tensor, "m 5"], threshold: float) -> None:
    """Compare rows of P1: the same votes, within a landmark in the same order."""
    mine, yours = _canonical(ours, threshold), _canonical(theirs, threshold)
    if mine.shape != yours.shape:
        raise DisagreementError(f"expected {len(yours)} rows, got {len(mine)}")
    same_numbers(mine, yours, ROW_TOLERANCE)


def same_sums(ours: Float[Tensor, "*shape"], theirs: Float[Tensor, "*shape"]) -> None:
    """Compare sums of votes, cell by cell."""
    same_numbers(ours, theirs, SUM_TOLERANCE * max(1.0, float(theirs.abs().max())))


def same_numbers(
    ours: Float[Tensor, "*shape"], theirs: Float[Tensor, "*shape"], tolerance: float
) -> None:
    """Compare two arrays, number by number."""
    if ours.shape != theirs.shape:
        raise DisagreementError(f"expected shape {list(theirs.shape)}, got {list(ours.shape)}")
    worst = float((ours - theirs).abs().max()) if ours.numel() else 0.0
    # Not "worst > tolerance", which NaN would pass.
    if not worst <= tolerance:
        raise DisagreementError(f"expected differences of at most {tolerance:g}, got {worst:g}")


def near(
    found: Float64[np.ndarray, "landmarks 3"],
    wanted: Float64[np.ndarray, "landmarks 3"],
    tolerance: float,
) -> None:
    """Check that every landmark lies where it should, in voxels."""
    distance = np.linalg.norm(found - wanted, axis=1)
    if not bool((distance <= tolerance).all()):
        raise DisagreementError(
            f"expected every landmark within {tolerance:g} voxels, got {np.round(distance, 2)}"
        )


def _canonical(rows: Float[Tensor, "n 5"], threshold: float) -> Float[Tensor, "m 5"]:
    """Leave out what the last bit of a probability decides, and sort by landmark."""
    rows = rows[(rows[:, 1] - threshold).abs() > AT_THRESHOLD]
    return rows[torch.argsort(rows[:, 0], stable=True)]
