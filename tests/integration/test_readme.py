"""The README's commands, run as they stand there."""

import gzip
import json
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
from numpy.testing import assert_allclose

from app.voting.votes import Votes
from tests.support.services import ServiceProcess

ROOT = Path(__file__).resolve().parents[2]
ADDRESS = "http://127.0.0.1:8000"
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```sh\n(.*?)```", README, flags=re.DOTALL)
COMMANDS = [
    line
    for block in BLOCKS
    for line in block.splitlines()
    if line.startswith(("curl ", "landmarkd "))
    and "NAME" not in line
    and " serve" not in line
    # What makes and uses a model of one's own is run in order, by test_own_landmarks.
    and "my-model" not in line
    and "--check" not in line
]


@pytest.fixture(scope="module")
def service() -> Iterator[ServiceProcess]:
    process = ServiceProcess(ROOT / "models")
    yield process
    process.kill()


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run the README's Python, in a folder of its own; gives its variables, and that folder."""
    here = tmp_path_factory.mktemp("notebook")
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    (here / "notebook.py").write_text("\n".join(blocks), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(here)
        return runpy.run_path(str(here / "notebook.py")) | {"folder": here}


@pytest.fixture
def folder(tmp_path: Path, notebook: dict[str, Any]) -> Path:
    """Make the files that the README takes for granted."""
    voxels = np.random.default_rng(1).normal(size=(90, 100, 80)).astype(np.float32)
    scan = nib.Nifti1Image(voxels, np.diag([0.2, 0.2, 0.25, 1.0])).to_bytes()
    (tmp_path / "scan.nii.gz").write_bytes(scan)
    (tmp_path / "scan.nii").write_bytes(scan)
    (tmp_path / "scans").mkdir()
    (tmp_path / "scans" / "one.nii.gz").write_bytes(scan)
    (tmp_path / "landmarks").mkdir()
    (tmp_path / "landmarks" / "one.csv").write_text("name,x,y,z\n1,9.0,10.0,8.0\n")
    (tmp_path / "models").symlink_to(ROOT / "models")
    (tmp_path / "votes.npz").symlink_to(notebook["folder"] / "votes.npz")
    return tmp_path


def test_readme_has_commands_to_run() -> None:
    assert len(COMMANDS) >= 8


def run(command: str, service: ServiceProcess, folder: Path) -> None:
    here = command.replace(ADDRESS, service.url).replace("curl ", "curl -sSf ")
    python = (
        f'PYTHONPATH={shlex.quote(str(ROOT))} {shlex.quote(sys.executable)} -m app.cli.main "$@"'
    )
    script = f"landmarkd() {{ {python}; }}\n{here}"
    done = subprocess.run(
        ["bash", "-euc", script],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_command_of_the_readme_works(command: str, service: ServiceProcess, folder: Path) -> None:
    run(command, service, folder)


def test_own_votes_find_the_true_places(notebook: dict[str, Any]) -> None:
    votes, truth = notebook["votes"], notebook["truth"]
    assert isinstance(votes, Votes)
    assert len(notebook["rows"]) == len(votes) == (notebook["probs"][..., 1:] > 0).sum()
    assert notebook["heatmaps"].sum().item() == pytest.approx(0.9 * len(votes), rel=1e-5)
    assert_allclose(notebook["landmark"].ijk, truth[-1], atol=1e-4)


def test_own_votes_say_the_same_in_python_and_over_http(
    service: ServiceProcess, folder: Path, notebook: dict[str, Any]
) -> None:
    for command in COMMANDS:
        if "/v1/votes" in command:
            run(command, service, folder)
    rows = np.loadtxt(folder / "rows.csv", np.float32, delimiter=",", skiprows=1)
    assert np.array_equal(rows, notebook["rows"].numpy())
    heatmaps = gzip.decompress((folder / "heatmaps.nii.gz").read_bytes())
    found = nib.Nifti1Image.from_bytes(heatmaps).get_fdata(dtype=np.float32)
    assert np.array_equal(np.moveaxis(found, -1, 0), notebook["heatmaps"].numpy())
    landmarks = json.loads((folder / "landmarks.json").read_bytes())["landmarks"]
    assert [mark["name"] for mark in landmarks] == [spec.name for spec in notebook["specs"]]
    assert [mark["status"] for mark in landmarks] == ["detected"] * 3
    assert_allclose([mark["ras_mm"] for mark in landmarks], notebook["truth"], atol=1e-4)


def test_readme_names_every_call_and_command() -> None:
    for word in ("/v1/landmarks", "/v1/votes", "/v1/models", "/livez", "/readyz", "/metrics"):
        assert word in README
    for word in ("serve", "detect", "check", "models", "phantom", "bench"):
        assert f"landmarkd {word}" in README
    for word in ("train", "refine", "evaluate", "calibrate", "average"):
        assert f"landmarkd {word}" in README
