"""What is compiled when the service is installed is what it needs."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from app.inference.load import load_checked
from tests.support.model_folders import make_model_folder
from tests.support.skulls import scan_path
from tests.support.spines import SUBJECTS, spine_files

SERVE = """\
import sys
from itertools import product
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save

from app.compute import HOST, fast_precisions
from app.errors import TooLarge
from app.inference import Detector, VotesRequest, answer_votes, load_checked, write_scan_heatmaps
from app.inference.scan_heatmaps import VoteMap
from app.io import VolumeLimits, read_volume, write_nifti
from app.model import Field
from app.phantom import make_phantom
from app.settings import Settings
from app.voting import VOTES_FORMATS, Layout, Readout, filter_rows, filter_votes
from tests.support.vote_archives import npz


def signatures():
    modules = [value for name, value in sys.modules.items() if name.startswith("app.")]
    return {
        (name, str(signature))
        for module in modules
        for name, value in vars(module).items()
        for signature in getattr(value, "signatures", ())
    }


load_checked(Path("models", "phantom"), HOST.device)
before = signatures()
precisions = ["float32", *fast_precisions(HOST.device)]
for precision in precisions:
    model = load_checked(Path("models/phantom"), HOST.device, precision)
    Detector(model).detect(make_phantom(6).volume)
phantom, volume = load_checked(Path("models/phantom"), HOST.device), make_phantom(6).volume
scaled = (volume.voxels - volume.voxels.min()) / np.ptp(volume.voxels) * 255
for dtype in (np.uint8, np.int16, np.uint16, np.int32, np.float32, np.float64):
    Detector(phantom).detect(read_volume(write_nifti(scaled.astype(dtype), volume.affine)))

limits, shape = VolumeLimits.of(Settings()), (5, 7, 6)
for threshold in (None, 0.5):
    readout = Readout(2, shape, (1.0, 1.0, 1.0), radius_mm=3.0, heatmap_threshold=threshold)
    scores, offsets = torch.full((2, *shape), 0.9), torch.zeros(3, 2, *shape)
    votes = filter_votes(field := Field(scores, offsets, "none", background=False), 0.5)
    filter_rows(field, 0.95, shape)  # No vote passes.
    for landmarks in (0, [0, 1]):
        votes_of_scan = VoteMap(votes, readout, np.eye(4))
        write_scan_heatmaps(votes_of_scan, landmarks, shape, np.eye(4), lambda: None)
for dtypes in product((torch.float16, torch.bfloat16, torch.float32, torch.float64), repeat=2):
    for name, channels, activation in (
        ("probs", 2, None), ("probs", 3, None), ("scores", 2, "sigmoid"), ("scores", 3, "softmax")
    ):
        for order in ("last", "first"):
            sizes = [(*shape, n) if order == "last" else (n, *shape) for n in (channels, 6)]
            arrays = {
                key: torch.full(size, value, dtype=dtype)
                for key, size, value, dtype in zip((name, "offsets"), sizes, (0.7, 0.25), dtypes)
            }
            files = [save(arrays)]
            if torch.bfloat16 not in dtypes:
                files.append(npz({key: array.numpy() for key, array in arrays.items()}))
            layout = Layout(order, "axis", None, activation)
            for content in files:
                for file in (None, *VOTES_FORMATS):
                    asked = VotesRequest(
                        layout, 0.1, None, 1.0, None, (), limits, 1 << 20, file, 0.0
                    )
                    answer_votes(content, asked, lambda: None)
for scan in sys.argv[1:]:
    for name in ("lumbar-mri", "mouse-skull"):
        model = load_checked(Path("models", name), HOST.device, "auto")
        try:
            Detector(model).detect(read_volume(Path(scan).read_bytes()))
        except TooLarge:
            pass
print(sorted(signatures() - before))
"""


def test_no_request_compiles_a_loop_once_a_model_is_loaded(data_dir: Path) -> None:
    """Scans, heatmaps of them, and votes, of all types; in every precision that is native here.

    A skull shows hardly a vote to the spine's model.
    """
    scans = (scan_path(data_dir, "NU_J"), spine_files(data_dir, SUBJECTS[0]).scan)
    # In a process of its own: other tests compile loops, too.
    done = subprocess.run(
        [sys.executable, "-c", SERVE, *map(str, scans)],
        cwd=Path(__file__).resolve().parents[3],
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "[]\n"


Result = TypeVar("Result")


def test_self_check_on_the_thread_of_a_device_compiles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stop waits for that thread, and for those that loops are split among, but for no other."""
    steps: list[str] = []

    def on_device(function: Callable[[], Result], /) -> Result:
        steps.append("device")
        return function()

    monkeypatch.setattr("app.inference.load.compile_loops", lambda: steps.append("compile"))
    load_checked(make_model_folder(tmp_path), torch.device("cpu"), on_device=on_device)
    # The network is moved to its device before; all else is the check.
    assert steps == ["device", "compile", "device"]
