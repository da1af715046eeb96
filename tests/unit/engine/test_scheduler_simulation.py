"""Long random simulations of the scheduler, checked after every event against a plain model."""

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from app.engine.scheduler import Batch, Scheduler

EVENTS = 4000
MAX_REQUESTS = 12
LANES = {"cheap": (4, 1.0), "expensive": (2, 5.0), "single": (1, 2.0)}
"""Batch size and cost of a tile."""


@dataclass
class Expected:
    """What is known of a request, kept apart from the scheduler."""

    lane: str
    tiles: int
    deadline: float
    stages: int
    run: Counter[int] = field(default_factory=Counter)
    waited: int = 0
    passed: int = 0


class Simulation:
    """A scheduler, the events that happen to it, and what must hold after each."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.scheduler = Scheduler[int](lambda n: LANES[str(n)][0], lambda n: LANES[str(n)][1])
        self.now = 0.0
        self.requests: dict[int, Expected] = {}
        self.finished = self.names = 0

    def arrive(self) -> None:
        if len(self.requests) == MAX_REQUESTS:
            return
        name, self.names = self.names, self.names + 1
        deadline = self.now + self.random.choice([3.0, 30.0, 300.0])
        lane, tiles = self.random.choice(list(LANES)), self.random.choice([1, 1, 2, 7, 40])
        self.requests[name] = Expected(lane, tiles, deadline, stages=self.random.choice([1, 1, 2]))
        self.scheduler.add(name, deadline)
        self.scheduler.add_tiles(name, lane, tiles)

    def leave(self) -> None:
        """A client disconnects, or a request fails."""
        if self.requests:
            name = self.random.choice(list(self.requests))
            gone = self.requests.pop(name)
            assert self.scheduler.remove(name) == gone.tiles - gone.run.total()

    def tick(self) -> None:
        self.now += self.random.random()
        late = [n for n, expected in self.requests.items() if self.now >= expected.deadline]
        for name in late:
            if self.random.random() < 0.3:
                # Somebody else waits for the same answer.
                self.requests[name].deadline = self.now + 5.0
                self.scheduler.set_deadline(name, self.now + 5.0)
            else:
                self.scheduler.remove(name)
                del self.requests[name]

    def run(self) -> None:
        batch = self.scheduler.next_batch(self.now)
        active = {n: a for n, a in self.requests.items() if self.now < a.deadline}
        waiting = {n: a for n, a in active.items() if a.run.total() < a.tiles}
        if batch is None:
            assert not waiting, "nothing runs though tiles wait"
            return
        self.check(batch, waiting)
        for name, tile in batch.tiles:
            expected = self.requests[name]
            assert expected.run[tile] == 0, "a tile runs twice"
            expected.run[tile] = 1
        served = set(batch.requests())
        for name, expected in waiting.items():
            expected.waited = 0 if name in served else expected.waited + 1
            expected.passed = (
                0 if name in served else expected.passed + (batch.lane == expected.lane)
            )
            assert expected.waited <= bound(), f"{name} starves"
            assert expected.passed < MAX_REQUESTS, f"{name} was passed twice by the same request"
        for name in served:
            self.maybe_finish(name)

    def check(self, batch: Batch[int], waiting: dict[int, Expected]) -> None:
        lane = [n for n, expected in waiting.items() if expected.lane == batch.lane]
        left = sum(waiting[n].tiles - waiting[n].run.total() for n in lane)
        assert set(batch.requests()) <= set(lane), "cancelled, late, or of another lane"
        assert len(batch.tiles) == min(LANES[str(batch.lane)][0], left), "an empty slot"
        assert len(set(batch.tiles)) == len(batch.tiles)

    def maybe_finish(self, name: int) -> None:
        expected = self.requests[name]
        if expected.run.total() < expected.tiles:
            return
        assert sorted(expected.run) == list(range(expected.tiles)), "a tile is lost"
        expected.stages -= 1
        if expected.stages:
            expected.run, expected.tiles, expected.lane = Counter(), 1, "single"
            self.scheduler.add_tiles(name, "single", 1)
        else:
            del self.requests[name]
            assert self.scheduler.remove(name) == 0
            self.finished += 1


def bound() -> int:
    """Most batches that a request with waiting tiles can see go by before it is served.

    Its own lane serves it within one batch per competitor. Between two batches of its lane, charged
    at most size x cost, every other lane is charged at least cost / requests per batch and so gets
    at most 1 + that ratio; the sum over lanes is taken at its worst.
    """
    size = max(size * cost for size, cost in LANES.values())
    cheapest = min(cost for _, cost in LANES.values()) / MAX_REQUESTS
    return MAX_REQUESTS * (1 + int((len(LANES) - 1) * (1 + size / cheapest)))


@pytest.mark.no_cover
@pytest.mark.parametrize("seed", range(6))
def test_no_tile_is_lost_doubled_or_starved_in_a_long_run(seed: int) -> None:
    simulation = Simulation(seed)
    events = (
        [simulation.arrive] * 4
        + [simulation.run] * 8
        + [simulation.leave, simulation.tick, simulation.tick]
    )
    for _ in range(EVENTS):
        simulation.random.choice(events)()
        assert len(simulation.requests) <= MAX_REQUESTS
        assert simulation.scheduler.waiting_tiles == sum(
            expected.tiles - expected.run.total() for expected in simulation.requests.values()
        )
    assert simulation.finished > EVENTS / 20
    while simulation.requests:
        simulation.run()
        simulation.tick()
    assert simulation.scheduler.waiting_tiles == 0
    assert simulation.scheduler.next_batch(simulation.now) is None


@pytest.mark.no_cover
@pytest.mark.parametrize("seed", range(4))
def test_lanes_that_always_have_work_get_the_device_by_their_requests(seed: int) -> None:
    rng = random.Random(seed)
    scheduler = Scheduler[str](lambda n: LANES[str(n)][0], lambda n: LANES[str(n)][1])
    requests = {lane: rng.randint(1, 6) for lane in LANES}
    for lane, count in requests.items():
        for number in range(count):
            scheduler.add(f"{lane} {number}")
            scheduler.add_tiles(f"{lane} {number}", lane, 10_000)
    given = dict.fromkeys(LANES, 0.0)
    for _ in range(2000):
        batch = scheduler.next_batch(0.0)
        assert batch is not None
        lane = str(batch.lane)
        given[lane] += len(batch.tiles) * LANES[lane][1] / requests[lane]
        # The bound of start-time fair queueing: a largest batch of each of the two.
        most = [size * cost / requests[lane] for lane, (size, cost) in LANES.items()]
        assert max(given.values()) - min(given.values()) <= 2 * max(most)


@pytest.mark.parametrize("competitors", [1, 5])
def test_one_tile_overtakes_huge_scans_after_one_batch_per_competitor(competitors: int) -> None:
    scheduler = Scheduler[str](lambda _: 1, lambda _: 1.0)
    for number in range(competitors):
        scheduler.add(f"huge {number}")
        scheduler.add_tiles(f"huge {number}", "lane", 1000)
    for _ in range(50):
        scheduler.next_batch(0.0)
    scheduler.add("small")
    scheduler.add_tiles("small", "lane", 1)
    batches = [scheduler.next_batch(0.0) for _ in range(competitors + 1)]
    assert any(batch and batch.requests() == ("small",) for batch in batches)
