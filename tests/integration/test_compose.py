"""The service with what docker-compose.yml and the image set, without a container."""

import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.support.documents import ROOT, read
from tests.support.services import RAW, ServiceProcess, problem_of, toy_models, toy_scan

COMPOSE = ROOT / "docker-compose.yml"
IMAGE = ROOT / "Dockerfile"
SCRAPED = ROOT / "deploy" / "monitoring" / "prometheus.yml"
HOSTS = "ALLOWED_HOSTS"
CROSS_SITE = {"Sec-Fetch-Site": "cross-site"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_models(tmp_path_factory.mktemp("compose"))


@contextmanager
def composed(models: Path, **environment: str) -> Iterator[ServiceProcess]:
    """Run the service as a container would, with what its user has in the environment."""
    (value,) = re.findall(rf'^ +LANDMARKD_{HOSTS}: "(.*)"$', read(COMPOSE), flags=re.MULTILINE)
    default = re.compile(rf"\$\{{LANDMARKD_{HOSTS}:-([^}}]*)\}}")
    hosts = default.sub(lambda found: environment.get(HOSTS) or found[1], value)
    (address,) = re.findall(r"LANDMARKD_HOST=(\S+)", read(IMAGE))
    service = ServiceProcess(models, HOST=address, **{HOSTS: hosts})
    try:
        yield service
    finally:
        service.kill()


def status(service: ServiceProcess, host: str, **headers: str) -> int:
    """Send a scan to a name; return the status."""
    url, scan = f"{service.url}/v1/landmarks", toy_scan()
    sent = RAW | {"Host": host} | headers
    return httpx.post(url, content=scan, headers=sent, timeout=60).status_code


def test_container_answers_its_own_machine_and_no_page_of_another_site(models: Path) -> None:
    with composed(models) as service:
        for host in ("127.0.0.1:8000", "localhost:8000", "[::1]:8000", "127.0.0.1:9", "landmarkd"):
            assert status(service, host) == 200, host
        for host in ("evil.example:8000", "192.168.0.7:8000", "localhost.evil.example"):
            assert status(service, host) == 403, host
        assert status(service, "localhost:8000", **CROSS_SITE) == 403
        refused = httpx.get(service.url, headers={"Host": "evil.example"})
        assert "LANDMARKD_ALLOWED_HOSTS" in problem_of(refused).detail


def test_container_is_found_healthy_and_scraped(models: Path) -> None:
    (command,) = re.findall(r"HEALTHCHECK .*\\\n +CMD (\[.*\])", read(IMAGE))
    (target,) = re.findall(r'targets: \["(.*)"\]', read(SCRAPED))
    with composed(models) as service:
        environment = {"LANDMARKD_PORT": str(service.port), "PATH": "/usr/bin:/usr/local/bin"}
        # Docker gives containers the proxy that its client is configured with.
        environment["http_proxy"] = "http://127.0.0.1:9"
        subprocess.run(json.loads(command), env=environment, check=True, timeout=30)
        scraped = httpx.get(f"{service.url}/metrics", headers={"Host": target})
        assert "landmarkd_ready 1.0" in scraped.text


def test_no_container_has_privileges() -> None:
    for file in (COMPOSE, SCRAPED.with_name("compose.yml")):
        text = read(file)
        containers = text.count("restart: unless-stopped")
        assert containers
        assert text.count("cap_drop: [ALL]") == containers
        assert text.count("no-new-privileges:true") == containers


def test_one_line_names_other_hosts_of_a_container(models: Path) -> None:
    with composed(models, **{HOSTS: "scans.example"}) as service:
        for host in ("scans.example", "localhost:8000", "landmarkd:8000"):
            assert status(service, host) == 200, host
        assert status(service, "evil.example") == 403
    with composed(models, **{HOSTS: "*"}) as service:
        assert status(service, "evil.example", **CROSS_SITE) == 200


def test_image_of_ray_has_what_kuberay_calls() -> None:
    step = re.compile(r"if \[ -e /opt/venv/bin/ray \];(.*?)\bfi\b", re.DOTALL)
    (installed,) = step.findall(read(IMAGE))
    assert re.search(r"apt-get install .*\bwget\b", installed)
    assert "ln -s /opt/venv/bin/ray /usr/local/bin/" in installed
