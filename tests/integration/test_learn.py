"""From the service to a better model and back: keep, learn, load, while scans are answered."""

import json
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import numpy as np
import pytest

from app.api.dependencies import hash_key
from app.phantom import Phantom, make_phantom, scan_bytes, write_phantoms
from tests.support.services import RAW, ServiceProcess
from tests.support.training_data import landmarkd
from tests.unit.training.test_learn import make_worse

PHANTOM = Path(__file__).resolve().parents[2] / "models" / "phantom"
KEY = "a key"
CASES = 15
SOON = """
from app.cli.main import main
from app.training.cli import learn
learn.WATCH_S = 0.5
main()
"""


def corrected(answer: dict[str, Any], phantom: Phantom) -> dict[str, Any]:
    """Correct an answer as a person would who knows the truth."""
    to_voxels = np.linalg.inv(phantom.volume.affine)
    truth = dict(zip(phantom.names, phantom.points, strict=True))
    unknown = ("confidence", "mass", "coherence", "spread_mm", "region95_mm", "disagreement_mm")
    for landmark in answer["landmarks"]:
        ras = truth[landmark["name"]]
        landmark.update(dict.fromkeys(unknown), decided_by="person", candidates=None)
        landmark.update(status="not_found", ijk=None, ras_mm=None, lps_mm=None)
        if np.isfinite(ras).all():
            ijk = (to_voxels @ [*ras, 1])[:3].tolist()
            lps = (ras * [-1, -1, 1]).tolist()
            landmark.update(status="detected", ijk=ijk, ras_mm=ras.tolist(), lps_mm=lps)
    return answer


def test_corrected_cases_make_a_better_model_that_the_service_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, store = tmp_path / "models" / "phantom", tmp_path / "store"
    shutil.copytree(PHANTOM, model)
    make_worse(model)
    monkeypatch.setenv("LANDMARKD_API_KEY", KEY)
    service = ServiceProcess(model.parent, STORE=str(store), ADMIN_KEY_HASH=hash_key(KEY))
    try:
        with httpx.Client(base_url=service.url, timeout=120) as client:

            def find(phantom: Phantom) -> dict[str, Any]:
                response = client.post("/v1/landmarks", content=scan_bytes(phantom), headers=RAW)
                assert response.status_code == 200, response.text
                answer: dict[str, Any] = response.json()
                return answer

            for seed in range(CASES):
                phantom = make_phantom(seed)
                answer = json.dumps(corrected(find(phantom), phantom))
                form = {"volume": scan_bytes(phantom), "answer": answer.encode()}
                assert client.post("/v1/cases", files=form).status_code == 201
            learned, seen = Event(), set()

            def go_on() -> None:
                while not learned.is_set():
                    seen.add(find(make_phantom(99))["model"]["version"])

            with ThreadPoolExecutor(1) as threads:
                going = threads.submit(go_on)
                words = ("--from", store / "phantom", "--steps", 40, "--rate", 1e-3)
                said = landmarkd("learn", model, *words, "--device", "cpu", "--url", service.url)
                learned.set()
                going.result()
            assert "version 1.1.1 is in place" in said
            assert seen <= {"1.1.0", "1.1.1"}
            assert find(make_phantom(99))["model"]["version"] == "1.1.1"
            landmarkd("learn", model, "--back", "--url", service.url)
            assert find(make_phantom(99))["model"]["version"] == "1.1.0"
    finally:
        service.kill()


def test_watched_store_is_learned_from_when_its_cases_change(tmp_path: Path) -> None:
    model, store = tmp_path / "models" / "phantom", tmp_path / "store" / "phantom"
    shutil.copytree(PHANTOM, model)
    write_phantoms(store, count=3, seed=0)
    words = ["learn", str(model), "--from", str(store), "--watch", "--steps", "1", "--rate", "0"]
    with subprocess.Popen(
        [sys.executable, "-u", "-c", SOON, *words, "--device", "cpu"],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            said = iter(process.stdout.readline, "")
            assert any("at least 5 cases" in line for line in said)
            write_phantoms(store, count=15, seed=0)
            assert any("version 1.1.0 stays" in line for line in said)
        finally:
            process.kill()
