"""The rules of the house that no other tool checks."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted(path for top in ("app", "models", "tests") for path in (ROOT / top).rglob("*.py"))
MODULE_LINES = 300
FUNCTION_LINES = 50


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_modules_and_functions_stay_short(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MODULE_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno:
            assert node.end_lineno - node.lineno + 1 <= FUNCTION_LINES, node.name


def test_readme_shows_its_first_command_by_line_15() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert any("make run" in line for line in lines[:15])


def test_no_committed_text_names_a_place_on_one_machine() -> None:
    names = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    private = re.compile(r"/(?:work|home|root)/|/tmp/(?!\b)")
    for name in filter(None, names.split("\0")):
        path = ROOT / name
        if path.suffix in (".safetensors", ".png") or not path.is_file():
            continue
        found = private.search(path.read_text(encoding="utf-8"))
        assert found is None, f"{name}: {found and found.group()}"
