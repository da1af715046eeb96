"""program file -> nn.Module: read a network without running any code of it.

``torch.export.load`` unpickles sample inputs, constants and weights, passes strings of the file to
``eval`` (sizes, guards) and writes its names into Python source that it then executes. Here an
exported program is data: a list of ``aten`` calls and the raw bytes of its tensors. This module
reads both itself, refuses what is neither, and makes the calls one after the other. TorchScript is
parsed and interpreted by torch in C++; only calls that touch files are refused.
"""

import io
import json
import re
import warnings
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final
from zipfile import BadZipFile

import torch
from torch import Tensor, nn

from app.errors import ModelRefused
from app.model.exported.operators import DEVICE, DTYPES, STRIDED, Call, bind, read_calls, resolve

SCHEMA_MAJOR: Final = 8
"""Major version of torch's file schema that is read here; torch 2.9 to 2.13 write it."""

SOURCE_LIMIT: Final = 1 << 24
"""Bytes of a source file in TorchScript: a hundred times what large networks have."""

ScriptCall: Final = re.compile(r"\btorch\.(save|from_file)\b|\bops\.(?!aten\.|prim\.)\w+\.\w+")


class Program(nn.Module):
    """An exported program: the calls of its graph, in order.

    Attributes:
        input_shape: Size of every axis of its input; None where it takes any.
    """

    def __init__(self, tensors: Mapping[str, Tensor], graph: "Graph") -> None:
        super().__init__()
        self.input_shape = graph.input_shape
        self._graph = graph
        self._names = list(tensors)
        for index, tensor in enumerate(tensors.values()):
            self.register_buffer(f"tensor_{index}", tensor)

    def forward(self, tiles: Tensor) -> Tensor:
        """Make the calls.

        Args:
            tiles: The program's only input.

        Returns:
            Its only output.
        """
        values: dict[str, Any] = dict(zip(self._names, self.buffers(), strict=True))
        values |= {self._graph.input: tiles, DEVICE.name: tiles.device}
        for call in self._graph.calls:
            result = call.function(
                *resolve(call.args, values),
                **{name: resolve(value, values) for name, value in call.kwargs.items()},
            )
            bind(call.outputs, result, values)
            for name in call.last_uses:
                del values[name]
        output: Tensor = values[self._graph.output]
        return output


@dataclass(frozen=True, slots=True)
class Graph:
    """What a program does: names of its input and output, and the calls between them."""

    input: str
    input_shape: tuple[int | None, ...]
    output: str
    calls: tuple[Call, ...]


def read_script(data: bytes) -> nn.Module:
    """Read a TorchScript archive.

    Args:
        data: The whole file.

    Returns:
        The module, on the CPU.

    Raises:
        ModelRefused: It is no TorchScript, or calls operators that are refused.
    """
    with _open(data) as archive:
        _check_source(archive)
    with warnings.catch_warnings():
        # torch calls TorchScript deprecated; so does models/README.md, and old files keep working.
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            module: nn.Module = torch.jit.load(io.BytesIO(data), map_location="cpu")
        except RuntimeError as error:
            first = str(error).partition("\n")[0]
            raise ModelRefused(f"expected a TorchScript file, got {first:.200}") from None
    return module


def read_program(data: bytes) -> Program:
    """Read a file written by ``torch.export.save``.

    Args:
        data: The whole file.

    Returns:
        The program, on the CPU.

    Raises:
        ModelRefused: The file is damaged, of another version, or holds something else than calls
            of aten operators and plain tensors.
    """
    try:
        with _open(data) as archive:
            if any(item.compress_type != zipfile.ZIP_STORED for item in archive.infolist()):
                raise ModelRefused("expected an archive without compression, as torch writes it")
            root = archive.namelist()[0].split("/")[0]
            model = json.loads(_member(archive, f"{root}/models/model.json"))
            payload = _payload(archive, root, "weights") | _payload(archive, root, "constants")
        return _program(model, payload)
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, BadZipFile) as error:
        raise ModelRefused(
            f"expected a program written by torch.export.save, got {type(error).__name__}: {error}"
        ) from error


def _check_source(archive: zipfile.ZipFile) -> None:
    """Refuse TorchScript whose source calls operators that reach outside their tensors."""
    for item in archive.infolist():
        if "/code/" not in item.filename or not item.filename.endswith(".py"):
            continue
        if item.file_size > SOURCE_LIMIT:
            raise ModelRefused(f"expected source up to {SOURCE_LIMIT} bytes, got {item.file_size}")
        try:
            source = archive.read(item).decode("utf-8", "replace")
        except (BadZipFile, zlib.error, RuntimeError) as error:
            raise ModelRefused(f"expected an undamaged archive, got {error}") from None
        if found := ScriptCall.search(source):
            raise ModelRefused(f"expected plain tensor operators, got {found[0]}")


def _open(data: bytes) -> zipfile.ZipFile:
    try:
        archive = zipfile.ZipFile(io.BytesIO(data))
    except BadZipFile:
        raise ModelRefused(
            "expected a zip archive as torch writes it, got something else"
        ) from None
    return archive


def _member(archive: zipfile.ZipFile, name: str) -> bytes:
    try:
        return archive.read(name)
    except KeyError:
        short = name.partition("/")[2]
        raise ModelRefused(
            f"expected a member {short}, found none; export it again with torch 2.9 or newer"
        ) from None


def _payload(archive: zipfile.ZipFile, root: str, kind: str) -> dict[str, Tensor]:
    """Read the tensors of one kind; several may share the bytes of one member."""
    folder = f"{root}/data/{kind}"
    config = json.loads(_member(archive, f"{folder}/model_{kind}_config.json"))["config"]
    flat: dict[tuple[str, int], Tensor] = {}
    tensors: dict[str, Tensor] = {}
    for name, entry in config.items():
        meta = entry["tensor_meta"]
        if entry["use_pickle"] or meta is None or meta["layout"] != STRIDED:
            raise ModelRefused(f"expected plain tensors in data/{kind}, {name!r} is pickled")
        key = (str(entry["path_name"]), int(meta["dtype"]))
        if key not in flat:
            raw = bytearray(_member(archive, f"{folder}/{key[0]}"))
            dtype = DTYPES[key[1]]
            flat[key] = torch.frombuffer(raw, dtype=dtype) if raw else torch.zeros(0, dtype=dtype)
        sizes, strides = (
            [int(size["as_int"]) for size in meta[which]] for which in ("sizes", "strides")
        )
        tensors[name] = flat[key].as_strided(sizes, strides, int(meta["storage_offset"]["as_int"]))
    return tensors


def _program(model: Mapping[str, Any], payload: Mapping[str, Tensor]) -> Program:
    """Put a program together from its description and its tensors."""
    if model["schema_version"]["major"] != SCHEMA_MAJOR:
        raise ModelRefused(
            f"expected schema {SCHEMA_MAJOR}, got {model['schema_version']['major']}; export it "
            "again with torch 2.9 or newer"
        )
    signature, graph = model["graph_module"]["signature"], model["graph_module"]["graph"]
    tensors: dict[str, Tensor] = {}
    inputs: list[str] = []
    for spec in signature["input_specs"]:
        ((kind, body),) = spec.items()
        if kind == "user_input":
            inputs.append(body["arg"]["as_tensor"]["name"])
        elif kind in ("parameter", "buffer", "tensor_constant"):
            tensors[body["arg"]["name"]] = payload[body[f"{kind}_name"]]
        else:
            raise ModelRefused(f"expected only tensors as inputs, got a {kind}")
    outputs = [body["arg"]["as_tensor"]["name"] for body in _user_outputs(signature)]
    if len(inputs) != 1 or len(outputs) != 1:
        raise ModelRefused(
            f"expected one input and one output tensor, got {len(inputs)} and {len(outputs)}"
        )
    sizes = graph["tensor_values"][inputs[0]]["sizes"]
    shape = tuple(size.get("as_int") for size in sizes)
    return Program(
        tensors, Graph(inputs[0], shape, outputs[0], read_calls(graph["nodes"], outputs[0]))
    )


def _user_outputs(signature: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    for spec in signature["output_specs"]:
        ((kind, body),) = spec.items()
        if kind != "user_output":
            raise ModelRefused(
                f"expected a program that only answers, got a {kind}; call eval() before the export"
            )
        yield body
