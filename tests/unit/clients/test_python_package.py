"""The package ``landmarkd``: what programs import."""

import os
import subprocess
import sys

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
