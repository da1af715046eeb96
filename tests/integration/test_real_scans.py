"""Real scans through the real service and the models that are shipped."""

import gzip
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient
from httpx2 import Response

from app.geometry import transform
from app.inference.detector import Detection, Detector
from app.inference.load import load_checked
from app.io.slicer import read_landmarks
from app.io.volume import read_volume
from tests.support.dicom_files import PATIENT, SERIES, as_dicom, zipped
from tests.support.required import needs_reports
from tests.support.scan_files import as_metaimage, as_mgh, as_nifti, as_nrrd
from tests.support.services import RAW, running, toy_settings
from tests.support.skulls import SKULLS, stored_in_all_orders
from tests.support.structured_reports import read_report, references

MODELS = Path(__file__).resolve().parents[2] / "models"

MEAN_ERROR_MM = 0.25
AXIS_ORDER_MM = 0.02
SAME_MM = 1e-3
LIVE_S = 0.1
"""A liveness probe answers within this time, whatever the device does."""


@pytest.fixture(scope="module")
def skulls(data_dir: Path) -> Path:
    return data_dir / "mouse-skull"


@pytest.fixture(scope="module")
def service() -> Iterator[TestClient]:
    with running(toy_settings(MODELS, threads=0)) as client:
        yield client


@pytest.fixture(scope="module")
def detector() -> Detector:
    return Detector(load_checked(MODELS / "mouse-skull", torch.device("cpu")))


def points_of(detection: Detection) -> dict[str, np.ndarray]:
    return {mark.name: mark.ras_mm for mark in detection.landmarks if mark.ras_mm is not None}


def post(service: TestClient, content: bytes, **query: Any) -> dict[str, Any]:
    query.setdefault("model", "mouse-skull")
    response = service.post("/v1/landmarks", content=content, params=query, headers=RAW)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def without_identity(answer: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in answer.items() if key not in ("request_id", "timing_ms")}


def test_skulls_are_found_within_the_stated_error(service: TestClient, skulls: Path) -> None:
    errors = []
    for name in SKULLS:
        answer = post(service, (skulls / "scans" / f"{name}.nii.gz").read_bytes())
        truth = read_landmarks(skulls / "landmarks" / f"{name}.mrk.json")
        found = {mark["name"]: mark["ras_mm"] for mark in answer["landmarks"] if mark["ras_mm"]}
        assert len(found) >= 0.9 * len(truth)
        errors += [np.linalg.norm(np.subtract(found[key], truth[key])) for key in found]
    assert np.mean(errors) <= MEAN_ERROR_MM


def test_raw_multipart_gzipped_and_plain_uploads_give_the_same_answer(
    service: TestClient, skulls: Path
) -> None:
    zipped = (skulls / "scans" / f"{SKULLS[0]}.nii.gz").read_bytes()
    plain = gzip.decompress(zipped)
    expected = without_identity(post(service, zipped))
    assert without_identity(post(service, plain)) == expected
    for content in (zipped, plain):
        response = service.post(
            "/v1/landmarks", files={"volume": ("x", content)}, params={"model": "mouse-skull"}
        )
        assert without_identity(response.json()) == expected


def test_frames_of_an_answer_agree_through_the_echoed_affine(
    service: TestClient, skulls: Path
) -> None:
    answer = post(service, (skulls / "scans" / f"{SKULLS[1]}.nii.gz").read_bytes())
    affine = np.array(answer["volume"]["affine"])
    for mark in answer["landmarks"]:
        if mark["ijk"] is not None:
            ras = transform(affine, np.array(mark["ijk"]))
            np.testing.assert_allclose(mark["ras_mm"], ras, atol=1e-4)
            np.testing.assert_allclose(mark["lps_mm"], ras * [-1, -1, 1], atol=1e-4)


def test_all_48_axis_orders_of_a_scan_give_the_same_millimetres(
    detector: Detector, skulls: Path
) -> None:
    volume = read_volume((skulls / "scans" / f"{SKULLS[2]}.nii.gz").read_bytes())
    expected = points_of(detector.detect(volume))
    orders = list(stored_in_all_orders(volume))
    assert len(orders) == 48
    for order in orders:
        found = points_of(detector.detect(order))
        assert found.keys() == expected.keys()
        for name, point in found.items():
            assert np.linalg.norm(point - expected[name]) <= AXIS_ORDER_MM


@pytest.fixture(scope="module")
def odd_answers(service: TestClient, data_dir: Path) -> dict[tuple[str, str], Response]:
    """Post every odd file to every model."""
    files = sorted(path for path in (data_dir / "uploads").iterdir() if path.suffix != ".md")
    return {
        (path.name, model): service.post(
            "/v1/landmarks", content=path.read_bytes(), params={"model": model}, headers=RAW
        )
        for path in files
        for model in ("phantom", "mouse-skull")
    }


def test_no_odd_file_makes_the_service_fail(
    odd_answers: dict[tuple[str, str], Response],
) -> None:
    assert len(odd_answers) >= 40
    for name, response in odd_answers.items():
        assert response.status_code < 500, (name, response.text)
        if response.status_code != 200:
            detail = response.json()["detail"]
            assert "expected" in detail, (name, detail)
            assert "got" in detail, (name, detail)


def test_no_odd_file_is_taken_for_a_skull(odd_answers: dict[tuple[str, str], Response]) -> None:
    answered = 0
    for (_, model), response in odd_answers.items():
        if model == "mouse-skull" and response.status_code == 200:
            answered += 1
            landmarks = response.json()["landmarks"]
            detected = [mark for mark in landmarks if mark["status"] == "detected"]
            assert len(detected) <= 0.05 * len(landmarks)
    assert answered >= 1


@pytest.mark.slow
def test_service_stays_alive_while_a_300_cubed_scan_is_answered(
    service: TestClient, skulls: Path
) -> None:
    small = read_volume((skulls / "scans" / f"{SKULLS[0]}.nii.gz").read_bytes())
    voxels = np.zeros((300, 310, 290), dtype=np.int16)
    a, b, c = small.voxels.shape
    voxels[:a, :b, :c] = small.voxels
    content = nib.Nifti1Image(voxels, small.affine).to_bytes()
    answers: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: answers.append(post(service, content)))
    thread.start()
    slowest = 0.0
    while thread.is_alive():
        start = time.perf_counter()
        assert service.get("/livez").status_code == 200
        slowest = max(slowest, time.perf_counter() - start)
        thread.join(0.05)
    assert slowest < LIVE_S
    assert len(answers[0]["landmarks"]) == 45


def test_a_skull_has_the_same_landmarks_in_every_format(detector: Detector, skulls: Path) -> None:
    volume = read_volume((skulls / "scans" / f"{SKULLS[0]}.nii.gz").read_bytes())
    # DICOM stores integers only.
    voxels = np.rint(volume.voxels).astype(np.int16)
    expected = points_of(detector.detect(read_volume(as_nifti(voxels, volume.affine))))
    assert expected
    for content in (
        as_nrrd(voxels, volume.affine, encoding="gzip"),
        as_metaimage(voxels, volume.affine, zipped=True),
        as_mgh(voxels, volume.affine, zipped=True),
        zipped(as_dicom(voxels, volume.affine)[::-1]),
    ):
        found = points_of(detector.detect(read_volume(content)))
        assert found.keys() == expected.keys()
        for name, point in found.items():
            assert np.linalg.norm(point - expected[name]) <= SAME_MM, name


@needs_reports
def test_a_skull_as_a_series_is_answered_by_a_report_on_its_images(
    service: TestClient, skulls: Path
) -> None:
    volume = read_volume((skulls / "scans" / f"{SKULLS[0]}.nii.gz").read_bytes())
    voxels = np.rint(volume.voxels).astype(np.int16)
    content = zipped(as_dicom(voxels, volume.affine)[::-1])
    query = {"model": "mouse-skull", "format": "dcm"}
    response = service.post("/v1/landmarks", content=content, params=query, headers=RAW)
    assert response.status_code == 200, response.text
    dataset, groups = read_report(response.content)
    expected = post(service, content)["landmarks"]
    assert len(groups) > len(expected)  # measurements, too
    for mark in expected:
        point = groups[mark["name"]].point
        assert (point is None) == (mark["lps_mm"] is None)
        if point is not None:
            assert np.linalg.norm(np.subtract(point, mark["lps_mm"])) <= SAME_MM, mark["name"]
    assert len(references(dataset)) == voxels.shape[2]
    assert PATIENT.encode() not in response.content


def test_a_skull_as_series_with_a_gap_a_tilt_and_a_second_one_is_refused_or_answered_rightly(
    service: TestClient, skulls: Path
) -> None:
    volume = read_volume((skulls / "scans" / f"{SKULLS[0]}.nii.gz").read_bytes())
    voxels = np.rint(volume.voxels).astype(np.int16)
    images = as_dicom(voxels, volume.affine)
    url, query = "/v1/landmarks", {"model": "mouse-skull"}
    gap = service.post(url, content=zipped(images[:40] + images[41:]), params=query, headers=RAW)
    assert (gap.status_code, gap.json()["code"]) == (422, "bad-geometry")
    assert "is one missing?" in gap.json()["detail"]
    scout = as_dicom(voxels[:, :, :3], volume.affine, SeriesInstanceUID=f"{SERIES}.9")
    both = zipped([*scout, *images[::-1]])
    asked = service.post(url, content=both, params=query, headers=RAW)
    assert asked.status_code == 422
    assert f'series 0: "{PATIENT}", {voxels.shape[2]} images' in asked.json()["detail"]
    chosen = post(service, both, series=0)["landmarks"]
    assert [mark["lps_mm"] for mark in chosen] == [
        mark["lps_mm"] for mark in post(service, zipped(images))["landmarks"]
    ]
    # The gantry's tilt shifts each image along the one before.
    tilted = volume.affine.copy()
    tilted[:3, 2] += 0.1 * tilted[:3, 1]
    expected = post(service, as_nifti(voxels, tilted))["landmarks"]
    for mark, same in zip(
        post(service, zipped(as_dicom(voxels, tilted)))["landmarks"], expected, strict=True
    ):
        assert mark["status"] == same["status"]
        if mark["lps_mm"] is not None:
            assert np.linalg.norm(np.subtract(mark["lps_mm"], same["lps_mm"])) <= SAME_MM
