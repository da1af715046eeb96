"""Reads mutated ONNX files: ``python -m tests.support.onnx_mutations FILE COUNT KIND``.

A process of its own, because a file that crashes ONNX Runtime would take the tests with it. Prints
how many files were read and refused, and by how many MiB memory grew; any other error ends it.
"""

import random
import resource
import sys
from collections import Counter
from collections.abc import Callable, Iterator, MutableSequence
from pathlib import Path
from typing import Any, Final

import onnx

from app.errors import ModelRefused
from app.model.modules.onnx import Message, read_onnx

INTEGERS: Final = (0, 1, -1, 2, 3, 7, 64, 255, 1 << 20, (1 << 31) - 1, -(1 << 31), 1 << 62)
OPERATORS: Final = sorted({schema.name for schema in onnx.defs.get_all_schemas()})


def mutate_bytes(data: bytes, draw: random.Random) -> bytes:
    """Flip, insert, delete or repeat some bytes."""
    changed = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 4, 16))):
        at, count = draw.randrange(len(changed)), draw.randrange(1, 9)
        kind = draw.randrange(5)
        if kind == 0:
            changed[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            changed[at] = draw.choice((0, 1, 127, 128, 255))
        elif kind == 2:
            del changed[at : at + count]
        elif kind == 3:
            changed[at:at] = draw.randbytes(count)
        else:
            start = draw.randrange(len(data))
            changed[at : at + 8 * count] = data[start : start + 8 * count]
    return bytes(changed)


def mutate_fields(data: bytes, draw: random.Random) -> bytes:
    """Change some fields, so that the file is well-formed and what it says is not."""
    model = onnx.load_model_from_string(data)
    for _ in range(draw.choice((1, 1, 2, 3, 5))):
        message, name = draw.choice(list(_fields(model)))
        value = getattr(message, name)
        if isinstance(value, MutableSequence):
            _mutate_list(value, draw)
        elif name == "op_type":
            message.op_type = draw.choice(OPERATORS)
        else:
            setattr(message, name, _other(value, draw))
    mutated: bytes = model.SerializeToString()
    return mutated


def _fields(message: Message) -> Iterator[tuple[Message, str]]:
    """List the fields that are set, in a message and in those within."""
    for field, value in message.ListFields():
        if field.message_type is None:
            yield message, field.name
            continue
        for item in [value] if hasattr(value, "ListFields") else value:
            yield from _fields(item)
        if not hasattr(value, "ListFields"):
            yield message, field.name


def _mutate_list(values: MutableSequence[Any], draw: random.Random) -> None:
    at, kind = draw.randrange(len(values)), draw.randrange(3)
    if kind == 0:
        del values[at]
    elif kind == 1 or hasattr(values[at], "ListFields"):
        values.append(values[at])
    else:
        values[at] = _other(values[at], draw)


def _other(value: object, draw: random.Random) -> object:
    """Draw another value of the same type."""
    if isinstance(value, int):
        return draw.choice(INTEGERS if value > 255 or draw.random() < 0.5 else (value + 1, 0, 1))
    if isinstance(value, float):
        return draw.choice((0.0, -1.0, 1e38, float("inf"), float("nan")))
    if isinstance(value, bytes):
        return draw.choice((b"", value[:-1], value + b"\0", b"\xff"))
    return draw.choice(("", "x", "y", "val_1", str(value)[::-1]))


KINDS: Final[dict[str, Callable[[bytes, random.Random], bytes]]] = {
    "bytes": mutate_bytes,
    "fields": mutate_fields,
}


def main(path: str, count: str, kind: str) -> None:
    """Read mutations of a file; see the module."""
    data = Path(path).read_bytes()
    read_onnx(data)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcomes = Counter[str]()
    for seed in range(int(count)):
        draw = random.Random(seed)
        try:
            mutated = KINDS[kind](data, draw)
        except (TypeError, ValueError):
            continue  # no such value fits the field
        try:
            read_onnx(mutated)
        except ModelRefused:
            outcomes["refused"] += 1
        else:
            outcomes["read"] += 1
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    sys.stdout.write(f"{outcomes['read']} {outcomes['refused']} {grown >> 10}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
