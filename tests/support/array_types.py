"""Checks of array shapes and types at each call of a function.

Named in ``--jaxtyping-packages`` of pyproject.toml, which applies it to every function of ``app``.
"""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import is_dataclass
from functools import partial, wraps
from types import FunctionType
from typing import Any, Literal, ParamSpec, Self, TypeVar, get_args, get_origin

import jaxtyping
from beartype import BeartypeConf, beartype

P = ParamSpec("P")
R = TypeVar("R")

LATER = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
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
    """Have jaxtyping compare shapes only of what has arrays in its annotations, and in one go.

    Left to itself, it binds the arguments of each call, checks them, and checks them again with
    what is returned: half of the time of the tests would go there, most of it in functions without
    an array. It is left to itself where annotations are quoted, as it tries to read them, and where
    a call does not run at once: beartype checks that later.
    """
    jaxtyped = jaxtyping.jaxtyped

    def in_one_go(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def compared(*args: P.args, **kwargs: P.kwargs) -> R:
            with jaxtyped("context"):
                return function(*args, **kwargs)

        return compared

    def decorate(
        decorated: Callable[..., object] | None = None,
        *,
        typechecker: Callable[..., Callable[..., object]],
    ) -> object:
        if decorated is None:
            return partial(decorate, typechecker=typechecker)
        own = vars(decorated).get("__init__") if is_dataclass(decorated) else None
        function = decorated if own is None else own
        if not isinstance(function, FunctionType) or _is_read_by_jaxtyping(function):
            return jaxtyped(decorated, typechecker=typechecker)
        made = typechecker(function)
        shaped = in_one_go(made) if _may_have_arrays(function) else made
        if own is None:
            return shaped
        setattr(decorated, "__init__", shaped)  # noqa: B010 - mypy wants no such assignment
        return decorated

    vars(jaxtyping)["jaxtyped"] = decorate


def _is_read_by_jaxtyping(function: FunctionType) -> bool:
    is_later = bool(function.__code__.co_flags & LATER) and _may_have_arrays(function)
    return is_later or any(isinstance(hint, str) for hint in _hints(function))


def _may_have_arrays(function: FunctionType) -> bool:
    return any(map(_may_be_array, _hints(function)))


def _hints(function: FunctionType) -> Iterable[object]:
    return inspect.get_annotations(function).values()


def _may_be_array(hint: object) -> bool:
    if isinstance(hint, type) and issubclass(hint, jaxtyping.AbstractArray):
        return True
    if get_origin(hint) is Literal:
        return False
    inner = hint if isinstance(hint, list) else get_args(hint)
    return any(map(_may_be_array, inner))
