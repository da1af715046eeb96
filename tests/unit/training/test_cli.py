"""Commands of the trainer without the packages that only the trainer needs."""

import subprocess
import sys
import tomllib
from pathlib import Path

import httpx
import pytest
import torch
from packaging.requirements import Requirement
from typer.testing import CliRunner

from app.cli.main import app
from app.errors import BadParameter, StartupError
from app.training import versions
from app.training.cli.arguments import REQUIRED
from tests.support.training_data import landmarkd

ROOT = Path(__file__).resolve().parents[3]
MODELS = str(ROOT / "models")
DATA = ["--scans", "scans", "--landmarks", "landmarks"]


@pytest.mark.parametrize(
    "words",
    [
        ["train", ".", ".", "-o", "model"],
        ["refine", ".", ".", "."],
        ["evaluate", "model", *DATA],
        ["calibrate", "model", *DATA, "--folds"],
        ["learn", ".", "--from", "."],
    ],
)
def test_a_command_without_the_extra_says_in_one_line_what_to_install(
    monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    """None among the modules is one that cannot be imported."""
    monkeypatch.setitem(sys.modules, "scipy", None)
    result = CliRunner().invoke(app, words)
    assert isinstance(result.exception, StartupError)
    assert str(result.exception) == "this command needs scipy: pip install 'landmarkd[train]'"


@pytest.mark.parametrize(
    "words", [["train", ".", ".", "--check"], ["evaluate", "model", "--scans", "no", *DATA[2:]]]
)
def test_commands_take_as_many_threads_as_the_settings_say(
    monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    """In a container with a share of a machine's time they took a thread for each of its cores."""
    before = torch.get_num_threads()
    monkeypatch.setenv("LANDMARKD_THREADS", str(before + 1))
    try:
        assert CliRunner().invoke(app, words).exit_code != 0  # As there are no scans.
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("command", "options"),
    [
        (["train", ".", "."], ["--spacing", "--radius", "--rate", "--elastic"]),
        (["refine", ".", ".", "."], ["--spacing", "--radius", "--rate", "--elastic"]),
        (["learn", "."], ["--rate"]),
    ],
)
def test_a_number_that_is_not_finite_is_refused_before_any_data_are_read(
    command: list[str], options: list[str]
) -> None:
    """``train --check --elastic inf`` found nothing wrong."""
    for option in options:
        result = CliRunner().invoke(app, [*command, option, "inf"])
        assert result.exit_code == 2
        assert f"Invalid value for '{option}': expected a finite number, got inf" in result.output


def test_the_extra_alone_installs_what_the_commands_ask_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra = {Requirement(line).name for line in project["optional-dependencies"]["train"]}
    assert extra == set(REQUIRED)
    assert extra.isdisjoint(Requirement(line).name for line in project["dependencies"])


def test_a_service_is_asked_to_reload_at_an_address_without_a_scheme(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All was learned by then, and ``landmarkd detect`` takes the same address."""
    monkeypatch.setattr(versions, "put_back", lambda _: ("1.1.1", "1.1.0"))
    monkeypatch.setenv("LANDMARKD_API_KEY", "key")
    refused = r"--url: expected a service at 127\.0\.0\.1:1, got: .*refused"
    words = ["learn", str(tmp_path), "--back", "--url", "anna:secret@127.0.0.1:1"]
    with pytest.raises(BadParameter, match=refused):
        CliRunner().invoke(app, words, catch_exceptions=False)


def test_a_service_is_asked_for_a_linked_model_by_the_name_of_the_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It serves the model by that name, and was asked for the name of the target."""
    (tmp_path / "toy").symlink_to(tmp_path / "toy-v3")
    (tmp_path / "toy-v3").mkdir()
    asked: list[str] = []

    def answer(_client: httpx.Client, address: str) -> httpx.Response:
        asked.append(address)
        return httpx.Response(200)

    monkeypatch.setattr(versions, "put_back", lambda _: ("1.1.1", "1.1.0"))
    monkeypatch.setenv("LANDMARKD_API_KEY", "key")
    monkeypatch.setattr(httpx.Client, "post", answer)
    landmarkd("learn", tmp_path / "toy", "--back", "--url", "http://127.0.0.1:1")
    assert asked == ["http://127.0.0.1:1/v1/models/toy/reload"]


@pytest.mark.no_cover
def test_the_service_and_detection_run_without_the_extra(tmp_path: Path) -> None:
    script = f"""
import sys
for name in {REQUIRED!r}:
    sys.modules[name] = None
import app.server
from app.cli.main import app
app(["phantom", "scan.nii.gz"], standalone_mode=False)
app(["detect", "scan.nii.gz", "-m", "phantom", "--device", "cpu", "--models-dir", {MODELS!r}])
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert '"landmarks"' in done.stdout
