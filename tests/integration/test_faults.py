"""A real service with a network that misbehaves: which requests fail, and how it recovers."""

import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support import faulty_network as commands
from tests.support.faulty_network import command_scan, faulty_models
from tests.support.faulty_service import TILES, Faulty, assert_same, code_of
from tests.support.model_folders import TILE
from tests.support.services import RAW, until


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return faulty_models(tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="module")
def service(models: Path) -> Iterator[Faulty]:
    process = Faulty(models)
    yield process
    process.kill()


@pytest.fixture
def fresh(models: Path) -> Iterator[Faulty]:
    process = Faulty(models)
    yield process
    process.kill()


@pytest.mark.parametrize("fault", [commands.RAISE, commands.NAN])
def test_one_bad_scan_fails_alone(service: Faulty, fault: float) -> None:
    with service.held() as blocker:
        good = [service.send(command_scan(seed=seed)) for seed in (1, 2)]
        bad = service.send(command_scan(fault))
        service.queued(3 * TILES)
    assert (bad.result().status_code, code_of(bad.result())) == (500, "network-failed")
    assert blocker.result().status_code == 200
    for seed, answer in zip((1, 2), good, strict=True):
        assert_same(answer.result(), service.ask(command_scan(seed=seed)))


def test_sharing_a_batch_changes_no_answer(service: Faulty) -> None:
    shapes = [(40, 30, 50), TILE, (20, 60, 41), (33, 25, 90), (31, 23, 39)]
    scans = [command_scan(seed=seed, shape=shape) for seed, shape in enumerate(shapes)]
    alone = [service.ask(scan) for scan in scans]
    with service.held():
        together = [service.send(scan) for scan in scans]
        until(lambda: service.metric("requests_in_flight") == 1 + len(scans))
        batches, tiles = service.metric("batch_tiles_count"), service.metric("batch_tiles_sum")
    for first, second in zip(alone, together, strict=True):
        assert_same(first, second.result())
    batches = service.metric("batch_tiles_count") - batches
    tiles = service.metric("batch_tiles_sum") - tiles
    assert tiles > 2 * batches, "expected shared batches"


def test_cancelled_request_leaves_its_batch_unharmed(service: Faulty) -> None:
    leaving = httpx.Client()
    before = service.metric("tiles_total")
    with service.held() as blocker, ThreadPoolExecutor(1) as thread:
        stay = [service.send(command_scan(seed=seed)) for seed in (1, 2)]
        url = f"{service.url}/v1/landmarks"
        headers = RAW | {"X-Request-ID": "leaves"}
        # A client that loses patience closes its connection.
        gone = thread.submit(
            leaving.post, url, content=command_scan(seed=3), headers=headers, timeout=5.0
        )
        service.queued(3 * TILES)
        assert isinstance(gone.exception(), httpx.ReadTimeout)
        leaving.close()
        assert service.wait_for(request_id="leaves")["code"] == "client-left"
    answers = [answer.result() for answer in stay]
    assert blocker.result().status_code == 200
    assert service.metric("tiles_total") - before == 1 + 2 * TILES
    assert service.metric('dropped_total{why="cancelled"}') == 1
    for seed, answer in zip((1, 2), answers, strict=True):
        assert_same(answer, service.ask(command_scan(seed=seed)))


def test_identical_scans_in_flight_run_once(service: Faulty) -> None:
    before = service.metric("tiles_total")
    with service.held():
        same = [service.send(command_scan(seed=5)) for _ in range(3)]
        until(lambda: service.metric("shared_total") >= 2)
    for answer in same:
        assert_same(answer.result(), same[0].result())
    assert service.metric("tiles_total") - before == 1 + TILES
    ids = {answer.result().json()["request_id"] for answer in same}
    assert len(ids) == len(same)


def test_late_request_gets_504_while_the_device_is_busy(service: Faulty) -> None:
    with service.held():
        url = "/v1/landmarks?timeout_s=0.5"
        late = service.client.post(url, content=command_scan(seed=6), headers=RAW)
        assert (late.status_code, code_of(late)) == (504, "deadline-exceeded")
        assert service.metric("queue_tiles") == service.metric("scans_preparing") == 0


def test_service_recovers_after_out_of_memory(models: Path, fresh: Faulty) -> None:
    scan = command_scan(commands.TOO_MANY)
    first = fresh.ask(scan)
    assert fresh.metric('batch_size{device="cpu"}') == commands.FITS
    assert fresh.metric('faults_total{kind="out-of-memory"}') == 1
    # The smaller size is remembered: nothing has to be run twice again.
    assert_same(first, fresh.ask(scan))
    assert fresh.metric('faults_total{kind="out-of-memory"}') == 1
    alone = Faulty(models, BATCH_SIZE="1")
    try:
        assert_same(first, alone.ask(scan))
    finally:
        alone.kill()


def test_tile_that_does_not_fit_gets_507_with_the_need_and_the_limit(fresh: Faulty) -> None:
    with fresh.held():
        good = fresh.send(command_scan(seed=2))
        large = fresh.send(command_scan(commands.TOO_LARGE, shape=TILE))
        fresh.queued(TILES + 1)
    answer = large.result()
    assert (answer.status_code, code_of(answer)) == (507, "does-not-fit")
    assert str(commands.IMPOSSIBLE_BYTES) in answer.json()["detail"]
    assert "GiB in all" in answer.json()["detail"]
    assert good.result().status_code == 200


def test_device_that_runs_out_three_times_in_a_row_is_checked_and_recovers(fresh: Faulty) -> None:
    for _ in range(3):
        answer = fresh.ask(command_scan(commands.TOO_LARGE, shape=TILE))
        assert answer.status_code == 507
    fresh.wait_for(message="device unhealthy")
    fresh.wait_for(message="device recovered")
    until(lambda: fresh.client.get("/readyz").status_code == 200)
    assert fresh.ask(command_scan()).status_code == 200


def test_device_that_fails_its_self_check_stays_out(fresh: Faulty) -> None:
    answers = [fresh.ask(command_scan(commands.BREAK, shape=TILE))]
    answers += [fresh.ask(command_scan(seed=seed, shape=TILE)) for seed in (1, 2)]
    assert [answer.status_code for answer in answers] == [507] * 3
    fresh.wait_for(message="device failed its self-check")
    until(lambda: fresh.client.get("/readyz").status_code == 503)
    assert "self-check" in fresh.client.get("/readyz").json()["reason"]
    assert code_of(fresh.ask(command_scan())) == "not-ready"
    fresh.terminate()
    assert fresh.wait() == 0


def test_dead_device_thread_fails_its_jobs_and_is_replaced(fresh: Faulty) -> None:
    with fresh.held() as blocker:
        waiting = [blocker, *(fresh.send(command_scan(seed=seed)) for seed in (1, 2))]
        deadly = fresh.send(command_scan(commands.DIE))
        fresh.queued(3 * TILES)
    assert code_of(deadly.result()) == "not-ready"
    # Whoever is being finished beside that thread is answered if it is soon enough.
    assert {answer.result().status_code for answer in waiting} <= {200, 503}
    fresh.wait_for(message="device recovered")
    until(lambda: fresh.client.get("/readyz").status_code == 200)
    assert fresh.ask(command_scan()).status_code == 200


def test_device_thread_that_cannot_be_replaced_ends_the_process(fresh: Faulty) -> None:
    assert code_of(fresh.ask(command_scan(commands.BREAK_AND_DIE))) == "not-ready"
    assert fresh.wait() == 1


def test_sigterm_answers_everything_accepted(fresh: Faulty) -> None:
    with fresh.held() as blocker:
        accepted = [fresh.send(command_scan(seed=seed)) for seed in range(6)]
        fresh.queued(6 * TILES)  # A request counts as in flight before its body is there.
        fresh.terminate()
        fresh.wait_for(message="draining")
        refused = fresh.ask(command_scan())
        assert (refused.status_code, code_of(refused)) == (503, "draining")
        assert fresh.client.get("/readyz").status_code == 503
    assert blocker.result().status_code == 200
    assert [answer.result().status_code for answer in accepted] == [200] * 6
    assert fresh.wait() == 0


def test_second_sigterm_tells_all_who_wait_to_try_elsewhere(fresh: Faulty) -> None:
    events = {"Accept": "text/event-stream"}
    with fresh.held() as blocker:
        waiting = [blocker, *(fresh.send(command_scan(seed=seed)) for seed in range(3))]
        stream = fresh.send(command_scan(seed=4), **events)
        fresh.queued(4 * TILES)
        fresh.terminate()
        fresh.wait_for(message="draining")
        fresh.terminate()
        answers = [answer.result() for answer in waiting]
        assert [(one.status_code, code_of(one)) for one in answers] == [(503, "not-ready")] * 4
        assert stream.result().text.splitlines()[-3] == "event: problem"
    assert fresh.wait() == 0


class StoppedWhileLoading(Faulty):
    """A service that is told to stop as soon as it listens, before its models are loaded."""

    def next_line(self) -> dict[str, Any]:
        """Wait for the next log line, and act on it."""
        line = super().next_line()
        if line["message"] == "listening":
            self.terminate()
        if line["message"] == "draining":
            self.gate.write_bytes(b"")
        return line


def test_sigterm_while_models_load_exits_0(tmp_path: Path) -> None:
    """The first of two models is being loaded; the other is refused by the stop."""
    models = faulty_models(tmp_path)
    shutil.copytree(models / "faulty", models / "other")
    manifest = models / "other" / "model.toml"
    manifest.write_text(manifest.read_text().replace('name = "faulty"', 'name = "other"'))
    process = StoppedWhileLoading(models, hold_loading=True)
    try:
        assert process.wait() == 0
    finally:
        process.kill()


class AskedWhileLoading(Faulty):
    """A service that is asked for a model as soon as it listens, before the model is loaded."""

    def next_line(self) -> dict[str, Any]:
        """Wait for the next log line, and act on it."""
        line = super().next_line()
        if line["message"] == "listening":
            self.early = httpx.get(f"{line['url']}v1/models/faulty")
            self.gate.write_bytes(b"")
        return line


def test_model_that_is_still_loaded_is_not_said_to_be_unknown(models: Path) -> None:
    process = AskedWhileLoading(models, hold_loading=True)
    try:
        assert (process.early.status_code, code_of(process.early)) == (503, "not-ready")
        assert process.client.get("/v1/models/faulty").status_code == 200
        assert process.client.get("/v1/models/other").status_code == 404
    finally:
        process.kill()


def cpu_ns(pid: int) -> int:
    """Add up the time that all threads of a process have run."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks)


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="reads /proc")
def test_idle_service_uses_no_cpu(service: Faulty) -> None:
    assert service.ask(command_scan()).status_code == 200
    measured_s, share = 4.0, 0.005
    start = cpu_ns(service.pid)
    time.sleep(measured_s)
    assert cpu_ns(service.pid) - start < share * measured_s * 1e9
