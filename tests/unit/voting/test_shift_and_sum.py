"""Shift and sum, the known case P3, as an example of the sums of voting."""

import numpy as np
import pytest
import torch

from app.voting.heatmaps import aggregate
from app.voting.readout import Readout
from tests.benchmarks.shift_and_sum import shift_and_sum
from tests.support import oracle
from tests.support.synthetic import votes_at


@pytest.mark.parametrize("step", [1, 2, 5])
def test_shift_and_sum_is_the_known_case_p3(step: int) -> None:
    """Against the oracle, a transposed convolution and scatter_add_, to 1e-5."""
    random = torch.Generator().manual_seed(3)
    x = torch.randn(2, 7, 5, 11, generator=random)
    mask = (torch.rand(5, 11, generator=random) > 0.5).float()
    summed = shift_and_sum(x, mask, step)
    expected = oracle.shift_and_sum(x.double().numpy(), mask.double().numpy(), step)
    np.testing.assert_allclose(summed.numpy(), expected, atol=1e-5)

    wide = 11 + 6 * step
    kernel = torch.zeros(7, 1, 1, 6 * step + 1)
    kernel[torch.arange(7), 0, 0, torch.arange(7) * step] = 1.0
    by_convolution = torch.nn.functional.conv_transpose2d(x * mask, kernel)
    columns = torch.arange(11) + torch.arange(7)[:, None, None] * step
    by_scatter = torch.zeros(2, 5, wide)
    for row in range(2):
        index = torch.arange(5)[:, None] * wide + columns
        by_scatter[row].view(-1).scatter_add_(0, index.flatten(), (x[row] * mask).flatten())
    torch.testing.assert_close(summed, by_convolution, rtol=0, atol=1e-5)
    torch.testing.assert_close(summed[:, 0], by_scatter, rtol=0, atol=1e-5)


def test_shift_and_sum_is_voting_with_one_offset_per_channel() -> None:
    """The same sums, bit by bit, as those of votes whose offset is the shift."""
    x = torch.rand(1, 4, 6, 8, generator=torch.Generator().manual_seed(4))
    channel, h, w = torch.nonzero(torch.ones(4, 6, 8), as_tuple=True)
    position = torch.stack([torch.zeros_like(h), h, w + 3 * channel], 1)
    votes = votes_at(position.numpy(), probability=x.flatten().tolist())
    readout = Readout(1, (1, 6, 8 + 9), (1.0, 1.0, 1.0), radius_mm=1.0)
    assert torch.equal(shift_and_sum(x, torch.ones(1), 3)[0], aggregate(votes, [0], readout)[0])
