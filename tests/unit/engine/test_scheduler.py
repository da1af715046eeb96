"""The batching policy, driven step by step without a device or a clock."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.engine.scheduler import BACKGROUND, Batch, Scheduler


def scheduler_of(size: int) -> Scheduler[str]:
    return Scheduler[str](lambda _: size, lambda _: 1.0)


def add(
    scheduler: Scheduler[str],
    name: str,
    lane: str = "lane",
    tiles: int = 1,
    deadline: float = math.inf,
    client: str = "",
) -> None:
    scheduler.add(name, deadline, client)
    scheduler.add_tiles(name, lane, tiles)


def drain(scheduler: Scheduler[str], now: float = 0.0) -> list[Batch[str]]:
    batches = []
    while (batch := scheduler.next_batch(now)) is not None:
        batches.append(batch)
    return batches


def next_of(scheduler: Scheduler[str], now: float = 0.0) -> Batch[str]:
    batch = scheduler.next_batch(now)
    assert batch is not None
    return batch


def test_small_scan_overtakes_a_huge_one_after_one_batch() -> None:
    scheduler = scheduler_of(1)
    add(scheduler, "huge", tiles=100)
    scheduler.next_batch(0.0)
    add(scheduler, "small")
    assert "small" in [next_of(scheduler).tiles[0][0] for _ in range(2)]


def test_requests_share_a_batch_tile_by_tile() -> None:
    scheduler = scheduler_of(4)
    for name in ("a", "b", "c"):
        add(scheduler, name, tiles=3)
    assert next_of(scheduler).tiles == (("a", 0), ("b", 0), ("c", 0), ("a", 1))


def test_leftover_slots_go_to_the_earliest_deadline() -> None:
    scheduler = scheduler_of(4)
    add(scheduler, "old", tiles=5)
    add(scheduler, "urgent", tiles=5, deadline=9.0)
    assert [request for request, _ in next_of(scheduler).tiles].count("urgent") == 3


def test_leftover_slots_go_to_the_oldest_if_nothing_is_urgent() -> None:
    scheduler = scheduler_of(3)
    add(scheduler, "old", tiles=9)
    add(scheduler, "new", tiles=9)
    for _ in range(3):
        assert [request for request, _ in next_of(scheduler).tiles].count("old") == 2


@pytest.mark.parametrize("lanes", [1, 60], ids=["one lane", "a lane each"])
def test_many_huge_scans_of_one_client_do_not_delay_the_small_one_of_another(lanes: int) -> None:
    scheduler = scheduler_of(4)
    for number in range(60):
        add(scheduler, f"huge {number}", lane=f"lane {number % lanes}", tiles=100, client="hog")
    for _ in range(50):
        next_of(scheduler)
    add(scheduler, "small", lane="lane 0", tiles=8, client="other")
    batches = [next_of(scheduler) for _ in range(5)]
    assert sum(request == "small" for batch in batches for request, _ in batch.tiles) == 8


def test_clients_share_the_device_evenly_whatever_they_ask() -> None:
    scheduler = scheduler_of(3)
    for number in range(10):
        add(scheduler, f"many {number}", tiles=30, client="many")
    add(scheduler, "one", tiles=300, client="one")
    tiles = [request for _ in range(100) for request, _ in next_of(scheduler).tiles]
    assert abs(tiles.count("one") - 150) <= 3


def test_a_client_gains_nothing_by_coming_back() -> None:
    scheduler = scheduler_of(1)
    add(scheduler, "steady", tiles=100, client="steady")
    for number in range(20):
        add(scheduler, f"brief {number}", client="brief")
        batches = [next_of(scheduler) for _ in range(2)]
        assert sorted(batch.tiles[0][0] for batch in batches) == [f"brief {number}", "steady"]
        scheduler.remove(f"brief {number}")


@pytest.mark.parametrize("client", ["slow", BACKGROUND])
def test_a_client_gains_nothing_while_its_scan_is_prepared(client: str) -> None:
    scheduler = scheduler_of(1)
    scheduler.add("large", client=client)
    add(scheduler, "many", tiles=50, client="other")
    drain(scheduler)
    scheduler.add_tiles("large", "lane", 50)
    add(scheduler, "small", client="other")
    assert "small" in [next_of(scheduler).tiles[0][0] for _ in range(2)]


def test_a_client_does_not_pay_for_slots_that_another_has_filled() -> None:
    """Those of a job, whose tiles count several times, took it far ahead of a large scan's."""
    scheduler = scheduler_of(8)
    add(scheduler, "large", "one", tiles=50, client="a")
    add(scheduler, "job", "other", tiles=400, client=BACKGROUND)
    for number in range(10):
        small = f"small {number}"
        add(scheduler, small, "other", client="b")
        assert small in {one for _ in range(2) for one in next_of(scheduler).requests()}


def test_a_client_does_not_pay_for_what_interrupted_a_batch() -> None:
    scheduler = Scheduler[str](lambda _: 1, lambda lane: 10.0 if lane == "slow" else 0.5)
    add(scheduler, "huge", "slow", tiles=9, client="a")
    running = next_of(scheduler)
    for number in range(20):
        add(scheduler, f"job {number}", "fast", client=BACKGROUND)
    while interrupting(scheduler, running):
        pass
    add(scheduler, "new", "slow", client="b")
    assert "new" in next_of(scheduler).requests() + next_of(scheduler).requests()


def test_foreseen_cost_counts_the_share_of_every_other_client() -> None:
    scheduler = scheduler_of(1)
    for number in range(5):
        add(scheduler, f"hog {number}", tiles=100, client="hog")
    add(scheduler, "mine", tiles=2, client="me")
    assert scheduler.estimate_cost("lane", 8, "me") == 8 + 2 + 10
    assert scheduler.estimate_cost("lane", 8, "hog") == 8 + 5 * 8 + 2


def test_expired_request_gives_its_slots_to_others() -> None:
    scheduler = scheduler_of(2)
    add(scheduler, "late", tiles=2, deadline=1.0)
    add(scheduler, "fine", tiles=2)
    assert next_of(scheduler, now=1.0).requests() == ("fine",)


def test_lanes_never_mix_and_take_turns() -> None:
    scheduler = scheduler_of(8)
    add(scheduler, "a", "lane one", tiles=20)
    add(scheduler, "b", "lane two", tiles=20)
    lanes = [batch.lane for batch in drain(scheduler)]
    assert lanes == ["lane one", "lane two"] * 3


def test_lanes_share_the_device_by_their_requests() -> None:
    scheduler = scheduler_of(1)
    add(scheduler, "alone", "one", tiles=100)
    for name in "abc":
        add(scheduler, name, "three", tiles=100)
    lanes = [next_of(scheduler).lane for _ in range(80)]
    assert abs(lanes.count("one") - 20) <= 1


def test_lanes_share_the_device_by_time_not_by_tiles() -> None:
    scheduler = Scheduler[str](lambda _: 1, lambda lane: 4.0 if lane == "expensive" else 1.0)
    add(scheduler, "e", "expensive", tiles=100)
    add(scheduler, "c", "cheap", tiles=100)
    lanes = [next_of(scheduler).lane for _ in range(50)]
    assert abs(lanes.count("expensive") - 10) <= 1


def test_lane_gains_nothing_by_having_been_idle() -> None:
    scheduler = scheduler_of(1)
    add(scheduler, "steady", "one", tiles=100)
    for _ in range(30):
        next_of(scheduler)
    add(scheduler, "new", "two", tiles=100)
    lanes = [next_of(scheduler).lane for _ in range(20)]
    assert abs(lanes.count("two") - 10) <= 1


def test_removed_request_leaves_no_tile_behind() -> None:
    scheduler = scheduler_of(2)
    add(scheduler, "gone", tiles=5)
    add(scheduler, "stays", tiles=3)
    scheduler.next_batch(0.0)
    assert scheduler.remove("gone") == 4
    assert {request for batch in drain(scheduler) for request, _ in batch.tiles} == {"stays"}
    assert scheduler.waiting_tiles == 0
    assert scheduler.remove("gone") == 0


def test_tiles_of_another_pass_are_queued_again() -> None:
    scheduler = scheduler_of(1)
    add(scheduler, "a")
    add(scheduler, "b", tiles=2)
    assert next_of(scheduler).tiles == (("a", 0),)
    scheduler.add_tiles("a", "another lane", 1)
    assert {next_of(scheduler).lane for _ in range(3)} == {"lane", "another lane"}
    assert scheduler.next_batch(0.0) is None
    assert scheduler.waiting_tiles == 0


def test_backlog_is_what_the_waiting_tiles_cost() -> None:
    scheduler = Scheduler[str](lambda _: 2, lambda lane: 0.5 if lane == "a" else 2.0)
    add(scheduler, "x", "a", tiles=6)
    add(scheduler, "y", "b", tiles=3)
    assert scheduler.backlog == pytest.approx(9.0)
    scheduler.next_batch(0.0)
    assert scheduler.backlog == pytest.approx(8.0)


def test_request_without_tiles_or_added_twice_is_refused() -> None:
    scheduler = scheduler_of(2)
    with pytest.raises(ValueError, match="expected tiles"):
        add(scheduler, "a", tiles=0)
    with pytest.raises(ValueError, match="before: 'a'"):
        scheduler.add("a")
    scheduler.add_tiles("a", "lane", 1)
    with pytest.raises(ValueError, match="got 1 after 1"):
        scheduler.add_tiles("a", "lane", 1)


@given(
    st.integers(1, 9),
    st.lists(st.tuples(st.integers(1, 40), st.sampled_from(["x", "y"])), min_size=1, max_size=12),
)
def test_every_tile_runs_exactly_once_and_no_slot_is_wasted(
    batch_size: int, requests: list[tuple[int, str]]
) -> None:
    scheduler = Scheduler[int](lambda _: batch_size, lambda _: 1.0)
    for name, (tiles, lane) in enumerate(requests):
        scheduler.add(name)
        scheduler.add_tiles(name, lane, tiles)
    seen: list[tuple[int, int]] = []
    while (batch := scheduler.next_batch(0.0)) is not None:
        assert {requests[request][1] for request, _ in batch.tiles} == {batch.lane}
        lane_left = sum(t for t, lane in requests if lane == batch.lane)
        lane_left -= sum(1 for request, _ in seen if requests[request][1] == batch.lane)
        assert len(batch.tiles) == min(batch_size, lane_left)
        seen.extend(batch.tiles)
    assert sorted(seen) == [(n, t) for n, (tiles, _) in enumerate(requests) for t in range(tiles)]


def scheduler_of_costs(**costs: float) -> Scheduler[str]:
    """Make a scheduler whose lanes cost what is given."""
    return Scheduler[str](lambda _: 2, lambda lane: costs[str(lane)])


def interrupting(
    scheduler: Scheduler[str], running: Batch[str], spare: float = 9.0, now: float = 0.0
) -> list[str]:
    batch = scheduler.interrupting_batch(running, spare, now)
    return [] if batch is None else [request for request, _ in batch.tiles]


def test_much_smaller_scans_need_not_wait_for_the_end_of_a_batch() -> None:
    scheduler = scheduler_of_costs(slow=8.0, medium=5.0, fast=1.5)
    add(scheduler, "huge", "slow")
    running = next_of(scheduler)
    add(scheduler, "late", "fast", deadline=-1.0)
    add(scheduler, "medium", "medium")
    add(scheduler, "long", "fast", tiles=3)
    assert interrupting(scheduler, running) == []
    for name in ("a", "b", "c"):
        add(scheduler, name, "fast")
    assert interrupting(scheduler, running, spare=1.4) == []
    assert interrupting(scheduler, running) == ["a", "b"]
    assert interrupting(scheduler, running) == ["c"]
    assert interrupting(scheduler, running) == []
    assert [batch.lane for batch in drain(scheduler)] == ["medium", "fast", "fast"]


def test_all_that_interrupt_a_batch_together_take_no_longer_than_they_may() -> None:
    scheduler = scheduler_of(8)
    add(scheduler, "huge", tiles=20)
    running = next_of(scheduler)
    for number in range(4):
        add(scheduler, f"{number}")
    assert interrupting(scheduler, running, spare=2.5) == ["0", "1"]
    assert interrupting(scheduler, running, spare=0.9) == []
    assert interrupting(scheduler, running, spare=1.0) == ["2"]


def test_scan_of_one_tile_interrupts_one_of_many_tiles_of_its_own_lane() -> None:
    scheduler = scheduler_of(1)
    add(scheduler, "huge", tiles=2)
    running = next_of(scheduler)
    add(scheduler, "small")
    assert interrupting(scheduler, running) == ["small"]
    running = next_of(scheduler)  # Now only this tile is left.
    add(scheduler, "another")
    assert interrupting(scheduler, running) == []


def test_batch_that_holds_a_small_scan_is_not_interrupted_for_one_as_small() -> None:
    scheduler = scheduler_of(2)
    add(scheduler, "huge", tiles=9)
    add(scheduler, "small")
    running = next_of(scheduler)
    add(scheduler, "another")
    assert interrupting(scheduler, running) == []
    scheduler.remove("huge")
    assert interrupting(scheduler, running) == []


def test_clients_interrupt_in_their_order() -> None:
    scheduler = scheduler_of_costs(slow=9.0, fast=1.0)
    add(scheduler, "huge", "slow", client="a")
    running = next_of(scheduler)
    for number in range(3):
        add(scheduler, f"b{number}", "fast", client="b")
    add(scheduler, "c", "fast", client="c")
    assert sorted(interrupting(scheduler, running)) == ["b0", "c"]


def test_who_waits_interrupts_a_batch_that_nobody_waits_for_sooner_than_the_reverse() -> None:
    scheduler = scheduler_of_costs(one=4.0, same=4.0)
    for client, other in ((BACKGROUND, "a"), ("a", BACKGROUND)):
        add(scheduler, client, "one", client=client)
        running = next_of(scheduler)
        add(scheduler, other, "same", client=other)
        assert interrupting(scheduler, running) == ([other] if client == BACKGROUND else [])
        scheduler.remove(client)
        scheduler.remove(other)


def test_work_that_nobody_waits_for_gets_a_fifth_beside_a_client() -> None:
    scheduler = scheduler_of(1)
    add(scheduler, "job", tiles=200, client=BACKGROUND)
    alone = [next_of(scheduler).tiles[0][0] for _ in range(20)]
    assert set(alone) == {"job"}
    add(scheduler, "waited for", tiles=100, client="a")
    names = [next_of(scheduler).tiles[0][0] for _ in range(50)]
    assert abs(names.count("job") - 10) <= 1


def test_foreseen_cost_counts_little_of_what_nobody_waits_for() -> None:
    scheduler = scheduler_of(1)
    add(scheduler, "job", tiles=200, client=BACKGROUND)
    assert scheduler.estimate_cost("lane", 8, "a") == pytest.approx(8 + 8 / 4)
    assert scheduler.estimate_cost("lane", 8, BACKGROUND) == pytest.approx(8 + 8)


def test_request_is_in_one_of_the_batches_that_run_side_by_side() -> None:
    """So those that come find a free place beside one with many tiles."""
    scheduler = Scheduler[str](lambda _: 2, lambda _: 1.0, batches=3)
    add(scheduler, "huge", tiles=9)
    add(scheduler, "other", tiles=1)
    first = next_of(scheduler)
    assert set(first.requests()) == {"huge", "other"}
    assert scheduler.next_batch(0.0) is None
    add(scheduler, "late", tiles=3)
    beside = next_of(scheduler)
    assert beside.tiles == (("late", 0), ("late", 1))
    scheduler.remove("late")
    scheduler.end(beside)
    assert scheduler.next_batch(0.0) is None
    scheduler.end(first)
    assert next_of(scheduler).requests() == ("huge",)


def test_batch_gives_way_to_no_request_that_runs_beside_it() -> None:
    scheduler = Scheduler[str](lambda _: 1, lambda _: 1.0, batches=2)
    add(scheduler, "huge", tiles=100)
    add(scheduler, "small", tiles=2)
    running, beside = next_of(scheduler), next_of(scheduler)
    assert interrupting(scheduler, running) == []
    scheduler.end(beside)
    assert interrupting(scheduler, running) == ["small"]


def test_batch_of_much_smaller_requests_is_told_from_others_beside_it() -> None:
    scheduler = Scheduler[str](lambda _: 1, lambda lane: 8.0 if lane == "big" else 1.0, batches=4)
    add(scheduler, "huge", lane="big")
    huge = next_of(scheduler)
    assert not scheduler.is_beside_smaller(huge)
    add(scheduler, "middle", lane="small", tiles=5)
    middle = next_of(scheduler)
    assert not scheduler.is_beside_smaller(huge)
    add(scheduler, "small", lane="small", tiles=2)
    small = next_of(scheduler)
    assert [scheduler.is_beside_smaller(one) for one in (huge, middle, small)] == [
        True,
        True,
        False,
    ]
    scheduler.end(small)
    assert not scheduler.is_beside_smaller(huge)
