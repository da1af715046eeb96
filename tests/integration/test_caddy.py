"""Behind a real Caddy, set as docs/deployment.md has it, with its own authority's certificate."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import httpx
import pytest

from app.cli.client import Client, Unreachable
from tests.benchmarks.servers import free_port
from tests.support.faulty_network import command_scan, faulty_models
from tests.support.faulty_service import Faulty
from tests.support.services import ended, until

CADDY: Final = shutil.which("caddy")
DEPLOYMENT: Final = Path(__file__).resolve().parents[2] / "docs" / "deployment.md"
OPTIONS: Final = "{{\nadmin off\nauto_https disable_redirects\nstorage file_system {}\n"
OWN: Final = "skip_install_trust\nlocal_certs\n}}\n"

pytestmark = pytest.mark.skipif(CADDY is None, reason="needs Caddy")


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Serve both sites of the documentation; answers the address of each, and ``authority``."""
    assert CADDY is not None
    folder = tmp_path_factory.mktemp("caddy")
    (text,) = re.findall(r"```caddy\n(.*?)```", DEPLOYMENT.read_text(encoding="utf-8"), re.DOTALL)
    assert text.count("127.0.0.1:8000") == 2
    urls = {"authority": str(folder / "pki" / "authorities" / "local" / "root.crt")}
    for site in ("scans.example", "www.example"):
        urls[site] = f"https://localhost:{free_port()}"
        text = text.replace(f"{site} {{", f"{urls[site]} {{")
    with ended(Faulty(faulty_models(folder), JOBS=str(folder / "jobs"))) as service:
        text = text.replace("127.0.0.1:8000", f"127.0.0.1:{service.port}")
        settings = folder / "Caddyfile"
        settings.write_text((OPTIONS + OWN).format(folder) + text)
        run = [CADDY, "run", "--config", str(settings), "--adapter", "caddyfile"]
        process = subprocess.Popen(run, stderr=subprocess.DEVNULL)
        try:
            until(lambda: all(_answers(url) for url in urls.values() if url.startswith("https")))
            yield urls
        finally:
            process.terminate()
            process.wait(30)


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, verify=False).status_code < 400  # noqa: S501
    except httpx.TransportError:
        return False


@pytest.mark.parametrize("at", [("scans.example", ""), ("www.example", "/landmarks")])
def test_client_that_is_told_the_authority_sends_scans_and_jobs(
    sites: dict[str, str], at: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", sites["authority"])
    site, path = at
    with Client(sites[site] + path) as client:
        assert len(client.detect(command_scan()).landmarks) == 3
        job = client.wait(client.submit(command_scan()).id)
    assert job.scans[0].result is not None
    assert job.scans[0].result.startswith(f"{path}/v1/jobs/")


def test_page_is_found_without_the_slash_at_the_end_of_its_path(sites: dict[str, str]) -> None:
    url = f"{sites['www.example']}/landmarks"
    page = httpx.get(url, verify=False, follow_redirects=True)  # noqa: S501
    assert page.url.path == "/landmarks/"
    assert "<title>" in page.text


def test_client_that_does_not_know_the_authority_says_how_to_name_it(
    sites: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    with (
        Client(sites["scans.example"]) as client,
        pytest.raises(Unreachable, match=r"verify failed.*SSL_CERT_FILE"),
    ):
        client.readiness()
