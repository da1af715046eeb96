"""S6: process start -> ready."""

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

from tests.benchmarks.harness import Limit, Row, Run
from tests.benchmarks.scans import PHANTOM
from tests.benchmarks.servers import OURS, serving
from tests.benchmarks.surroundings import ROOT

RIVAL = "import torch, load, one forward"


def s6_starting(run: Run) -> Iterator[Row]:
    """Until /readyz says yes, self-check included, against the least that any program must do."""
    ours, theirs = [], []
    # The first turn fills the cache of the file system.
    turns, warm = (1, 0) if run.fast else (run.rounds, 1)
    for turn in range(warm + turns):
        with serving(OURS, PHANTOM) as server:
            seconds = server.start_s
        start = time.perf_counter()
        words = ["-m", "tests.benchmarks.rivals.plain_start", str(PHANTOM)]
        subprocess.run([sys.executable, *words], cwd=ROOT, check=True)
        if turn >= warm:
            ours.append(seconds)
            theirs.append(time.perf_counter() - start)
    yield Row(
        "process start -> ready, phantom model",
        statistics.median(ours),
        "s",
        RIVAL,
        statistics.median(theirs),
        Limit(1.2, "cost"),
        rounds=turns,
    )
