"""What is pinned agrees with what a new user gets from PyPI, which is not what a mirror has."""

import os
import socket
import subprocess
import sys
from typing import Final

import pytest

from tests.support.documents import ROOT

PYPI: Final = "pypi.org"


def is_reachable() -> bool:
    """Try to connect to PyPI."""
    try:
        socket.create_connection((PYPI, 443), timeout=10).close()
    except OSError:
        return False
    return True


def test_pinned_versions_agree_with_torch_for_cuda() -> None:
    """It has requirements of its own, such as one Triton, that torch for CPUs alone lacks."""
    if not is_reachable():
        pytest.skip("no connection to PyPI")
    settings = {key: value for key, value in os.environ.items() if not key.startswith("PIP_")}
    if certificates := os.environ.get("PIP_CERT"):
        settings["PIP_CERT"] = certificates
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
    done = subprocess.run(
        [*install, "--index-url", f"https://{PYPI}/simple", "-c", "constraints.txt", "torch"],
        cwd=ROOT,
        env={**settings, "PIP_CONFIG_FILE": os.devnull},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
