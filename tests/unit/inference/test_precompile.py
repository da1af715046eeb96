"""What is compiled when the service is installed is what it needs."""

import subprocess
import sys
from pathlib import Path

from tests.support.skulls import scan_path
from tests.support.spines import UNSEEN, spine_files

SERVE = """\
import sys
from pathlib import Path

import app.voting.cpu as loops
from app.compute import HOST, fast_precisions
from app.errors import TooLarge
from app.inference import Detector, load_checked
from app.inference.precompile import compile_loops
from app.io import read_volume
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
precisions = ["float32", *fast_precisions(HOST.device)]
for precision in precisions:
    model = load_checked(Path("models/phantom"), HOST.device, precision)
    Detector(model).detect(make_phantom(6).volume)
for scan in sys.argv[1:]:
    for name in ("lumbar-mri", "mouse-skull"):
        model = load_checked(Path("models", name), HOST.device, "auto")
        try:
            Detector(model).detect(read_volume(Path(scan).read_bytes()))
        except TooLarge:
            pass
print(sorted(signatures() - before))
"""


def test_scan_compiles_no_loop_that_was_not_compiled_ahead(data_dir: Path) -> None:
    """In every precision that is native here; a skull shows hardly a vote to the spine's model."""
    scans = (scan_path(data_dir, "NU_J"), spine_files(data_dir, UNSEEN[0]).scan)
    # In a process of its own: other tests compile loops, too.
    done = subprocess.run(
        [sys.executable, "-c", SERVE, *map(str, scans)],
        cwd=Path(__file__).resolve().parents[3],
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "[]\n"
