"""The README's commands, run as they stand there."""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from tests.services import ServiceProcess

ROOT = Path(__file__).resolve().parents[1]
ADDRESS = "http://127.0.0.1:8000"
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```sh\n(.*?)```", README, flags=re.DOTALL)
COMMANDS = [
    line
    for block in BLOCKS
    for line in block.splitlines()
    if line.startswith(("curl ", "landmarkd ")) and "NAME" not in line and " serve" not in line
]


@pytest.fixture(scope="module")
def service() -> Iterator[ServiceProcess]:
    process = ServiceProcess(ROOT / "models")
    yield process
    process.kill()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Make the files that the README takes for granted."""
    voxels = np.random.default_rng(1).normal(size=(90, 100, 80)).astype(np.float32)
    scan = nib.Nifti1Image(voxels, np.diag([0.2, 0.2, 0.25, 1.0])).to_bytes()
    (tmp_path / "scan.nii.gz").write_bytes(scan)
    (tmp_path / "scan.nii").write_bytes(scan)
    (tmp_path / "scans").mkdir()
    (tmp_path / "scans" / "one.nii.gz").write_bytes(scan)
    (tmp_path / "models").symlink_to(ROOT / "models")
    return tmp_path


def test_readme_has_commands_to_run() -> None:
    assert len(COMMANDS) >= 8


@pytest.mark.parametrize("command", COMMANDS)
def test_command_of_the_readme_works(command: str, service: ServiceProcess, folder: Path) -> None:
    here = command.replace(ADDRESS, service.url).replace("curl ", "curl -sSf ")
    python = f'PYTHONPATH={shlex.quote(str(ROOT))} {shlex.quote(sys.executable)} -m app.cli "$@"'
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


def test_readme_names_every_call_and_command() -> None:
    for word in ("/v1/landmarks", "/v1/models", "/livez", "/readyz", "/metrics"):
        assert word in README
    for word in ("serve", "detect", "check", "models", "phantom", "bench"):
        assert f"landmarkd {word}" in README
