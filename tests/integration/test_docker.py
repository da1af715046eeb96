"""The image and docker-compose.yml in a real engine; ``make docker-test`` builds and runs this."""

import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest

from app.cli.client import Client
from app.io.schemas import LandmarksAnswer, Problem
from app.phantom import make_phantom, scan_bytes
from tests.support.containers import IMAGE, ServiceContainer, compose, docker
from tests.support.documents import DOCS, read
from tests.support.model_folders import make_program_folder
from tests.support.nifti_files import nifti
from tests.support.services import RAW

pytestmark = [pytest.mark.docker, pytest.mark.timeout(1800)]

SEED = 6
"""Of a phantom without its ring."""

NEAR_MM = 2.0
"""One voxel of the model."""

LIMIT = 2 << 30
PROCESSES = 4096
USER = "10001"

CGROUP = "/sys/fs/cgroup"
MEMORY_LIMIT = (f"{CGROUP}/memory.max", f"{CGROUP}/memory/memory.limit_in_bytes")
PROCESS_LIMIT = (f"{CGROUP}/pids.max", f"{CGROUP}/pids/pids.max")
MEMORY_EVENTS = (f"{CGROUP}/memory.events", f"{CGROUP}/memory/memory.oom_control")
"""Of a container, by version of Linux's control groups."""

REFUSALS = {413, 422, 429, 503, 504, 507}
"""Statuses that docs/http.md gives to scans that are too large, or for which there is no time."""


@pytest.fixture(scope="module")
def service() -> Iterator[ServiceContainer]:
    with ServiceContainer(MEMORY_LIMIT=str(LIMIT)) as container:
        yield container


def scan_of(side: int, spacing_mm: float, *, noise: bool = False) -> bytes:
    """Make a cube of noise, or of zeros, of which gzip makes some 200 bytes."""
    shape = (side, side, side)
    voxels = np.random.default_rng(7).integers(0, 255 if noise else 1, shape, np.uint8)
    turn = np.diag([spacing_mm, spacing_mm, spacing_mm, 1.0])
    fields = {f"srow_{axis}": turn[index] for index, axis in enumerate("xyz")}
    return nifti(voxels, zipped=not noise, **fields)


def assert_answers_right(service: ServiceContainer) -> None:
    phantom = make_phantom(SEED)
    with Client(service.url) as client:
        answer = client.detect(scan_bytes(phantom), model="phantom")
    truth = dict(zip(phantom.names, phantom.points, strict=True))
    assert {landmark.name for landmark in answer.landmarks} == set(truth)
    for landmark in answer.landmarks:
        true = truth[landmark.name]
        assert (landmark.ras_mm is None) == bool(np.isnan(true).any()), landmark.name
        if landmark.ras_mm is not None:
            assert np.linalg.norm(np.asarray(landmark.ras_mm) - true) < NEAR_MM, landmark.name


def test_compose_accepts_the_files_with_all_their_services(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GRAFANA_PASSWORD", "chosen")
    compose("--profile", "gpu", "config", "--quiet")
    files = ["--file", "docker-compose.yml", "--file", "deploy/monitoring/compose.yml"]
    compose(*files, "--profile", "gpu", "config", "--quiet")


def test_compose_builds_both_images_with_the_torch_of_the_index_that_is_named() -> None:
    index = "https://example.org/older-cuda"
    config = compose("--profile", "gpu", "config", TORCH_INDEX=index)
    assert config.count(f"TORCH_INDEX: {index}") == 2


def test_phantom_is_answered_right_through_the_published_port(service: ServiceContainer) -> None:
    assert_answers_right(service)


def test_nothing_but_tmp_can_be_written_not_even_by_root(service: ServiceContainer) -> None:
    for folder in ("/", "/etc", "/opt/venv", "/srv/code", "/srv/landmarkd/models"):
        done = service.execute("touch", f"{folder}/written", user="0")
        assert "Read-only file system" in done.stderr, folder
    assert service.execute("sh", "-c", "touch /tmp/written").returncode == 0


def test_processes_have_no_privileges(service: ServiceContainer) -> None:
    statuses = service.execute("sh", "-c", "cat /proc/[0-9]*/status").stdout
    assert statuses.count("landmarkd") >= 1
    for field, expected in (
        ("Uid", "\t".join([USER] * 4)),
        ("Gid", "\t".join([USER] * 4)),
        ("CapBnd", "0" * 16),
        ("CapEff", "0" * 16),
        ("NoNewPrivs", "1"),
    ):
        assert set(re.findall(rf"^{field}:\t(.*)$", statuses, flags=re.MULTILINE)) == {expected}


def test_memory_and_processes_are_limited(service: ServiceContainer) -> None:
    assert int(service.read(*MEMORY_LIMIT)) == LIMIT
    assert int(service.read(*PROCESS_LIMIT)) == PROCESSES


def test_requests_may_take_half_of_the_memory_of_the_container(service: ServiceContainer) -> None:
    # 512 voxels of the model along each axis.
    response = post(service, scan_of(64, 15.9))
    assert response.status_code == 413
    problem = Problem.model_validate_json(response.content)
    # A quarter of that half is for bodies.
    assert f"at most {LIMIT // 2 * 3 // 4 >> 20} MiB of memory" in problem.detail


def test_start_compiles_no_loops(service: ServiceContainer) -> None:
    assert_answers_right(service)
    done = service.execute("sh", "-c", "diff --recursive --brief /srv/loops $NUMBA_CACHE_DIR")
    assert (done.returncode, done.stdout) == (0, "")


def test_image_is_as_large_as_documented_and_holds_no_tools(service: ServiceContainer) -> None:
    packages = service.execute("sh", "-c", "ls /opt/venv/lib/python3*/site-packages").stdout.split()
    assert "torch" in packages
    assert "pip" not in packages
    if "triton" in packages:
        pytest.skip("expected torch for CPUs; on CUDA, Triton needs a compiler")
    assert service.execute("sh", "-c", "command -v cc gcc clang").stdout == ""
    size = service.execute("du", "--total", "--bytes", "-s", "/opt/venv", "/srv").stdout.split()[-2]
    documented = re.search(r"\*\*(\d+) MB\*\*", read(DOCS / "deployment.md"))
    assert documented
    assert int(size) / 1e6 == pytest.approx(int(documented[1]), rel=0.05)


def test_onnx_model_that_is_mounted_can_be_served(tmp_path: Path) -> None:
    folder = make_program_folder(tmp_path)
    mounted = f"{folder}:/models/{folder.name}:ro"
    options = ["--rm", "--read-only", "--tmpfs=/tmp", "--volume", mounted]
    # It ends with 1 if the model is refused.
    docker("run", *options, IMAGE, "landmarkd", "check", f"/models/{folder.name}")


def post(service: ServiceContainer, scan: bytes, timeout_s: float = 60.0) -> httpx.Response:
    return httpx.post(
        f"{service.url}/v1/landmarks",
        params={"model": "phantom", "timeout_s": timeout_s},
        content=scan,
        headers=RAW,
        timeout=600,
    )


def test_memory_limit_holds_under_large_bodies_and_giant_grids(service: ServiceContainer) -> None:
    start = service.inspect("State.StartedAt")
    assert post(service, scan_of(300, 2.0, noise=True), 600).status_code == 200
    # Voxels of 600 mm span grids of gigabytes; those of 15.9 mm are refused by nothing but memory.
    giants = [scan_of(2, 600.0 + index) for index in range(24)]
    giants += [scan_of(22 + index, 15.9) for index in range(24)]
    assert max(map(len, giants)) < 400
    large = nifti(np.random.default_rng(7).normal(size=(300, 310, 320)).astype(np.float32))
    with ThreadPoolExecutor(24) as clients:
        for scans in (giants, [large] * 24):
            answers = list(clients.map(lambda scan: post(service, scan, 20), scans))
            assert {answer.status_code for answer in answers} <= {200} | REFUSALS
            assert_answers_right(service)
    assert service.inspect("State.StartedAt") == start
    assert service.inspect("State.OOMKilled") is False
    assert re.search(r"^oom_kill 0$", service.read(*MEMORY_EVENTS), flags=re.MULTILINE)


def test_jobs_and_cases_outlive_the_container_in_its_volume() -> None:
    kept = {"LANDMARKD_JOBS": "/data/jobs", "LANDMARKD_STORE": "/data/cases"}
    with ServiceContainer(**kept) as service:
        url = f"{service.url}/v1/jobs"
        sent = httpx.post(url, params={"model": "phantom"}, content=scan_of(30, 2.0), headers=RAW)
        assert sent.status_code == 202
        service.replace()
        assert [job["id"] for job in httpx.get(url).json()["jobs"]] == [sent.json()["id"]]
        assert service.execute("test", "-w", "/data/cases").returncode == 0


def test_sigterm_answers_what_is_in_flight_and_exits_0() -> None:
    with ServiceContainer() as service, Client(service.url):
        stopping = threading.Thread(target=service.stop)
        headers = RAW | {"Accept": "text/event-stream"}
        url, scan = f"{service.url}/v1/landmarks?model=phantom", scan_of(200, 2.0, noise=True)
        with httpx.stream("POST", url, content=scan, headers=headers, timeout=600) as response:
            lines = response.iter_lines()
            assert next(lines) == "event: progress"
            stopping.start()
            *_, event, data = (line for line in lines if line)
        stopping.join()
        assert event == "event: answer"
        assert LandmarksAnswer.model_validate_json(data.removeprefix("data: ")).landmarks
        assert service.inspect("State.ExitCode") == 0
