"""S2: how long a small scan waits while a huge one runs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import nibabel as nib
import numpy as np

from app.io.volume import read_volume
from tests.benchmarks.harness import DisagreementError, Limit, Row, Run
from tests.benchmarks.loads import Load, Stream, of_kind, percentile, send
from tests.benchmarks.scans import (
    HUGE,
    PHANTOM,
    SKULL,
    enlarge,
    large_scans,
    pack,
    skulls,
    small_scans,
)
from tests.benchmarks.servers import (
    OURS,
    RIVALS,
    Kind,
    Server,
    absent,
    answers,
    check_same,
    serving,
)

IDLE_COUNT: Final = 30
BUSY_S: Final = 20.0
LIMIT: Final = Limit(2.5, "cost")
SMALL: Final = "small"
"""Rivals answer few small scans in that time; their 95th percentile is then the slowest one."""


@dataclass(frozen=True, slots=True)
class Waits:
    """Times of small scans in ms: the median when idle, p95 while a huge scan runs, how many."""

    idle: float
    busy: float
    count: int


def s2_sharing(run: Run) -> Iterator[Row]:
    """A scan of one tile beside one of 64, both of the phantom model; then two skulls, whole."""
    small = small_scans(2 if run.fast else 8)
    (huge,) = large_scans(1, (120, 84, 100) if run.fast else HUGE)
    size = "a small volume" if run.fast else "300x296x304, 64 tiles,"
    with serving(OURS, PHANTOM) as server:
        expected = answers(server, [*small, huge])
        ours = _measure(server, small, huge, run)
    what = f"p95 of a one-tile scan while {size} runs"
    note = f"phantom model, {ours.count} small scans"
    yield Row(what, ours.busy, "ms", "its own idle median", ours.idle, LIMIT, note)
    for kind in RIVALS:
        if not kind.installed:
            yield absent(kind, what)
            continue
        theirs = _measure_rival(kind, small, huge, expected, run)
        note = f"theirs: {theirs.count} small scans, idle median {theirs.idle:.0f} ms"
        yield Row(what, ours.busy, "ms", kind.name, theirs.busy, note=note)
    if not run.fast:
        yield _whole(run)


def _measure_rival(
    kind: Kind, small: Sequence[bytes], huge: bytes, expected: Sequence[bytes], run: Run
) -> Waits:
    with serving(kind, PHANTOM) as server:
        for mine, yours in zip(expected, answers(server, [*small, huge]), strict=True):
            check_same(mine, yours, kind.name)
        return _measure(server, small, huge, run)


def _measure(server: Server, small: Sequence[bytes], huge: bytes, run: Run) -> Waits:
    messages = tuple(server.message(SMALL, content) for content in small)
    count = 3 if run.fast else IDLE_COUNT
    idle = send(Load(server.port, (Stream(messages, count=count),)))
    other = Stream((server.message("huge", huge),))
    seconds = 0.3 if run.fast else BUSY_S
    replies = send(Load(server.port, (other, Stream(messages)), seconds))
    wrong = {reply.status for reply in (*idle, *replies)} - {200}
    if wrong:
        raise DisagreementError(f"{server.kind.name}: expected status 200, got {wrong}")
    busy = of_kind(replies, SMALL)
    return Waits(percentile(idle, 50), percentile(busy, 95), len(busy))


def _whole(run: Run) -> Row:
    """Measure two skulls, of which a network sees each in one piece."""
    small, note = skulls(8)
    scan = read_volume(small[0])
    voxels = enlarge(np.asarray(scan.voxels), HUGE)
    image = nib.Nifti1Image(voxels, scan.affine)
    with serving(OURS, SKULL) as server:
        waits = _measure(server, small, pack(voxels, image.affine, level=1), run)
    what = "p95 of a skull while one of 300x296x304 runs, each seen whole"
    note = f"mouse-skull model, {waits.count} {note}; a tile is a whole scan"
    return Row(what, waits.busy, "ms", "its own idle median", waits.idle, LIMIT, note)
