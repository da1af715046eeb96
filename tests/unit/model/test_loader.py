"""Modules: allow-shorten architectures with exactly their weights, or nothing."""

import re
import tomllib
import warnings
from pathlib import Path

import onnx
import pytest
import torch
from safetensors.torch import load_file, save_file

from app.errors import ModelRefused
from app.model.editing import editing, update_hashes
from app.model.loader import _mismatches, load_module
from app.model.manifest import read_manifest
from app.model.modules import find_architecture
from app.model.sections import ShapeSpec
from app.model.selfcheck import write_selfcheck
from tests.support.model_folders import (
    TILE,
    build_network,
    make_model_folder,
    make_program_folder,
    manifest_table,
    put_program,
    toy_onnx,
)


def load(folder: Path) -> torch.nn.Module:
    return load_module(folder, read_manifest(folder))


def refusal_of(folder: Path) -> str:
    with pytest.raises(ModelRefused) as refusal:
        load(folder)
    message = str(refusal.value)
    assert str(folder.parent) not in message
    return message


def put_weights(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, folder / "weights.safetensors")
    write_hash(folder)


def write_hash(folder: Path) -> None:
    with editing(folder) as document:
        update_hashes(folder, document)


DYNUNET = {
    "architecture": "monai.networks.nets:DynUNet",
    "output_stride": 2,
    "arguments": {
        "spatial_dims": 3,
        "in_channels": 1,
        "out_channels": 12,
        "kernel_size": [3, 3, 3],
        "strides": [2, 2, 2],
        "upsample_kernel_size": [2, 2],
        "filters": [4, 6, 8],
        "norm_name": ["INSTANCE", {"affine": True}],
    },
}
BASIC_UNET = {
    "architecture": "monai.networks.nets.basic_unet:BasicUNet",
    "arguments": {
        "spatial_dims": 3,
        "in_channels": 1,
        "out_channels": 12,
        "features": [2, 2, 2, 2, 2, 2],
        "norm": ["GROUP", {"num_groups": 1}],
    },
}


@pytest.mark.parametrize("network", [{}, DYNUNET, BASIC_UNET])
def test_architecture_loads_with_its_weights(tmp_path: Path, network: dict[str, object]) -> None:
    folder = make_model_folder(tmp_path, network=network, checked=False)
    write_hash(folder)
    module = load(folder)
    table = manifest_table()
    table["network"] |= network
    tiles = torch.rand(2, 1, *TILE)
    torch.testing.assert_close(module(tiles), build_network(table)(tiles))
    assert not module.training
    assert not any(parameter.requires_grad for parameter in module.parameters())


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        ("os:system", "expected a module of monai.networks.nets or .*, got os; .*onnx.export"),
        ("monai.networks.netsx:UNet", "expected a module of monai.networks.nets"),
        ("monai.networks.nets.nothing:UNet", "expected an installed module"),
        ("monai.networks.nets:Sequential", "expected a network of monai.networks.nets"),
        ("monai.networks.nets.unet:Convolution", "expected a network of monai.networks.nets.unet"),
        ("monai.networks.nets:resnet50", "expected a network of monai.networks.nets"),
        ("monai.networks.nets:sys", "expected a network of monai.networks.nets"),
    ],
)
def test_architecture_outside_the_list_is_refused(architecture: str, message: str) -> None:
    with pytest.raises(ModelRefused, match=rf"toy: network.architecture: {message}"):
        find_architecture("toy", architecture)


def test_argument_that_the_architecture_lacks_is_refused(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path)
    text = (folder / "model.toml").read_text()
    (folder / "model.toml").write_text(text.replace("strides = ", "stride = "))
    message = refusal_of(folder)
    assert message.startswith("toy: network.arguments: TypeError: ")
    assert "'stride'" in message


def test_network_in_2d_is_refused(tmp_path: Path) -> None:
    table = manifest_table()
    table["network"]["arguments"]["spatial_dims"] = 2
    folder = make_model_folder(tmp_path, checked=False, network=table["network"])
    message = r"toy: network: .*, got RuntimeError: .* conv2d, but got input"
    with pytest.raises(ModelRefused, match=message):
        write_selfcheck(folder)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("channels = [4, 8]", "channels = [6400000, 8]"),  # 0.7 GB in the first layer alone
        ("strides = [2]", "strides = [2], num_res_units = 1000000"),  # minutes of small layers
    ],
)
def test_network_much_larger_than_its_weights_is_given_up_while_it_is_built(
    tmp_path: Path, old: str, new: str
) -> None:
    folder = make_model_folder(tmp_path)
    text = (folder / "model.toml").read_text()
    assert old in text
    (folder / "model.toml").write_text(text.replace(old, new))
    assert "expected a network of about the size of its weights" in refusal_of(folder)


def test_argument_that_would_fetch_weights_is_refused(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path)
    text = (folder / "model.toml").read_text()
    for extra, key in (
        ('pretrained_url = "https://example.org/x.pth"', "pretrained_url"),
        ("encoder = {pretrained = true}", "encoder.pretrained"),
        ('checkpoint = "x.pth"', "checkpoint"),
    ):
        (folder / "model.toml").write_text(text.replace("strides = ", f"{extra}, strides = "))
        assert f"network.arguments.{key}: expected nothing to fetch" in refusal_of(folder)


def test_default_that_would_fetch_weights_is_refused(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path)
    text = (folder / "model.toml").read_text().replace("nets:UNet", "nets:ResNetFeatures")
    (folder / "model.toml").write_text(text)
    assert "network.arguments.pretrained: expected nothing to fetch, got True" in refusal_of(folder)


def test_other_bytes_than_hashed_are_refused(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path)
    (folder / "weights.safetensors").write_bytes(b"other")
    message = refusal_of(folder)
    assert message.startswith("toy: network.sha256: expected ")
    assert "weights.safetensors has d9298a10d1b0735837dc4bd85dac641b0f3cef27" in message


def test_missing_weights_are_refused(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path)
    (folder / "weights.safetensors").unlink()
    assert refusal_of(folder) == (
        "toy: network.weights: expected a file 'weights.safetensors', found none"
    )


def test_weights_that_are_no_safetensors_are_refused(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path)
    (folder / "weights.safetensors").write_bytes(b"no weights at all")
    write_hash(folder)
    assert "toy: network.weights: not safetensors: " in refusal_of(folder)


def test_missing_extra_and_misshapen_weights_are_named(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path)
    weights = load_file(folder / "weights.safetensors")
    names = sorted(name for name in weights if name.endswith("conv.weight"))
    weights["extra"] = weights.pop(names[0])
    weights[names[1]] = weights[names[1]][:1].clone()
    put_weights(folder, weights)
    message = refusal_of(folder)
    assert f"expected 1 more tensors: {names[0]}; " in message
    assert "got 1 tensors that the architecture lacks: extra; " in message
    assert f"{names[1]}: expected [" in message


@pytest.mark.parametrize("network", [{}, DYNUNET])
@pytest.mark.parametrize("wrapper", ["module.", "_orig_mod.", "model.net."])
def test_weights_of_a_network_within_another_module_are_told(
    tmp_path: Path, wrapper: str, network: dict[str, object]
) -> None:
    """As DataParallel, torch.compile and Lightning save them: all were missing, and all unknown."""
    folder = make_model_folder(tmp_path, network=network)
    weights = load_file(folder / "weights.safetensors")
    wrapped = {f"{wrapper}{name}": tensor for name, tensor in weights.items()}
    put_weights(folder, {"loss.pos_weight": torch.ones(3), **wrapped})
    assert f"tensors, got them with {wrapper!r} before them, as of a network" in refusal_of(folder)


def test_network_that_holds_another_like_itself_is_not_taken_for_wrapped() -> None:
    state = {name: torch.ones(1) for name in ("0.bias", "1.0.bias", "1.1.0.bias")}
    assert not list(_mismatches(state, state))
    some = {"1.0.bias": torch.ones(1)}
    assert list(_mismatches(state, some)) == ["expected 2 more tensors: 0.bias, 1.1.0.bias"]


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    """Without their scales they made another network, which passed its own self-check."""
    folder = make_model_folder(tmp_path)
    weights = load_file(folder / "weights.safetensors")
    first = min(weights)
    put_weights(folder, weights | {first: weights[first].to(torch.int8)})
    message = refusal_of(folder)
    assert f"weights: expected floats, got torch.int8: {first}" in message


def test_half_precision_weights_become_float32(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path)
    # Copies: tensors may be the file itself, in memory, which is about to be written over.
    weights = {
        name: tensor.clone() for name, tensor in load_file(folder / "weights.safetensors").items()
    }
    put_weights(folder, {name: tensor.half() for name, tensor in weights.items()})
    for name, tensor in load(folder).state_dict().items():
        torch.testing.assert_close(tensor, weights[name].half().float())


def test_program_loads(tmp_path: Path) -> None:
    folder = make_program_folder(tmp_path)
    tiles = torch.rand(3, 1, *TILE)
    expected = build_network(manifest_table())(tiles)
    torch.testing.assert_close(load(folder)(tiles), expected, rtol=1e-4, atol=1e-5)


def test_program_with_other_bytes_than_hashed_is_refused(tmp_path: Path) -> None:
    folder = make_program_folder(tmp_path)
    (folder / "network.onnx").write_bytes(b"other")
    assert "toy: network.sha256: expected " in refusal_of(folder)


def test_program_for_one_tile_is_served(tmp_path: Path) -> None:
    folder = make_program_folder(tmp_path)
    put_program(folder, toy_onnx(dynamic=False))
    tiles = torch.rand(3, 1, *TILE)
    expected = build_network(manifest_table())(tiles)
    torch.testing.assert_close(load(folder)(tiles), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("batch", [2, 0])
def test_program_for_another_size_of_batch_is_refused(tmp_path: Path, batch: int) -> None:
    folder = make_program_folder(tmp_path)
    model = onnx.load_model_from_string(toy_onnx(dynamic=False))
    for one in (model.graph.input[0], model.graph.output[0]):
        one.type.tensor_type.shape.dim[0].dim_value = batch
    del model.graph.value_info[:]
    put_program(folder, model.SerializeToString())
    assert refusal_of(folder) == (
        "toy: network.program: network.onnx: expected an input of shape (any or 1, 1, 32, 24, 40), "
        f"got ({batch}, 1, 32, 24, 40); export it with these dimensions dynamic"
    )


@pytest.mark.parametrize(
    ("tile", "expected"),
    [('"whole"', "any, any, any"), ("[32, 24, 48]", "32, 24, 48")],
)
def test_program_for_other_tiles_is_refused(tmp_path: Path, tile: str, expected: str) -> None:
    folder = make_program_folder(tmp_path)
    text = (folder / "model.toml").read_text().replace("[32, 24, 40]", tile)
    (folder / "model.toml").write_text(text)
    message = refusal_of(folder)
    assert f"shape (any or 1, 1, {expected}), got (any, 1, 32, 24, 40); export it " in message


def test_broken_program_is_refused(tmp_path: Path) -> None:
    folder = make_program_folder(tmp_path)
    put_program(folder, b"not a program")
    assert refusal_of(folder).startswith(
        "toy: network.program: network.onnx: expected a valid ONNX file, got DecodeError: "
    )


def rename_program(folder: Path, name: str) -> None:
    (folder / "network.onnx").rename(folder / name)
    text = (folder / "model.toml").read_text().replace("network.onnx", name)
    (folder / "model.toml").write_text(text)


def test_program_of_unknown_kind_is_refused(tmp_path: Path) -> None:
    folder = make_program_folder(tmp_path)
    rename_program(folder, "network.pkl")
    with pytest.raises(ModelRefused, match=r"network.pkl: expected a name ending in .onnx"):
        write_selfcheck(folder)


def test_program_of_torch_export_is_refused_with_what_to_do(tmp_path: Path) -> None:
    folder = make_program_folder(tmp_path)
    rename_program(folder, "network.pt2")
    assert refusal_of(folder) == (
        "toy: network.program: network.pt2: expected ONNX, got a program of torch.export; export "
        'it with torch.onnx.export(network, (tiles,), "network.onnx", dynamo=True, '
        "external_data=False)"
    )


def test_torchscript_is_refused_unless_it_is_allowed(tmp_path: Path) -> None:
    folder = make_program_folder(tmp_path, script=True)
    message = refusal_of(folder)
    assert "network.pt: expected ONNX, got TorchScript, which torch's unpickler reads" in message
    assert message.endswith("or set LANDMARKD_ALLOW_TORCHSCRIPT=true")
    module = load_module(folder, read_manifest(folder), allow_torchscript=True)
    tiles = torch.rand(3, 1, *TILE)
    torch.testing.assert_close(module(tiles), build_network(manifest_table())(tiles))


@pytest.mark.parametrize("key", ["program", "weights"])
@pytest.mark.parametrize(("whole", "new"), [(False, True), (True, True), (False, False)])
def test_a_file_of_torch_save_is_refused_with_what_to_do(
    tmp_path: Path, key: str, whole: bool, new: bool
) -> None:
    """Also one that is no archive, as torch wrote it before 1.6 and does still if it is asked."""
    folder = make_program_folder(tmp_path) if key == "program" else make_model_folder(tmp_path)
    network = build_network(manifest_table())
    torch.save(
        network if whole else network.state_dict(),
        folder / "network.pt",
        _use_new_zipfile_serialization=new,
    )
    with editing(folder) as document:
        document["network"][key] = "network.pt"
    kind = "ONNX" if key == "program" else "safetensors"
    with pytest.raises(ModelRefused) as refusal:
        write_selfcheck(folder)
    message = str(refusal.value)
    assert f"network.{key}: network.pt: expected {kind}, got a file of torch.save, which" in message
    assert 'safetensors.torch.save_model(network, "weights.safetensors")' in message
    assert "torch.onnx.export" in message
    assert "LANDMARKD_ALLOW_TORCHSCRIPT" not in message


def test_weights_stored_under_all_their_names_are_taken_too(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path, network=DYNUNET, checked=False)
    stored = load_file(folder / "weights.safetensors")
    everything = build_network({"network": DYNUNET}).state_dict()
    assert len(stored) < len(everything)
    put_weights(folder, {name: tensor.clone() for name, tensor in everything.items()})
    load(folder)


def test_missing_name_of_shared_weights_is_named(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path, network=DYNUNET, checked=False)
    stored = load_file(folder / "weights.safetensors")
    stored.pop(next(name for name in stored if "bottleneck.conv1" in name or "next_layer" in name))
    put_weights(folder, stored)
    assert "toy: network.weights: expected 2 more tensors: " in refusal_of(folder)


def examples(language: str) -> list[str]:
    """Read the examples of models/README.md."""
    text = (Path(__file__).parents[3] / "models" / "README.md").read_text()
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


@pytest.mark.no_cover
def test_examples_in_the_readme_work(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    first, surroundings, measurement, program = examples("toml")
    shape = {"mean": "shape.safetensors", "sha256": "0" * 64, "tolerance_mm": 9.6}
    assert len(ShapeSpec(**shape, **tomllib.loads(surroundings)).surroundings) == 2
    manifest = first.replace("[64, 64, 48]", "[32, 32, 48]") + "\n" + measurement
    (folder / "model.toml").write_text(manifest)
    names: dict[str, object] = {}
    weights, export = (text.replace("models/my-model", str(folder)) for text in examples("python"))
    exec(weights, names)  # noqa: S102 - it is our own text
    made = write_selfcheck(folder)
    assert [landmark.mirror for landmark in made.landmarks] == ["right", "left"]
    tiles = torch.rand(3, 1, 32, 32, 48)
    expected = load(folder)(tiles)
    with warnings.catch_warnings():
        # torch 2.13 copies tree specifications in a way that it has itself deprecated.
        warnings.simplefilter("ignore")
        exec(export.replace("64, 64, 48", "32, 32, 48"), names)  # noqa: S102
    assert [path.name for path in folder.glob("network.onnx*")] == ["network.onnx"]
    head, rest = manifest.partition("[network]\n")[::2]
    (folder / "model.toml").write_text(head + program + "[voting]" + rest.partition("[voting]")[2])
    write_selfcheck(folder)
    torch.testing.assert_close(load(folder)(tiles), expected, rtol=1e-4, atol=1e-4)
