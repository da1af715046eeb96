"""A model is loaded again and again while its scans are answered."""

import hashlib
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from app.phantom import make_phantom, scan_bytes
from tests.support.services import RAW, ServiceProcess

PHANTOM = Path(__file__).resolve().parents[2] / "models" / "phantom"
KEY = "a key"
RELOADS = 20


@pytest.fixture
def service(tmp_path: Path) -> Iterator[ServiceProcess]:
    shutil.copytree(PHANTOM, tmp_path / "phantom")
    process = ServiceProcess(tmp_path, ADMIN_KEY_HASH=hashlib.sha256(KEY.encode()).hexdigest())
    yield process
    process.kill()


def test_twenty_reloads_at_once_are_few_loads_and_scans_go_on(service: ServiceProcess) -> None:
    scan = scan_bytes(make_phantom(1))
    with httpx.Client(base_url=service.url, timeout=120) as client:

        def reload() -> float:
            start = time.perf_counter()
            headers = {"Authorization": f"Bearer {KEY}"}
            answer = client.post("/v1/models/phantom/reload", headers=headers)
            assert answer.status_code == 200, answer.text
            return time.perf_counter() - start

        def ask() -> float:
            start = time.perf_counter()
            answer = client.post("/v1/landmarks", content=scan, headers=RAW)
            assert answer.status_code == 200, answer.text
            return time.perf_counter() - start

        ask()
        one_reload_s = reload()
        with ThreadPoolExecutor(RELOADS) as threads:
            reloads = [threads.submit(reload) for _ in range(RELOADS)]
            scans_s = [ask()]
            while not all(one.done() for one in reloads):
                scans_s.append(ask())
            for one in reloads:
                one.result()
    assert max(scans_s) < RELOADS / 2 * one_reload_s
    service.terminate()
    loads = 0
    while (line := service.next_line())["message"] != "draining":
        loads += line["message"] == "model loaded"
    # At the start, alone, the first of all at once, and those who shared the next one.
    assert loads <= 4 + RELOADS // 4, "expected reloads that wait to share one load"
