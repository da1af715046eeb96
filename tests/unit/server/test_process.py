"""What the service sets of uvicorn."""

import resource
from pathlib import Path

import pytest

from app.server.log_writer import LogWriter
from app.server.process import LandmarkdServer, allow_connections
from tests.support.services import toy_settings

PROXY_S = 60
"""For which nginx and other proxies keep an idle connection to a service."""


def test_idle_connections_are_kept_longer_than_by_a_proxy(tmp_path: Path) -> None:
    log = LogWriter()
    assert LandmarkdServer(toy_settings(tmp_path), log).config.timeout_keep_alive > PROXY_S
    log.close()


@pytest.mark.parametrize(
    ("limits", "raised", "connections"),
    [
        ((1024, 1 << 20), (4096, 1 << 20), 3072),
        ((256, resource.RLIM_INFINITY), (4096, resource.RLIM_INFINITY), 3072),
        ((1024, 2000), (2000, 2000), 1500),
        ((100, 100), None, 75),
        ((1 << 20, 1 << 20), None, 3072),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), None, 3072),
    ],
)
def test_usual_limit_of_open_files_is_none_of_connections(
    limits: tuple[int, int],
    raised: tuple[int, int] | None,
    connections: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: made.append(pair))
    assert allow_connections() == connections
    assert made == ([raised] if raised else [])
