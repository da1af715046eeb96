"""Checks of array shapes and types at each call of a function.

Named in ``--jaxtyping-packages`` of pyproject.toml, which applies it to every function of ``app``.
"""

import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, Self, TypeVar

from beartype import BeartypeConf, beartype

P = ParamSpec("P")
R = TypeVar("R")

# An int may stand where a float is expected, as it may for the type checker.
CONF = BeartypeConf(is_pep484_tower=True)


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Check a function by its annotations.

    Args:
        function: Any function or method.

    Returns:
        The function with the checks, or as it was if it returns ``Self``, which beartype can read
        only where it decorates the class.
    """
    hints: dict[str, Any] = inspect.get_annotations(function)
    return function if Self in hints.values() else beartype(conf=CONF)(function)
