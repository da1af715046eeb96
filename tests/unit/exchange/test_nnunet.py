"""Trainings of nnU-Net and nnLandmark become model folders that answer what the originals do."""

import copy
import json
import math
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from app.errors import BadParameter, ModelRefused
from app.exchange.nnunet import import_nnunet
from app.inference import load_checked
from app.model.manifest import read_manifest
from tests.support import nnunet_results
from tests.support.nnunet_results import (
    ORIENTATION,
    PATCH,
    SPACING,
    detect,
    make_case,
    make_plans,
    predict,
    read_out,
    to_file,
    trained,
    write_results,
)

CPU = torch.device("cpu")
LARGE = (40, 50, 30)
EXACT = 0.01
"""Voxels."""


def imported(
    root: Path, networks: Sequence[nn.Module], mirror: tuple[int, ...] | None = None
) -> Path:
    """Import a training of some folds."""
    results = root / "Dataset900_Blobs"
    results.mkdir()
    write_results(results, networks, mirror=mirror)
    radius = float(nnunet_results.BALL_RADIUS)
    return import_nnunet(results, root / "blobs", orientation=ORIENTATION, radius=radius)


@pytest.mark.no_cover
@pytest.mark.parametrize("mirror", [None, (0, 2)])
@pytest.mark.parametrize("folds", [1, 2])
def test_landmarks_are_those_of_the_original_in_one_tile(
    tmp_path: Path, folds: int, mirror: tuple[int, ...] | None
) -> None:
    networks = [trained(seed) for seed in range(folds)]
    folder = imported(tmp_path, networks, mirror=mirror)
    manifest = read_manifest(folder)
    values, truth = make_case(PATCH, seed=77)
    found, tiles = detect(folder, values)
    logits = predict(networks, values, mirror or ())
    assert tiles == 1
    assert np.abs(found - read_out(logits, manifest)).max() <= EXACT
    peaks = [np.unravel_index(int(one.argmax()), PATCH) for one in logits]
    assert np.abs(found - to_file(np.array(peaks))).max() < 1.5, "nnU-Net's own read-out"
    assert np.abs(found - to_file(truth)).max() < 1.5


@pytest.mark.no_cover
@pytest.mark.parametrize("shape", [LARGE, (24, 50, 21)])
@pytest.mark.parametrize("labels", [False, True])
def test_landmarks_are_those_of_the_original_in_several_tiles(
    tmp_path: Path, shape: tuple[int, ...], *, labels: bool
) -> None:
    """Of networks that were trained for seconds, tiles disagree more than of real ones."""
    networks = [trained(0, labels=True)] if labels else [trained(0), trained(1)]
    folder = imported(tmp_path, networks)
    manifest = read_manifest(folder)
    assert manifest.network.activation == ("softmax" if labels else "sigmoid")
    for seed in range(78, 82):
        values, truth = make_case(shape, seed=seed)
        found, tiles = detect(folder, values)
        assert tiles == (3 * 3 * 2 if shape == LARGE else 3)
        expected = read_out(predict(networks, values), manifest)
        assert np.abs(found - expected).max() <= (1e-4 if labels else EXACT)
        assert np.abs(found - to_file(truth)).max() < 1.5


def test_tiles_lie_where_a_scan_is_not_empty(tmp_path: Path) -> None:
    """And landmarks where they are in the scan."""
    folder = imported(tmp_path, [trained(0)])
    values, truth = make_case(LARGE, seed=78)
    before = np.array([7, 3, 30])
    found, tiles = detect(folder, np.pad(values, [(7, 0), (3, 40), (30, 5)]))
    assert tiles == 3 * 3 * 2
    moved = to_file(before[None])
    expected = read_out(predict([trained(0)], values), read_manifest(folder)) + moved
    assert np.abs(found - expected).max() <= EXACT
    assert np.abs(found - moved - to_file(truth)).max() < 1.5


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Write a training of one fold, of a network that was not trained."""
    torch.manual_seed(1)
    folder = tmp_path / "Dataset900_Blobs"
    folder.mkdir()
    return write_results(folder, [nnunet_results.build()])


def change(path: Path, **values: object) -> None:
    """Change keys of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def change_configuration(results: Path, **values: object) -> None:
    """Change keys of the configuration in the plans."""
    configurations = make_plans()["configurations"]
    configurations["3d_fullres"] |= values
    change(results / "plans.json", configurations=configurations)


def test_manifest_says_what_the_plans_say(results: Path, tmp_path: Path) -> None:
    folder = import_nnunet(results, tmp_path / "blobs", orientation=ORIENTATION, version="0.3.0")
    manifest = read_manifest(folder)
    assert manifest.version == "0.3.0"
    assert manifest.license == "CC0-1.0"
    assert [one.name for one in manifest.landmarks] == ["bright", "dark"]
    spec, network = manifest.input, manifest.network
    # The file's k, j, i are S, P, L; the plans take the second, the third and the first.
    assert (spec.orientation, spec.spacing_mm, spec.tile_shape) == ("PLS", SPACING, PATCH)
    assert spec.intensity.model_dump(exclude_unset=True) == {"method": "zscore", "region": "all"}
    assert (network.output, network.activation) == ("heatmaps", "sigmoid")
    assert (network.members, network.mirror) == ((), ())
    # The ball of 15 voxels falls to a fifth at 12.8 of them, which are 3 mm³ large.
    assert manifest.voting.radius_mm == pytest.approx(12.8 * 3 ** (1 / 3), abs=1e-3)
    assert manifest.voting.round_in == "voxels"
    assert spec.tile_layout == "nnunet"
    card = (folder / "README.md").read_text()
    assert "nnLandmark" in card
    assert "splines" not in card


@pytest.mark.parametrize(
    "changes",
    [
        {"resampling_fn_data": "resample_torch_fornnunet"},
        {"resampling_fn_data_kwargs": {"is_seg": False, "order": 1}},
    ],
)
def test_card_says_that_scans_of_the_training_were_resampled_otherwise(
    results: Path, tmp_path: Path, changes: dict[str, object]
) -> None:
    plans = make_plans()
    plans["configurations"]["3d_fullres"] |= changes
    (results / "plans.json").write_text(json.dumps(plans))
    folder = import_nnunet(results, tmp_path / "blobs", orientation=ORIENTATION)
    card = " ".join((folder / "README.md").read_text().split())
    function = plans["configurations"]["3d_fullres"].get(
        "resampling_fn_data", "resample_data_or_seg_to_shape"
    )
    assert f"those of the training were by `{function}`" in card


def test_intensities_of_ct_are_clipped_as_in_training(results: Path, tmp_path: Path) -> None:
    change_configuration(results, normalization_schemes=["CTNormalization"])
    folder = import_nnunet(results, tmp_path / "blobs", orientation="RAS")
    rule = read_manifest(folder).input.intensity
    assert (rule.method, rule.lower, rule.upper) == ("clip", -2.0, 9.0)
    assert (rule.mean, rule.deviation) == (3.0, 2.0)


@pytest.mark.parametrize("reader", ["NibabelIOWithReorient", "SimpleITKIOWithReorient"])
def test_scans_that_were_reoriented_need_no_orientation(
    results: Path, tmp_path: Path, reader: str
) -> None:
    change(results / "plans.json", image_reader_writer=reader)
    folder = import_nnunet(results, tmp_path / "blobs")
    assert read_manifest(folder).input.orientation == "ARS"
    with pytest.raises(BadParameter, match=f"expected RAS, as {reader} read them, got LPS"):
        import_nnunet(results, tmp_path / "others", orientation="LPS")


@pytest.mark.parametrize("name", ["PlainConvUNet", "ResidualEncoderUNet"])
def test_plans_before_version_2_4_name_the_same_network(
    results: Path, tmp_path: Path, name: str
) -> None:
    configurations = make_plans()["configurations"]
    given = configurations["3d_lowres"].pop("architecture")["arch_kwargs"]
    configurations["3d_lowres"] |= {
        "UNet_class_name": name,
        "UNet_base_num_features": 8,
        "unet_max_num_features": 16,
        "n_conv_per_stage_encoder": given["n_conv_per_stage"],
        "n_conv_per_stage_decoder": given["n_conv_per_stage_decoder"],
        "conv_kernel_sizes": given["kernel_sizes"],
        "pool_op_kernel_sizes": given["strides"],
    }
    results.joinpath("fold_0", "checkpoint_final.pth").unlink()
    results.joinpath("fold_0").rmdir()
    plans = make_plans() | {"configurations": configurations}
    residual = name == "ResidualEncoderUNet"
    network = nnunet_results.build(residual=residual, features_per_stage=[8, 16, 16])
    write_results(results, [network], plans)
    folder = import_nnunet(results, tmp_path / "blobs", orientation="RAS")
    load_checked(folder, CPU)


def test_a_residual_network_is_found_by_the_first_name_of_its_module(tmp_path: Path) -> None:
    plans, results = copy.deepcopy(make_plans()), tmp_path / "Dataset900_Blobs"
    architecture = plans["configurations"]["3d_lowres"]["architecture"]
    named = architecture["network_class_name"]
    first = named.replace(".unet.PlainConvUNet", ".residual_unet.ResidualEncoderUNet")
    architecture["network_class_name"] = first
    arguments = architecture["arch_kwargs"]
    arguments["n_blocks_per_stage"] = arguments.pop("n_conv_per_stage")
    results.mkdir()
    write_results(results, [nnunet_results.build(residual=True)], plans)
    load_checked(import_nnunet(results, tmp_path / "blobs", orientation="RAS"), CPU)


def test_labels_of_a_segmentation_need_a_radius(tmp_path: Path) -> None:
    results = tmp_path / "Dataset900_Blobs"
    results.mkdir()
    write_results(results, [nnunet_results.build(num_classes=3)])
    with pytest.raises(BadParameter, match="--radius"):
        import_nnunet(results, tmp_path / "blobs", orientation="RAS")
    manifest = read_manifest(
        import_nnunet(results, tmp_path / "blobs", orientation="RAS", radius=3.0)
    )
    assert manifest.network.activation == "softmax"
    assert manifest.voting.radius_mm == pytest.approx(3 * 3 ** (1 / 3), abs=1e-3)


def test_best_checkpoint_serves_where_the_final_one_is_missing(
    results: Path, tmp_path: Path
) -> None:
    final = results / "fold_0" / "checkpoint_final.pth"
    final.rename(final.with_name("checkpoint_best.pth"))
    (results / "fold_0").rename(results / "fold_all")
    folder = import_nnunet(results, tmp_path / "blobs", orientation="RAS")
    assert (folder / "fold_all.safetensors").exists()


class Malicious:
    """What a checkpoint must not make."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("it ran"),)


def test_checkpoint_runs_no_code(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"network_weights": Malicious()}, results / "fold_0" / "checkpoint_final.pth")
    with pytest.raises(ModelRefused, match="nothing but tensors, numbers and text"):
        import_nnunet(results, tmp_path / "blobs", orientation="RAS")
    assert not (tmp_path / "it ran").exists()
    assert not (tmp_path / "blobs").exists()


@pytest.mark.parametrize(
    "content", [b"", b"not a checkpoint", pickle.dumps({"epoch": 3}, protocol=2)]
)
def test_file_that_is_no_checkpoint_is_refused(
    results: Path, tmp_path: Path, content: bytes
) -> None:
    (results / "fold_0" / "checkpoint_final.pth").write_bytes(content)
    with pytest.raises(ModelRefused, match=r"fold_0/checkpoint_final\.pth: expected a checkpoint"):
        import_nnunet(results, tmp_path / "blobs", orientation="RAS")


@pytest.mark.parametrize(
    ("file", "values", "message"),
    [
        ("dataset.json", {"channel_names": {"0": "T1", "1": "T2"}}, "one channel"),
        ("dataset.json", {"labels": {"background": 0, "a": [1, 2]}}, "expected"),
        ("dataset.json", {"labels": {"0": 0, "a": 1, "b": 2, "c": 3}}, "a network of 3 heatmaps"),
        ("dataset.json", {"labels": {"background": 0, "a": 1, "b": 3}}, "labels 0 for the"),
        ("plans.json", {"configurations": {}}, "expected plans.json and dataset.json of nnU-Net"),
        ("plans.json", {"transpose_forward": [0, 1, 7]}, "plans.json"),
    ],
)
def test_training_that_cannot_be_served_is_refused(
    results: Path, tmp_path: Path, file: str, values: dict[str, object], message: str
) -> None:
    change(results / file, **values)
    with pytest.raises(ModelRefused, match=rf"Dataset900_Blobs: .*{message}"):
        import_nnunet(results, tmp_path / "blobs", orientation="RAS")
    assert not (tmp_path / "blobs").exists()


WIDER = copy.deepcopy(make_plans()["configurations"]["3d_lowres"]["architecture"])
WIDER["arch_kwargs"]["features_per_stage"] = [8, 12, 20]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"patch_size": [64, 64]}, "in 3D"),
        ({"previous_stage": "3d_lowres"}, "needs no other"),
        ({"normalization_schemes": ["MyNormalization"]}, "a normalisation of ZScore"),
        ({"inherits_from": "3d_fullres"}, "nnU-Net"),
        ({"patch_size": [24, 32, 5000]}, r"input\.tile_shape"),
        ({"architecture": WIDER}, "fold_0: expected weights of .*PlainConvUNet with the arguments"),
    ],
)
def test_configuration_that_cannot_be_served_is_refused(
    results: Path, tmp_path: Path, values: dict[str, object], message: str
) -> None:
    change_configuration(results, **values)
    with pytest.raises(ModelRefused, match=message):
        import_nnunet(results, tmp_path / "blobs", orientation="RAS")


@pytest.mark.parametrize(
    ("where", "key", "value"),
    [
        ("3d_fullres", "spacing", [2.0, "wide", 1.5]),
        ("3d_fullres", "spacing", [2.0, -1.0, 1.5]),
        ("3d_fullres", "spacing", [2.0, 0.0, 1.5]),
        ("3d_fullres", "spacing", [2.0, 10**400, 1.5]),
        ("3d_fullres", "spacing", [2.0, math.nan, 1.5]),
        ("3d_lowres", "patch_size", [24, "", 28]),
        ("3d_lowres", "patch_size", [24, math.inf, 28]),
        ("3d_lowres", "architecture", {"strides": [None, 1]}),
        ("", "dataset_name", "half a \ud83d"),
    ],
)
def test_plans_that_hold_something_else_are_refused(
    results: Path, tmp_path: Path, where: str, key: str, value: object
) -> None:
    plans = copy.deepcopy(make_plans())
    section = plans["configurations"][where] if where else plans
    if key == "architecture":
        section[key]["arch_kwargs"] |= {"norm_op_kwargs": value}
    else:
        section[key] = value
    (results / "plans.json").write_text(json.dumps(plans))
    with pytest.raises(ModelRefused):
        import_nnunet(results, tmp_path / "blobs", orientation=ORIENTATION)
    assert not (tmp_path / "blobs").exists()


def test_layer_that_plans_name_is_taken_from_a_list_only(results: Path, tmp_path: Path) -> None:
    plans = make_plans()
    plans["configurations"]["3d_lowres"]["architecture"]["arch_kwargs"]["nonlin"] = "os.system"
    (results / "plans.json").write_text(json.dumps(plans))
    with pytest.raises(ModelRefused, match=r"arguments\.nonlin: expected one of"):
        import_nnunet(results, tmp_path / "blobs", orientation="RAS")


@pytest.mark.parametrize("orientation", [None, "RASS", "RR"])
def test_orientation_must_be_known(results: Path, tmp_path: Path, orientation: str | None) -> None:
    with pytest.raises(BadParameter, match="--orientation"):
        import_nnunet(results, tmp_path / "blobs", orientation=orientation)


def test_folds_can_be_chosen_and_must_be_there(results: Path, tmp_path: Path) -> None:
    import_nnunet(results, tmp_path / "blobs", orientation="RAS", folds=["0"])
    with pytest.raises(ModelRefused, match=r"fold_3: expected checkpoint_final\.pth"):
        import_nnunet(results, tmp_path / "others", orientation="RAS", folds=["3"])
    with pytest.raises(BadParameter, match="not there yet"):
        import_nnunet(results, tmp_path / "blobs", orientation="RAS")


def test_folds_of_several_trainings_are_no_model(results: Path, tmp_path: Path) -> None:
    state = torch.load(results / "fold_0" / "checkpoint_final.pth", weights_only=False)
    state["inference_allowed_mirroring_axes"] = (0, 1)
    (results / "fold_1").mkdir()
    torch.save(state, results / "fold_1" / "checkpoint_final.pth")
    with pytest.raises(ModelRefused, match="expected folds of one training, got several"):
        import_nnunet(results, tmp_path / "blobs", orientation="RAS")


def test_folder_of_one_fold_is_refused_with_the_name_of_the_one_to_give(
    results: Path, tmp_path: Path
) -> None:
    """It said of fold_0: expected folders fold_0, fold_1, ..., found none."""
    fold = results / "fold_0"
    message = f"^{fold}: expected the folder of a training, with fold_0, .*__3d_fullres, found no"
    with pytest.raises(ModelRefused, match=message):
        import_nnunet(fold, tmp_path / "blobs", orientation="RAS")
