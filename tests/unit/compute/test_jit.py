"""Compiling by Numba, and its cache."""

import os
import subprocess
import sys
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


def test_loops_run_where_the_disk_is_full(tmp_path: Path) -> None:
    """As where a quota is used up: files can be made, but not filled."""
    (tmp_path / "loops.py").write_text(
        "from app.compute.jit import numba_jit\n@numba_jit\ndef add(a, b):\n    return a + b\n"
    )
    done = python(
        "import resource\n"
        "from loops import add\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"
        "print(add(1, 2))",
        NUMBA_CACHE_DIR=str(tmp_path / "cache"),
        PYTHONPATH=os.pathsep.join([str(APP.parent), str(tmp_path)]),
    )
    assert done.stdout == "3\n", done.stderr
    assert not list(tmp_path.glob("cache/**/*.nbi"))


def python(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
