"""Fair budgets: nobody holds more than there is, and clients share it evenly."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.engine import fair_budget
from app.engine.fair_budget import FairBudget
from app.errors import DeadlineExceeded

FAR = 1e9


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await test()

    asyncio.run(bounded())


class Client:
    """Holds memory in a task of its own until it is told to let go."""

    def __init__(self, budget: FairBudget, name: str, size: int, deadline: float = FAR) -> None:
        self.holding = asyncio.Event()
        self.release = asyncio.Event()
        self.task = asyncio.create_task(self._hold(budget, name, size, deadline))

    async def _hold(self, budget: FairBudget, name: str, size: int, deadline: float) -> None:
        async with budget.hold(size, name, deadline):
            self.holding.set()
            await self.release.wait()

    async def leave(self) -> None:
        self.release.set()
        await self.task


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.fixture
def patience_s(monkeypatch: pytest.MonkeyPatch) -> float:
    monkeypatch.setattr(fair_budget, "PATIENCE_S", 0.5)
    return 0.5


async def lose_patience(patience_s: float) -> None:
    """Wait until those that wait now are not passed any more, for most of ``patience_s``."""
    await asyncio.sleep(patience_s)
    passed_s = asyncio.get_running_loop().time() % (2 * patience_s)
    await asyncio.sleep((patience_s - passed_s) % (2 * patience_s) + 0.01)


def test_what_does_not_fit_now_waits_until_it_does() -> None:
    async def test() -> None:
        budget = FairBudget(100)
        first, second = Client(budget, "a", 60), Client(budget, "b", 60)
        await settle()
        assert first.holding.is_set()
        assert not second.holding.is_set()
        assert not second.task.done()
        assert budget.used == 60
        await first.leave()
        await second.holding.wait()
        await second.leave()
        assert (budget.used, dict(budget.held)) == (0, {})

    run(test)


def test_who_waits_too_long_is_told_and_holds_nothing() -> None:
    async def test() -> None:
        budget = FairBudget(100)
        async with budget.hold(60, "a", FAR):
            soon = asyncio.get_running_loop().time() + 0.01
            with pytest.raises(DeadlineExceeded, match="other requests had it"):
                async with budget.hold(60, "b", soon):
                    pass
            assert budget.used == 60
        assert budget.used == 0  # Whoever still waited would hold it now.

    run(test)


def test_an_error_of_the_holder_gives_the_memory_back_and_is_not_hidden() -> None:
    async def test() -> None:
        budget = FairBudget(100)
        with pytest.raises(TimeoutError, match="mine"):
            async with budget.hold(60, "a", FAR):
                raise TimeoutError("mine")
        assert budget.used == 0

    run(test)


def test_the_client_that_holds_least_comes_first() -> None:
    async def test() -> None:
        budget = FairBudget(100)
        greedy = [Client(budget, "greedy", 50) for _ in range(6)]
        await settle()
        modest = Client(budget, "modest", 50)
        await settle()
        assert [one.holding.is_set() for one in greedy] == [True, True, *[False] * 4]
        await greedy[0].leave()
        await settle()
        assert modest.holding.is_set()
        assert not greedy[2].holding.is_set()
        for one in (modest, *greedy[1:]):
            await one.holding.wait()
            await one.leave()

    run(test)


def test_client_that_waits_for_what_is_over_its_own_share_holds_up_no_other(
    patience_s: float,
) -> None:
    async def test() -> None:
        budget = FairBudget(100, 0.5)
        alone = Client(budget, "a", 60)  # With nothing else, it may have more than its share.
        await settle()
        assert alone.holding.is_set()
        await alone.leave()
        holding = Client(budget, "a", 30), Client(budget, "b", 40)
        await settle()
        more = Client(budget, "a", 30)
        await lose_patience(patience_s)
        other = Client(budget, "b", 10)
        await settle()
        assert other.holding.is_set()
        assert not more.holding.is_set()
        for one in (*holding, more, other):
            await one.leave()

    run(test)


def test_small_requests_pass_a_large_one_but_not_for_ever(patience_s: float) -> None:
    async def test() -> None:
        budget = FairBudget(100)
        holder, large = Client(budget, "a", 50), Client(budget, "b", 90)
        await settle()
        early = Client(budget, "c", 10)
        await settle()
        assert early.holding.is_set()
        await lose_patience(patience_s)
        late = Client(budget, "d", 10)
        await settle()
        assert not late.holding.is_set()
        await holder.leave()
        await early.leave()
        await settle()
        assert large.holding.is_set()
        assert late.holding.is_set()
        await large.leave()
        await late.leave()

    run(test)


def test_small_requests_do_not_wait_as_long_as_a_large_one_does(patience_s: float) -> None:
    """It may wait for an answer that is read slowly."""

    async def test() -> None:
        budget = FairBudget(100)
        reader, large = Client(budget, "a", 5), Client(budget, "b", 97)
        await settle()
        await lose_patience(patience_s)
        small = Client(budget, "c", 10)
        async with asyncio.timeout(2 * patience_s):
            await small.holding.wait()
        assert not large.holding.is_set()
        for one in (reader, small, large):
            await one.holding.wait()
            await one.leave()

    run(test)


def test_one_that_waits_long_is_passed_by_clients_that_hold_less(patience_s: float) -> None:
    """Two clients with many large requests must not keep out a third one with a small one."""

    async def test() -> None:
        budget = FairBudget(100)
        held = [Client(budget, "a", 40), Client(budget, "b", 40)]
        await settle()
        waiting = [Client(budget, "a", 40), Client(budget, "b", 40)]
        await settle()
        await lose_patience(patience_s)
        small = Client(budget, "c", 10)
        await settle()
        assert small.holding.is_set()
        assert [one.holding.is_set() for one in waiting] == [False, False]
        for one in (small, *held, *waiting):
            await one.holding.wait()
            await one.leave()

    run(test)


def test_part_of_a_reservation_can_be_kept() -> None:
    async def test() -> None:
        budget = FairBudget(100)
        reservation = await budget.reserve(80, "a", FAR)
        second = Client(budget, "b", 70)
        await settle()
        budget.release(reservation, keep=30)
        await second.holding.wait()
        assert budget.used == 100
        budget.release(reservation, keep=50)
        assert budget.used == 100
        await second.leave()
        budget.release(reservation)
        assert budget.used == 0

    run(test)


def test_what_is_given_up_is_held_until_no_thread_uses_it_any_more() -> None:
    async def test() -> None:
        budget = FairBudget(100)
        owner = [np.zeros(1)]
        with suppress(ZeroDivisionError):
            async with budget.hold(80, "a", FAR) as reservation:
                with budget.hold_while_used(reservation, owner[0]):
                    raise ZeroDivisionError
        second = Client(budget, "b", 70)
        await settle()
        assert budget.used == 80
        await asyncio.to_thread(owner.clear)
        await second.holding.wait()
        assert budget.used == 70
        await second.leave()

    run(test)


def test_a_share_is_kept_free_for_other_clients() -> None:
    async def test() -> None:
        budget = FairBudget(4, max_share=0.75)
        greedy = [Client(budget, "greedy", 1) for _ in range(5)]
        await settle()
        assert budget.used == 3
        other = Client(budget, "other", 1)
        await settle()
        assert other.holding.is_set()
        for one in (other, *greedy):
            await one.holding.wait()
            await one.leave()

    run(test)


def test_what_is_released_early_is_given_back_once() -> None:
    async def test() -> None:
        budget = FairBudget(4)
        async with budget.hold(3, "a", FAR) as reservation:
            budget.release(reservation)
            assert budget.used == 0
            async with budget.hold(4, "b", FAR):
                budget.release(reservation)
                assert budget.used == 4
        assert budget.used == 0

    run(test)


def test_release_may_fall_between_a_cancellation_and_its_notice() -> None:
    async def test() -> None:
        budget = FairBudget(1)
        held = await budget.reserve(1, "a", FAR)
        waiting = asyncio.create_task(budget.reserve(1, "b", FAR))
        await settle()
        waiting.cancel()
        budget.release(held)
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert budget.used == 0

    run(test)


def test_a_cancelled_request_leaves_the_queue() -> None:
    async def test() -> None:
        budget = FairBudget(100)
        holder, waiting = Client(budget, "a", 100), Client(budget, "b", 100)
        await settle()
        waiting.task.cancel()
        await asyncio.wait([waiting.task])
        await holder.leave()
        assert budget.used == 0  # Whoever still waited would hold it now.

    run(test)


@settings(max_examples=50)
@given(
    requests=st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(0, 100), st.integers(0, 3)), max_size=30
    )
)
def test_never_more_is_held_than_there_is_and_everybody_is_served(
    requests: list[tuple[str, int, int]],
) -> None:
    async def test() -> None:
        budget = FairBudget(100)
        served = 0

        async def one(name: str, size: int, steps: int) -> None:
            nonlocal served
            async with budget.hold(size, name, FAR):
                assert budget.used <= budget.limit
                assert sum(budget.held.values()) == budget.used
                for _ in range(steps):
                    await asyncio.sleep(0)
                served += 1

        async with AsyncExitStack() as stack:
            group = await stack.enter_async_context(asyncio.TaskGroup())
            for request in requests:
                group.create_task(one(*request))
        assert served == len(requests)
        assert budget.used == 0

    run(test)
