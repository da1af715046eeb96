"""kinds: networks that answer votes, heatmaps and coordinates, trained alike, and one as ONNX."""

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import torch

from app.inference.detector import Detector
from app.inference.load import load_checked
from app.io.volume import read_volume
from app.phantom import make_phantom, scan_bytes
from app.training.evaluate.metrics import errors_mm, measure_presence
from app.training.evaluate.outcomes import Outcome, compare
from tests.benchmarks.harness import Row, Run
from tests.benchmarks.kinds_of_output import KINDS, export_onnx, load_scans, train, write_folder
from tests.benchmarks.scans import PHANTOM
from tests.benchmarks.surroundings import ROOT

CPU_S: Final = 300.0
"""Seconds of one processor to train each network; the shipped one was trained for far longer."""

SCANS: Final = 240
FIRST: Final = 5000
COUNT: Final = 50
"""Seeds of the phantoms to measure with; none was trained on."""

SMALL: Final = 5007
"""A phantom of two tiles, most have eight."""

EXPORTED: Final = "heatmaps"
"""The kind whose network is measured as ONNX, too: the same weights, run by ONNX Runtime."""

PROBE: Final = ("120", "120", "120")
"""Voxels of 1 mm of the scan whose memory is measured."""


def kinds(run: Run) -> Iterator[Row]:
    """Error, presence, time and memory of each network beside the shipped one."""
    cpu_s, scans = (0.2, 3) if run.fast else (CPU_S, SCANS)
    seeds = [SMALL] if run.fast else range(FIRST, FIRST + COUNT)
    threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as root:
        torch.set_num_threads(1)
        seen = load_scans(range(20_000, 20_000 + scans))
        folders = {"shipped": PHANTOM}
        for name, kind in KINDS.items():
            network = train(kind, seen, cpu_s)
            folders[name] = write_folder(Path(root), name, kind, network)
            if name == EXPORTED:
                onnx = f"{name}-onnx"
                folders[onnx] = export_onnx(folders[name], onnx, kind, network)
        torch.set_num_threads(threads)
        probe = not run.fast
        figures = {name: _measure(folder, seeds, probe) for name, folder in folders.items()}
    shipped = figures.pop("shipped")
    for name, found in figures.items():
        for (what, unit, figure), (_, _, theirs) in zip(found, shipped, strict=True):
            yield Row(
                f"{name}, trained for {cpu_s:g} s: {what}", figure, unit, "shipped votes", theirs
            )


def _measure(
    folder: Path, seeds: Sequence[int], probe: bool
) -> list[tuple[str, str, float | None]]:
    """Measure a model: what, unit and figure; memory only if asked for, as it takes a process."""
    detector = Detector(load_checked(folder, torch.device("cpu")))
    outcomes: list[Outcome] = []
    times = []
    for seed in seeds:
        phantom = make_phantom(seed)
        volume = read_volume(scan_bytes(phantom))
        places = zip(phantom.names, phantom.points, strict=True)
        truth = {name: point for name, point in places if np.isfinite(point).all()}
        begin = time.perf_counter()
        found = detector.detect(volume).landmarks
        times.append(1e3 * (time.perf_counter() - begin))
        outcomes += compare(str(seed), volume, truth, found, missing="absent")
    errors = errors_mm(outcomes)
    if not len(errors):
        errors = np.array([np.nan])
    there = measure_presence(outcomes)
    weights = sum((folder / name).stat().st_size for name in detector.model.manifest.network.files)
    return [
        ("mean error", "mm", float(errors.mean())),
        ("median error", "mm", float(np.median(errors))),
        ("95th percentile", "mm", float(np.percentile(errors, 95))),
        ("presence errors", "%", 100 * (there.missed + there.invented) / len(outcomes)),
        ("time per scan", "ms", float(np.median(times))),
        ("peak memory above weights", "MB", _peak_bytes(folder) / 1e6 if probe else None),
        ("weights", "MB", weights / 1e6),
    ]


def _peak_bytes(folder: Path) -> int:
    """Measure what a scan takes at its peak, above the weights, in a process of its own."""
    words = ["-m", "tests.benchmarks.memory_probe", str(folder), *PROBE]
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return int(done.stdout.split()[0])
