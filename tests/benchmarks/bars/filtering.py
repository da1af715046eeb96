"""V2 and V3: P1's arrays -> rows, and heatmaps."""

from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from typing import Final

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from tests.benchmarks import agreement, ours
from tests.benchmarks.fields import KnownCase, known_case_of, make_known_case, make_scene
from tests.benchmarks.harness import Case, Limit, Rival, Row, Run
from tests.benchmarks.rivals import numpy_add_at, python_loops

Rows = Float[Tensor, "rows 5"]
RowsAndHeatmaps = tuple[Rows, Float[Tensor, "landmarks i j k"]]

THRESHOLD: Final = 0.957
"""Keeps 3.4 million of the 81 million uniform probabilities of 300³ voxels and 3 landmarks."""


def v2_rows(run: Run) -> Iterator[Case | Row]:
    """The filter of the known case, against TensorFlow."""
    shape, sample_shape = (70, 70, 70), (50, 60, 70)
    if run.fast:
        shape, sample_shape = (24, 20, 28), (20, 20, 22)
    random = make_known_case(shape, 3, sample_shape, THRESHOLD)
    balls = known_case_of(make_scene(shape, 3))
    for name, case in (("random", random), ("balls", balls)):
        what = f"P1 rows, {'x'.join(map(str, shape))}, {name}"
        if find_spec("tensorflow") is None:
            yield Row(what, None, limit=Limit(4.0), note="TensorFlow is not installed")
        else:
            rival = _tensorflow(case, Limit(4.0), partial(_same_rows, case))
            yield Case(what, partial(_rows, case), (rival,))


def v3_rows_and_heatmaps(run: Run) -> Iterator[Case | Row]:
    """Rows and heatmaps of random data, against TensorFlow's rows alone."""
    shape = (24, 20, 28) if run.fast else (300, 300, 300)
    case = make_known_case(shape, 3, shape, THRESHOLD)
    votes = len(_rows(case)) / 1e6
    what = f"P1 rows and heatmaps, {'x'.join(map(str, shape))}, {votes:.2g} M votes"
    if find_spec("tensorflow") is None:
        yield Row(what, None, limit=Limit(1.0), note="TensorFlow is not installed")
    else:
        rival = _tensorflow(case, Limit(1.0), partial(_same_all, case))
        yield Case(what, partial(_rows_and_heatmaps, case), (rival,), "theirs: rows only")
    yield _heatmaps_alone(make_known_case((24, 20, 28), 3, (24, 20, 28), THRESHOLD))


def _heatmaps_alone(case: KnownCase) -> Case:
    """Aggregation alone, small enough for Python loops."""
    shape = case.probs.shape[:3]
    reading = ours.make_reading(shape, case.landmarks, 6.0)
    votes = ours.filter_votes(case.field(), case.threshold)
    rows = ours.list_all(votes).numpy()
    rivals = (
        Rival("three Python loops", partial(python_loops.add_up, rows, 3, shape), _same_heatmaps),
        Rival("np.add.at", partial(numpy_add_at.add_up, rows, 3, shape), _same_heatmaps),
    )
    return Case(
        f"votes -> heatmaps, {'x'.join(map(str, shape))}",
        partial(ours.add_up, votes, range(3), reading),
        rivals,
    )


def _tensorflow(case: KnownCase, limit: Limit, agree: partial[None]) -> Rival:
    # Only now: it is an extra, and takes seconds to import.
    from tests.benchmarks.rivals.tensorflow_filter import compile_filter  # noqa: PLC0415

    return Rival("TensorFlow", compile_filter(case), agree, limit)


def _rows(case: KnownCase) -> Rows:
    return ours.filter_rows(case.field(), case.threshold, case.sample_shape)


def _rows_and_heatmaps(case: KnownCase) -> RowsAndHeatmaps:
    rows = _rows(case)
    reading = ours.make_reading(case.probs.shape[:3], case.landmarks, 6.0)
    votes = ours.filter_votes(case.field(), case.threshold)
    return rows, ours.add_up(votes, range(case.landmarks), reading)


def _same_rows(case: KnownCase, rows: Rows, theirs: np.ndarray) -> None:
    # A copy, because TensorFlow's memory is not to be written to, and torch warns of that.
    agreement.same_rows(rows, torch.from_numpy(theirs.copy()), case.threshold)


def _same_all(case: KnownCase, result: RowsAndHeatmaps, theirs: np.ndarray) -> None:
    """Compare rows with theirs, and heatmaps with a plain sum of all votes."""
    _same_rows(case, result[0], theirs)
    votes = ours.filter_votes(case.field(), case.threshold)
    rows = ours.list_all(votes).numpy()
    _same_heatmaps(result[1], numpy_add_at.add_up(rows, case.landmarks, case.probs.shape[:3]))


def _same_heatmaps(heatmaps: Float[Tensor, "landmarks i j k"], theirs: np.ndarray) -> None:
    agreement.same_sums(heatmaps, torch.from_numpy(theirs).float())
