"""What importing the package does to the process."""

import os
import subprocess
import sys

import pytest

SHOW = "import app, os; print(os.environ['GOMP_SPINCOUNT'])"


@pytest.mark.parametrize(("before", "after"), [(None, "20000"), ("infinity", "infinity")])
def test_waiting_threads_of_torch_leave_the_cores_to_others_unless_told(
    before: str | None, after: str
) -> None:
    environment = {key: text for key, text in os.environ.items() if key != "GOMP_SPINCOUNT"}
    if before is not None:
        environment["GOMP_SPINCOUNT"] = before
    run = subprocess.run(
        [sys.executable, "-c", SHOW], env=environment, capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == after
