"""nodes of an exported program -> Calls: operators on tensors, with their arguments read.

Deny by default: an operator is one of aten, or simple arithmetic on sizes; an argument is a number,
a constant of torch, or the result of an earlier call. Nothing else of a file gets through.
"""

import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch._ops import OpOverload

from app.errors import ModelRefused

FORBIDDEN: Final = frozenset({"from_file", "save", "_print", "warn"})
"""Operators of aten that reach outside their tensors."""

ASSERTIONS: Final = frozenset(
    {"_assert_async", "_assert_scalar", "_assert_tensor_metadata"}
    | {"sym_constrain_range", "sym_constrain_range_for_size"}
)
"""Operators that only check; they bake in the device of the export, so they are left out."""

ARITHMETIC: Final[Mapping[str, Callable[..., Any]]] = {
    f"{prefix}.{name}": getattr(module, name)
    for prefix, module, names in (
        (
            "_operator",
            operator,
            "add sub mul floordiv truediv mod neg eq ne lt le gt ge and_ or_ not_",
        ),
        ("math", math, "ceil floor trunc"),
        ("torch", torch, "sym_int sym_float sym_max sym_min sym_not sym_ite"),
    )
    for name in names.split()
}
"""What a program may do with sizes."""

STRIDED: Final = 7
DTYPES: Final[Mapping[int, torch.dtype]] = {
    1: torch.uint8,
    2: torch.int8,
    3: torch.int16,
    4: torch.int32,
    5: torch.int64,
    6: torch.float16,
    7: torch.float32,
    8: torch.float64,
    12: torch.bool,
    13: torch.bfloat16,
}
CONSTANTS: Final[Mapping[str, Mapping[int, Any]]] = {
    "as_scalar_type": DTYPES,
    "as_memory_format": {
        1: torch.contiguous_format,
        2: torch.channels_last,
        3: torch.channels_last_3d,
        4: torch.preserve_format,
    },
    "as_layout": {STRIDED: torch.strided},
}
LITERALS: Final = frozenset({"as_int", "as_ints", "as_bool", "as_bools", "as_string"})
REFERENCES: Final = frozenset({"name", "as_name"})
NESTED: Final = frozenset(
    {"as_tensor", "as_optional_tensor", "as_sym_int", "as_sym_float", "as_sym_bool"}
)
LISTS: Final = frozenset(f"{kind}s" for kind in NESTED)
"""How a file writes arguments: as they are, as a name, one layer deeper, or as lists of these."""

AtenName: Final = re.compile(r"torch\.ops\.aten\.(\w+)\.(\w+)")


@dataclass(frozen=True, slots=True)
class Ref:
    """A value that an earlier call has made, by name."""

    name: str


DEVICE: Final = Ref("<device>")
"""Stands for every device in a program: the one that the tile is on."""


@dataclass(frozen=True, slots=True)
class Call:
    """One operator with its arguments, the names of what it gives, and what is free after it."""

    function: Callable[..., Any]
    args: list[Any]
    kwargs: dict[str, Any]
    outputs: Any
    last_uses: tuple[str, ...]


def read_calls(nodes: Iterable[Mapping[str, Any]], output: str) -> tuple[Call, ...]:
    """Read the calls of a graph, and after which of them each value is no longer needed.

    Args:
        nodes: The graph's nodes as the file has them.
        output: Name of the value that is the graph's answer.

    Returns:
        The calls, in order.

    Raises:
        ModelRefused: A node is no plain operator on tensors and numbers.
    """
    read: list[Call] = []
    for node in nodes:
        function = _function(node["target"])
        if function is None:
            continue
        values = [(item["name"], _value(item["arg"])) for item in node["inputs"]]
        # Operators of aten know their arguments by name; those on sizes take them in order.
        named = isinstance(function, OpOverload)
        read.append(
            Call(
                function,
                [] if named else [value for _, value in values],
                dict(values) if named else {},
                _outputs(node["outputs"]),
                (),
            )
        )
    kept = {output, DEVICE.name}
    calls: list[Call] = []
    for call in reversed(read):
        names = {ref.name for ref in _refs([call.args, list(call.kwargs.values()), call.outputs])}
        last_uses = tuple(sorted(names - kept))
        kept |= names
        calls.append(replace(call, last_uses=last_uses))
    return tuple(reversed(calls))


def _function(target: str) -> Callable[..., Any] | None:
    """Look up what a node calls; None if it only checks."""
    if target in ARITHMETIC:
        return ARITHMETIC[target]
    match = AtenName.fullmatch(target)
    if match is None or match[1] in FORBIDDEN:
        raise ModelRefused(f"expected plain aten operators, got {target!r:.120}")
    if match[1] in ASSERTIONS:
        return None
    function = getattr(getattr(torch.ops.aten, match[1], None), match[2], None)
    if not isinstance(function, OpOverload):
        raise ModelRefused(f"expected operators that this torch has, got {target!r:.120}")
    return function


def _value(argument: Mapping[str, Any]) -> Any:  # noqa: ANN401 - operators take any type
    """Turn an argument of the file into what the operator takes, with Refs for earlier values."""
    ((kind, value),) = argument.items()
    if kind in LITERALS:
        return value
    if kind in REFERENCES:
        return Ref(value)
    if kind in NESTED:
        return _value(value)
    if kind in LISTS:
        return [_value(item) for item in value]
    return _constant(kind, value)


def _constant(kind: str, value: Any) -> Any:  # noqa: ANN401 - as above
    """Read a float, which JSON may hold as "Infinity", or a name of one of torch's constants."""
    match kind:
        case "as_none":
            return None
        case "as_float":
            return float(value)
        case "as_floats":
            return [float(item) for item in value]
        case "as_device":
            return DEVICE
        case "as_scalar_type" | "as_memory_format" | "as_layout":
            return CONSTANTS[kind][value]
        case _:
            raise ModelRefused(f"expected numbers and tensors as arguments, got {kind}")


def _outputs(items: Sequence[Mapping[str, Any]]) -> Any:  # noqa: ANN401 - as above
    """Read where a call's result goes: one name, or a list of them for a tuple or a list."""
    targets = [_value(item) for item in items]
    return targets[0] if len(targets) == 1 else targets


def _refs(value: Any) -> Iterable[Ref]:  # noqa: ANN401 - as above
    if isinstance(value, Ref):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _refs(item)


def resolve(value: Any, values: Mapping[str, Any]) -> Any:  # noqa: ANN401 - as above
    """Put the values of earlier calls in the place of the Refs to them."""
    if isinstance(value, Ref):
        return values[value.name]
    return [resolve(item, values) for item in value] if isinstance(value, list) else value


def bind(target: Any, result: Any, values: dict[str, Any]) -> None:  # noqa: ANN401 - as above
    """Store what a call gave under the names that later calls know it by."""
    if isinstance(target, Ref):
        values[target.name] = result
    elif isinstance(target, list) and target:
        for item, value in zip(target, result, strict=True):
            bind(item, value, values)
