"""Batch sizes, as measured on the batches that run."""

import sys
import threading

import pytest

from app.engine.batch_sizes import MAX_LANES, MAX_TILES, MIN_TIMINGS, BatchSizes

LANE = ("model", (8, 9, 10))


def run(sizes: BatchSizes, seconds_of: dict[int, float], batches: int = 40) -> None:
    """Run full batches that take so long, and the first of each size longer."""
    seen: set[int] = set()
    for _ in range(batches):
        size = sizes.size(LANE)
        sizes.observe(LANE, size, seconds_of[size] * (1 if size in seen else 9))
        seen.add(size)


@pytest.mark.parametrize(
    ("seconds_of", "chosen"),
    [
        ({1: 0.010, 2: 0.020}, 1),
        ({1: 0.010, 2: 0.0192}, 1),
        ({1: 0.010, 2: 0.012, 4: 0.016, 8: 0.031}, 4),
        ({1: 0.010, 2: 0.012, 4: 0.026}, 2),
        ({1: 0.030, 2: 0.040}, 2),
        ({1: 0.031}, 1),
    ],
    ids=[
        "batching gains nothing",
        "gains too little",
        "gains up to four",
        "then costs",
        "four takes too long",
        "two takes too long",
    ],
)
def test_smallest_size_within_five_per_cent_of_the_fastest_is_chosen(
    seconds_of: dict[int, float], chosen: int
) -> None:
    sizes = BatchSizes()
    for batches in (40, 1, 1):  # Once it is chosen, it stays.
        run(sizes, seconds_of, batches)
        assert sizes.size(LANE) == sizes.largest == chosen
    rows = sizes.timings("model")
    assert [row.tiles for row in rows if row.chosen] == [chosen]
    assert {row.tiles: row.seconds for row in rows} == seconds_of
    assert sizes.timings("another model") == []


def test_sizes_end_where_memory_or_the_limit_does() -> None:
    ideal = {2**power: 0.01 for power in range(12)}
    limited = BatchSizes()
    run(limited, ideal)
    assert limited.size(LANE) == MAX_TILES
    full = BatchSizes(memory_headroom=lambda: 1.9)
    run(full, ideal)
    assert full.size(LANE) == 1


def test_size_that_ran_out_of_memory_is_never_tried_again() -> None:
    sizes = BatchSizes()
    run(sizes, {2**power: 0.01 for power in range(12)}, batches=9)
    assert sizes.size(LANE) > 2
    sizes.limit(LANE, 2)
    run(sizes, {2: 0.01})
    assert sizes.size(LANE) == 2


def test_size_below_one_that_ran_out_of_memory_is_measured_as_any() -> None:
    sizes = BatchSizes()
    seconds_of = {1: 0.010, 2: 0.012, 3: 0.018, 4: 0.016, 8: 0.024}
    run(sizes, seconds_of, batches=3 * (MIN_TIMINGS + 1))
    assert sizes.size(LANE) == 8
    sizes.limit(LANE, 3)  # A batch of seven was halved.
    run(sizes, seconds_of)
    assert sizes.size(LANE) == 2


def test_fixed_size_is_kept_and_its_cost_measured() -> None:
    sizes = BatchSizes(fixed=6)
    assert not sizes.is_measured(LANE)
    run(sizes, {6: 3.0})
    assert sizes.size(LANE) == 6
    assert sizes.is_measured(LANE)
    assert sizes.cost(LANE) == pytest.approx(0.5, rel=0.1)


def test_machine_that_was_held_up_is_not_expected_to_stay_slow() -> None:
    """Scans that are refused for the estimate would never be timed again."""
    sizes = BatchSizes(fixed=1)
    sizes.observe(LANE, 1, 60.0)
    assert not sizes.is_measured(LANE)
    sizes.observe(LANE, 1, 0.1)
    assert sizes.is_measured(LANE)
    assert sizes.cost(LANE) <= 0.2
    sizes.observe(LANE, 1, 60.0)
    assert sizes.cost(LANE) <= 0.2


def test_slow_batch_counts_for_a_fifth_of_the_cost() -> None:
    sizes = BatchSizes(fixed=1)
    for seconds in (0.10, 0.10, 0.15):
        sizes.observe(LANE, 1, seconds)
    assert sizes.cost(LANE) == pytest.approx(0.11)


def test_lanes_that_were_used_least_recently_are_forgotten() -> None:
    """A model that sees scans whole has a lane for every shape."""
    sizes = BatchSizes(fixed=1)
    lanes = [("model", (n, n, n)) for n in range(1, MAX_LANES + 1)]
    for lane in lanes:
        sizes.observe(lane, 1, 0.1)
        sizes.observe(lane, 1, 0.1)
    sizes.size(lanes[0])
    sizes.size(LANE)
    assert [sizes.is_measured(lane) for lane in lanes] == [lane != lanes[1] for lane in lanes]


def test_tile_of_an_unknown_lane_costs_what_known_ones_do_by_their_voxels() -> None:
    """A first giant grid must not be taken for a small one: others would wait for all of it."""
    sizes = BatchSizes(fixed=1)
    assert sizes.cost(LANE) > 0
    sizes.observe(("model", (8, 8, 8)), 1, 0.25)
    sizes.observe(slow := ("other", (8, 8, 24)), 1, 1.75)
    assert sizes.cost(("unknown", (8, 80, 8))) == pytest.approx(5.0)
    assert sizes.cost(slow) == pytest.approx(1.75)


def test_costs_may_be_read_while_the_device_thread_changes_lanes() -> None:
    """The event loop reads them for every request; both walk the same table of lanes."""
    sizes = BatchSizes(fixed=1)
    lanes = [("model", (n, n, n)) for n in range(MAX_LANES)]
    for lane in lanes:
        sizes.observe(lane, 1, 0.5)
    stop = threading.Event()

    def change() -> None:
        while not stop.is_set():
            for lane in lanes:
                sizes.size(lane)

    interval = sys.getswitchinterval()
    thread = threading.Thread(target=change)
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        for _ in range(500):
            assert sizes.mean_cost == pytest.approx(0.5)
            assert sizes.largest == 1
            assert sizes.timings("model") == []
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(interval)
