"""Probes and metrics."""

import asyncio
import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from app.errors import DeadlineExceeded
from app.settings import GIB, MIB
from tests.support.services import (
    MODEL,
    problem_of,
    running,
    shared_of,
    toy_models,
    toy_scan,
    toy_settings,
)

URL = "/v1/landmarks"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    with running(toy_settings(toy_models(tmp_path_factory.mktemp("health")))) as client:
        yield client


def test_probes_report_alive_and_ready(client: TestClient) -> None:
    assert client.get("/livez").json() == {"alive": True}
    response = client.get("/readyz")
    assert response.status_code == 200
    assert response.json()["models"] == {MODEL: "ready"}


def test_service_without_a_model_is_alive_but_not_ready(tmp_path: Path) -> None:
    with running(toy_settings(tmp_path)) as client:
        assert client.get("/livez").status_code == 200
        response = client.get("/readyz")
        assert response.status_code == 503
        assert response.json()["reason"]
        assert problem_of(client.post(URL, content=b"x")).code == "not-ready"


def test_metrics_count_requests_by_route_and_outcome(client: TestClient) -> None:
    client.post(URL, content=toy_scan())
    client.post(URL, content=b"")
    client.get("/patients/jane")
    text: str = client.get("/metrics").text
    assert 'landmarkd_requests_total{code="ok",route="/v1/landmarks"}' in text
    assert 'landmarkd_requests_total{code="not-a-volume",route="/v1/landmarks"}' in text
    assert 'landmarkd_requests_total{code="not-found",route="unmatched"}' in text
    assert 'landmarkd_stage_seconds_count{stage="network"}' in text
    assert "landmarkd_requests_in_flight 0.0" in text
    assert "jane" not in text


def test_metrics_tell_what_is_held_of_the_memory(tmp_path: Path) -> None:
    """Why scans are refused, or wait: nothing else tells an operator."""
    with running(toy_settings(toy_models(tmp_path), memory=400 << 20)) as client:
        engine, portal = shared_of(client).engine, client.portal
        assert portal is not None

        async def read_while_held() -> str:
            loop = asyncio.get_running_loop()
            with engine.admission.admit("anna") as request:
                request.count_bytes(7 << 20)
                async with engine.memory.hold(290 << 20, "anna", math.inf):
                    late = engine.memory.reserve(20 << 20, "bert", loop.time())
                    waiting = asyncio.create_task(late)
                    await asyncio.sleep(0)
                    text = shared_of(client).metrics.render().decode()
                    with pytest.raises(DeadlineExceeded):
                        await waiting
            return text

        text = portal.call(read_while_held)
    for line in (
        f'memory_bytes{{part="bodies"}} {7 << 20}',
        f'memory_bytes{{part="work"}} {290 << 20}',
        f'memory_limit_bytes{{part="bodies"}} {100 << 20}',
        f'memory_limit_bytes{{part="work"}} {300 << 20}',
        "memory_waiting 1",
    ):
        name, value = line.rsplit(" ", 1)
        (found,) = re.findall(rf"^landmarkd_{re.escape(name)} (.*)$", text, re.MULTILINE)
        assert float(found) == float(value), name


@pytest.mark.parametrize(
    ("limit", "told"),
    [({"max_body_bytes": GIB}, 75 * MIB), ({"max_body_bytes": MIB}, None), ({}, None)],
)
def test_a_body_limit_that_memory_does_not_allow_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, limit: dict[str, int], told: int | None
) -> None:
    """Only if an operator has set it: the default is cut without a word."""
    with running(toy_settings(toy_models(tmp_path), memory=400 * MIB, **limit)):
        pass
    lines = [line for line in caplog.records if line.message == "bodies are limited"]
    assert [getattr(line, "got", 0) for line in lines] == ([told] if told else [])
