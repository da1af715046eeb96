"""What importing the package does to the process."""

import os
import subprocess
import sys

import pytest

NAMES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
SHOW = f"import app, os; print(*(os.environ[name] for name in {NAMES}))"


@pytest.mark.skipif(sys.platform != "linux", reason="only GNU OpenMP is told")
@pytest.mark.parametrize(
    ("before", "after"),
    [({}, "5000 active"), ({"OMP_WAIT_POLICY": "passive"}, "5000 passive")],
    ids=["unset", "set"],
)
def test_how_long_threads_of_torch_wait_is_set_unless_the_environment_does(
    before: dict[str, str], after: str
) -> None:
    environment = {key: text for key, text in os.environ.items() if key not in NAMES} | before
    run = subprocess.run(
        [sys.executable, "-c", SHOW], env=environment, capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == after
