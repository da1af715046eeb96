"""A service that is killed while it keeps cases: what it has confirmed is there, and whole."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from numpy.testing import assert_allclose

from app.io import read_landmarks, read_volume
from app.training.data.specimens import pair_files
from tests.support.scan_files import as_nifti
from tests.support.services import MODEL, RAW, SHAPE, ServiceProcess, toy_models

AFFINE = np.diag([1.0, 1.25, 0.8, 1.0])
ROUNDS = 4
CLIENTS = 2


def scan_of(number: int) -> bytes:
    return as_nifti(np.random.default_rng(number).normal(100, 20, SHAPE).astype(np.float32), AFFINE)


def test_killed_service_has_kept_what_it_confirmed_and_nothing_half(tmp_path: Path) -> None:
    store, confirmed = tmp_path / "store", set[str]()
    models = toy_models(tmp_path)
    for round_ in range(ROUNDS):
        service = ServiceProcess(models, STORE=str(store))
        folder = store / MODEL

        def go_on(first: int, service: ServiceProcess = service) -> None:
            with httpx.Client(base_url=service.url, timeout=60) as client:
                for number in range(first, first + 1000):
                    try:
                        confirmed.add(keep(client, scan_of(number)))
                    except httpx.TransportError:  # It is killed.
                        return

        with ThreadPoolExecutor(CLIENTS) as threads:
            going = [threads.submit(go_on, 1000 * (CLIENTS * round_ + n)) for n in range(CLIENTS)]
            for _ in range(3 + round_):
                service.wait_for(message="request", route="/v1/cases")
            service.kill()
            for one in going:
                one.result()
    service = ServiceProcess(models, STORE=str(store))
    try:
        listed = httpx.get(f"{service.url}/v1/cases", params={"model": MODEL}).json()
    finally:
        service.kill()
    ids = {case["id"] for case in listed["cases"]}
    assert confirmed <= ids
    assert {path.name for path in folder.rglob("*") if path.is_file()} == {
        name for each in ids for name in (f"{each}.nii.gz", f"{each}.mrk.json")
    }
    for files in pair_files(folder / "scans", folder / "landmarks"):
        assert read_volume(files.scan.read_bytes()).digest.startswith(files.name)
        assert_allclose(read_landmarks(files.landmarks)["1"], [2, 5, 8])


def keep(client: httpx.Client, scan: bytes) -> str:
    """Keep a scan with its first landmark corrected; return the case's id."""
    answer: dict[str, Any] = client.post("/v1/landmarks", content=scan, headers=RAW).json()
    at = {"ijk": [2, 4, 10], "ras_mm": [2, 5, 8], "lps_mm": [-2, -5, 8]}
    by_person = {"decided_by": "person", "status": "detected", "confidence": None}
    answer["landmarks"][0].update(at | by_person)
    form = {"volume": scan, "answer": json.dumps(answer).encode()}
    return str(client.post("/v1/cases", files=form).json()["id"])
