"""Commands of the trainer are commands of ``landmarkd`` where it is installed, and cost no time."""

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from app.cli.main import app
from tests.support.model_folders import make_model_folder


def run(words: list[str], before: str = "", after: str = "") -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own, with lines of Python before and after it."""
    script = f"""
import sys
{before}
from app.cli.main import app
try:
    app({words!r})
finally:
    {after or "pass"}
"""
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )


def test_help_lists_its_commands_after_those_of_the_service() -> None:
    text = CliRunner().invoke(app, ["--help"]).stdout
    assert text.index("serve") < text.index("phantom") < text.index("Train a model")


WITHOUT = "sys.modules['app.training'] = None"
"""As where ``app/training`` is not there."""


def test_without_the_trainer_its_commands_are_unknown() -> None:
    assert run(["--help"], WITHOUT).returncode == 0
    done = run(["train", "--help"], WITHOUT)
    assert done.returncode == 2
    assert "No such command 'train'" in done.stderr


@pytest.mark.no_cover
def test_without_the_trainer_a_model_is_checked(tmp_path: Path) -> None:
    done = run(["check", str(make_model_folder(tmp_path)), "--device", "cpu"], WITHOUT)
    assert done.returncode == 0, done.stderr


@pytest.mark.no_cover
@pytest.mark.parametrize(
    "words", [["--help"], ["--version"], ["train", "--help"], ["serve", "--help"]]
)
def test_neither_help_nor_the_service_waits_for_the_trainer(words: list[str]) -> None:
    """Only the signatures of its commands are imported."""
    done = run(
        words,
        after="""\
parts = {name.split(".")[2] for name in sys.modules if name.startswith("app.training.")}
    print("torch" in sys.modules, "matplotlib" in sys.modules, *sorted(parts))""",
    )
    assert done.stdout.splitlines()[-1] == "False False cli files"
