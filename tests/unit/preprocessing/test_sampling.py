"""Values between voxels, against torch's own interpolation."""

from itertools import permutations

import numpy as np
import pytest
import torch
from torch.nn.functional import grid_sample

from app.preprocessing.sampling import sample_at


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_values_between_voxels_are_torchs_in_any_order_in_memory(
    order: tuple[int, int, int],
) -> None:
    generator = torch.Generator().manual_seed(1)
    voxels = torch.randn(7, 8, 9, generator=generator).permute(order)
    index = torch.rand(33, 5, 6, 3, generator=generator) * 14 - 3  # Many outside, or at an edge.
    unit = (2 * index + 1) / torch.tensor(voxels.shape) - 1
    expected = grid_sample(voxels[None, None], unit.flip(-1)[None], align_corners=False)[0, 0]
    torch.testing.assert_close(sample_at(voxels, index), expected, atol=2e-6, rtol=0)


def test_voxels_are_sampled_exactly_and_nothing_is_outside() -> None:
    voxels = torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(2))
    inside = torch.from_numpy(np.moveaxis(np.indices(voxels.shape), 0, -1).astype(np.float32))
    assert torch.equal(sample_at(voxels, inside), voxels)
    outside = torch.tensor([[-1.0, 2, 2], [2, 5, 2], [2, 2, float("nan")], [1e30, 0, 0]])
    assert not sample_at(voxels, outside[None, None]).any()


def test_one_voxel_fades_out_over_the_width_of_a_voxel() -> None:
    index = torch.zeros(1, 1, 3, 3)
    index[0, 0, :, 0] = torch.tensor([-0.75, 0.25, 1.0])
    assert sample_at(torch.ones(1, 1, 1), index).flatten().tolist() == [0.25, 0.75, 0.0]
