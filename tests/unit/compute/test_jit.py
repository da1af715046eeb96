"""Compiling by Numba, and its cache."""

from collections.abc import Callable
from pathlib import Path
from shutil import copytree

import pytest

from app.compute.jit import APP, LOOPS, cache_folder, numba_jit
from app.inference.precompile import compile_loops


def test_loops_run_where_nothing_can_be_cached() -> None:
    """Code without a file has no folder for a cache."""
    namespace: dict[str, Callable[[int, int], int]] = {}
    exec("def add(a, b):\n    return a + b", namespace)  # noqa: S102 - the only way to have no file
    assert numba_jit(namespace["add"])(1, 2) == 3


def test_what_one_loop_says_decides_where_all_are_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numba looks at the file of each loop only, and would go on to use what others were."""
    before = cache_folder("there")
    assert before.parent == Path("there")
    for folder in LOOPS:
        copytree(APP / folder, tmp_path / folder)
    monkeypatch.setattr("app.compute.jit.APP", tmp_path)
    assert cache_folder("there") == before
    with (tmp_path / "voting" / "cpu" / "rows.py").open("a") as source:
        source.write("\n")
    assert cache_folder("there") != before


def test_all_modules_with_loops_are_looked_at() -> None:
    users = [path for path in APP.rglob("*.py") if "@numba_jit" in path.read_text("utf-8")]
    assert users
    assert {path.parent.relative_to(APP).as_posix() for path in users} <= set(LOOPS)


def test_loops_can_be_compiled_ahead() -> None:
    """What installing runs."""
    compile_loops()
