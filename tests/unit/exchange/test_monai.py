"""MONAI bundles become model folders that answer what the originals do."""

import stat
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
from monai.bundle.config_parser import ConfigParser
from monai.inferers.inferer import Inferer, SimpleInferer, SlidingWindowInferer
from torch import Tensor, nn

from app.errors import BadParameter, ModelRefused
from app.exchange.monai import import_monai
from app.inference import Detector, load_checked
from app.io import read_volume
from app.model import WHOLE
from app.model.manifest import Manifest, read_manifest
from app.model.outputs import make_output
from app.voting import GridFrame, filter_votes, locate
from app.voting.readout import Readout
from tests.support.monai_bundles import (
    ARGUMENTS,
    RADIUS_MM,
    build,
    make_config,
    make_metadata,
    trained,
    write_bundle,
)
from tests.support.nnunet_results import PATCH, SPACING, make_case

CPU = torch.device("cpu")
LARGE = (40, 50, 30)
SLIDING: Mapping[str, Any] = {"overlap": 0.5, "mode": "gaussian"}
EXACT = 0.01
"""Voxels."""


def write_scan(path: Path, shape: tuple[int, ...], seed: int, margin: int = 6) -> Path:
    """Write a scan whose axes point to L, S, A, of the spacing of the network."""
    values, _ = make_case(shape, seed, margin)  # P, L, S, as the network's.
    affine = np.zeros((4, 4))
    affine[0, 0], affine[2, 1], affine[1, 2] = -SPACING[1], SPACING[2], SPACING[0]
    affine[3, 3] = 1.0
    image = nib.Nifti1Image(values[::-1].transpose(1, 2, 0), affine)
    image.header.set_xyzt_units("mm")
    nib.save(image, path)
    return path


def original(network: nn.Module, scan: Path, inferer: Inferer) -> tuple[Tensor, np.ndarray]:
    """Run a bundle as MONAI does: heatmaps, and the affine of their voxels."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # MONAI looks for readers that are not installed.
        preprocess = ConfigParser(make_config()).get_parsed_content("preprocessing")
        image = preprocess({"image": str(scan)})["image"]
    with torch.inference_mode():
        return inferer(image.as_tensor()[None], network)[0], image.affine.numpy()


def read_out(logits: Tensor, affine: np.ndarray, manifest: Manifest) -> np.ndarray:
    """Read the landmarks of heatmaps that are there whole, in mm."""
    i, j, k = logits.shape[1:]
    voting = manifest.voting
    readout = Readout(2, (i, j, k), SPACING, voting.radius_mm, heatmap_threshold=voting.threshold)
    field = make_output(manifest).field(logits, logits.shape[1:])
    votes = filter_votes(field, voting.threshold)
    marks = locate(votes, readout, GridFrame(affine, affine), manifest.landmarks)
    return np.array([one.ras_mm for one in marks])


def detect(folder: Path, scan: Path, *, allow_torchscript: bool = False) -> np.ndarray:
    """Find the landmarks, in mm."""
    detector = Detector(load_checked(folder, CPU, allow_torchscript=allow_torchscript))
    landmarks = detector.detect(read_volume(scan.read_bytes())).landmarks
    assert {one.status for one in landmarks} <= {"detected", "low_confidence"}
    return np.array([one.ras_mm for one in landmarks])


@pytest.mark.no_cover
@pytest.mark.parametrize("file", ["model.pt", "model.onnx", "model.ts"])
def test_landmarks_are_those_of_the_original(tmp_path: Path, file: str) -> None:
    script = file.endswith(".ts")
    bundle = write_bundle(tmp_path / "bundle", trained(), file)
    folder = import_monai(bundle, tmp_path / "blobs", given=[RADIUS_MM], allow_torchscript=script)
    manifest = read_manifest(folder)
    scan = write_scan(tmp_path / "scan.nii", PATCH, seed=77)
    logits, affine = original(trained(), scan, SlidingWindowInferer(PATCH, **SLIDING))
    found = detect(folder, scan, allow_torchscript=script)
    assert np.abs((found - read_out(logits, affine, manifest)) / min(SPACING)).max() <= EXACT
    peaks = [np.unravel_index(int(one.argmax()), PATCH) for one in logits]
    there = nib.affines.apply_affine(affine, np.array(peaks))
    assert np.abs((found - there) / max(SPACING)).max() < 1.5
    network = load_checked(folder, CPU, allow_torchscript=script).network
    tile = torch.rand(1, *PATCH)
    with torch.inference_mode():
        expected = trained()(tile[None])[0]
    scores = network.predict_tiles([tile])[0].scores
    assert (scores.sigmoid() - expected.sigmoid()).abs().max() <= 1e-5
    assert (scores - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.no_cover
@pytest.mark.parametrize(
    "inferer",
    [
        {},
        {"overlap": 0.25, "sigma_scale": 0.2},
        {"overlap": [0.4, 0.4, 0.4], "mode": "constant"},
    ],
)
def test_landmarks_are_those_of_the_original_in_several_tiles(
    tmp_path: Path, inferer: dict[str, Any]
) -> None:
    """Also at the borders, where MONAI bounds importances from below, and in small scans."""
    config = make_config()
    config["inferer"] |= inferer
    bundle = write_bundle(tmp_path / "bundle", trained(), config=config)
    folder = import_monai(bundle, tmp_path / "blobs", given=[RADIUS_MM])
    for shape, seed in ((LARGE, 78), (LARGE, 89), ((24, 50, 21), 78), ((24, 50, 21), 89)):
        scan = write_scan(tmp_path / "scan.nii", shape, seed=seed, margin=1)
        slide = SlidingWindowInferer(PATCH, **{**SLIDING, **inferer})
        logits, affine = original(trained(), scan, slide)
        found = detect(folder, scan)
        expected = read_out(logits, affine, read_manifest(folder))
        assert np.abs((found - expected) / min(SPACING)).max() <= EXACT


def make_simple(spatial_shape: list[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Make the metadata and the configuration of a bundle that sees scans whole."""
    metadata = make_metadata()
    metadata["network_data_format"]["inputs"]["image"]["spatial_shape"] = spatial_shape
    return metadata, make_config(inferer={"_target_": "SimpleInferer"})


@pytest.mark.parametrize("shape", [PATCH, (40, 52, 28), (24, 52, 20)])
def test_scan_is_seen_whole_where_monai_does(tmp_path: Path, shape: tuple[int, ...]) -> None:
    metadata, config = make_simple(["4*n", "2 * n", "*"])
    bundle = write_bundle(tmp_path / "bundle", trained(), metadata=metadata, config=config)
    folder = import_monai(bundle, tmp_path / "blobs", given=[RADIUS_MM])
    manifest = read_manifest(folder)
    assert (manifest.input.tile_shape, manifest.input.divisor) == (WHOLE, 4)
    for seed in (78, 89):
        scan = write_scan(tmp_path / "scan.nii", shape, seed=seed)
        logits, affine = original(trained(), scan, SimpleInferer())
        expected = read_out(logits, affine, manifest)
        assert np.abs((detect(folder, scan) - expected) / min(SPACING)).max() <= EXACT


def test_edges_of_whole_scans_are_asked_for_what_they_are_multiples_of(tmp_path: Path) -> None:
    metadata, config = make_simple(list(PATCH))
    bundle = write_bundle(tmp_path / "bundle", build(), metadata=metadata, config=config)
    with pytest.raises(BadParameter, match=r"give --set 'input\.divisor=16'$"):
        import_monai(bundle, tmp_path / "blobs", given=[RADIUS_MM])
    whole, tiled = (
        read_manifest(import_monai(bundle, tmp_path / name, given=[RADIUS_MM, option])).input
        for name, option in (("a", "input.divisor=8"), ("b", f"input.tile_shape={list(PATCH)}"))
    )
    assert (whole.tile_shape, whole.divisor) == (WHOLE, 8)
    assert tiled.tile_shape == PATCH


@pytest.mark.parametrize(
    ("inferer", "message"),
    [
        ({"_target_": "SaliencyInferer"}, "SlidingWindowInferer or SimpleInferer"),
        ({"padding_mode": "reflect"}, "padding_mode 'constant'"),
        ({"cval": -1000}, "cval 0"),
        ({"with_coord": True}, "with_coord False"),
    ],
)
def test_inference_that_cannot_be_followed_is_refused(
    tmp_path: Path, inferer: dict[str, Any], message: str
) -> None:
    config = make_config()
    config["inferer"] |= inferer
    bundle = write_bundle(tmp_path / "bundle", build(), config=config)
    with pytest.raises(ModelRefused, match=f"bundle: inferer: expected {message}"):
        import_monai(bundle, tmp_path / "blobs", given=[RADIUS_MM])


def test_tiles_that_no_literal_describes_are_asked_for(tmp_path: Path) -> None:
    config = make_config()
    config["inferer"] |= {"overlap": [0.5, 0.5, 0.25], "sigma_scale": "@sigma", "roi_size": "@roi"}
    bundle = write_bundle(tmp_path / "bundle", build(), config=config)
    with pytest.raises(BadParameter, match=r"tile_overlap=0\.25.*tile_sigma=0\.125"):
        import_monai(bundle, tmp_path / "blobs", given=[RADIUS_MM])
    given = [RADIUS_MM, "input.tile_overlap=0.5", "input.tile_sigma=0.125"]
    spec = read_manifest(import_monai(bundle, tmp_path / "blobs", given=given)).input
    assert (spec.tile_layout, spec.tile_shape) == ("monai", PATCH)


@pytest.mark.parametrize("value", ["[" * 90_000, "9" * 5_000])
def test_a_value_that_nobody_means_is_refused_for_its_key(value: str, tmp_path: Path) -> None:
    """Each was a traceback."""
    bundle = write_bundle(tmp_path / "bundle", build())
    with pytest.raises(ModelRefused, match=r"radius_mm: Input should be a valid number") as caught:
        import_monai(bundle, tmp_path / "blobs", given=[f"voting.radius_mm={value}"])
    assert len(str(caught.value)) < 500


def test_manifest_says_what_the_bundle_says(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "bundle", build())
    manifest = read_manifest(import_monai(bundle, tmp_path / "blobs", given=[RADIUS_MM]))
    spec = manifest.input
    assert (manifest.version, manifest.description) == ("0.3.1", "Two blobs")
    assert [one.name for one in manifest.landmarks] == ["bright", "dark"]
    assert (spec.orientation, spec.spacing_mm, spec.tile_shape) == ("PLS", SPACING, PATCH)
    assert (spec.tile_overlap, spec.tile_sigma, spec.intensity.method) == (0.5, 0.125, "zscore")
    network = manifest.network
    assert (network.architecture, network.activation) == ("monai.networks.nets:UNet", "sigmoid")
    assert network.arguments == ARGUMENTS
    assert (manifest.voting.threshold, manifest.voting.radius_mm) == (0.2, 5.8)


def test_weights_are_for_all_to_read(tmp_path: Path) -> None:
    """A service often runs as another user."""
    bundle = write_bundle(tmp_path / "bundle", build(), "model.pt")
    folder = import_monai(bundle, tmp_path / "blobs", given=[RADIUS_MM])
    assert stat.S_IMODE((folder / "weights.safetensors").stat().st_mode) == 0o644


def test_options_count_more_than_the_bundle(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "bundle", build())
    given = [RADIUS_MM, "input.orientation=LPS", "voting.threshold=0.3", "license=CC0-1.0"]
    given += ["input.intensity={method = 'window', lower = -5.0, upper = 9.0}"]
    folder = import_monai(bundle, tmp_path / "blobs", landmarks=["left", "right"], given=given)
    manifest = read_manifest(folder)
    assert [one.name for one in manifest.landmarks] == ["left", "right"]
    assert (manifest.input.orientation, manifest.license) == ("LPS", "CC0-1.0")
    assert (manifest.voting.threshold, manifest.input.intensity.lower) == (0.3, -5.0)


def test_background_of_a_softmax_is_no_landmark(tmp_path: Path) -> None:
    named = {"0": "background", "1": "bright"}
    after = {"transforms": [{"_target_": "Activationsd", "keys": "pred", "softmax": True}]}
    config = make_config(postprocessing=after)
    metadata = make_metadata(channel_def=named)
    bundle = write_bundle(tmp_path / "bundle", build(), metadata=metadata, config=config)
    manifest = read_manifest(import_monai(bundle, tmp_path / "blobs", given=[RADIUS_MM]))
    assert [one.name for one in manifest.landmarks] == ["bright"]
    assert (manifest.network.activation, manifest.voting.threshold) == ("softmax", 0.5)


@pytest.mark.parametrize("output", ["votes", "coordinates"])
def test_other_kinds_of_output_are_an_option(tmp_path: Path, output: str) -> None:
    bundle = write_bundle(tmp_path / "bundle", build())
    given = [f"network.output={output}", *([RADIUS_MM] if output == "votes" else [])]
    with pytest.raises(ModelRefused, match=r"expected an output of shape"):
        import_monai(bundle, tmp_path / "blobs", given=given)


def test_one_error_names_an_option_for_each_thing_that_is_missing(tmp_path: Path) -> None:
    transforms = [{"_target_": "Resized", "keys": "image", "spatial_size": [9, 9, 9]}]
    config = make_config(preprocessing={"transforms": transforms}, inferer="$@inferer_of_others")
    metadata = make_metadata(channel_def={})
    metadata["network_data_format"]["inputs"]["image"]["spatial_shape"] = ["16*n", "*", "*"]
    bundle = write_bundle(tmp_path / "bundle", build(), metadata=metadata, config=config)
    given = ["input.orientation=PLS", f"input.spacing_mm={list(SPACING)}", RADIUS_MM]
    given += [f"input.tile_shape={list(PATCH)}", 'input.intensity={method = "none"}']
    with pytest.raises(BadParameter) as refusal:
        import_monai(bundle, tmp_path / "blobs")
    for option in (*given, "--landmark", "--ignore Resized"):
        assert option.partition("=")[0] in str(refusal.value)
    landmarks, ignored = ["bright", "dark"], ["Resized"]
    import_monai(bundle, tmp_path / "blobs", landmarks=landmarks, given=given, ignored=ignored)


def test_yaml_is_said_not_to_be_read(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "bundle", build())
    config = bundle / "configs" / "inference.json"
    config.rename(config.with_suffix(".yaml"))
    with pytest.raises(BadParameter, match="YAML is not read"):
        import_monai(bundle, tmp_path / "blobs")


def test_torchscript_has_to_be_allowed(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "bundle", build(), "model.ts")
    with pytest.raises(ModelRefused, match="LANDMARKD_ALLOW_TORCHSCRIPT"):
        import_monai(bundle, tmp_path / "blobs", given=[RADIUS_MM])
    assert not (tmp_path / "blobs").exists()


@pytest.mark.parametrize(
    "wrap", [lambda state: {"model": state}, lambda state: {"state_dict": state, "epoch": 3}]
)
def test_state_may_be_part_of_a_checkpoint(
    tmp_path: Path, wrap: Callable[[object], object]
) -> None:
    network = build()
    bundle = write_bundle(tmp_path / "bundle", network)
    state = {f"module.{name}": one for name, one in network.state_dict().items()}
    torch.save(wrap(state), bundle / "models" / "model.pt")
    load_checked(import_monai(bundle, tmp_path / "blobs", given=[RADIUS_MM]), CPU)
