"""A scan at another spacing, against whole matrices in float64."""

from itertools import permutations, product

import numpy as np
import pytest
import torch
from jaxtyping import Float64

from app.compute import upload
from app.preprocessing.cpu.sampling import UINT16_ONE
from app.preprocessing.resampling import resample
from app.preprocessing.smoothing import smooth_for

CPU = torch.device("cpu")
SHAPE = (17, 22, 13)
STEP = (2.3, 0.7, 1.0)


def matrix(size: int, step: float) -> Float64[np.ndarray, "new size"]:
    """Sample a line linearly, smoothed as the spacing grows; its middle stays where it is."""
    sigma = 0.5 * np.sqrt(max(step**2 - 1, 0.0))
    distance = np.subtract.outer(np.arange(size), np.arange(size))
    near = np.abs(distance) <= (4 * sigma + 1 if sigma else 0)
    smooth = np.exp(-0.5 * (distance / max(sigma, 1e-6)) ** 2) * near
    smooth /= smooth.sum(axis=1, keepdims=True)
    new = max(1, round(size / step))
    place = np.clip((size - 1) / 2 + step * (np.arange(new) - (new - 1) / 2), 0, size - 1)
    low = np.minimum(np.floor(place).astype(int), max(size - 2, 0))
    share = (place - low)[:, None]
    rows = (1 - share) * smooth[low] + share * smooth[np.minimum(low + 1, size - 1)]
    return np.asarray(rows)


@pytest.mark.parametrize("dtype", ["uint8", ">i2", "float32", "float64"])
@pytest.mark.parametrize("threads", [1, 3])
def test_all_axes_are_resampled_in_any_order_and_direction_in_memory(
    dtype: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three axes finer, coarser and as they are; slabs of two planes, and parts of one."""
    monkeypatch.setattr("app.preprocessing.cpu.slabs.SLAB_VOXELS", 2 * 17 * 13)
    monkeypatch.setattr("app.preprocessing.cpu.resampling.PLANES_PER_THREAD", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    voxels = np.random.default_rng(1).integers(0, 200, SHAPE).astype(dtype)
    each = [matrix(*pair) for pair in zip(SHAPE, STEP, strict=True)]
    expected = np.einsum("ai,bj,ck,ijk->abc", *each, voxels.astype(np.float64))
    for order, signs in product(permutations(range(3)), product((1, -1), repeat=3)):
        flips = tuple(slice(None, None, sign) for sign in signs)
        stored = np.ascontiguousarray(voxels[flips].transpose(order))
        back = stored.transpose(np.argsort(order))[flips]
        found, _ = resample(back, STEP, CPU)
        assert found.is_contiguous()
        np.testing.assert_allclose(found.numpy(), expected, atol=1e-4)


def test_other_devices_resample_and_smooth_as_the_cpu_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs on them is torch's, so it runs here as well."""
    voxels = np.random.default_rng(3).integers(0, 200, SHAPE).astype(np.int16)[:, ::-1]
    affine = np.diag([0.5, 1.0, 3.0, 1.0])

    def filtered(device: torch.device) -> list[torch.Tensor]:
        smooth = [smooth_for(voxels, 2.0, affine, device, window) for window in (None, (20, 150))]
        return [resample(voxels, STEP, device)[0], smooth[0], smooth[1].double()]

    expected = filtered(CPU)
    expected[2] /= UINT16_ONE
    for module in ("resampling", "smoothing"):
        monkeypatch.setattr(
            f"app.preprocessing.{module}.upload",
            lambda array, _device, order: upload(array, CPU, order),
        )
    for found, same in zip(filtered(torch.device("cuda")), expected, strict=True):
        torch.testing.assert_close(found, same, atol=1e-4, rtol=0, check_dtype=False)


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 9, 2), (3, 1, 400)])
@pytest.mark.parametrize("step", [0.3, 1.0, 5.0])
def test_thin_scans_are_resampled(shape: tuple[int, int, int], step: float) -> None:
    voxels = np.random.default_rng(2).random(shape)
    each = [matrix(size, step) for size in shape]
    expected = np.einsum("ai,bj,ck,ijk->abc", *each, voxels)
    found, _ = resample(voxels, [step] * 3, CPU)
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-6)


def test_a_scan_is_not_changed_and_shares_no_memory() -> None:
    voxels = np.ones((4, 5, 6), np.float32)
    for step in (1.0, 2.0):
        found, _ = resample(voxels, [step] * 3, CPU)
        found.zero_()
    assert voxels.all()
