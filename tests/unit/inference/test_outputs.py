"""Models of every kind of output, from the scan to its landmarks."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from app.errors import ModelRefused, TooLarge
from app.inference.detector import Detection, Detector
from app.inference.forecast import forecast
from app.inference.forward import collect, launch
from app.inference.load import load_checked, self_check
from app.inference.scan_state import MERGED_TILES, ScanState
from app.inference.verification import verify_precisions
from app.io import VolumeLimits, read_volume
from app.model import LoadedModel, write_selfcheck
from tests.support.model_folders import (
    make_blob_folder,
    make_model_folder,
    manifest_table,
    scripted,
)
from tests.support.nifti_files import AFFINE, nifti
from tests.support.onnx_files import as_heatmap, centre_of_mass
from tests.support.synthetic import make_blob

pytest.importorskip("onnxruntime")

CPU = torch.device("cpu")
SHAPE = (30, 34, 22)
IJK = np.array([13.3, 18.1, 10.6])
TILE = (80, 72, 80)
HEATMAPS = {"output": "heatmaps", "activation": "none"}
SIGMA_MM = 4.0
RADIUS_MM = 7.18  # Where a Gaussian of that width has fallen to a fifth.


def load(folder: Path) -> LoadedModel:
    return load_checked(folder, CPU)


def scan(ijk: np.ndarray = IJK) -> bytes:
    """Write a scan of a blob, on an oblique and sheared grid."""
    return nifti(make_blob(SHAPE, ijk.tolist(), SIGMA_MM, AFFINE))


def detect(folder: Path, ijk: np.ndarray = IJK) -> Detection:
    return Detector(load(folder)).detect(read_volume(scan(ijk)))


def heatmap_folder(root: Path, **overrides: Any) -> Path:
    network = HEATMAPS | overrides.pop("network", {})
    voting = {"threshold": 0.2, "radius_mm": RADIUS_MM}
    return make_blob_folder(root, as_heatmap(), network=network, voting=voting, **overrides)


def coordinate_folder(root: Path, *extras: float, **network: object) -> Path:
    return make_blob_folder(
        root,
        centre_of_mass(TILE, *extras),
        network={"output": "coordinates", **network},
        input={"tile_shape": list(TILE)},
        voting={"radius_mm": None},
    )


@pytest.mark.parametrize("tile_shape", ["whole", [24, 32, 24]])
def test_heatmap_network_finds_a_landmark_between_voxels(
    tmp_path: Path, tile_shape: object
) -> None:
    """Resampling smooths the blob a little; whole or in tiles, its centre stays."""
    detection = detect(heatmap_folder(tmp_path, input={"tile_shape": tile_shape}))
    (landmark,) = detection.landmarks
    assert (detection.tiles == 1) == (tile_shape == "whole")
    assert landmark.status == "detected"
    assert landmark.ijk == pytest.approx(IJK, abs=0.05)
    assert landmark.ras_mm == pytest.approx(AFFINE[:3, :3] @ IJK + AFFINE[:3, 3], abs=0.1)
    assert landmark.mass == pytest.approx(1.0, abs=0.15)
    assert landmark.disagreement_mm is not None


def test_heatmaps_are_averaged_of_tiles_that_ran_while_another_pass_gave_way(
    tmp_path: Path,
) -> None:
    volume, tiles = read_volume(scan()), {"tile_shape": [24, 32, 24], "tile_layout": "monai"}
    heatmaps = Detector(load(heatmap_folder(tmp_path, input=tiles)))
    large = Detector(load(make_model_folder(tmp_path, "other"))).prepare(volume)
    passes = heatmaps.passes(volume)
    state = next(passes)
    assert isinstance(state, ScanState)
    waiting = [(state, tile) for tile in range(state.tiles)]

    def run_waiting() -> None:
        while waiting:
            collect(launch([waiting.pop(0)]))

    launch([(large, 0)], run_waiting)
    located = next(passes)
    assert not isinstance(located, ScanState)
    (found,), (expected,) = located.landmarks, heatmaps.detect(volume).landmarks
    assert found.ijk is not None
    assert expected.ijk is not None
    assert found.ijk.tolist() == expected.ijk.tolist()


def test_mean_of_heatmaps_does_not_depend_on_how_many_tiles_share_a_batch(tmp_path: Path) -> None:
    tiles = {"tile_shape": [16, 16, 16], "tile_overlap": 0.5}
    detector, found = Detector(load(heatmap_folder(tmp_path, input=tiles))), []
    noisy = make_blob(SHAPE, IJK.tolist(), SIGMA_MM, AFFINE)
    noisy += np.random.default_rng(0).random(SHAPE, np.float32)
    for size in (1, 3, 50):
        state = detector.prepare(read_volume(nifti(noisy)))
        for first in range(0, state.tiles, size):
            last = min(first + size, state.tiles)
            collect(launch([(state, tile) for tile in range(first, last)]))
        found.append(state.merge_votes().columns)
    assert state.tiles > 2 * MERGED_TILES
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_heatmap_of_another_peak_gives_the_same_landmark(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (plain,) = detect(heatmap_folder(tmp_path)).landmarks
    network = {"heatmap_peak": 1.0}
    (other,) = detect(heatmap_folder(tmp_path / "other", network=network)).landmarks
    assert plain.ijk is not None
    assert plain.ijk.tolist() == pytest.approx(other.ijk)


def test_coordinate_network_answers_its_position_with_no_spread(tmp_path: Path) -> None:
    (landmark,) = detect(coordinate_folder(tmp_path)).landmarks
    assert landmark.status == "detected"
    assert landmark.ijk == pytest.approx(IJK, abs=0.2)
    assert (landmark.mass, landmark.coherence) == (1.0, 1.0)
    assert landmark.spread_mm is landmark.disagreement_mm is None


def test_variance_of_a_coordinate_is_its_spread_and_moves_nothing(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (plain,) = detect(coordinate_folder(tmp_path)).landmarks
    extras = {"coordinate_extras": ["log_variance", "presence"], "activation": "none"}
    folder = coordinate_folder(tmp_path / "other", 2 * np.log(1.5), 0.4, **extras)
    (landmark,) = detect(folder).landmarks
    assert landmark.ras_mm == pytest.approx(plain.ras_mm, abs=1e-3)
    assert landmark.spread_mm == pytest.approx(1.5 * np.sqrt(3), rel=1e-4)
    assert landmark.mass == pytest.approx(0.4, abs=1e-5)
    assert landmark.status == "detected"


def test_position_beyond_the_scan_is_out_of_field(tmp_path: Path) -> None:
    folder = make_blob_folder(
        tmp_path,
        centre_of_mass(TILE),
        network={"output": "coordinates", "coordinate_unit": "fraction"},
        input={"tile_shape": list(TILE)},
        voting={"radius_mm": None},
    )
    (landmark,) = detect(folder).landmarks  # Voxels taken for whole tiles.
    assert landmark.status in ("out_of_field", "not_found")
    assert landmark.ijk is None


def test_coordinate_network_takes_one_tile_only(tmp_path: Path) -> None:
    model = load(coordinate_folder(tmp_path))
    content = nifti(np.zeros((90, 60, 60), dtype=np.float32))
    with pytest.raises(TooLarge, match=r"fits one tile of \[80, 72, 80\] voxels .* got one of"):
        forecast(content, VolumeLimits(), model)
    with pytest.raises(TooLarge, match="answers coordinates"):
        Detector(model).prepare(read_volume(content))


def test_self_check_of_coordinates_notices_other_answers(tmp_path: Path) -> None:
    folder = coordinate_folder(tmp_path)
    model = load(folder)
    assert model.expected is not None
    moved = model.expected["offsets"] + 1.0
    changed = replace(model, expected={**model.expected, "offsets": moved})
    with pytest.raises(ModelRefused, match="expected offsets within"):
        self_check(changed)


def test_network_of_another_output_is_refused_with_what_was_promised(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match="3 heatmaps for tiles of"):
        make_model_folder(tmp_path, network={"output": "heatmaps"})


def test_torchscript_answers_heatmaps_too(tmp_path: Path) -> None:
    class Twice(torch.nn.Module):
        def forward(self, tiles: torch.Tensor) -> torch.Tensor:
            return 2 * tiles

    folder = heatmap_folder(tmp_path, network={"heatmap_peak": 2.0})
    text = (folder / "model.toml").read_text().replace("network.onnx", "network.pt")
    (folder / "model.toml").write_text(text)
    (folder / "network.pt").write_bytes(scripted(Twice()))
    write_selfcheck(folder, allow_torchscript=True)
    model = load_checked(folder, CPU, allow_torchscript=True)
    (landmark,) = Detector(model).detect(read_volume(scan())).landmarks
    assert landmark.ijk == pytest.approx(IJK, abs=0.05)


def test_heatmaps_are_verified_in_lower_precisions(tmp_path: Path) -> None:
    """Of a network with weights: an ONNX file computes in its own precision."""
    arguments = {**manifest_table()["network"]["arguments"], "out_channels": 3}
    folder = make_model_folder(
        tmp_path, network={"output": "heatmaps", "arguments": arguments}, voting={"threshold": 0.5}
    )
    exact, rough = (load_checked(folder, CPU, name) for name in ("float32", "bfloat16"))
    volume = read_volume(nifti(np.random.default_rng(0).random((24, 20, 18), dtype=np.float32)))
    for model in (exact, rough):
        assert len(Detector(model).detect(volume).landmarks) == 3
    outcomes = verify_precisions(folder, lambda: [volume], CPU)
    assert all(outcome.reason or outcome.shift_mm is not None for outcome in outcomes)
