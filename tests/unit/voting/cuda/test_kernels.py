"""The kernel of voting, compiled; what it computes is tested where it is called."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


@pytest.mark.no_cover
@pytest.mark.skipif(sys.platform != "linux", reason="expected Triton's compiler for CUDA")
@pytest.mark.parametrize("capability", [pytest.param("80", marks=pytest.mark.slow), "90"])
def test_kernels_compile_to_loads_of_16_bytes_without_a_device(
    capability: str, tmp_path: Path
) -> None:
    """What the interpreter lets pass, the compiler may not."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.compile_kernels", capability],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        cwd=Path(__file__).parents[4],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    names = set(re.findall(r"\.entry (\w+)\(", done.stdout))
    assert names == {"append_votes"}
    assert f".target sm_{capability}" in done.stdout
    assert "ld.global.v4.b32" in done.stdout
    assert "red" in done.stdout or "atom" in done.stdout
