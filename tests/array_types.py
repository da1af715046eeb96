"""function -> the same function, its array shapes and types checked at each call.

Named in ``--jaxtyping-packages`` of pyproject.toml, which applies it to every function of ``app``.
"""

import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, Self, TypeVar

from beartype import beartype

P = ParamSpec("P")
R = TypeVar("R")


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Check a function by its annotations.

    Args:
        function: Any function or method.

    Returns:
        The function with the checks, or as it was if it returns ``Self``, which beartype can read
        only where it decorates the class.
    """
    hints: dict[str, Any] = inspect.get_annotations(function)
    return function if Self in hints.values() else beartype(function)
