"""Which requests are admitted, and what a refusal says."""

from contextlib import ExitStack
from functools import partial

import pytest

from app.engine.admission import Admission, AdmittedRequest
from app.errors import Draining, QueueFull


def make_admission(max_requests: int = 2, max_body_bytes: int = 1000) -> Admission:
    return Admission(max_requests, max_body_bytes)


def test_requests_that_end_make_room() -> None:
    admission = make_admission()
    for _ in range(5):
        with admission.admit() as request:
            request.count_bytes(100)
            assert (admission.requests, admission.body_bytes.used) == (1, 100)
            with admission.admit():
                pass
            assert not admission.idle.is_set()
            request.start_work()
            assert (admission.requests, admission.body_bytes.used) == (1, 100)
    assert (admission.requests, admission.body_bytes.used) == (0, 0)
    assert admission.idle.is_set()


def test_too_many_requests_are_refused_with_a_time_to_try_again() -> None:
    admission = make_admission()
    admission.observe_cost(busy_s=21.0)
    with admission.admit(), admission.admit(), pytest.raises(QueueFull) as refusal:
        admission.admit().__enter__()
    assert refusal.value.retry_after_s == 5
    told = "at most 2 requests that are received, got 3; the operator's limit is "
    assert f"{told}LANDMARKD_MAX_IN_FLIGHT" in str(refusal.value)


def test_requests_in_work_are_counted_apart_from_those_that_are_received() -> None:
    admission = make_admission()
    with ExitStack() as stack:
        working = [stack.enter_context(admission.admit()) for _ in range(2)]
        for request in working:
            request.start_work()
        with pytest.raises(QueueFull, match="at most 2 requests in work, got 3"):
            admission.admit().__enter__()
    with admission.admit("a"), admission.admit("b") as arrived:
        arrived.start_work()
        with admission.admit("c"):
            assert admission.requests == 3


def test_up_to_twice_as_many_requests_are_in_work_once_all_have_arrived() -> None:
    admission = make_admission()
    with ExitStack() as stack:
        first = stack.enter_context(admission.admit("a"))
        arriving = [stack.enter_context(admission.admit("b"))]
        first.start_work()
        arriving.append(stack.enter_context(admission.admit("c")))
        for request in arriving:
            request.start_work()
        assert admission.working.used == 2 * admission.max_requests - 1
        with pytest.raises(QueueFull, match="at most 2 requests in work, got 4"):
            admission.admit("d").__enter__()


def test_uploads_of_one_client_take_no_more_places_than_its_share_once_they_are_work() -> None:
    admission = make_admission(8)
    with ExitStack() as stack:
        for start in (True, True, True, True, False, False):
            request = stack.enter_context(admission.admit("greedy"))
            if start:
                request.start_work()
        with pytest.raises(QueueFull, match="at most 6 requests in work of one client, got 7"):
            admission.admit("greedy").__enter__()


def test_bytes_count_as_they_arrive_and_not_as_they_are_announced() -> None:
    admission = make_admission()
    with admission.admit("idle") as idle, admission.admit("other") as other:
        idle.check_bytes(700)
        other.check_bytes(600)
        other.count_bytes(600)
        idle.count_bytes(400)
        with pytest.raises(QueueFull, match=r"at most 1000 bytes of bodies, got 1001; .*_MEMORY"):
            idle.count_bytes(1)
        assert admission.body_bytes.used == 1000


def test_body_that_does_not_fit_now_is_refused_before_it_arrives() -> None:
    admission = make_admission()
    with admission.admit("a") as first, admission.admit("b") as second:
        first.count_bytes(500)
        second.check_bytes(500)
        with pytest.raises(QueueFull, match="got 1001"):
            second.check_bytes(501)


def test_one_client_leaves_some_of_the_bytes_to_others() -> None:
    admission = make_admission()
    with admission.admit("greedy") as greedy, admission.admit("other") as other:
        greedy.count_bytes(500)
        with pytest.raises(QueueFull, match="at most 750 bytes of bodies of one client, got 751"):
            greedy.count_bytes(251)
        other.count_bytes(500)


def test_nothing_is_admitted_while_draining() -> None:
    admission = make_admission()
    admission.open = False
    with pytest.raises(Draining):
        admission.admit().__enter__()


def test_request_that_fails_makes_room() -> None:
    admission = make_admission()

    def fail() -> None:
        with admission.admit() as request:
            request.count_bytes(5)
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        fail()
    assert (admission.requests, admission.body_bytes.used) == (0, 0)


def test_two_devices_halve_the_time_to_try_again() -> None:
    waits = []
    for count in (1, 2):
        admission = Admission(8, 1000, devices=partial(int, count))
        admission.observe_cost(96.0)
        with admission.admit(), admission.admit():
            waits.append(admission.retry_after_s())
    assert waits == [20, 10]


@pytest.mark.parametrize("in_work", [False, True])
def test_one_client_leaves_some_of_the_places_to_others(in_work: bool) -> None:
    admission = make_admission(4)

    def admit(client: str) -> AdmittedRequest:
        request = stack.enter_context(admission.admit(client))
        if in_work:
            request.start_work()
        return request

    with ExitStack() as stack:
        for _ in range(3):
            admit("greedy")
        with pytest.raises(QueueFull, match=r"at most 3 requests .* of one client, got 4"):
            admit("greedy")
        admit("other")
        assert admission.requests == 4
    assert admission.requests == 0
