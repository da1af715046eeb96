"""Requests that web pages of other sites make a browser send."""

from pathlib import Path
from typing import Any

import pytest

from app.api.origin import host_name, make_origin_check
from app.settings import Settings
from tests.support.services import problem_of, running, toy_settings

KEY_HASH = "0" * 64
PUBLIC = {"host": "0.0.0.0"}  # noqa: S104 - of a setting
CROSS_SITE = {"Sec-Fetch-Site": "cross-site"}
LINK = CROSS_SITE | {"Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}


def allowed(settings: dict[str, Any], headers: dict[str, str], method: str = "GET") -> bool:
    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    check = make_origin_check(Settings(**settings))
    return check({"type": "http", "method": method, "headers": raw}) is None


@pytest.mark.parametrize(
    ("settings", "host", "expected"),
    [
        ({}, "localhost:8000", True),
        ({}, "127.0.0.1", True),
        ({}, "[::1]:8000", True),
        ({}, "LOCALHOST.:9", True),
        ({}, "evil.example:8000", False),
        ({}, "localhost.evil.example", False),
        ({}, "192.168.0.7:8000", False),
        ({"host": "127.0.0.2"}, "127.0.0.2:8000", True),
        ({"host": "::1"}, "[::1]", True),
        ({"allowed_hosts": "scans.example, other"}, "Scans.Example", True),
        ({"allowed_hosts": "scans.example"}, "evil.example", False),
        ({"allowed_hosts": "scans.example:8443, [fd00::7]:80"}, "scans.example:8443", True),
        ({"allowed_hosts": "scans.example:8443, [fd00::7]:80"}, "[fd00::7]:80", True),
        ({"allowed_hosts": "scans.example:8443"}, "evil.example:8443", False),
        ({"allowed_hosts": "*"}, "evil.example", True),
        ({"api_keys": KEY_HASH}, "evil.example", True),
        (PUBLIC, "evil.example", True),
        (PUBLIC | {"allowed_hosts": "scans.example"}, "evil.example", False),
        (PUBLIC | {"allowed_hosts": "scans.example"}, "scans.example", True),
    ],
)
def test_service_without_keys_answers_under_known_names_only(
    settings: dict[str, Any], host: str, expected: bool
) -> None:
    assert allowed(settings, {"Host": host}) is expected


@pytest.mark.parametrize(
    ("settings", "method", "headers", "expected"),
    [
        ({}, "POST", CROSS_SITE, False),
        ({}, "GET", CROSS_SITE, False),
        ({}, "GET", LINK, True),
        ({}, "POST", LINK, False),
        ({}, "GET", LINK | {"Sec-Fetch-Dest": "iframe"}, False),
        ({}, "POST", {"Sec-Fetch-Site": "same-origin"}, True),
        ({}, "POST", {}, True),
        ({}, "POST", {"Origin": "https://evil.example"}, False),
        ({}, "POST", {"Origin": "null"}, False),
        ({}, "POST", {"Origin": "http://localhost:8000"}, True),
        ({"allowed_hosts": "scans.example"}, "POST", {"Origin": "https://scans.example"}, True),
        ({"api_keys": KEY_HASH}, "POST", CROSS_SITE, True),
        ({"allowed_hosts": "*"}, "POST", CROSS_SITE, True),
        (PUBLIC, "POST", CROSS_SITE, True),
    ],
)
def test_service_without_keys_answers_no_page_of_another_site(
    settings: dict[str, Any], method: str, headers: dict[str, str], expected: bool
) -> None:
    assert allowed(settings, headers | {"Host": "localhost:8000"}, method) is expected


@pytest.mark.parametrize(
    ("host", "name"),
    [("", ""), ("a", "a"), ("A:1", "a"), ("[::1]", "[::1]"), ("[::1]:1", "[::1]"), ("a:", "a:")],
)
def test_port_is_no_part_of_a_host(host: str, name: str) -> None:
    assert host_name(host) == name


def test_refusal_is_a_problem_that_names_the_setting(tmp_path: Path) -> None:
    with running(toy_settings(tmp_path)) as client:
        for path in ("/", "/v1/models", "/livez"):
            problem = problem_of(client.get(path, headers={"Host": "evil.example"}))
            assert (problem.status, problem.code) == (403, "forbidden")
            assert "LANDMARKD_ALLOWED_HOSTS" in problem.detail
        assert problem_of(client.post("/v1/votes", headers=CROSS_SITE)).code == "forbidden"
        text = client.get("/metrics").text
    assert 'landmarkd_requests_total{code="forbidden",route="unmatched"} 4.0' in text
