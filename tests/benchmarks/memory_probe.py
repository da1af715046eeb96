"""model folder, shape -> peak bytes above the weights, tiles and votes: run in a fresh process."""

import sys
from importlib import import_module
from pathlib import Path
from typing import Final

import numpy as np
import torch

from app.inference.detector import Detector
from app.inference.forward import collect, launch
from app.inference.load import load_checked
from app.inference.scan_state import ScanState
from app.io.volume import Volume
from tests.benchmarks.linux import resident_bytes

RUNTIMES: Final = ("monai.networks.nets", "onnx", "onnxruntime")
"""What a model imports when it is first loaded: no part of what a scan takes."""


def main() -> None:
    """Find the landmarks of noise and print what it took."""
    folder, *shape = sys.argv[1:]
    for name in RUNTIMES:
        import_module(name)
    # Before the model: its weights are taken off by their size, whatever loading them costs counts.
    before = resident_bytes()
    model = load_checked(Path(folder), torch.device("cpu"), "auto")
    detector = Detector(model)
    random = np.random.default_rng(0)
    voxels = random.random([int(edge) for edge in shape], dtype=np.float32)
    volume = Volume(np.asfortranarray(voxels), np.eye(4))
    del voxels
    passes = detector.passes(volume)
    case = next(passes)
    assert isinstance(case, ScanState)
    for tile in range(len(case.plan)):
        collect(launch([(case, tile)]))
    next(passes)
    weights = sum((Path(folder) / name).stat().st_size for name in model.manifest.network.files)
    peak = resident_bytes(peak=True) - before - weights
    votes = sum(len(votes) for votes in case.votes)
    sys.stdout.write(f"{peak} {len(case.plan)} {votes}\n")


if __name__ == "__main__":
    main()
