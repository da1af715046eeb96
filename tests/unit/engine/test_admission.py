"""Which requests are admitted, and what a refusal says."""

from functools import partial

import pytest

from app.engine.admission import Admission
from app.errors import Draining, QueueFull, TooLarge


def make_admission() -> Admission:
    return Admission(max_requests=2, max_bytes=1000, max_body_bytes=600)


def test_requests_that_end_make_room() -> None:
    admission = make_admission()
    for _ in range(5):
        with admission.admit(100):
            assert admission.requests == 1
            assert not admission.idle.is_set()
    assert (admission.requests, admission.bytes) == (0, 0)
    assert admission.idle.is_set()


def test_too_many_requests_are_refused_with_a_time_to_try_again() -> None:
    admission = make_admission()
    admission.observe_cost(busy_s=21.0)
    with admission.admit(1), admission.admit(1), pytest.raises(QueueFull) as refusal:
        admission.admit(1).__enter__()
    assert refusal.value.retry_after_s == 5
    assert "fewer than 2 requests" in str(refusal.value)


def test_too_many_bytes_are_refused_whatever_the_number_of_requests() -> None:
    admission = make_admission()
    with admission.admit(500), pytest.raises(QueueFull), admission.admit(501):
        pass


def test_body_of_unknown_length_counts_as_the_largest() -> None:
    admission = make_admission()
    with admission.admit(None):
        assert admission.bytes == 600


def test_body_over_the_limit_is_refused_with_both_sizes() -> None:
    with pytest.raises(TooLarge, match="at most 600 bytes, got 601"):
        make_admission().admit(601).__enter__()


def test_single_body_within_its_limit_is_always_admitted() -> None:
    admission = Admission(max_requests=2, max_bytes=10, max_body_bytes=600)
    with admission.admit(600):
        assert admission.requests == 1


def test_nothing_is_admitted_while_draining() -> None:
    admission = make_admission()
    admission.open = False
    with pytest.raises(Draining):
        admission.admit(1).__enter__()


def test_request_that_fails_makes_room() -> None:
    admission = make_admission()
    with pytest.raises(RuntimeError, match="broken"), admission.admit(5):
        raise RuntimeError("broken")
    assert admission.requests == 0


def test_two_devices_halve_the_time_to_try_again() -> None:
    waits = []
    for count in (1, 2):
        admission = Admission(8, 1000, 600, devices=partial(int, count))
        admission.observe_cost(96.0)
        with admission.admit(1), admission.admit(1):
            waits.append(admission.retry_after_s())
    assert waits == [20, 10]


def test_one_client_leaves_some_of_the_places_to_others() -> None:
    admission = Admission(max_requests=4, max_bytes=1000, max_body_bytes=600)
    with admission.admit(1, "greedy"), admission.admit(1, "greedy"), admission.admit(1, "greedy"):
        with pytest.raises(QueueFull, match="fewer than 3 requests of one client"):
            admission.admit(1, "greedy").__enter__()
        with admission.admit(1, "other"):
            assert admission.requests == 4
    assert not admission.clients
