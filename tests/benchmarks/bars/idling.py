"""S5: what a server does while nobody asks."""

import time
from collections.abc import Iterator
from typing import Final

from tests.benchmarks.harness import Limit, Row, Run
from tests.benchmarks.linux import cpu_s
from tests.benchmarks.scans import PHANTOM, small_scans
from tests.benchmarks.servers import OURS, RIVALS, Kind, absent, answers, serving

SETTLE_S: Final = 2.0
"""After its last answer a server may tidy up."""

IDLE_S: Final = 10.0
LIMIT: Final = Limit(0.5, "figure")


def s5_idling(run: Run) -> Iterator[Row]:
    """CPU time of all threads and children, in percent of a core."""
    ours = _idle_percent(OURS, run)
    what = f"idle CPU over {IDLE_S:g} s, % of a core"
    for kind in RIVALS:
        if kind.installed:
            yield Row(what, ours, "%", kind.name, _idle_percent(kind, run), LIMIT)
        else:
            yield absent(kind, what)
    if not any(kind.installed for kind in RIVALS):
        yield Row(what, ours, "%", limit=LIMIT)


def _idle_percent(kind: Kind, run: Run) -> float:
    settle, seconds = (0.2, 0.3) if run.fast else (SETTLE_S, IDLE_S)
    with serving(kind, PHANTOM) as server:
        answers(server, small_scans(1))
        time.sleep(settle)
        before, start = cpu_s(server.process), time.perf_counter()
        time.sleep(seconds)
        return 100 * (cpu_s(server.process) - before) / (time.perf_counter() - start)
