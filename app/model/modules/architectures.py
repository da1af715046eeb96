"""An allow-listed architecture, with its arguments -> nn.Module."""

import getpass
import importlib
import inspect
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from app.errors import ModelRefused
from app.model.modules.onnx import EXPORT

UNETS: Final = "dynamic_network_architectures.architectures.unet"
"""The U-Nets of nnU-Net, an extra."""

ARCHITECTURES: Final = ("monai.networks.nets", UNETS)
"""Modules whose networks may be named; their submodules too."""

LAYERS: Final = {
    spelling: layer
    for layer in (
        nn.BatchNorm3d, nn.Conv3d, nn.Dropout3d, nn.ELU, nn.GELU, nn.InstanceNorm3d,
        nn.LeakyReLU, nn.PReLU, nn.ReLU, nn.SiLU,
    )
    for spelling in (f"torch.nn.{layer.__name__}", f"{layer.__module__}.{layer.__name__}")
}  # fmt: skip
"""Classes that U-Nets of nnU-Net are made of, by the names in its plans."""

FETCHES: Final = re.compile(r"pretrained|url|checkpoint|path|file|download")
"""Arguments by which a constructor might fetch or unpickle weights from elsewhere."""

SPARE_BYTES: Final = 64 << 20
MAX_GROWTH: Final = 4
"""Weights may be halves of the network's, and a constructor may make tensors that it drops."""

SPARE_CALLS: Final = 5000
CALLS_PER_TENSOR: Final = 50
"""Constructors of MONAI call torch up to 7 times for each tensor that they keep."""


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
        func: Callable[..., object],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
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


def build_network(
    name: str, architecture: str, arguments: Mapping[str, Any], weights: Mapping[str, Tensor]
) -> nn.Module:
    """Make a network, in float32, by an allow-listed constructor; it has not the weights yet.

    Raises:
        ModelRefused: The class or an argument is not allowed, or the constructor refuses it.
    """
    found = find_architecture(name, architecture)
    arguments = _complete(name, architecture, arguments)
    for key, value in _fetching(found, arguments):
        raise ModelRefused(
            f"{name}: network.arguments.{key}: expected nothing to fetch, got {value!r}"
        )
    try:
        with _BoundedConstruction(weights):
            return found(**arguments).to(torch.float32)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ModelRefused(f"{name}: network.arguments: {reason:.500}") from error


def find_architecture(name: str, architecture: str) -> type[nn.Module]:
    """Import an allow-listed network class, named as ``module:Class``.

    Raises:
        ModelRefused: The module is not allowed, or defines no such network.
    """
    key = f"{name}: network.architecture"
    module_name, _, class_name = architecture.partition(":")
    if not _allowed(module_name):
        raise ModelRefused(
            f"{key}: expected a module of {' or '.join(ARCHITECTURES)}, got {module_name}; if the "
            f"class is your own, {EXPORT}"
        )
    _name_user()
    try:
        found = getattr(importlib.import_module(module_name), class_name, None)
    except ImportError as error:
        install = "; pip install 'landmarkd[nnunet]'" if module_name == UNETS else ""
        raise ModelRefused(
            f"{key}: expected an installed module, got {module_name}{install}"
        ) from error
    if not (
        isinstance(found, type) and issubclass(found, nn.Module) and _allowed(found.__module__)
    ):
        raise ModelRefused(f"{key}: expected a network of {module_name}, got {class_name}")
    return found


def _name_user() -> None:
    """Name a user whom the machine does not know, as in a container: MONAI asks on import."""
    try:
        getpass.getuser()
    except (KeyError, OSError):  # OSError from Python 3.13 on
        os.environ["LOGNAME"] = str(os.getuid())


def _allowed(module_name: str) -> bool:
    return any(module_name == a or module_name.startswith(f"{a}.") for a in ARCHITECTURES)


def _complete(name: str, architecture: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Put classes in the place of their names, where nnU-Net's networks take classes."""
    if architecture.partition(":")[0] != UNETS:
        return dict(arguments)
    for key, value in arguments.items():
        if isinstance(value, str) and value not in LAYERS:
            raise ModelRefused(
                f"{name}: network.arguments.{key}: expected one of {', '.join(sorted(LAYERS))}, "
                f"got {value!r}"
            )
    # Heads below the full resolution are there to be trained with.
    given = {key: LAYERS[v] if isinstance(v, str) else v for key, v in arguments.items()}
    return given | {"deep_supervision": False}


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
