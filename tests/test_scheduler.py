"""The batching policy, driven step by step without a device or a clock."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.scheduler import Batch, Scheduler


def drain(scheduler: Scheduler[str], now: float = 0.0) -> list[Batch[str]]:
    batches = []
    while (batch := scheduler.next_batch(now)) is not None:
        batches.append(batch)
    return batches


def test_small_scan_passes_a_huge_one_after_one_batch() -> None:
    scheduler = Scheduler[str](batch_size=1)
    scheduler.add("huge", "lane", tiles=100)
    scheduler.next_batch(0.0)
    scheduler.add("small", "lane", tiles=1)
    order = [
        batch.tiles[0][0]
        for batch in (scheduler.next_batch(0.0), scheduler.next_batch(0.0))
        if batch
    ]
    assert "small" in order


def test_requests_share_a_batch_tile_by_tile() -> None:
    scheduler = Scheduler[str](batch_size=4)
    for name in ("a", "b", "c"):
        scheduler.add(name, "lane", tiles=3)
    batch = scheduler.next_batch(0.0)
    assert batch is not None
    assert batch.tiles == (("a", 0), ("b", 0), ("c", 0), ("a", 1))


def test_leftover_slots_go_to_the_earliest_deadline() -> None:
    scheduler = Scheduler[str](batch_size=4)
    scheduler.add("old", "lane", tiles=5)
    scheduler.add("urgent", "lane", tiles=5, deadline=9.0)
    batch = scheduler.next_batch(0.0)
    assert batch is not None
    assert [request for request, _ in batch.tiles].count("urgent") == 3


def test_late_request_gives_its_slots_to_others() -> None:
    scheduler = Scheduler[str](batch_size=2)
    scheduler.add("late", "lane", tiles=2, deadline=1.0)
    scheduler.add("fine", "lane", tiles=2)
    batch = scheduler.next_batch(1.0)
    assert batch is not None
    assert batch.requests() == ("fine",)
    assert scheduler.late(1.0) == ("late",)


def test_lanes_never_mix_and_take_turns() -> None:
    scheduler = Scheduler[str](batch_size=8)
    scheduler.add("a", "lane one", tiles=20)
    scheduler.add("b", "lane two", tiles=20)
    assert [batch.lane for batch in drain(scheduler)] == ["lane one", "lane two"] * 3


def test_removed_request_leaves_no_tile_behind() -> None:
    scheduler = Scheduler[str](batch_size=2)
    scheduler.add("gone", "lane", tiles=5)
    scheduler.add("stays", "lane", tiles=3)
    scheduler.next_batch(0.0)
    assert scheduler.remove("gone") == 4
    assert {request for batch in drain(scheduler) for request, _ in batch.tiles} == {"stays"}
    assert scheduler.waiting_tiles == 0


def test_request_without_tiles_or_held_twice_is_refused() -> None:
    scheduler = Scheduler[str](batch_size=2)
    with pytest.raises(ValueError, match="at least one tile, got 0"):
        scheduler.add("a", "lane", tiles=0)
    scheduler.add("a", "lane", tiles=1)
    with pytest.raises(ValueError, match="held: 'a'"):
        scheduler.add("a", "other lane", tiles=1)


@given(
    st.integers(1, 9),
    st.lists(st.tuples(st.integers(1, 40), st.sampled_from(["x", "y"])), min_size=1, max_size=12),
)
def test_every_tile_runs_exactly_once_and_no_slot_is_wasted(
    batch_size: int, requests: list[tuple[int, str]]
) -> None:
    scheduler = Scheduler[int](batch_size=batch_size)
    for name, (tiles, lane) in enumerate(requests):
        scheduler.add(name, lane, tiles)
    seen: list[tuple[int, int]] = []
    while (batch := scheduler.next_batch(0.0)) is not None:
        assert {requests[request][1] for request, _ in batch.tiles} == {batch.lane}
        lane_left = sum(t for t, lane in requests if lane == batch.lane)
        lane_left -= sum(1 for request, _ in seen if requests[request][1] == batch.lane)
        assert len(batch.tiles) == min(batch_size, lane_left)
        seen.extend(batch.tiles)
    assert sorted(seen) == [(n, t) for n, (tiles, _) in enumerate(requests) for t in range(tiles)]
