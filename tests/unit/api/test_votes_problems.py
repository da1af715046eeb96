"""Problems of POST /v1/votes: invalid uploads are refused by name and at little cost."""

import asyncio
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.support.services import (
    RAW,
    admitted,
    body_then_disconnect,
    problem_of,
    run_asgi,
    running,
    shared_of,
    toy_settings,
    until,
)
from tests.support.vote_archives import (
    LANDMARKS,
    OBLIQUE,
    SHAPE,
    laid_out,
    make_output,
    npz,
    safetensors,
)

URL = "/v1/votes"
LIMIT = 1 << 20


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    """Run a service without models."""
    models = tmp_path_factory.mktemp("votes")
    changes = {"max_body_bytes": LIMIT, "max_inflated_bytes": 4 * LIMIT, "max_voxels": 1 << 18}
    with running(toy_settings(models, max_in_flight=2, max_axis=200, **changes)) as client:
        yield client


PROBS = np.full((*SHAPE, LANDMARKS + 1), 0.5, dtype=np.float32)
OFFSETS = np.zeros((*SHAPE, 3 * LANDMARKS), dtype=np.float32)


@pytest.fixture
def good() -> bytes:
    return npz({"probs": PROBS, "offsets": OFFSETS})


def holed(array: NDArray[np.float32], value: float) -> NDArray[np.float32]:
    array = array.copy()
    array[2, 3, 4, 1] = value
    return array


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"probs": None}, "'probs' and 'scores': expected one of them, got none"),
        ({"scores": PROBS}, "'probs' and 'scores': expected one of them, got both"),
        ({"offsets": None}, "'offsets': expected an array, got NoneType"),
        ({"extra": PROBS}, "'extra': expected one of probs, scores, offsets, affine"),
        ({"probs": PROBS[0]}, "'probs': expected four axes"),
        ({"offsets": OFFSETS[..., 0]}, "'offsets': expected four axes"),
        ({"offsets": OFFSETS[:4]}, "'offsets': expected the voxels [5, 7, 6] of 'probs'"),
        ({"offsets": OFFSETS[..., :6]}, "'probs': expected 2 or 3 channels"),
        ({"offsets": OFFSETS[..., :7]}, "'offsets': expected 3 channels per landmark, got 7"),
        ({"probs": PROBS.astype(np.int32)}, "'probs': expected numbers of float16"),
        ({"offsets": OFFSETS.astype(complex)}, "'offsets': expected numbers of float16"),
        ({"probs": PROBS.astype(object)}, "'probs': expected numbers of float16"),
        ({"probs": holed(PROBS, np.nan)}, "'probs': expected probabilities from 0 to 1, got NaN"),
        ({"probs": holed(PROBS, 1.5)}, "'probs': expected probabilities from 0 to 1, got 0.5 to 1"),
        ({"probs": holed(PROBS, -0.5)}, "'probs': expected probabilities from 0 to 1, got -0.5"),
        (
            {"probs": None, "scores": holed(PROBS, np.nan)},
            "'scores': expected finite float32 numbers, got NaN",
        ),
        (
            {"probs": None, "scores": holed(PROBS, np.inf)},
            "'scores': expected finite float32 numbers, got 0.5 to inf",
        ),
        (
            {"probs": None, "scores": PROBS.astype(np.float64) * 1e300},
            "'scores': expected finite float32 numbers",
        ),
        ({"affine": np.eye(3)}, "'affine': expected shape [4, 4], got [3, 3]"),
        ({"affine": np.diag([1.0, 1, 0, 1])}, "'affine': expected a spacing"),
        ({"affine": OBLIQUE[[0, 0, 1, 3]]}, "'affine': expected three independent axes"),
        ({"affine": np.full((4, 4), np.nan)}, "'affine': expected numbers"),
    ],
)
def test_bad_array_is_named_with_expected_and_got(
    changes: dict[str, NDArray[np.generic] | None], words: str, client: TestClient
) -> None:
    arrays: dict[str, NDArray[np.generic] | None]
    arrays = {"probs": PROBS, "offsets": OFFSETS, "affine": np.eye(4), **changes}
    content = npz({name: array for name, array in arrays.items() if array is not None})
    problem = problem_of(client.post(URL, content=content))
    assert (problem.status, problem.code) == (422, "bad-arrays")
    assert words in problem.detail


@pytest.mark.parametrize(
    ("changes", "status", "code", "words"),
    [
        ({"content": b""}, 400, "not-an-archive", "safetensors or npz file, got 0 bytes"),
        ({"content": b"\x1f\x8b" * 99}, 400, "not-an-archive", "bytes of another kind"),
        ({"content": npz({"probs": PROBS})[:-9]}, 400, "broken-archive", "got a broken one"),
        ({"params": {"format": "png"}}, 406, "unknown-format", "rows.csv, rows.npy, nii.gz"),
        ({"headers": {"Accept": "image/png"}}, 406, "unknown-format", "application/x-npy"),
        ({"content": bytes(LIMIT + 1)}, 413, "too-large", f"at most {LIMIT} bytes"),
        (
            {"content": npz({"probs": np.zeros((4, 4, LIMIT), dtype=np.float32)})},
            413,
            "too-large",
            "expected arrays of at most 4,194,304 bytes together, got 67,108,864",
        ),
        ({"headers": {"Content-Type": "image/png"}}, 415, "unsupported-media-type", "image/png"),
        ({"headers": {"Content-Encoding": "gzip"}}, 415, "unsupported-media-type", "gzip"),
        ({"params": {"treshold": "0.5"}}, 422, "bad-parameter", "treshold"),
        ({"params": {"threshold": "1.5"}}, 422, "bad-parameter", "threshold"),
        ({"params": {"threshold": "nan"}}, 422, "bad-parameter", "threshold"),
        ({"params": {"order": "z"}}, 422, "bad-parameter", "order"),
        ({"params": {"sample_shape": "4,6"}}, 422, "bad-parameter", "sample_shape"),
        ({"params": {"sample_shape": "4,8,6"}}, 422, "bad-parameter", "1 to 5,7,6, .*4,8,6"),
        ({"params": {"sample_shape": "0,6,6"}}, 422, "bad-parameter", "got 0,6,6"),
        ({"params": {"names": "a,b"}}, 422, "bad-parameter", "expected 3 names, got 2"),
        ({"params": {"names": "a,b,a"}}, 422, "bad-parameter", "expected every name once"),
        ({"params": {"names": "a,,b"}}, 422, "bad-parameter", "expected printable names"),
        ({"params": {"radius_mm": "0.1"}}, 422, "bad-parameter", "1 to 64 voxels.*got 0.1"),
        ({"params": {"radius_mm": "1e9"}}, 422, "bad-parameter", "1 to 64 voxels.*got 1e.09"),
        ({"params": {"smooth_mm": "99"}}, 422, "bad-parameter", "8 voxels.*got 99"),
        ({"params": {"timeout_s": "1e6"}}, 422, "bad-parameter", "at most 600, got 1e.06"),
        ({"params": {"timeout_s": "1e-6"}}, 504, "deadline-exceeded", "expected"),
    ],
)
def test_refusal_is_a_problem_that_says_expected_and_got(
    changes: dict[str, Any],
    status: int,
    code: str,
    words: str,
    client: TestClient,
    good: bytes,
) -> None:
    problem = problem_of(client.post(URL, **({"content": good} | changes)))
    assert (problem.status, problem.code) == (status, code)
    assert re.search(words, problem.detail)


@pytest.mark.parametrize("shape", [(201, 2, 1), (70, 65, 60)])
def test_too_many_voxels_are_refused(shape: tuple[int, int, int], client: TestClient) -> None:
    arrays = {
        "probs": np.zeros((*shape, 1), dtype=np.float16),
        "offsets": np.zeros((*shape, 3), dtype=np.float16),
    }
    problem = problem_of(client.post(URL, content=npz(arrays)))
    assert (problem.status, problem.code) == (413, "too-large")
    assert "expected at most 262,144 voxels and 200 along an axis" in problem.detail


def test_too_many_landmarks_are_refused(client: TestClient) -> None:
    arrays = {"probs": np.zeros((3, 2, 1, 300)), "offsets": np.zeros((3, 2, 1, 900))}
    problem = problem_of(client.post(URL, content=npz(arrays)))
    assert (problem.status, problem.code) == (413, "too-large")
    assert "expected at most 256 landmarks, got 300" in problem.detail


def test_too_many_votes_are_refused(
    client: TestClient, good: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.inference.votes_request.MAX_VOTES", 100)
    for form in ("json", "rows.npy"):
        problem = problem_of(client.post(URL, content=good, params={"format": form}))
        assert (problem.status, problem.code) == (413, "too-large")
        assert "expected at most 100 votes" in problem.detail


def test_arrays_and_votes_that_never_fit_the_memory_are_refused(tmp_path: Path) -> None:
    # Three quarters are for work: 2 MiB besides what any request takes.
    with running(toy_settings(tmp_path, memory=24 << 20)) as client:
        for side, problem in ((60, "at most 18 MiB of memory"), (20, "raise the threshold")):
            arrays = {"probs": np.ones((side, side, side, 2), np.float16)}
            arrays["offsets"] = np.zeros((side, side, side, 6), np.float16)
            response = problem_of(client.post(URL, content=npz(arrays)))
            assert (response.status, response.code) == (413, "too-large")
            assert problem in response.detail
            # A thread may still be about to let go of the work that it has refused.
            until(lambda: shared_of(client).engine.memory.used == 0)
        few = {"probs": np.zeros((20, 20, 20, 2), np.float16), "offsets": arrays["offsets"]}
        assert client.post(URL, content=npz(few)).status_code == 200


def test_request_over_the_limit_gets_429_before_its_body_is_read(client: TestClient) -> None:
    with admitted(client, 2):
        response = client.post(URL, content=b"x", headers=RAW)
    assert problem_of(response).code == "queue-full"
    assert shared_of(client).engine.admission.requests == 0


def test_work_is_cancelled_when_the_client_disconnects(client: TestClient, good: bytes) -> None:
    sent = run_asgi(client, URL, *body_then_disconnect(good))
    assert sent[0]["status"] == 499
    engine = shared_of(client).engine
    assert engine.admission.requests == 0
    assert client.post(URL, content=good).status_code == 200


def test_work_that_is_no_longer_awaited_ends_itself(client: TestClient) -> None:
    engine = shared_of(client).engine
    ends: list[BaseException] = []

    async def ask() -> None:
        loop = asyncio.get_running_loop()
        started, ended = asyncio.Event(), asyncio.Event()

        def work(go_on: Callable[[], None]) -> None:
            loop.call_soon_threadsafe(started.set)
            try:
                while True:
                    go_on()
            except BaseException as error:
                ends.append(error)
                raise
            finally:
                loop.call_soon_threadsafe(ended.set)

        with engine.admission.admit() as admitted:
            computing = engine.compute(
                work, admitted=admitted, memory=1, result_bytes=lambda _: 0, timeout_s=60
            )
            task = asyncio.create_task(computing)
            await started.wait()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await ended.wait()

    assert client.portal is not None
    client.portal.call(ask)
    assert [str(end) for end in ends] == ["expected somebody to wait for the answer, got nobody"]


def test_key_is_required(tmp_path: Path) -> None:
    with running(toy_settings(tmp_path, api_keys=("0" * 64,))) as guarded:
        assert problem_of(guarded.post(URL, content=b"x")).code == "unauthorized"


GOOD = [
    npz(laid_out(make_output("none"), "last", "axis") | {"affine": OBLIQUE}),
    safetensors(laid_out(make_output("sigmoid"), "last", "axis"), torch.bfloat16),
]


@given(
    content=st.sampled_from(GOOD),
    end=st.one_of(st.none(), st.integers(0, 8000)),
    flips=st.lists(st.tuples(st.integers(-600, 600), st.integers(1, 255)), max_size=3),
    form=st.sampled_from(["json", "rows.csv", "nii.gz"]),
)
@settings(max_examples=150)
def test_damaged_archives_never_cause_an_internal_error(
    content: bytes, end: int | None, flips: list[tuple[int, int]], form: str, client: TestClient
) -> None:
    damaged = bytearray(content[:end])
    for place, bits in flips if damaged else []:
        damaged[place % len(damaged)] ^= bits
    response = client.post(URL, content=bytes(damaged), params={"format": form})
    assert response.status_code in {200, 400, 413, 422}, response.text
