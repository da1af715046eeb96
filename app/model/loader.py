"""model folder -> nn.Module: the network with its weights, as its manifest promises it.

A folder brings either weights for an architecture that is installed here, or a whole program.
Neither way runs code from the folder: architectures come from allow-listed modules, weights are
safetensors, and programs are ONNX. TorchScript, which does run code, has to be allowed.
"""

import importlib
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from app.errors import ModelRefused
from app.model.files import read_file, read_tensors
from app.model.manifest import WHOLE, Manifest
from app.model.onnx import OnnxNetwork, read_onnx
from app.model.torchscript import read_script

ARCHITECTURES: Final = ("monai.networks.nets",)
"""Modules whose networks may be named; their submodules too."""

FETCHES: Final = re.compile(r"pretrained|url|checkpoint|path|file|download")
"""Arguments by which a constructor might fetch or unpickle weights from elsewhere."""

ONNX_SUFFIX: Final = ".onnx"
SCRIPT_SUFFIXES: Final = (".pt", ".ts")
EXPORT: Final = (
    'export it with torch.onnx.export(network, (tiles,), "network.onnx", dynamo=True, '
    "external_data=False)"
)
"""What to do with a program of another kind."""

SPARE_BYTES: Final = 64 << 20
MAX_GROWTH: Final = 4
"""Weights may be halves of the network's, and a constructor may make tensors that it drops."""

SPARE_CALLS: Final = 5000
CALLS_PER_TENSOR: Final = 50
"""Constructors of MONAI call torch up to 7 times for each tensor that they keep."""

NAMES_SHOWN: Final = 3
"""How many names of weights a message lists."""


def load_module(folder: Path, manifest: Manifest, *, allow_torchscript: bool = False) -> nn.Module:
    """Load the network of a model folder, after checking its hash.

    Args:
        folder: The model folder.
        manifest: Its manifest.
        allow_torchscript: Whether its program may be TorchScript.

    Returns:
        The module on the CPU, in eval mode, its weights frozen.

    Raises:
        ModelRefused: A file is missing or is not what the manifest promises; the key is named.
    """
    if manifest.network.program is None:
        module = _load_architecture(folder, manifest)
    else:
        module = _load_program(folder, manifest, manifest.network.program, allow_torchscript)
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    return module.eval()


def _load_program(
    folder: Path, manifest: Manifest, name: str, allow_torchscript: bool
) -> nn.Module:
    """Read the program of a model folder."""
    key = f"{folder.name}: network.program: {name}"
    suffix = Path(name).suffix
    _check_kind(key, suffix, allow_torchscript)
    data = read_file(folder, "network.program", name, manifest.network.sha256)
    try:
        if suffix != ONNX_SUFFIX:
            return read_script(data)
        network = read_onnx(data)
        _check_input(network, manifest)
    except ModelRefused as error:
        raise ModelRefused(f"{key}: {error}") from error
    return network


def _check_kind(key: str, suffix: str, allow_torchscript: bool) -> None:
    """Refuse programs that are not ONNX, unless TorchScript is allowed."""
    if suffix == ".pt2":
        raise ModelRefused(f"{key}: expected ONNX, got a program of torch.export; {EXPORT}")
    if suffix not in (ONNX_SUFFIX, *SCRIPT_SUFFIXES):
        raise ModelRefused(f"{key}: expected a name ending in {ONNX_SUFFIX}")
    if suffix in SCRIPT_SUFFIXES and not allow_torchscript:
        raise ModelRefused(
            f"{key}: expected ONNX, got TorchScript, which torch's unpickler reads and which runs "
            f"unreviewed code; {EXPORT}, or set LANDMARKD_ALLOW_TORCHSCRIPT=true"
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


def _load_architecture(folder: Path, manifest: Manifest) -> nn.Module:
    """Build an installed network and fill it with weights."""
    name = manifest.network.weights or ""
    if Path(name).suffix != ".safetensors":
        raise ModelRefused(f"{folder.name}: network.weights: expected .safetensors, got {name!r}")
    state = read_tensors(folder, "network.weights", name, manifest.network.sha256)
    module = _build(folder.name, manifest, state)
    state = _with_aliases(module.state_dict(), state)
    reasons = list(_mismatches(module.state_dict(), state))
    if reasons:
        raise ModelRefused(f"{folder.name}: network.weights: {'; '.join(reasons)}")
    module.load_state_dict(state)
    return module


class _BoundedConstruction(TorchFunctionMode):
    """Context in which a constructor may make a network about as large as the weights of its file.

    With a few digits too many in its arguments it would take all memory, or minutes.
    """

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._bytes_left = SPARE_BYTES + MAX_GROWTH * sum(one.nbytes for one in weights.values())
        self._calls_left = SPARE_CALLS + CALLS_PER_TENSOR * len(weights)
        self._seen: set[int] = set()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - as of whatever is called
        """Call a function of torch, and count the call and the memory of what it makes."""
        del types
        result = func(*args, **(kwargs or {}))
        self._calls_left -= 1
        if isinstance(result, Tensor) and result.untyped_storage().data_ptr() not in self._seen:
            self._seen.add(result.untyped_storage().data_ptr())
            self._bytes_left -= result.untyped_storage().nbytes()
        if min(self._calls_left, self._bytes_left) < 0:
            raise ValueError(
                "expected a network of about the size of its weights, got a larger one"
            )
        return result


def _build(name: str, manifest: Manifest, weights: Mapping[str, Tensor]) -> nn.Module:
    """Call the constructor that the manifest names, for these weights."""
    architecture = find_architecture(name, manifest.network.architecture or "")
    arguments = dict(manifest.network.arguments)
    for key, value in _fetching(architecture, arguments):
        raise ModelRefused(
            f"{name}: network.arguments.{key}: expected nothing to fetch, got {value!r}"
        )
    try:
        with _BoundedConstruction(weights):
            return architecture(**arguments).to(torch.float32)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ModelRefused(f"{name}: network.arguments: {reason:.500}") from error


def find_architecture(name: str, architecture: str) -> type[nn.Module]:
    """Import an allow-listed network class.

    Args:
        name: The model's name, for the message.
        architecture: Where it is, as ``module:Class``.

    Returns:
        The class.

    Raises:
        ModelRefused: The module is not allowed, or defines no such network.
    """
    key = f"{name}: network.architecture"
    module_name, _, class_name = architecture.partition(":")
    if not _allowed(module_name):
        raise ModelRefused(
            f"{key}: expected a module of {', '.join(ARCHITECTURES)}, got {module_name}"
        )
    try:
        found = getattr(importlib.import_module(module_name), class_name, None)
    except ImportError as error:
        raise ModelRefused(f"{key}: expected an installed module, got {module_name}") from error
    if not (
        isinstance(found, type) and issubclass(found, nn.Module) and _allowed(found.__module__)
    ):
        raise ModelRefused(f"{key}: expected a network of {module_name}, got {class_name}")
    return found


def _allowed(module_name: str) -> bool:
    return any(module_name == a or module_name.startswith(f"{a}.") for a in ARCHITECTURES)


def _fetching(
    architecture: type[nn.Module], arguments: Mapping[str, object]
) -> Iterator[tuple[str, object]]:
    """List arguments, given or default, that would make a constructor fetch weights."""
    defaults = {
        key: parameter.default
        for key, parameter in inspect.signature(architecture).parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }
    for key, value in _flatten({**defaults, **arguments}):
        fetches = isinstance(value, str) or "pretrained" in key
        if fetches and value and FETCHES.search(key):
            yield key, value


def _flatten(value: object, key: str = "") -> Iterator[tuple[str, object]]:
    """List the leaves of nested arguments with their dotted keys."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _flatten(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _flatten(item, key)
    else:
        yield key, value


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
    """Say what a file of weights lacks, has too much, or has in another shape."""
    if missing := sorted(expected.keys() - got.keys()):
        yield f"expected {len(missing)} more tensors: {_some(missing)}"
    if unexpected := sorted(got.keys() - expected.keys()):
        yield f"got {len(unexpected)} tensors that the architecture lacks: {_some(unexpected)}"
    for name in sorted(expected.keys() & got.keys()):
        if expected[name].shape != got[name].shape:
            yield f"{name}: expected {list(expected[name].shape)}, got {list(got[name].shape)}"


def _some(names: list[str]) -> str:
    return ", ".join(names[:NAMES_SHOWN]) + (", ..." if len(names) > NAMES_SHOWN else "")
