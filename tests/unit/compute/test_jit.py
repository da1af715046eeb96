"""Compiling by Numba, and its cache."""

from collections.abc import Callable

from app.compute.jit import numba_jit
from app.inference.precompile import compile_loops


def test_loops_run_where_nothing_can_be_cached() -> None:
    """Code without a file has no folder for a cache."""
    namespace: dict[str, Callable[[int, int], int]] = {}
    exec("def add(a, b):\n    return a + b", namespace)  # noqa: S102 - the only way to have no file
    assert numba_jit(namespace["add"])(1, 2) == 3


def test_loops_can_be_compiled_ahead() -> None:
    """What installing runs."""
    compile_loops()
