"""model folder -> nn.Module: the network with its weights, as its manifest promises it.

A folder brings either weights for an architecture that is installed here, or a whole program.
Neither way runs code from the folder: architectures come from allow-listed modules, weights are
safetensors, and programs are ONNX. TorchScript, which does run code, has to be allowed.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn

from app.errors import ModelRefused
from app.model.files import parse_tensors, read_files
from app.model.manifest import Manifest
from app.model.modules import (
    EXPORT,
    OnnxNetwork,
    build_network,
    is_saved,
    read_onnx,
    read_script,
)
from app.model.sections import WHOLE

ONNX_SUFFIX: Final = ".onnx"
SCRIPT_SUFFIXES: Final = (".pt", ".ts")
KINDS: Final = {"network.weights": "safetensors", "network.program": "ONNX"}

NAMES_SHOWN: Final = 3
"""How many names of weights a message lists."""


def load_module(folder: Path, manifest: Manifest, *, allow_torchscript: bool = False) -> nn.Module:
    """Load the network of a model folder, after checking its hash.

    Returns:
        The module on the CPU, in eval mode, its weights frozen; a list of modules if there are
        several members.

    Raises:
        ModelRefused: A file is missing or is not what the manifest promises; the key is named.
    """
    names = manifest.network.files
    key = "network.weights" if manifest.network.program is None else "network.program"
    files = read_files(folder, key, names, manifest.network.sha256)
    for name, data in zip(names, files, strict=True):
        _check_kind(f"{folder.name}: {key}: {name}", key, name, data, allow_torchscript)
    load = _load_architecture if manifest.network.program is None else _load_program
    modules = [load(folder, manifest, name, data) for name, data in zip(names, files, strict=True)]
    module = modules[0] if len(modules) == 1 else nn.ModuleList(modules)
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    return module.eval()


def _load_program(folder: Path, manifest: Manifest, name: str, data: bytes) -> nn.Module:
    """Make a network of a program."""
    try:
        if Path(name).suffix != ONNX_SUFFIX:
            return read_script(data)
        network = read_onnx(data)
        _check_input(network, manifest)
    except ModelRefused as error:
        raise ModelRefused(f"{folder.name}: network.program: {name}: {error}") from error
    return network


def _check_kind(where: str, key: str, name: str, data: bytes, allow_torchscript: bool) -> None:
    """Refuse weights that are no safetensors, and programs that are not ONNX or allowed."""
    if is_saved(data):
        raise ModelRefused(
            f"{where}: expected {KINDS[key]}, got a file of torch.save, which is no program: write "
            "the weights of a network of MONAI with safetensors.torch.save_model(network, "
            f'"weights.safetensors"); if its class is your own, {EXPORT}'
        )
    suffix = Path(name).suffix
    if key == "network.weights":
        if suffix != ".safetensors":
            raise ModelRefused(f"{where}: expected .safetensors")
        return
    if suffix == ".pt2":
        raise ModelRefused(f"{where}: expected ONNX, got a program of torch.export; {EXPORT}")
    if suffix not in (ONNX_SUFFIX, *SCRIPT_SUFFIXES):
        raise ModelRefused(f"{where}: expected a name ending in {ONNX_SUFFIX}")
    if suffix in SCRIPT_SUFFIXES and not allow_torchscript:
        raise ModelRefused(
            f"{where}: expected ONNX, got TorchScript, which torch's unpickler reads and which "
            f"runs unreviewed code; {EXPORT}, or set LANDMARKD_ALLOW_TORCHSCRIPT=true"
        )


def _check_input(network: OnnxNetwork, manifest: Manifest) -> None:
    """Check that a network takes batches of any size or of 1, and the tiles of the manifest."""
    tile = manifest.input.tile_shape
    edges: tuple[int | None, ...] = (None, None, None) if tile == WHOLE else tile
    got = network.input_shape
    fits = len(got) == 5 and got[0] in (None, 1) and got[1] in (None, 1)
    if not fits or any(g not in (None, edge) for g, edge in zip(got[2:], edges, strict=True)):
        raise ModelRefused(
            f"expected an input of shape (any or 1, 1, {_sizes(edges)}), got ({_sizes(got)}); "
            "export it with these dimensions dynamic"
        )


def _sizes(sizes: tuple[int | None, ...]) -> str:
    return ", ".join("any" if size is None else str(size) for size in sizes)


def _load_architecture(folder: Path, manifest: Manifest, name: str, data: bytes) -> nn.Module:
    """Build an installed network and fill it with weights."""
    key, network = f"{folder.name}: network.weights", manifest.network
    state = parse_tensors(folder, "network.weights", data)
    module = build_network(folder.name, network.architecture or "", network.arguments, state)
    state = _with_aliases(module.state_dict(), state)
    reasons = list(_mismatches(module.state_dict(), state))
    if reasons:
        # Of several members, it is not clear which one is meant.
        which = f"{key}: {name}" if network.members else key
        raise ModelRefused(f"{which}: {'; '.join(reasons)}")
    module.load_state_dict(state)
    return module


def _with_aliases(expected: Mapping[str, Tensor], got: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Add the names that a file may leave out because they are other names of tensors it has.

    Some networks (DynUNet) register each layer twice; safetensors stores shared tensors once.
    """
    groups: dict[tuple[int, torch.Size], list[str]] = {}
    for name, tensor in expected.items():
        groups.setdefault((tensor.data_ptr(), tensor.shape), []).append(name)
    filled = dict(got)
    for names in groups.values():
        stored = [name for name in names if name in got]
        if stored and expected[stored[0]].numel():
            filled |= {name: got[stored[0]] for name in names if name not in got}
    return filled


def _mismatches(expected: Mapping[str, Tensor], got: Mapping[str, Tensor]) -> Iterator[str]:
    """Say what a file of weights lacks, has too much, or has in another shape or type."""
    if wrapper := _find_wrapper(expected, got):
        yield (
            f"expected the names of the network's own tensors, got them with {wrapper!r} before "
            "them, as of a network within another module: save that network's own state_dict"
        )
        return
    if missing := sorted(expected.keys() - got.keys()):
        yield f"expected {len(missing)} more tensors: {_some(missing)}"
    if unexpected := sorted(got.keys() - expected.keys()):
        yield f"got {len(unexpected)} tensors that the architecture lacks: {_some(unexpected)}"
    both = sorted(expected.keys() & got.keys())
    floats = [name for name in both if expected[name].is_floating_point()]
    # As of a quantised network, whose scales are elsewhere: they would be taken for its weights.
    if others := [name for name in floats if not got[name].is_floating_point()]:
        yield f"expected floats, got {got[others[0]].dtype}: {_some(others)}"
    for name in both:
        if expected[name].shape != got[name].shape:
            yield f"{name}: expected {list(expected[name].shape)}, got {list(got[name].shape)}"


def _find_wrapper(expected: Mapping[str, Tensor], got: Mapping[str, Tensor]) -> str:
    """Find what all names of a network have before them, such as ``module.``; empty if nothing.

    There may be others beside them, as of a loss. Names that the file may leave out count as there.
    """
    if expected.keys() & got.keys():
        return ""
    first = min(expected, default="")
    wrapper = next((name for name in got if name.endswith(f".{first}")), first).removesuffix(first)
    within = {name.removeprefix(wrapper) for name in got if name.startswith(wrapper)}
    return wrapper if within <= expected.keys() else ""


def _some(names: list[str]) -> str:
    return ", ".join(names[:NAMES_SHOWN]) + (", ..." if len(names) > NAMES_SHOWN else "")
