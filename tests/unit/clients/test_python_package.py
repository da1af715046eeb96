"""The package ``landmarkd``: what programs import."""

import os
import subprocess
import sys
from pathlib import Path

import landmarkd
import landmarkd.voting

from tests.support.documents import PAGES, ROOT, code_blocks, read

PATHS = (ROOT, ROOT / "clients" / "python")
NO_TORCH = "import landmarkd, sys; assert not {'torch', 'monai', 'fastapi'} & sys.modules.keys()"


def test_package_is_imported_without_torch() -> None:
    path = os.pathsep.join(map(str, PATHS))
    subprocess.run(
        [sys.executable, "-c", NO_TORCH], env=os.environ | {"PYTHONPATH": path}, check=True
    )


def test_script_may_be_called_app(tmp_path: Path) -> None:
    script = tmp_path / "app.py"
    script.write_text("import landmarkd.voting; print(landmarkd.Client.__module__)")
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, PATHS))}
    run = subprocess.run(
        [sys.executable, str(script)], env=env, check=True, capture_output=True, text=True
    )
    assert run.stdout == "app.cli.client\n"


def test_package_called_app_is_named(tmp_path: Path) -> None:
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__init__.py").touch()
    (tmp_path / "main.py").write_text("import app, landmarkd")
    env = os.environ | {"PYTHONPATH": str(PATHS[1])}
    run = subprocess.run(
        [sys.executable, str(tmp_path / "main.py")],
        check=False,
        env=env,
        capture_output=True,
        text=True,
    )
    assert run.returncode != 0
    assert f"{tmp_path / 'app' / '__init__.py'} has been imported by that name" in run.stderr


def test_every_name_is_there_and_on_a_page() -> None:
    pages = "".join(map(read, PAGES))
    for module in (landmarkd, landmarkd.voting):
        assert [name for name in module.__all__ if not hasattr(module, name)] == []
        assert [name for name in module.__all__ if name not in pages] == []


def test_examples_import_nothing_else_of_landmarkd() -> None:
    blocks = "".join(block for page in PAGES for block in code_blocks(read(page), "python"))
    assert "from landmarkd import" in blocks
    assert "from app" not in blocks
    assert "import app" not in blocks
