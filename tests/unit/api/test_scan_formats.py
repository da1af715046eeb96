"""``POST /v1/landmarks`` with every format of scans, above all with DICOM."""

import asyncio
import io
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient

from app.engine.engine import Engine
from app.engine.fair_budget import FairBudget, Reservation
from app.engine.metrics import Metrics
from tests.support.dicom_files import PATIENT, as_dicom, as_enhanced, zipped
from tests.support.required import needs_reports
from tests.support.scan_files import as_metaimage, as_mgh, as_nifti, as_nrrd
from tests.support.services import SHAPE, running, shared_of, toy_models, toy_settings
from tests.support.structured_reports import read_report

URL = "/v1/landmarks"
NEAR_MM = 1e-3
AFFINE = np.diag([1.0, 1.25, 0.8, 1.0])
VOXELS = np.random.default_rng(7).normal(100.0, 20.0, SHAPE).astype(np.int16)
SERIES = zipped(as_dicom(VOXELS, AFFINE))
SCOUT = as_dicom(VOXELS[:, :, :2], AFFINE, SeriesInstanceUID="1.2")
FILES = {
    "application/nifti": as_nifti(VOXELS, AFFINE),
    "application/x-nrrd": as_nrrd(VOXELS, AFFINE, encoding="gzip"),
    "application/x-metaimage": as_metaimage(VOXELS, AFFINE, zipped=True),
    "application/x-mgh": as_mgh(VOXELS, AFFINE, zipped=True),
    "application/zip": SERIES,
    "application/dicom": as_enhanced(VOXELS, AFFINE),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_models(tmp_path_factory.mktemp("formats"))


@pytest.fixture(scope="module")
def client(models: Path) -> Iterator[TestClient]:
    with running(toy_settings(models, max_inflated_bytes=1 << 20)) as client:
        yield client


def points_of(answer: dict[str, Any]) -> np.ndarray:
    return np.array([mark["ras_mm"] or [np.nan] * 3 for mark in answer["landmarks"]])


@pytest.mark.parametrize("media_type", FILES)
def test_a_scan_has_the_same_landmarks_in_every_format(client: TestClient, media_type: str) -> None:
    expected = client.post(URL, content=FILES["application/nifti"]).json()
    response = client.post(URL, content=FILES[media_type], headers={"Content-Type": media_type})
    assert response.status_code == 200, response.text
    answer = response.json()
    assert np.isfinite(points_of(answer)).any()
    np.testing.assert_allclose(points_of(answer), points_of(expected), atol=NEAR_MM)
    assert answer["volume"]["shape"] == expected["volume"]["shape"]


def test_a_series_is_chosen_by_its_number(client: TestClient) -> None:
    content = zipped([*SCOUT, *as_dicom(VOXELS, AFFINE)])
    problem = client.post(URL, content=content).json()
    assert problem["code"] == "bad-geometry"
    size, called = "20 x 18 of 1 x 1.25 mm, axial every 0.8 mm", f'"{PATIENT}"'
    assert f"series 0: {called}, 24 images, CT, {size}; series 1: {called}, 2" in problem["detail"]
    for field in ({"content": content}, {"files": {"volume": content}}):
        answer = client.post(URL, params={"series": 0}, **field)
        assert answer.status_code == 200, answer.text
        assert answer.json()["volume"]["shape"] == list(SHAPE)
    refused = client.post(URL, content=FILES["application/nifti"], params={"series": 1})
    assert refused.json()["detail"] == "expected series from 0 to 0, got 1"


@needs_reports
@pytest.mark.parametrize("media_type", ["application/zip", "application/dicom"])
@pytest.mark.parametrize(
    "asked", [{"params": {"format": "dcm"}}, {"headers": {"Accept": "application/dicom"}}]
)
def test_a_series_is_answered_by_a_report_in_its_frame_of_reference(
    client: TestClient, media_type: str, asked: dict[str, Any]
) -> None:
    content = FILES[media_type]
    response = client.post(URL, content=content, **asked)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/dicom"
    assert "total" in response.headers["server-timing"]
    dataset, groups = read_report(response.content)
    answer = client.post(URL, content=content).json()
    assert [group.point is not None for group in groups.values()] == [
        mark["lps_mm"] is not None for mark in answer["landmarks"]
    ]
    for mark in filter(lambda mark: mark["lps_mm"], answer["landmarks"]):
        offset = np.subtract(groups[mark["name"]].point or np.nan, mark["lps_mm"])
        assert np.abs(offset).max() <= NEAR_MM
    assert not dataset.PatientName
    assert PATIENT.encode() not in response.content
    assert shared_of(client).engine.memory.used == 0


@needs_reports
def test_a_report_holds_no_memory_while_its_scan_waits_for_its_own(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scan may take more than one client's share, but only for a client that holds nothing."""
    memory, held = shared_of(client).engine.memory, []

    async def note(amount: int, *where: Any) -> Reservation:
        held.append(memory.used)
        return await FairBudget.reserve(memory, amount, *where)

    monkeypatch.setattr(memory, "reserve", note)
    assert client.post(URL, content=SERIES, params={"format": "dcm"}).status_code == 200
    assert len(held) > 2
    assert not any(held)


@needs_reports
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (FILES["application/nifti"], "a scan that came as DICOM"),
        (zipped(as_dicom(VOXELS, AFFINE, FrameOfReferenceUID=None)), "frame of reference"),
    ],
)
def test_a_report_that_cannot_refer_to_images_is_refused_before_the_network_runs(
    client: TestClient, content: bytes, said: str
) -> None:
    def runs() -> str:
        lines = client.get("/metrics").text.splitlines()
        return next(line for line in lines if line.startswith("landmarkd_tiles_total"))

    before = runs()
    response = client.post(URL, content=content, params={"format": "dcm"})
    assert response.status_code == 406
    assert response.json()["code"] == "unknown-format"
    assert said in response.json()["detail"]
    assert runs() == before


@needs_reports
def test_events_and_jobs_are_no_reports(client: TestClient) -> None:
    headers = {"Accept": "text/event-stream"}
    response = client.post(URL, content=SERIES, params={"format": "dcm"}, headers=headers)
    assert response.status_code == 406
    assert "expected format one of json, mrk.json" in response.json()["detail"]
    response = client.post(
        URL, content=SERIES, params={"format": "dcm"}, headers={"Prefer": "respond-async"}
    )
    assert response.status_code == 200


def test_an_archive_over_the_limit_is_refused_before_it_is_inflated(client: TestClient) -> None:
    response = client.post(URL, content=zipped([bytes(2 << 20)]))
    assert response.status_code == 413
    assert "LANDMARKD_MAX_INFLATED_BYTES" in response.json()["detail"]


def test_encryption_is_refused_while_the_archive_arrives(client: TestClient) -> None:
    content = bytearray(zipped([np.random.default_rng(1).bytes(100_000)], zipfile.ZIP_STORED))
    content[6] |= 1
    sent = 0

    def pieces() -> Iterator[bytes]:
        nonlocal sent
        for at in range(0, len(content), 1000):
            sent = at
            yield bytes(content[at : at + 1000])

    response = client.post(URL, content=pieces())
    assert response.status_code == 400
    assert "an encrypted one" in response.json()["detail"]


def test_a_series_that_cannot_be_answered_in_time_is_refused(client: TestClient) -> None:
    client.post(URL, content=SERIES)
    response = client.post(URL, content=SERIES, params={"timeout_s": 1e-4})
    assert response.status_code == 504


def test_dicom_is_refused_at_once_where_memory_is_too_small_to_look_for_its_scan(
    models: Path,
) -> None:
    with running(toy_settings(models, memory=32 << 20)) as client:
        response = client.post(URL, content=SERIES)
    assert response.status_code == 413
    assert "at most 24 MiB of memory, got one that takes 48 MiB" in response.json()["detail"]


def test_a_series_that_is_packed_otherwise_is_the_same_scan(models: Path) -> None:
    other = io.BytesIO()
    with zipfile.ZipFile(other, "w", zipfile.ZIP_STORED) as archive:
        for number, file in enumerate(reversed(as_dicom(VOXELS, AFFINE))):
            archive.writestr(f"{number}", file)

    async def scenario() -> None:
        engine = Engine(toy_settings(models), Metrics())
        await engine.start()
        model = engine.registry.get()
        answers = await asyncio.gather(
            *(
                engine.detect(content, model, timeout_s=30)
                for content in (SERIES, other.getvalue(), SERIES)
            )
        )
        digests = {answer.volume.digest for answer in answers}
        assert len(digests) == 1
        assert engine.memory.used == 0
        await engine.stop()

    asyncio.run(scenario())
