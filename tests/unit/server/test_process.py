"""What the service sets of uvicorn."""

from pathlib import Path

from app.server.log_writer import LogWriter
from app.server.process import LandmarkdServer
from tests.support.services import toy_settings

PROXY_S = 60
"""For which nginx and other proxies keep an idle connection to a service."""


def test_idle_connections_are_kept_longer_than_by_a_proxy(tmp_path: Path) -> None:
    log = LogWriter()
    assert LandmarkdServer(toy_settings(tmp_path), log).config.timeout_keep_alive > PROXY_S
    log.close()
