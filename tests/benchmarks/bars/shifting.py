"""V4: P3, shift and sum."""

from collections.abc import Iterator
from functools import partial
from typing import Final

import torch

from tests.benchmarks import agreement
from tests.benchmarks.harness import Case, Limit, Rival, Run
from tests.benchmarks.rivals.shifts import Sums, by_convolution, by_scatter_add, by_slices
from tests.benchmarks.shift_and_sum import shift_and_sum

STEP: Final = 2
TOLERANCE: Final = 1e-5
"""Largest difference from the exact sum that P3 allows; ours has to keep it."""

ROUNDING: Final = 5e-5
"""The same for rivals, who add up to 128 numbers in float32 to sums of 40: slices and
``scatter_add_`` err by 1.7e-5 at 512 channels, ours by 2e-6."""

MOST_TAPS: Final = 1000
"""A convolution with more taps than this takes minutes, and is left out."""


def v4_shift_and_sum(run: Run) -> Iterator[Case]:
    """Against slices, a convolution and ``scatter_add_``."""
    shapes = [(16, 28, 256, 256), (4, 512, 256, 256)]
    if run.fast:
        shapes = [(2, 5, 12, 16)]
    for shape in shapes:
        random = torch.Generator().manual_seed(shape[1])
        x = torch.randn(shape, generator=random)
        mask = (torch.rand(shape[2:], generator=random) < 0.5).float()
        exact = by_slices(x.double(), mask.double(), STEP)
        ways = {"slices": by_slices, "convolution": by_convolution, "scatter_add_": by_scatter_add}
        if STEP * shape[1] > MOST_TAPS:
            del ways["convolution"]
        yield Case(
            f"shift and sum, {' x '.join(map(str, shape))}, S = {STEP}",
            partial(shift_and_sum, x, mask, STEP),
            tuple(
                Rival(
                    name,
                    partial(way, x, mask, STEP),
                    partial(_agree, exact),
                    Limit(1.0) if name == "scatter_add_" else None,
                )
                for name, way in ways.items()
            ),
            "batch of 4, not 16: temporaries" if shape[1] == 512 else "",
        )


def _agree(exact: Sums, mine: Sums, theirs: Sums) -> None:
    agreement.same_numbers(mine.double(), exact, TOLERANCE)
    agreement.same_numbers(theirs.double(), exact, ROUNDING)
