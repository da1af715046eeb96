"""Small but real model folders, made in a temporary folder for tests."""

import io
import json
import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import save_model
from torch import Tensor, nn

from app.model.files import hash_file
from app.model.manifest import parse_manifest
from app.model.modules import find_architecture
from app.model.selfcheck import write_selfcheck

TILE = (32, 24, 40)


def make_model_folder(
    root: Path,
    name: str = "toy",
    landmarks: int = 3,
    checked: bool = True,
    **overrides: Mapping[str, object] | None,
) -> Path:
    """Make a tiny model folder that can be served; a forward pass takes some milliseconds.

    Args:
        root: Where to make it.
        name: The model's name.
        landmarks: How many landmarks it has, named "1", "2" and so on.
        checked: Whether to write true hashes and the self-check file.
        overrides: Sections of the manifest with the keys that shall differ; None leaves a key out.
            A section ``shape`` makes a mean shape too.

    Returns:
        The folder.
    """
    folder = root / name
    folder.mkdir()
    table = manifest_table(name, landmarks)
    for section, changes in overrides.items():
        merged = {**table.get(section, {}), **(changes or {})}
        table[section] = {key: value for key, value in merged.items() if value is not None}
    save_arrays({"mean": shape_of(landmarks)}, folder / "shape.safetensors")
    if "architecture" in table["network"]:
        save_model(build_network(table), str(folder / "weights.safetensors"))
    write_manifest(folder, table)
    if checked:
        write_selfcheck(folder)
    return folder


def manifest_table(name: str = "toy", landmarks: int = 3) -> dict[str, Any]:
    """Make the smallest manifest that keeps the contract, as a table of its sections."""
    return {
        "schema": 1,
        "name": name,
        "version": "1.0.0",
        "description": "noise in, noise out",
        "license": "Apache-2.0",
        "input": {
            "orientation": "RAS",
            "spacing_mm": [1.0, 1.5, 2.0],
            "tile_shape": list(TILE),
            "intensity": {"method": "percentile", "lower": 1.0, "upper": 99.5},
        },
        "network": {
            "architecture": "monai.networks.nets:UNet",
            "arguments": {
                "spatial_dims": 3,
                "in_channels": 1,
                "out_channels": 4 * landmarks,
                "channels": [4, 8],
                "strides": [2],
                "norm": ["INSTANCE", {"affine": True}],
            },
            "weights": "weights.safetensors",
            "sha256": "0" * 64,
            "activation": "sigmoid",
        },
        "voting": {"threshold": 0.3, "radius_mm": 2.0},
        "landmarks": [{"name": str(index + 1)} for index in range(landmarks)],
        "selfcheck": {"input": "noise:7", "expected": "selfcheck.safetensors"},
    }


def shape_of(landmarks: int) -> np.ndarray:
    """Make a mean shape: points on a helix, in mm."""
    turn = np.arange(landmarks, dtype=np.float64)
    return np.stack([10 * np.cos(turn), 10 * np.sin(turn), 3 * turn], axis=1)


def build_network(table: Mapping[str, Any], seed: int = 3) -> nn.Module:
    """Build the network that a manifest's table names, with seeded weights."""
    torch.manual_seed(seed)
    network = table["network"]
    architecture = find_architecture("toy", network["architecture"])
    return architecture(**network["arguments"]).eval()


def write_manifest(folder: Path, table: Mapping[str, Any]) -> None:
    """Write a table as ``model.toml``, as a person might: sections, and inline tables in them."""
    lines = [f"{key} = {toml(value)}" for key, value in table.items() if is_plain(value)]
    for key, value in table.items():
        if isinstance(value, dict):
            lines += ["", f"[{key}]  # of {folder.name}", *section(value)]
        elif isinstance(value, list):
            for item in value:
                lines += ["", f"[[{key}]]", *section(item)]
    (folder / "model.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")


def section(table: Mapping[str, object]) -> list[str]:
    """Write the lines of a section."""
    return [f"{key} = {toml(value)}" for key, value in table.items()]


def is_plain(value: object) -> bool:
    """Say whether a value stands before the first section."""
    return not isinstance(value, dict | list)


def toml(value: object) -> str:
    """Write a value in TOML."""
    if isinstance(value, dict):
        return "{" + ", ".join(section(value)) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml(item) for item in value) + "]"
    return json.dumps(value)


def make_program_folder(root: Path, name: str = "toy", *, script: bool = False) -> Path:
    """Make a folder whose network is an ONNX file, or TorchScript."""
    network = build_network(manifest_table(name))
    file = "network.pt" if script else "network.onnx"
    data = scripted(network) if script else toy_onnx()
    folder = make_model_folder(
        root,
        name,
        checked=False,
        network={"architecture": None, "arguments": None, "weights": None, "program": file},
    )
    (folder / file).write_bytes(data)
    write_selfcheck(folder, allow_torchscript=script)
    return folder


def make_blob_folder(root: Path, data: bytes, name: str = "toy", **overrides: Any) -> Path:
    """Make a folder of one landmark and a given ONNX file, for scans of ``make_blob``.

    Args:
        root: Where to make it.
        data: The program.
        name: The model's name.
        overrides: As of ``make_model_folder``.
    """
    given = overrides.pop("input", {})
    network = {"architecture": None, "arguments": None, "weights": None, "activation": None}
    network |= {"program": "network.onnx"} | overrides.pop("network", {})
    spec = {"spacing_mm": [1.0] * 3, "tile_shape": "whole", "intensity": {"method": "none"}}
    folder = make_model_folder(
        root, name, 1, checked=False, network=network, input=spec | given, **overrides
    )
    (folder / "network.onnx").write_bytes(data)
    write_selfcheck(folder)
    return folder


@cache
def toy_onnx(*, dynamic: bool = True) -> bytes:
    """Export the network of ``make_model_folder`` for any number of tiles, or for one."""
    network = build_network(manifest_table())
    if dynamic:
        return exported(network, torch.rand(2, 1, *TILE), {0: "n"})
    return exported(network, torch.rand(1, 1, *TILE))


def exported(network: nn.Module, tiles: Tensor, dynamic: dict[int, str] | None = None) -> bytes:
    """Export a network as an ONNX file.

    Args:
        network: The network.
        tiles: A batch as an example.
        dynamic: Names of the axes whose size may differ.
    """
    with warnings.catch_warnings():
        # torch 2.13 copies tree specifications in a way that it has itself deprecated.
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            network,
            (tiles,),
            dynamo=True,
            dynamic_shapes=(dynamic,) if dynamic else None,
            verbose=False,
        )
    assert program is not None
    data: bytes = program.model_proto.SerializeToString()
    return data


def scripted(network: nn.Module) -> bytes:
    """Trace a network to TorchScript."""
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        # Tracing is deprecated, and warns of every size that it takes for a constant.
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(network, torch.rand(2, 1, *TILE))
        torch.jit.save(traced, buffer)
    return buffer.getvalue()


def put_program(folder: Path, data: bytes) -> None:
    """Put another program into a folder, under its true hash."""
    manifest = parse_manifest(folder.name, (folder / "model.toml").read_text())
    path = folder / (manifest.network.program or "")
    path.write_bytes(data)
    text = (folder / "model.toml").read_text()
    text = text.replace(manifest.network.sha256, hash_file(path))
    (folder / "model.toml").write_text(text)
