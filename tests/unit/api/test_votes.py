"""POST /v1/votes: a network's output in, its votes, heatmaps and landmarks out."""

import csv
import gzip
import io
from collections.abc import Iterator

import nibabel as nib
import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient
from numpy.testing import assert_allclose
from numpy.typing import NDArray

from app.io.schemas import LandmarksAnswer
from tests.support import oracle
from tests.support.services import RAW, run_asgi, running, shared_of, toy_settings
from tests.support.vote_archives import (
    LANDMARKS,
    OBLIQUE,
    SAMPLE,
    SHAPE,
    Output,
    laid_out,
    make_output,
    npz,
    p1_rows,
    safetensors,
    spheres,
)

URL = "/v1/votes"
ROWS = {"format": "rows.npy", "threshold": "0.3", "sample_shape": "4,6,6"}
LIMIT = 1 << 20
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    """Run a service without models."""
    models = tmp_path_factory.mktemp("votes")
    changes = {"max_body_bytes": LIMIT, "max_inflated_bytes": 4 * LIMIT, "max_voxels": 1 << 18}
    with running(toy_settings(models, max_in_flight=2, max_axis=200, **changes)) as client:
        yield client


def packed(output: Output, channels: str, order: str, dtype: torch.dtype) -> bytes:
    arrays = laid_out(output, channels, order)
    if dtype is torch.bfloat16:
        return safetensors(arrays, dtype)
    return npz({name: torch.from_numpy(array).to(dtype).numpy() for name, array in arrays.items()})


def rows_of(client: TestClient, content: bytes, **params: str) -> NDArray[np.float32]:
    response = client.post(URL, content=content, params=ROWS | params)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-npy"
    rows: NDArray[np.float32] = np.load(io.BytesIO(response.content))
    return rows


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["none", "sigmoid", "softmax"])
@pytest.mark.parametrize("order", ["axis", "landmark"])
@pytest.mark.parametrize("channels", ["first", "last"])
def test_rows_are_those_of_p1_whatever_the_layout(
    channels: str, order: str, activation: str, dtype: torch.dtype, client: TestClient
) -> None:
    output = make_output(activation).rounded(dtype)
    content = packed(output, channels, order, dtype)
    rows = rows_of(client, content, channels=channels, order=order)
    expected = p1_rows(output, 0.3, SAMPLE)
    assert rows.shape == expected.shape
    exact = [0, 1, 2, 3, 4] if activation == "none" else [0, 2, 3, 4]
    assert np.array_equal(rows[:, exact], expected[:, exact])
    # Exponentials of two libraries may differ in the last bit.
    assert_allclose(rows[:, 1], expected[:, 1], rtol=1e-6)


@pytest.mark.parametrize("activation", ["none", "softmax"])
def test_safetensors_and_npz_give_the_same_rows(activation: str, client: TestClient) -> None:
    arrays = laid_out(make_output(activation), "last", "axis")
    files = (npz(arrays), npz(arrays, compressed=False), safetensors(arrays))
    tables = [rows_of(client, file) for file in files]
    assert np.array_equal(tables[0], tables[1])
    assert np.array_equal(tables[0], tables[2])


def test_layout_may_be_given_instead_of_inferred(client: TestClient) -> None:
    output = make_output("softmax")
    content = packed(output, "last", "axis", torch.float32)
    said = rows_of(client, content, background="true", activation="softmax")
    assert np.array_equal(said, rows_of(client, content))
    sigmoid = rows_of(client, content, activation="sigmoid")
    expected = p1_rows(Output(output.scores[1:], output.offsets, "sigmoid"), 0.3, SAMPLE)
    assert np.array_equal(sigmoid[:, [0, 2, 3, 4]], expected[:, [0, 2, 3, 4]])


def test_rows_as_csv_preserve_every_bit(client: TestClient) -> None:
    content = packed(make_output("sigmoid"), "last", "axis", torch.float32)
    response = client.post(URL, content=content, params=ROWS | {"format": "rows.csv"})
    assert response.headers["content-type"] == "text/csv; charset=utf-8"
    header, *lines = csv.reader(io.StringIO(response.text))
    assert header == ["landmark", "probability", "x", "y", "z"]
    assert np.array_equal(np.array(lines, dtype=np.float32), rows_of(client, content))


@pytest.mark.parametrize("sample", [None, SAMPLE])
def test_heatmaps_are_the_sums_of_the_votes(
    sample: tuple[int, int, int] | None, client: TestClient
) -> None:
    output = make_output("none")
    arrays = laid_out(output, "last", "axis") | {"affine": OBLIQUE}
    shape = sample or SHAPE
    params = {"format": "nii.gz", "threshold": "0.3"}
    if sample:
        params["sample_shape"] = ",".join(map(str, sample))
    response = client.post(URL, content=npz(arrays), params=params)
    assert response.headers["content-type"] == "application/gzip"
    image = nib.Nifti1Image.from_bytes(gzip.decompress(response.content))
    assert image.shape == (*shape, LANDMARKS)
    assert image.get_data_dtype() == np.float32
    assert_allclose(image.affine, OBLIQUE, rtol=1e-6)
    # Many programs take the spacing from here.
    spacing = np.linalg.norm(OBLIQUE[:3, :3], axis=0)
    assert_allclose(image.header.get_zooms(), [*spacing, 1], rtol=1e-6)
    assert image.header.get_xyzt_units()[0] == "mm"
    votes = oracle.collect(output.scores[1:].astype(float), output.offsets.astype(float), 0.3)
    expected = oracle.heatmaps(
        votes.landmark, votes.position, votes.probability, (LANDMARKS, *shape)
    )
    assert expected.sum() > 50
    assert_allclose(np.moveaxis(image.get_fdata(), -1, 0), expected, atol=1e-6)


def test_same_votes_give_the_same_file(client: TestClient) -> None:
    content = packed(make_output("none"), "last", "axis", torch.float32)
    for form, read in (("nii.gz", gzip.decompress), ("rows.npy", bytes), ("rows.csv", bytes)):
        one, two = (client.post(URL, content=content, params={"format": form}) for _ in range(2))
        assert read(one.content) == read(two.content)


def test_smoothing_spreads_heatmaps_and_keeps_their_sum(client: TestClient) -> None:
    probs, offsets = spheres(np.array([[9.0, 8.0, 10.0]]), (18, 17, 21), 3.0)
    content = npz({"probs": probs, "offsets": offsets})
    params = {"format": "nii.gz", "smooth_mm": "1.5"}
    image = nib.Nifti1Image.from_bytes(
        gzip.decompress(client.post(URL, content=content, params=params).content)
    )
    heatmap = image.get_fdata()
    assert heatmap.sum() == pytest.approx(probs[..., 1].sum(), rel=1e-5)
    assert heatmap[9, 8, 10, 0] == heatmap.max()


CENTRES = np.array([[9.3, 14.75, 20.1], [17.0, 8.4, 11.6], [12.5, 20.25, 7.0]])
BOX = (26, 29, 31)


@pytest.fixture(scope="module")
def balls() -> bytes:
    probs, offsets = spheres(CENTRES, BOX, 5.0)
    return npz({"probs": probs, "offsets": offsets, "affine": OBLIQUE})


def test_landmarks_lie_at_the_true_centres_in_mm(client: TestClient, balls: bytes) -> None:
    names = {"names": "left, right,top", "radius_mm": "5"}
    response = client.post(URL, content=balls, params=names)
    answer = LandmarksAnswer.model_validate_json(response.content)
    assert [mark.name for mark in answer.landmarks] == ["left", "right", "top"]
    assert [mark.status for mark in answer.landmarks] == ["detected"] * 3
    ras = CENTRES @ OBLIQUE[:3, :3].T + OBLIQUE[:3, 3]
    assert_allclose([mark.ijk or () for mark in answer.landmarks], CENTRES, atol=1e-4)
    assert_allclose([mark.ras_mm or () for mark in answer.landmarks], ras, atol=1e-3)
    assert_allclose([mark.lps_mm or () for mark in answer.landmarks], ras * [-1, -1, 1], atol=1e-3)
    assert answer.model.name == "votes"
    assert answer.volume.shape == BOX
    assert_allclose(answer.volume.affine, OBLIQUE)
    assert answer.request_id == response.headers["x-request-id"]
    assert "vote;dur=" in response.headers["server-timing"]


def test_landmark_beyond_the_sample_is_not_found_there(client: TestClient, balls: bytes) -> None:
    params = {"sample_shape": "26,29,14", "candidates": "true", "radius_mm": "5"}
    answer = client.post(URL, content=balls, params=params).json()
    assert [mark["status"] for mark in answer["landmarks"]] == ["not_found", "detected", "detected"]
    assert answer["volume"]["shape"] == [26, 29, 14]
    assert [len(mark["candidates"]) for mark in answer["landmarks"]] == [0, 1, 1]


@pytest.mark.parametrize(
    ("params", "accept", "media_type"),
    [
        ({}, None, "application/json"),
        ({}, "*/*", "application/json"),
        ({}, "text/csv", "text/csv; charset=utf-8"),
        ({}, "application/x-npy", "application/x-npy"),
        ({}, "application/gzip, application/json;q=0.5", "application/gzip"),
        ({"format": "mrk.json"}, "text/csv", "application/vnd.slicer.markups+json"),
        ({"format": "fcsv"}, None, "text/vnd.slicer.fcsv; charset=utf-8"),
        ({"format": "long"}, None, "text/csv; charset=utf-8"),
        ({"format": "tsv"}, None, "text/tab-separated-values; charset=utf-8"),
    ],
)
def test_query_or_accept_chooses_the_answer(
    params: dict[str, str], accept: str | None, media_type: str, client: TestClient, balls: bytes
) -> None:
    headers = RAW | ({"Accept": accept} if accept else {})
    response = client.post(URL, content=balls, headers=headers, params=params)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == media_type


def test_framing_of_the_upload_does_not_change_the_answer(client: TestClient, balls: bytes) -> None:
    raw = client.post(URL, content=balls, params={"format": "csv"})
    others = [
        client.post(URL, files={"votes": ("votes.npz", balls)}, params={"format": "csv"}),
        client.post(URL, content=iter([balls[:7], balls[7:]]), params={"format": "csv"}),
        client.post(
            URL,
            content=balls,
            headers={"Content-Type": "application/zip"},
            params={"format": "csv"},
        ),
    ]
    assert raw.status_code == 200
    assert {other.content for other in others} == {raw.content}


@pytest.mark.parametrize("offset", [np.nan, np.inf, 3e38, -3e38])
@pytest.mark.parametrize("form", ["json", "rows.csv", "nii.gz"])
def test_votes_outside_the_sample_are_dropped(form: str, offset: float, client: TestClient) -> None:
    content = npz(
        {"probs": np.ones((*SHAPE, 3)), "offsets": np.full((*SHAPE, 9), offset, np.float32)}
    )
    response = client.post(URL, content=content, params={"format": form})
    assert response.status_code == 200
    if form == "json":
        assert {mark["status"] for mark in response.json()["landmarks"]} == {"not_found"}
    elif form == "rows.csv":
        assert response.text == "landmark,probability,x,y,z\n"
    else:
        assert not any(gzip.decompress(response.content)[352:])


def test_requests_are_counted_and_logged(
    client: TestClient, balls: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "app.requests")
    client.post(URL, files={"votes": ("jane.npz", balls)})
    (line,) = [line for line in caplog.records if line.name == "app.requests"]
    said = vars(line)
    assert (said["route"], said["status"], said["code"]) == (URL, 200, "ok")
    assert (said["bytes"], tuple(said["shape"])) == (len(balls), BOX)
    assert "jane" not in str(said)
    text = client.get("/metrics").text
    assert 'landmarkd_requests_total{code="ok",route="/v1/votes"}' in text
    assert 'landmarkd_stage_seconds_count{stage="vote"}' in text


def test_request_and_its_memory_are_held_until_its_answer_has_been_sent(
    client: TestClient, balls: bytes
) -> None:
    engine = shared_of(client).engine
    held = list[tuple[int, int, int]]()

    def note(_: object) -> None:
        admission = engine.admission
        held.append((admission.requests, admission.body_bytes.used, engine.memory.used))

    body = {"type": "http.request", "body": balls, "more_body": False}
    sent = run_asgi(client, URL, body, query=b"format=rows.csv", on_send=note)
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    assert held == [(1, len(balls), len(sent[1]["body"]))] * 2
    assert engine.admission.requests == engine.admission.body_bytes.used == engine.memory.used == 0


def test_docs_describe_the_body_and_every_answer(client: TestClient) -> None:
    post = client.get("/openapi.json").json()["paths"][URL]["post"]
    assert "offsets" in post["requestBody"]["description"]
    assert "votes" in post["requestBody"]["content"]["multipart/form-data"]["schema"]["properties"]
    content = post["responses"]["200"]["content"]
    assert {"application/json", "text/csv", "application/x-npy", "application/gzip"} <= set(content)
    names = {parameter["name"] for parameter in post["parameters"]}
    assert {"channels", "order", "background", "threshold", "sample_shape", "names"} <= names
    problem = post["responses"]["default"]
    assert "application/problem+json" in problem["content"]
    for status in ("400", "413", "415", "422", "429", "504"):
        assert f" {status} " in problem["description"]
