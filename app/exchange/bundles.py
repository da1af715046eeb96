"""A MONAI bundle -> its components, as data. Nothing of it is computed or called.

A bundle's configuration names Python classes (``_target_``), and holds expressions (``$``) and
references (``@``), all of which MONAI would run. Here only literals count: numbers, text and lists.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

from app.errors import ModelRefused

Json = Mapping[str, Any]

METADATA: Final = "configs/metadata.json"
CONFIG: Final = "configs/inference.json"
NETWORKS: Final = ("models/model.onnx", "models/model.pt", "models/model.ts")
"""What is read of a bundle."""

MAX_DEPTH: Final = 8
"""Of lists in the arguments of a network."""

CLASS: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)
"""Name of a class, with its module or without."""


def read_target(component: object) -> tuple[str, str, dict[str, Any]]:
    """Read a component: the module and the name of its class, and its arguments.

    Raises:
        ModelRefused: It is none.
    """
    target = component.get("_target_") if isinstance(component, dict) else component
    if not isinstance(component, dict) or not CLASS.fullmatch(str(target)):
        raise ModelRefused(f"_target_: expected the name of a class, got {target!r:.80}")
    module, _, name = str(target).rpartition(".")
    return module, name, {k: v for k, v in component.items() if k not in ("_target_", "_desc_")}


def check_literals(arguments: Json) -> None:
    """Refuse arguments of which something would have to be computed.

    Raises:
        ModelRefused: There is an expression, a reference, a macro or a component.
    """
    for key, value in arguments.items():
        if key.startswith("_") or not _is_literal(value):
            raise ModelRefused(
                f"{key:.80}: expected a literal, as nothing of a bundle is computed, "
                f"got {value!r:.80}"
            )


def _is_literal(value: object, depth: int = 0) -> bool:
    if isinstance(value, dict | list):
        inner = value.values() if isinstance(value, dict) else value
        named = isinstance(value, dict) and any(key.startswith("_") for key in value)
        return depth < MAX_DEPTH and not named and all(_is_literal(one, depth + 1) for one in inner)
    return value is not None and not (isinstance(value, str) and value.startswith(("$", "@", "%")))
