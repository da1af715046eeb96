"""The training page's section on your own landmarks, from scans to a service, run as it stands."""

import json
import re
import shlex
from contextlib import chdir
from pathlib import Path

import httpx
import pytest

from app.errors import BadParameter
from tests.support.documents import DOCS, code_blocks, read, section
from tests.support.services import ServiceProcess
from tests.support.training_data import landmarkd

SECTION = section(read(DOCS / "training.md"), "## Your own landmarks in an hour")
COMMANDS = [line for block in code_blocks(SECTION, "sh") for line in block.splitlines()]
SMALL = "--steps 2 --filters 4,4,8 --tile 32 --spacing 3 --device cpu"
"""So short a training finds nothing, but does all that a long one does."""


def commands(word: str) -> list[str]:
    """List the section's commands of a kind."""
    return [line for line in COMMANDS if line.startswith(f"landmarkd {word}")]


def run(line: str, more: str = "") -> str:
    return landmarkd(*shlex.split(line)[1:], *shlex.split(more))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the data of the section."""
    here = tmp_path_factory.mktemp("own")
    with chdir(here):
        run(*commands("phantom"))
    return here


def test_the_section_goes_from_data_to_a_service(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.chdir(folder)
        check, train, folds = commands("train")
        output = run(check, "--device cpu")
        assert "8 scans with 6 landmarks: 0 errors, 0 warnings" in output
        assert "keep no" in output  # constellation, so tiles are suggested
        assert "step 2:" in run(train, SMALL)
        assert "│ --folds │ 5" in " ".join(run(f"{folds} --check", SMALL).split())
        (evaluate,) = commands("evaluate")
        held_out = json.loads(Path("models/my-model/recipe.json").read_text())["held_out"]
        assert re.findall(r"--only (\S+)", evaluate) == held_out
        run(evaluate, "--device cpu")
        run(commands("check")[0], "--device cpu")
    service = ServiceProcess(folder / "models")
    try:
        scan, address = re.findall(r"@(\S+) 'http://127\.0\.0\.1:8000(\S+)'", COMMANDS[-1])[0]
        answer = httpx.post(service.url + address, content=(folder / scan).read_bytes(), timeout=60)
    finally:
        service.kill()
    assert answer.status_code == 200, answer.text
    (markup,) = answer.json()["markups"]
    names = {point["label"] for point in markup["controlPoints"]}
    assert names == {"ball", "void", "shell", "target", "dumbbell", "ring"}


def test_no_second_network_is_trained_where_landmarks_keep_no_constellation(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing would tell it where to look."""
    monkeypatch.chdir(folder)
    model = Path(__file__).resolve().parents[2] / "models" / "phantom"
    (refine,) = commands("refine")
    with pytest.raises(BadParameter, match="fewer or keep none"):
        run(refine.replace("models/my-model", shlex.quote(str(model))), "--device cpu")
