"""``POST /v1/landmarks``, with the real engine."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient

from app.api.dependencies import WARNINGS_BYTES, warnings_header
from app.api.upload.kinds import CURL_TYPE
from app.io import FORMATS
from app.io.schemas import LandmarksAnswer, ModelInfo
from tests.support.dicom_files import as_dicom, zipped
from tests.support.model_folders import make_program_folder
from tests.support.services import (
    MODEL,
    RAW,
    SHAPE,
    Response,
    body_then_disconnect,
    run_asgi,
    running,
    shared_of,
    toy_models,
    toy_scan,
    toy_settings,
    until,
)

LIMIT = 1 << 20
URL = "/v1/landmarks"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_models(tmp_path_factory.mktemp("routes"))


@pytest.fixture(scope="module")
def client(models: Path) -> Iterator[TestClient]:
    with running(toy_settings(models, max_body_bytes=LIMIT, max_in_flight=2)) as client:
        yield client


@pytest.fixture(scope="module")
def scan() -> bytes:
    return toy_scan()


def stable(content: bytes) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(content)
    return {key: value for key, value in answer.items() if key not in ("request_id", "timing_ms")}


def test_raw_upload_is_answered_with_landmarks(client: TestClient, scan: bytes) -> None:
    response = client.post(URL, content=scan, headers=RAW)
    assert response.status_code == 200, response.text
    answer = LandmarksAnswer.model_validate_json(response.content)
    assert answer.model.name == MODEL
    assert answer.volume.shape == SHAPE
    assert answer.volume.spacing_mm == pytest.approx((1.0, 1.25, 0.8))
    assert answer.request_id == response.headers["x-request-id"]
    assert all(landmark.candidates is None for landmark in answer.landmarks)


def test_answer_names_every_landmark_in_the_manifests_order(
    client: TestClient, scan: bytes
) -> None:
    info = ModelInfo.model_validate_json(client.get(f"/v1/models/{MODEL}").content)
    answer = LandmarksAnswer.model_validate_json(client.post(URL, content=scan).content)
    assert [item.name for item in answer.landmarks] == [item.name for item in info.landmarks]


def test_framing_of_the_upload_does_not_change_the_answer(client: TestClient, scan: bytes) -> None:
    zipped = gzip.compress(scan)

    raw = client.post(URL, content=scan, headers=RAW)
    others = [
        client.post(URL, content=zipped, headers={"Content-Type": "application/gzip"}),
        client.post(URL, content=zipped, headers=RAW | {"Content-Encoding": "gzip"}),
        client.post(URL, content=iter([scan[:7], scan[7:]]), headers=RAW),
        client.post(URL, content=scan),
        client.post(URL, content=scan, headers={"Content-Type": CURL_TYPE}),
        client.post(URL, content=scan, headers={"Content-Type": "", "Content-Encoding": " "}),
        client.post(URL, files={"volume": ("patient name.nii", scan)}),
        client.post(URL, files={"volume": ("patient name.nii.gz", zipped, "application/gzip")}),
    ]
    assert raw.status_code == 200
    for other in others:
        assert stable(other.content) == stable(raw.content)


def test_stage_times_are_in_the_answer_and_the_header(client: TestClient, scan: bytes) -> None:
    response = client.post(URL, content=scan, headers=RAW)
    timing = LandmarksAnswer.model_validate_json(response.content).timing_ms.model_dump()
    header = dict(part.split(";dur=") for part in response.headers["server-timing"].split(", "))
    assert list(header) == list(timing)
    assert {name: float(ms) for name, ms in header.items()} == pytest.approx(timing, abs=1e-3)
    assert timing["total"] >= timing["receive"] + timing["decode"]


def test_candidates_are_listed_when_requested(client: TestClient, scan: bytes) -> None:
    content = client.post(URL, content=scan, headers=RAW, params={"candidates": "true"}).content
    answer = LandmarksAnswer.model_validate_json(content)
    assert all(landmark.candidates is not None for landmark in answer.landmarks)


@pytest.mark.parametrize(
    ("params", "accept", "media_type"),
    [
        ({}, (), "application/json"),
        ({}, ("*/*",), "application/json"),
        ({}, ("text/html, application/*;q=0.8",), "application/json"),
        ({}, ("text/csv",), "text/csv; charset=utf-8"),
        ({}, ("text/html", "text/csv"), "text/csv; charset=utf-8"),
        ({}, ("application/json;q=0.1", "text/event-stream"), "text/event-stream; charset=utf-8"),
        ({"format": "mrk.json"}, ("text/csv",), "application/vnd.slicer.markups+json"),
        ({"format": "fcsv"}, (), "text/vnd.slicer.fcsv; charset=utf-8"),
    ],
)
def test_query_or_accept_chooses_the_format(
    params: dict[str, str],
    accept: tuple[str, ...],
    media_type: str,
    client: TestClient,
    scan: bytes,
) -> None:
    headers = [*RAW.items(), *(("Accept", line) for line in accept)]
    response = client.post(URL, content=scan, headers=headers, params=params)
    assert response.status_code == 200
    assert response.headers["content-type"] == media_type


@pytest.mark.parametrize("form", ["csv", "json"])
def test_event_has_a_file_as_a_string_unless_that_is_json(
    form: str, client: TestClient, scan: bytes
) -> None:
    headers = RAW | {"Accept": "text/event-stream"}
    plain, events = (
        client.post(URL, content=scan, headers=each, params={"format": form}).text
        for each in (RAW, headers)
    )
    answer = json.loads(events.rpartition("\ndata: ")[2])
    if form == "json":
        assert answer["landmarks"] == json.loads(plain)["landmarks"]
    else:
        assert answer == plain


@pytest.mark.parametrize("form", [*(form.name for form in FORMATS), "heatmaps", "job"])
def test_warnings_are_told_beside_an_answer_of_any_format(
    form: str, models: Path, tmp_path: Path
) -> None:
    odd = toy_scan()[:-4] + np.float32(np.nan).tobytes()
    all_told = []
    with running(toy_settings(models, jobs=tmp_path)) as client:
        for scan in (toy_scan(), odd):
            told = client.post(URL, content=scan, headers=RAW).json()["warnings"]
            response = _answer_as(form, scan, client)
            assert json.loads(response.headers["x-warnings"]) == told
            all_told.append(told)
    assert [len(told) for told in all_told] == [1, 2]  # Its network detects nothing.


def _answer_as(form: str, scan: bytes, client: TestClient) -> Response:
    """Ask for an answer in a format, for heatmaps, or for a CSV of a job."""
    if form == "job":
        path = client.post("/v1/jobs", content=scan, headers=RAW).headers["location"]
        until(lambda: client.get(path).json()["state"] == "finished")
        return client.get(f"{path}/scans/0", params={"format": "csv"})
    if form == "heatmaps":
        return client.post("/v1/heatmaps", content=scan, headers=RAW)
    return client.post(URL, content=scan, headers=RAW, params={"format": form})


@pytest.mark.parametrize("told", [["Größe: 5 µm, 6 mm", 'a "b"'], ["x" * 5000, "y"]])
def test_warnings_fit_a_header(told: list[str]) -> None:
    text = warnings_header(told)["X-Warnings"]
    assert text.isascii()
    assert len(text) <= WARNINGS_BYTES
    short = ["2 warnings too long for a header; landmarks in JSON have them"]
    assert json.loads(text) == (told if len(told[0]) < WARNINGS_BYTES else short)
    assert warnings_header([]) == {}


def test_safe_request_id_is_kept_and_others_are_replaced(client: TestClient) -> None:
    kept = client.get("/livez", headers={"X-Request-ID": "run-7.a_B"})
    assert kept.headers["x-request-id"] == "run-7.a_B"
    for odd in ("", "x" * 65, "a b", "<script>"):
        replaced = client.get("/livez", headers={"X-Request-ID": odd})
        assert replaced.headers["x-request-id"] not in ("", odd)


def test_work_is_cancelled_when_the_client_disconnects(client: TestClient, scan: bytes) -> None:
    sent = run_asgi(client, URL, *body_then_disconnect(scan))
    assert sent[0]["status"] == 499
    engine = shared_of(client).engine
    assert engine.admission.requests == 0
    assert 'landmarkd_requests_total{code="client-left",route="/v1/landmarks"}' in metrics(client)
    assert client.post(URL, content=scan).status_code == 200


def metrics(client: TestClient) -> str:
    text: str = client.get("/metrics").text
    return text


def test_log_line_of_a_request_contains_no_file_name(
    client: TestClient, scan: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "app.requests")
    client.post(f"{URL}?model={MODEL}", files={"volume": ("jane.nii", scan)})
    (line,) = [line for line in caplog.records if line.name == "app.requests"]
    said = vars(line)
    assert (said["route"], said["status"], said["code"]) == (URL, 200, "ok")
    assert (said["model"], said["bytes"], tuple(said["shape"])) == (MODEL, len(scan), SHAPE)
    assert "jane" not in str(said)


def test_description_of_a_series_is_told_to_its_sender_and_not_logged(
    client: TestClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    two = [*as_dicom(SeriesDescription="of Jane"), *as_dicom(SeriesInstanceUID="9.9")]
    response = client.post(f"{URL}?model={MODEL}", content=zipped(two), headers=RAW)
    assert '"of Jane", 4 images' in response.json()["detail"]
    assert any(line.name == "app.requests" for line in caplog.records)
    assert "Jane" not in str([vars(line) for line in caplog.records])


def test_docs_show_both_ways_to_upload_and_every_problem(client: TestClient) -> None:
    document = client.get("/openapi.json").json()
    post = document["paths"][URL]["post"]
    body = post["requestBody"]["content"]
    assert "volume" in body["multipart/form-data"]["schema"]["properties"]
    assert body["application/octet-stream"]["schema"]["format"] == "binary"
    problem = post["responses"]["default"]
    assert "application/problem+json" in problem["content"]
    for status in ("400", "413", "415", "422", "429", "503", "504"):
        assert f" {status} " in problem["description"]
    assert post["responses"]["200"]["content"]["application/json"]["example"]["landmarks"]
    assert client.get("/docs").status_code == 200


@pytest.mark.parametrize("allowed", [False, True])
def test_torchscript_is_served_only_if_the_setting_allows_it(tmp_path: Path, allowed: bool) -> None:
    make_program_folder(tmp_path, MODEL, script=True)
    with running(toy_settings(tmp_path, allow_torchscript=allowed)) as client:
        refusals = client.get("/readyz").json()["models"]
    assert ("LANDMARKD_ALLOW_TORCHSCRIPT" in refusals[MODEL]) is not allowed
