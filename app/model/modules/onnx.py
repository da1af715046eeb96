"""Bytes of an ONNX file -> nn.Module, computed by ONNX Runtime.

The file is checked before ONNX Runtime sees it: it is data, all of it is in these bytes, and its
operators are those that ONNX and ONNX Runtime define. Both packages are an extra, ``onnx``, and are
imported only here and only when a model needs them.
"""

import importlib
import os
import re
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from app.errors import ModelRefused

EXPORT: Final = (
    'export it with torch.onnx.export(network, (tiles,), "network.onnx", dynamo=True, '
    "external_data=False)"
)
"""What to do with a network of another kind."""

DOMAINS: Final = frozenset({"", "ai.onnx", "ai.onnx.ml", "com.microsoft"})
"""Domains of operators that ONNX Runtime brings along; of others only the file's own functions."""

FORBIDDEN: Final = frozenset({"ATen", "EPContext", "PythonOp", "PythonOpGrad", "TritonOp"})
"""Operators of ``com.microsoft`` that call registered code or read another file."""

MAX_BYTES: Final = 2**31 - 1
"""Size of a protobuf message, which a file without external data is."""

FLOATS: Final = {"tensor(float)": torch.float32, "tensor(float16)": torch.float16}
"""Types of inputs and outputs, as ONNX Runtime and torch call them."""

OUT_OF_MEMORY: Final = re.compile(r"allocate memory|out of memory|bad.?alloc", re.IGNORECASE)
"""How ONNX Runtime says that memory ran out."""

MESSAGE_CHARACTERS: Final = 400
"""How much of a foreign message is quoted."""

Message: TypeAlias = Any
"""A message of protobuf, whose classes exist only at run time."""

Session: TypeAlias = Any
"""An ``onnxruntime.InferenceSession``, which has no types."""


class OnnxNetwork(nn.Module):
    """A network that ONNX Runtime computes; it has no parameters and cannot be trained.

    Its threads are as many as torch has when it is opened, and sleep while there is nothing to do.

    Attributes:
        input_shape: Size of every axis of its input; None where it takes any. With a batch size
            of 1, the tiles of a batch are computed one after the other.
    """

    def __init__(self, data: bytes) -> None:
        """Open a session on the CPU.

        Args:
            data: A checked ONNX file; see ``read_onnx``.

        Raises:
            ModelRefused: ONNX Runtime refuses it, or it has other inputs and outputs than one
                tensor of floats each.
        """
        super().__init__()
        # Only a session on another device needs the file again.
        self._data = data if torch.cuda.is_available() else b""
        self._device = torch.device("cpu")
        self._session = _open_session(data, self._device)
        inputs, outputs = self._session.get_inputs(), self._session.get_outputs()
        if [len(inputs), len(outputs)] != [1, 1] or {inputs[0].type, outputs[0].type} - set(FLOATS):
            raise ModelRefused(
                "expected one input and one output of float32 or float16, "
                f"got inputs {_describe(inputs)} and outputs {_describe(outputs)}"
            )
        self._input, self._output = inputs[0].name, outputs[0].name
        self._dtype = FLOATS[inputs[0].type]
        self.input_shape = tuple(n if isinstance(n, int) else None for n in inputs[0].shape)

    def forward(self, tiles: Float[Tensor, "n 1 i j k"]) -> Float[Tensor, "n ..."]:
        """Compute a batch.

        Args:
            tiles: On any device; the session moves to the device of the first batch, which is that
                of the self-check.

        Returns:
            The network's output, on the same device.

        Raises:
            ModelRefused: ONNX Runtime has no support for the device.
            MemoryError: The batch needs more memory than there is.
            RuntimeError: ONNX Runtime cannot compute it for another reason.
        """
        tiles = tiles.detach().to(self._dtype).contiguous()
        if tiles.device != self._device:
            self._session = _open_session(self._data, tiles.device)
            self._device = tiles.device
        run = self._run if tiles.device.type == "cpu" else self.run_bound
        try:
            if self.input_shape[0] is None:
                return run(tiles)
            return torch.cat([run(tile) for tile in tiles.split(1)])
        except Exception as error:  # those of ONNX Runtime have no other base
            kind = MemoryError if OUT_OF_MEMORY.search(str(error)) else RuntimeError
            raise kind(_quote(error)) from error

    def _run(self, tiles: Tensor) -> Tensor:
        (output,) = self._session.run([self._output], {self._input: tiles.numpy()})
        return torch.from_numpy(output)

    # --- CUDA: the project has no machine with onnxruntime-gpu, so only the CPU has run this. ---

    def run_bound(self, tiles: Tensor) -> Tensor:
        """Compute a batch without copies to or from the host.

        Args:
            tiles: Contiguous, of the input's type, on the session's device.

        Returns:
            The output, in memory of ONNX Runtime on the same device.
        """
        device = (tiles.device.type, tiles.device.index or 0)
        if tiles.device.type == "cuda":
            # ONNX Runtime has a stream of its own, which does not wait for torch's.
            torch.cuda.current_stream(tiles.device).synchronize()
        binding = self._session.io_binding()
        element = np.float16 if tiles.dtype == torch.float16 else np.float32
        binding.bind_input(self._input, *device, element, tuple(tiles.shape), tiles.data_ptr())
        binding.bind_output(self._output, *device)
        self._session.run_with_iobinding(binding)
        binding.synchronize_outputs()
        return torch.utils.dlpack.from_dlpack(binding.get_outputs()[0])


def read_onnx(data: bytes) -> OnnxNetwork:
    """Read an ONNX file.

    Returns:
        The network, on the CPU.

    Raises:
        ModelRefused: The extra is not installed, or the file is damaged, refers to another file,
            uses operators of others, or is no network of one input and one output.
    """
    onnx = _import("onnx")
    if len(data) > MAX_BYTES:
        raise ModelRefused(f"expected a file up to {MAX_BYTES} bytes, got {len(data)}")
    try:
        model = onnx.load_model_from_string(data)
        _check_content(model)
        # What is computed is what was checked: nothing that only a newer reader would understand.
        model.DiscardUnknownFields()
        data = model.SerializeToString()
        onnx.checker.check_model(data, full_check=True)
    except ModelRefused:
        raise
    except Exception as error:  # protobuf, the checker and shape inference have no common base
        raise ModelRefused(f"expected a valid ONNX file, got {_quote(error)}") from error
    del model
    return OnnxNetwork(data)


def _check_content(model: Message) -> None:
    """Refuse tensors in other files, sparse tensors, and foreign operators."""
    functions = {(function.domain, function.name) for function in model.functions}
    for message in _messages(model):
        kind = message.DESCRIPTOR.name
        if kind == "TensorProto" and (message.data_location or message.external_data):
            raise ModelRefused(
                f"expected all weights in the file, {message.name[:100]!r} lies in another; "
                "export it with external_data=False"
            )
        if kind == "SparseTensorProto":
            # A few bytes may stand for a tensor of any size.
            raise ModelRefused("expected dense tensors, got a sparse one")
        if kind == "NodeProto":
            known = message.domain in DOMAINS and message.op_type not in FORBIDDEN
            if not known and (message.domain, message.op_type) not in functions:
                name = f"{message.domain}:{message.op_type}"
                raise ModelRefused(f"expected operators of ONNX, got {name:.100}")


def _messages(message: Message) -> Iterator[Message]:
    """List a protobuf message and all messages in it, but not what is in a tensor."""
    yield message
    if message.DESCRIPTOR.name == "TensorProto":
        return
    for field, value in message.ListFields():
        if field.message_type is not None:
            for item in [value] if hasattr(value, "ListFields") else value:
                yield from _messages(item)


def _open_session(data: bytes, device: torch.device) -> Session:
    """Open a session for a checked file on a device."""
    # Read once, when it is imported: it would report its use to its makers.
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    runtime = _import("onnxruntime")
    providers: list[Any] = ["CPUExecutionProvider"]
    if device.type == "cuda":
        providers.insert(0, ("CUDAExecutionProvider", {"device_id": device.index or 0}))
        if "CUDAExecutionProvider" not in runtime.get_available_providers():
            raise ModelRefused(
                f"expected onnxruntime-gpu for {device}, got onnxruntime for CPUs; "
                "pip uninstall onnxruntime && pip install onnxruntime-gpu"
            )
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 4  # Errors are raised; they need not be printed, too.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    # Not guessed from the bytes, which could pass for its own format, too.
    options.add_session_config_entry("session.load_model_format", "ONNX")
    try:
        return runtime.InferenceSession(data, options, providers=providers, enable_fallback=0)
    except Exception as error:  # those of ONNX Runtime have no other base
        # It names the operator, but not the types, of which it computes few beside two.
        lacking = type(error).__name__ == "NotImplemented"
        advice = "; export it in float32, or in float16" if lacking else ""
        raise ModelRefused(
            f"expected a network that ONNX Runtime can load, got {_quote(error)}{advice}"
        ) from error


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ModelRefused(
            f"expected the package {name}; pip install 'landmarkd[onnx]' ({_quote(error)})"
        ) from error


def _describe(arguments: Iterable[Any]) -> str:
    """List inputs or outputs with their types and shapes."""
    listed = ", ".join(f"{one.name}: {one.type} {one.shape}" for one in arguments)
    return f"[{listed:.{MESSAGE_CHARACTERS}}]"


def _quote(error: Exception) -> str:
    """Quote an error on one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text:.{MESSAGE_CHARACTERS}}"
