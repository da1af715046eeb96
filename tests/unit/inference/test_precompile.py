"""What is compiled when the service is installed is what it needs."""

import subprocess
import sys
from pathlib import Path

import pytest

SERVE = """\
import sys
from pathlib import Path

import app.voting.cpu as loops
from app.compute import HOST
from app.inference import Detector, load_checked
from app.inference.precompile import compile_loops
from app.phantom import make_phantom


def signatures():
    modules = [value for name, value in sys.modules.items() if name.startswith(loops.__name__)]
    return {
        (name, str(signature))
        for module in modules
        for name, value in vars(module).items()
        for signature in getattr(value, "signatures", ())
    }


compile_loops()
before = signatures()
model = load_checked(Path("models/phantom"), HOST.device)
Detector(model).detect(make_phantom(6).volume)
print(sorted(signatures() - before))
"""


@pytest.mark.slow
def test_scan_compiles_no_loop_that_was_not_compiled_ahead() -> None:
    # In a process of its own: other tests compile loops, too.
    done = subprocess.run(
        [sys.executable, "-c", SERVE],
        cwd=Path(__file__).resolve().parents[3],
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "[]\n"
