"""What a scan will take is known from its header, and bounds what is computed afterwards."""

import tracemalloc
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch

from app.errors import BadGeometry, TooLarge
from app.inference.detector import Detector
from app.inference.forecast import BASE_BYTES, GRID_BYTES, forecast
from app.inference.load import load_checked
from app.io import VolumeLimits, read_volume
from app.model import LoadedModel
from app.preprocessing import smooth_for
from tests.support.model_folders import make_model_folder

LIMITS = VolumeLimits()
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = make_model_folder(tmp_path_factory.mktemp("models"))
    return load_checked(folder, CPU)


def file_of(shape: tuple[int, int, int], spacing_mm: float = 1.0) -> bytes:
    voxels = np.random.default_rng(0).integers(0, 99, shape).astype(np.int16)
    image = nib.Nifti1Image(voxels, np.diag([*[spacing_mm] * 3, 1.0]))
    image.header.set_xyzt_units("mm")
    content: bytes = image.to_bytes()
    return content


@pytest.mark.parametrize("shape", [(5, 6, 7), (33, 20, 18), (70, 41, 64)])
def test_forecast_tiles_are_those_of_the_plan(
    model: LoadedModel, shape: tuple[int, int, int]
) -> None:
    content = file_of(shape)
    needs = forecast(content, LIMITS, model)
    state = Detector(model).prepare(read_volume(content))
    assert needs.tiles == state.tiles
    assert needs.lane == state.lane
    assert needs.memory > BASE_BYTES + state.grid.voxels.numel() * 4


def test_memory_grows_with_the_scan_and_with_the_grid(model: LoadedModel) -> None:
    small, fine, wide = (
        forecast(content, LIMITS, model).memory
        for content in (file_of((20, 20, 20)), file_of((40, 40, 40), 0.5), file_of((40, 40, 40)))
    )
    assert small < fine < wide


@pytest.mark.parametrize("spacing_mm", [0.4, 0.9, 1.9])
@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_a_scan_takes_no_more_memory_than_is_forecast(
    model: LoadedModel, spacing_mm: float, dtype: type[np.generic]
) -> None:
    """Resampled and smoothed; of what is not an array there is little."""
    voxels = np.random.default_rng(0).integers(0, 99, (150, 160, 170)).astype(dtype)
    image = nib.Nifti1Image(voxels, np.diag([*[spacing_mm] * 3, 1.0]))
    image.header.set_xyzt_units("mm")
    content = image.to_bytes()
    del image, voxels
    needs = forecast(content, LIMITS, model)
    tracemalloc.start()
    try:
        volume = read_volume(content)
        Detector(model).prepare(volume)
        smooth_for(volume.voxels, 2 * spacing_mm, volume.affine, CPU, (0.0, 99.0))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < needs.memory
    if spacing_mm == 0.4:
        assert needs.memory - BASE_BYTES < (10 if dtype is np.float32 else 7) * volume.voxels.size


def test_lines_of_many_voxels_that_become_few_take_no_more_memory_than_is_forecast(
    model: LoadedModel,
) -> None:
    """Voxels eight times as wide as the model's along two axes, and far finer along the third."""
    wide = 8 * model.manifest.input.spacing_mm[0]
    image = nib.Nifti1Image(
        np.zeros((4000, 11, 12), np.uint8), np.diag([wide / 4000, wide, wide, 1])
    )
    image.header.set_xyzt_units("mm")
    content = image.to_bytes()
    needs = forecast(content, LIMITS, model)
    tracemalloc.start()
    try:
        Detector(model).prepare(read_volume(content))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < needs.memory


@pytest.mark.parametrize(("dtype", "slope"), [(np.int32, 0.5), (np.int16, 0.5), (np.float64, 1.0)])
def test_a_scan_takes_no_more_memory_while_it_is_decoded(
    model: LoadedModel, dtype: type[np.generic], slope: float
) -> None:
    """Scaled, or with a voxel that is not finite: of either there are copies for a while."""
    voxels = np.random.default_rng(0).integers(0, 99, (250, 240, 230)).astype(dtype)
    if dtype is np.float64:
        voxels[3, 4, 5] = np.nan
    image = nib.Nifti1Image(voxels, np.eye(4))
    image.header.set_xyzt_units("mm")
    image.header.set_slope_inter(slope, 0.0)
    content = image.to_bytes()
    size = voxels.size
    del image, voxels
    needs = forecast(content, LIMITS, model)
    grid = np.prod(Detector(model).prepare(read_volume(content)).grid.voxels.shape)
    tracemalloc.start()
    try:
        volume = read_volume(content)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert volume.voxels.size == size
    assert peak < needs.memory - grid * GRID_BYTES


def test_memory_grows_with_outputs_that_are_averaged(tmp_path: Path) -> None:
    def memory(name: str, **network: object) -> int:
        whole = {"tile_shape": "whole", "divisor": 2}
        folder = make_model_folder(tmp_path, name, input=whole, network=network)
        loaded = load_checked(folder, CPU)
        return forecast(file_of((20, 20, 20)), LIMITS, loaded).memory

    grid = 20 * 14 * 10  # At the model's spacing, rounded up.
    assert memory("mirrored", mirror=["i"]) - memory("plain") >= 12 * 4 * grid


@pytest.mark.parametrize(("activation", "copies"), [("none", 1), ("spatial_softmax", 3)])
def test_memory_grows_with_the_channels_of_a_network_that_sees_scans_whole(
    tmp_path: Path, activation: str, copies: int
) -> None:
    """Measured with 104 channels: 400 bytes per voxel more than with 4, and 1200 by a softmax."""

    def memory(landmarks: int) -> int:
        network = {"spatial_dims": 3, "in_channels": 1, "channels": [4, 8], "strides": [2]}
        folder = make_model_folder(
            tmp_path,
            f"of-{landmarks}",
            landmarks,
            input={"tile_shape": "whole", "divisor": 2},
            network={
                "output": "heatmaps",
                "activation": activation,
                "heatmap_peak": 1.0,
                "arguments": network | {"out_channels": landmarks},
            },
        )
        return forecast(file_of((20, 20, 20)), LIMITS, load_checked(folder, CPU)).memory

    grid = 20 * 13 * 10  # At the model's spacing.
    assert memory(104) - memory(4) == copies * 100 * 4 * grid


@pytest.mark.parametrize(("activation", "bytes_each"), [("sigmoid", 0), ("softmax", 4)])
def test_memory_grows_with_the_channels_whose_mean_a_softmax_takes(
    tmp_path: Path, activation: str, bytes_each: int
) -> None:
    def memory(landmarks: int, size: int) -> int:
        network = {"spatial_dims": 3, "in_channels": 1, "channels": [4, 8], "strides": [2]}
        channels = landmarks + (activation == "softmax")
        folder = make_model_folder(
            tmp_path,
            f"of-{landmarks}-{size}",
            landmarks,
            input={"tile_shape": [16, 16, 16], "divisor": 2},
            network={
                "output": "heatmaps",
                "activation": activation,
                "arguments": network | {"out_channels": channels},
            },
        )
        return forecast(file_of((size,) * 3), LIMITS, load_checked(folder, CPU)).memory

    grid = 40 * 27 * 20  # At the model's spacing.
    assert memory(104, 40) - memory(4, 40) == bytes_each * 100 * grid
    assert memory(104, 16) == memory(4, 16)  # One tile.


def test_a_few_voxels_a_metre_wide_are_refused(model: LoadedModel) -> None:
    with pytest.raises(
        BadGeometry,
        match=r"8 times as wide as the model's .*got voxels of 800 x 800 x 800 mm.* right model",
    ):
        forecast(file_of((3, 3, 3), 800.0), LIMITS, model)


def test_tiles_are_counted_without_being_listed(model: LoadedModel) -> None:
    needs = forecast(file_of((300, 300, 300), 8.0), LIMITS, model)
    assert needs.tiles > 100_000


def test_what_the_header_rules_out_is_refused(model: LoadedModel) -> None:
    with pytest.raises(TooLarge):
        forecast(file_of((20, 20, 20)), VolumeLimits(axis=10), model)
