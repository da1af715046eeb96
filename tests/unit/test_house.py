"""The rules of the house that no other tool checks."""

import ast
import functools
import importlib
import re
import subprocess
from pathlib import Path

import pytest

from app.settings import PREFIX, Settings

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(path for top in ("app", "clients", "tests") for path in (ROOT / top).rglob("*.py"))
MODULE_LINES = 400
FUNCTION_LINES = 50
README_LINES = 15
# Folders that exist on one machine only; a container's own /opt/venv is none.
PRIVATE = re.compile(r"/(?:work|home|root|Users)/|/op[t]/(?!venv\b)")
# What the image and the Compose file decide themselves.
FIXED_IN_CONTAINERS = {"host", "port", "models_dir", "device"}


def test_modules_of_the_page_stay_short() -> None:
    scripts = list((ROOT / "app/api/ui/web").glob("*.js"))
    lengths = {path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in scripts}
    assert "page.js" in lengths
    assert {name: lines for name, lines in lengths.items() if lines > MODULE_LINES} == {}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_modules_and_functions_stay_short(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MODULE_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno:
            assert node.end_lineno - node.lineno + 1 <= FUNCTION_LINES, node.name


@pytest.mark.parametrize(
    "path", sorted((ROOT / "app").rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT))
)
def test_packages_are_imported_by_their_interface(path: Path) -> None:
    """What another package may use stands in ``__all__`` of its ``__init__``."""
    own = path.relative_to(ROOT / "app").parts[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("app."):
            _, package, *inside = (node.module or "").split(".")
            assert not inside or package == own, f"line {node.lineno}: {node.module}"


def _exported(init: Path) -> list[str]:
    for node in ast.parse(init.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return []


@functools.cache
def _used() -> frozenset[tuple[str, str, str]]:
    """List what code and pages use: the importing file, the package, and the name."""
    used = set()
    for path in (path for path in SOURCES if path.parts[len(ROOT.parts)] != "tests"):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.module:
                used |= {(str(path), node.module, name.name) for name in node.names}
    others = [ROOT / name for name in ("README.md", "Makefile", "Dockerfile")]
    for path in (*others, *(ROOT / "docs").glob("*.md")):
        text = path.read_text(encoding="utf-8")
        for package, names in re.findall(r"from (app[.\w]*) import (\([^)]*\)|[\w, ]+)", text):
            used |= {(str(path), package, name) for name in re.findall(r"\w+", names)}
    return frozenset(used)


@pytest.mark.parametrize(
    "init", sorted((ROOT / "app").rglob("__init__.py")), ids=lambda init: init.parent.name
)
def test_exported_names_are_there_and_used_outside_their_package(init: Path) -> None:
    package = ".".join(init.parent.relative_to(ROOT).parts)
    names = _exported(init)
    if names:
        module = importlib.import_module(package)
        assert [name for name in names if not hasattr(module, name)] == []
    inside = f"{init.parent}/"
    used = {name for path, of, name in _used() if of == package and not path.startswith(inside)}
    assert sorted(set(names) - used) == []


def test_readme_shows_its_first_command_by_line_15() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert any("make run" in line for line in lines[:README_LINES])


def test_no_committed_text_names_a_place_on_one_machine() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("expected a git checkout, which knows the committed files")
    names = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    for name in filter(None, names.split("\0")):
        path = ROOT / name
        if path.is_file():
            found = PRIVATE.search(path.read_bytes().decode("utf-8", errors="replace"))
            assert found is None, f"{name}: {found and found.group()}"


def test_compose_passes_every_setting_on() -> None:
    text = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
    passed_on = rf'^ +{PREFIX}(\w+):(?: "\$\{{{PREFIX}\1:-.*)?$'  # Perhaps with a default.
    named = set(re.findall(passed_on, text, flags=re.MULTILINE))
    expected = {name.upper() for name in Settings.model_fields.keys() - FIXED_IN_CONTAINERS}
    assert named == expected
