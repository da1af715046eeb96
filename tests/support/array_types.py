"""Checks of array shapes and types at each call of a function.

Named in ``--jaxtyping-packages`` of pyproject.toml, which applies it to every function of ``app``.
"""

import inspect
from collections.abc import Callable
from dataclasses import is_dataclass
from functools import partial
from types import FunctionType
from typing import Any, Literal, ParamSpec, Self, TypeVar, get_args, get_origin

import jaxtyping
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


def check_shapes_only_of_arrays() -> None:
    """Have jaxtyping decorate only what has arrays in its annotations; the rest is ``checked``.

    To compare the shapes of a call with each other, jaxtyping binds its arguments, and checks
    them again with what is returned. Half of the time of the tests would go there, most of it in
    functions without an array.
    """
    jaxtyped = jaxtyping.jaxtyped

    def decorate(
        decorated: Callable[..., object] | None = None, *, typechecker: Callable[..., object]
    ) -> object:
        if decorated is None:
            return partial(decorate, typechecker=typechecker)
        if isinstance(decorated, FunctionType) and not _may_have_arrays(decorated):
            return typechecker(decorated)
        own = vars(decorated).get("__init__") if is_dataclass(decorated) else None
        if own is not None and not _may_have_arrays(own):
            setattr(decorated, "__init__", typechecker(own))  # noqa: B010 - mypy wants no such assignment
            return decorated
        return jaxtyped(decorated, typechecker=typechecker)

    vars(jaxtyping)["jaxtyped"] = decorate


def _may_have_arrays(function: Callable[..., object]) -> bool:
    return any(map(_may_be_array, inspect.get_annotations(function).values()))


def _may_be_array(hint: object) -> bool:
    """Look through a hint; one that is quoted may be anything."""
    if isinstance(hint, str) or (
        isinstance(hint, type) and issubclass(hint, jaxtyping.AbstractArray)
    ):
        return True
    if get_origin(hint) is Literal:
        return False
    inner = hint if isinstance(hint, list) else get_args(hint)
    return any(map(_may_be_array, inner))
