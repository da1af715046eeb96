"""``/v1/cases``: what is kept, as what, for whom; and what is refused."""

import gzip
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient
from numpy.testing import assert_allclose
from pydantic import ByteSize

from app.api.cases.store import FILE_BYTES
from app.api.dependencies import hash_key
from app.engine.fair_budget import FairBudget, Reservation
from app.io import HEAD_BYTES, read_landmarks, read_truth, read_volume
from app.training.data.specimens import pair_files
from tests.support.answers import UNKNOWN, place_by_hand
from tests.support.dicom_files import as_dicom, zipped
from tests.support.nifti_files import nifti
from tests.support.scan_files import as_metaimage, as_mgh, as_nifti, as_nrrd
from tests.support.services import (
    MODEL,
    RAW,
    SHAPE,
    Response,
    problem_of,
    running,
    shared_of,
    toy_models,
    toy_scan,
    toy_settings,
)

URL = "/v1/cases"
AFFINE = np.diag([1.0, 1.25, 0.8, 1.0])
VOXELS = np.random.default_rng(7).normal(100.0, 20.0, SHAPE).astype(np.int16)
OTHERS = {
    "nrrd": as_nrrd(VOXELS, AFFINE, encoding="gzip"),
    "zipped nrrd": gzip.compress(as_nrrd(VOXELS, AFFINE)),
    "metaimage": as_metaimage(VOXELS, AFFINE, zipped=True),
    "freesurfer": as_mgh(VOXELS, AFFINE, zipped=True),
    "dicom": zipped(as_dicom(VOXELS, AFFINE)),
}
KEYS = {name: hash_key(name) for name in ("anna", "nameless", "admin")}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_models(tmp_path_factory.mktemp("cases"))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def client(models: Path, store: Path) -> Iterator[TestClient]:
    with running(toy_settings(models, store=store)) as made:
        yield made


@pytest.fixture
def empty(store: Path) -> Path:
    for path in store.rglob("*.*z"):
        path.unlink()
    for path in store.rglob("*.json"):
        path.unlink()
    return store / MODEL


def ask(client: TestClient, scan: bytes, **query: int) -> dict[str, Any]:
    answer: dict[str, Any] = client.post(
        "/v1/landmarks", content=scan, headers=RAW, params=query
    ).json()
    return answer


def corrected(client: TestClient, scan: bytes, **query: int) -> dict[str, Any]:
    """An answer whose first landmark a person placed; the second is absent, the third unjudged."""
    answer = ask(client, scan, **query)
    place_by_hand(answer, 0, (2, 4, 10))
    second = answer["landmarks"][1]
    second.update(dict.fromkeys(UNKNOWN), decided_by="person")
    second.update(status="not_found", ijk=None, ras_mm=None, lps_mm=None)
    return answer


def keep(client: TestClient, scan: bytes, answer: dict[str, Any], **query: int) -> Response:
    files = {"volume": ("jane doe.nii.gz", scan), "answer": ("x", json.dumps(answer).encode())}
    return client.post(URL, files=files, params=query)


def test_case_is_kept_as_training_reads_it(client: TestClient, empty: Path) -> None:
    scan = gzip.compress(toy_scan())
    answer = corrected(client, scan)
    response = keep(client, scan, answer)
    assert response.status_code == 201, response.text
    case = response.json()
    assert (case["id"], case["key"]) == (answer["volume"]["digest"][:32], None)
    assert (case["placed"], case["accepted"], case["absent"], case["unjudged"]) == (1, 0, 1, 1)
    assert case["model"] == answer["model"]
    (files,) = pair_files(empty / "scans", empty / "landmarks")
    assert files.name == case["id"]
    assert files.scan.read_bytes() == scan
    first, second, third = answer["landmarks"]
    found = read_landmarks(files.landmarks)
    assert_allclose(found[first["name"]], first["ras_mm"], atol=1e-3)
    truth = read_truth(files.landmarks)
    assert truth[second["name"]] is None
    assert second["name"] not in found
    sure = third["status"] == "detected"
    assert (third["name"] in found, third["name"] in truth) == (sure, sure)


def test_doubtful_point_that_nobody_judged_teaches_nothing(client: TestClient, empty: Path) -> None:
    answer = corrected(client, toy_scan())
    third = answer["landmarks"][2]
    third.update(status="low_confidence", ijk=[5, 5, 5], ras_mm=[5, 6.25, 4], lps_mm=[-5, -6.25, 4])
    keep(client, toy_scan(), answer)
    (path,) = (empty / "landmarks").iterdir()
    assert third["name"] not in read_truth(path)
    third.update(decided_by="person", status="detected", confidence=0.4)
    keep(client, toy_scan(), answer)
    assert_allclose(read_landmarks(path)[third["name"]], [5, 6.25, 4])


def test_landmark_file_says_who_kept_and_decided_what(client: TestClient, empty: Path) -> None:
    answer = corrected(client, toy_scan())
    case = keep(client, toy_scan(), answer).json()
    (path,) = (empty / "landmarks").iterdir()
    (markup,) = json.loads(path.read_text())["markups"]
    assert markup["landmarkd"] == case
    deciders = [point["landmarkd"]["decided_by"] for point in markup["controlPoints"]]
    assert deciders == ["person", "person", "network"]
    assert case["kept"].endswith("+00:00")


def test_plain_and_packed_file_of_a_scan_are_one_case(client: TestClient, empty: Path) -> None:
    scan = toy_scan()
    for content in (scan, gzip.compress(scan)):
        keep(client, content, corrected(client, content))
    assert len(list((empty / "scans").iterdir())) == 1
    (path,) = (empty / "scans").iterdir()
    assert gzip.decompress(path.read_bytes()) == scan


@pytest.mark.parametrize("form", OTHERS)
def test_scan_of_another_format_is_kept_as_nifti(
    client: TestClient, empty: Path, form: str
) -> None:
    content = OTHERS[form]
    response = keep(client, content, corrected(client, content))
    assert response.status_code == 201, response.text
    (path,) = (empty / "scans").iterdir()
    kept, given = read_volume(path.read_bytes()), read_volume(content)
    np.testing.assert_array_equal(kept.voxels, given.voxels)
    assert_allclose(kept.affine, given.affine, atol=1e-5)
    assert gzip.decompress(path.read_bytes())[344:348] == b"n+1\0"


def test_frames_of_a_file_are_cases_of_their_own(client: TestClient, empty: Path) -> None:
    frames = as_nifti(np.stack([VOXELS, VOXELS + 1], axis=-1), AFFINE)
    ids = [
        keep(client, frames, corrected(client, frames, frame=frame), frame=frame).json()["id"]
        for frame in (0, 1)
    ]
    assert [each[32:] for each in ids] == ["-frame0", "-frame1"]
    kept = read_volume((empty / "scans" / f"{ids[1]}.nii.gz").read_bytes())
    np.testing.assert_array_equal(kept.voxels, VOXELS + 1)
    alone = as_nifti(VOXELS, AFFINE)
    named = keep(client, alone, corrected(client, alone, frame=0), frame=0).json()["id"]
    assert len(named) == 32


def test_cases_are_listed_and_deleted(client: TestClient, empty: Path) -> None:
    case = keep(client, toy_scan(), corrected(client, toy_scan())).json()
    assert client.get(URL, params={"model": MODEL}).json() == {"cases": [case], "next": None}
    deleted = client.delete(f"{URL}/{MODEL}/{case['id']}")
    assert (deleted.status_code, deleted.headers.get("content-type")) == (204, None)
    assert client.get(URL, params={"model": MODEL}).json()["cases"] == []
    assert not list(empty.rglob("*.*z"))
    assert problem_of(client.delete(f"{URL}/{MODEL}/{case['id']}")).code == "unknown-case"


@pytest.mark.parametrize("model", [f"{MODEL}@1.0.0", "", "../toy"])
def test_cases_are_listed_by_the_name_of_a_model_alone(client: TestClient, model: str) -> None:
    """Those of all versions are kept together: of one, an empty list was answered."""
    problem = problem_of(client.get(URL, params={"model": model}))
    assert problem.code == "bad-parameter"
    assert "without a version" in problem.detail


def test_part_of_a_list_is_bounded(client: TestClient) -> None:
    for limit, status in ((100, 200), (101, 422), (0, 422)):
        assert client.get(URL, params={"model": MODEL, "limit": limit}).status_code == status


def test_parameter_that_is_missing_is_named(client: TestClient) -> None:
    assert problem_of(client.get(URL)).detail == "query.model: Field required; got none"


def test_parameter_of_a_list_that_is_unknown_is_refused(client: TestClient) -> None:
    """One that was misspelt was passed over, so that the list was another than was asked for."""
    problem = problem_of(client.get(URL, params={"model": MODEL, "limt": 1}))
    assert (problem.code, problem.status) == ("bad-parameter", 422)
    assert "did you mean 'limit'?" in problem.detail


def test_landmarks_of_another_scan_are_refused(client: TestClient, empty: Path) -> None:
    answer = corrected(client, toy_scan())
    problem = problem_of(keep(client, nifti(), answer))
    assert (problem.code, "digest" in problem.detail) == ("bad-parameter", True)
    for shape in ([], [*SHAPE, 1], [1] * 100_000):
        longer = answer | {"volume": answer["volume"] | {"shape": shape}}
        assert problem_of(keep(client, toy_scan(), longer)).code == "bad-parameter"
    grown = answer | {"volume": answer["volume"] | {"shape": [size + 1 for size in SHAPE]}}
    answer["volume"]["affine"][0][3] += 1
    for landmark in answer["landmarks"]:
        if landmark["ijk"]:
            landmark["ras_mm"][0] += 1
            landmark["lps_mm"][0] -= 1
    for other in (grown, answer):
        assert "shape and affine" in problem_of(keep(client, toy_scan(), other)).detail
    assert not list(empty.rglob("*.*z"))


def test_landmarks_that_cannot_be_learned_from_are_refused(client: TestClient, empty: Path) -> None:
    scan = toy_scan()
    answer = corrected(client, scan)
    far = {"ijk": [50, 4, 10], "ras_mm": [50, 5, 8], "lps_mm": [-50, -5, 8]}
    first, *others = answer["landmarks"]
    for decided_by in ("person", "network"):
        beyond = first | far | {"decided_by": decided_by}
        outside = {**answer, "landmarks": [beyond, *others]}
        assert "a position in the scan" in problem_of(keep(client, scan, outside)).detail
    fewer = {**answer, "landmarks": answer["landmarks"][1:]}
    assert "the 3 landmarks of toy" in problem_of(keep(client, scan, fewer)).detail
    nothing = {"ijk": None, "ras_mm": None, "lps_mm": None, "status": "not_found"}
    nothing["decided_by"] = "network"
    none = {**answer, "landmarks": [one | nothing for one in answer["landmarks"]]}
    detail = problem_of(keep(client, scan, none)).detail
    assert "detected or placed" in detail
    assert "learns nothing from one that shows none" in detail
    other = {**answer, "model": answer["model"] | {"name": "../toy"}}
    assert problem_of(keep(client, scan, other)).code == "unknown-model"
    assert problem_of(keep(client, scan, {"no": "answer"})).code == "bad-parameter"
    assert not list(empty.rglob("*.*z"))


@pytest.mark.parametrize(
    ("form", "status", "said"),
    [
        ({"content": toy_scan(), "headers": RAW}, 415, "volume and answer"),
        ({"content": toy_scan()}, 415, "volume and answer"),
        ({"files": {"volume": toy_scan()}}, 422, "'answer', got none"),
        ({"files": {"answer": b"{}"}}, 422, "'volume', got none"),
        ({"files": {"volume": toy_scan(), "scan": b"x"}}, 422, "'answer', got 'scan'"),
        ({"files": [("volume", b"x"), ("answer", b"x"), ("more", b"x")]}, 422, "got more"),
        ({"files": {"volume": b"", "answer": b"{}"}}, 400, "0 bytes"),
        ({"files": {"volume": toy_scan(), "answer": b" " * (5 << 20)}}, 413, "4194304"),
    ],
)
def test_malformed_upload_is_refused(
    client: TestClient, form: dict[str, Any], status: int, said: str
) -> None:
    problem = problem_of(client.post(URL, **form))
    assert problem.status == status
    assert said in problem.detail


@pytest.mark.parametrize(
    ("start", "said"),
    [
        (nifti(datatype=32), "got complex64"),
        (zipped(as_dicom(VOXELS, AFFINE))[:-99], "'answer', got none"),  # It tells too little.
    ],
    ids=["nifti", "dicom"],
)
def test_scan_is_refused_by_its_header_before_the_rest_of_a_form(
    client: TestClient, start: bytes, said: str
) -> None:
    head = b'--x\r\nContent-Disposition: form-data; name="volume"\r\n\r\n'
    form = head + start + bytes(HEAD_BYTES) + b"\r\n--x--"
    headers = {"Content-Type": "multipart/form-data; boundary=x"}
    assert said in problem_of(client.post(URL, content=form, headers=headers)).detail


def test_what_a_file_holds_besides_its_voxels_is_charged(models: Path, tmp_path: Path) -> None:
    more = 9 << 20  # Before the voxels.
    plain = toy_scan()
    scan = plain[:108] + struct.pack("<f", 352 + more) + plain[112:352] + bytes(more) + plain[352:]
    with running(toy_settings(models, store=tmp_path)) as client:
        answer = corrected(client, scan)
        memory, charged = shared_of(client).engine.memory, []

        async def note(amount: int, *where: Any) -> Reservation:
            charged.append(amount)
            return await FairBudget.reserve(memory, amount, *where)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(memory, "reserve", note)
            assert keep(client, scan, answer).status_code == 201
        *_, keeping = charged
        assert keeping > len(scan)


def test_service_without_a_store_says_so(models: Path) -> None:
    with running(toy_settings(models)) as client:
        for response in (
            keep(client, toy_scan(), {}),
            client.get(URL, params={"model": MODEL}),
            client.delete(f"{URL}/{MODEL}/{'0' * 32}"),
        ):
            problem = problem_of(response)
            assert (problem.status, problem.code) == (501, "not-configured")
            assert "LANDMARKD_STORE" in problem.detail
        assert client.get("/v1/models").json()["keeps_cases"] is False


def test_service_with_a_store_says_so(client: TestClient) -> None:
    assert client.get("/v1/models").json()["keeps_cases"] is True


def test_case_over_the_quota_is_refused(models: Path, tmp_path: Path) -> None:
    settings = toy_settings(models, store=tmp_path, store_max_bytes=ByteSize(2 * FILE_BYTES))
    with running(settings) as client:
        assert keep(client, toy_scan(), corrected(client, toy_scan())).status_code == 201
        other = toy_scan((12, 14, 13))
        problem = problem_of(keep(client, other, corrected(client, other)))
        assert (problem.status, problem.code) == (507, "not-stored")
        assert "1,048,576 bytes" in problem.detail


def test_name_of_the_key_is_kept(models: Path, tmp_path: Path) -> None:
    keys = (f"anna:{KEYS['anna']}", KEYS["nameless"])
    with running(
        toy_settings(models, store=tmp_path, api_keys=keys, admin_key_hash=KEYS["admin"])
    ) as client:
        assert problem_of(keep(client, toy_scan(), {})).code == "unauthorized"
        for key, name in (("anna", "anna"), ("nameless", KEYS["nameless"][:8]), ("admin", "admin")):
            headers = {"Authorization": f"Bearer {key}"}
            client.headers.update(headers)
            scan = toy_scan((12, 14, 10 + len(key)))
            kept = keep(client, scan, corrected(client, scan)).json()
            assert kept["key"] == name


def test_case_belongs_to_the_key_that_kept_it(models: Path, tmp_path: Path) -> None:
    keys = (f"anna:{KEYS['anna']}", f"anna:{hash_key('anna, at home')}", KEYS["nameless"])
    headers = {name: {"Authorization": f"Bearer {name}"} for name in (*KEYS, "anna, at home")}
    settings = toy_settings(models, store=tmp_path, api_keys=keys, admin_key_hash=KEYS["admin"])
    with running(settings) as client:
        client.headers.update(headers["anna"])
        answer = corrected(client, toy_scan())
        case = keep(client, toy_scan(), answer).json()
        path = f"{URL}/{MODEL}/{case['id']}"
        client.headers.update(headers["nameless"])
        assert client.get(URL, params={"model": MODEL}).json()["cases"] == [case]
        for refused in (keep(client, toy_scan(), answer), client.delete(path)):
            problem = problem_of(refused)
            assert (problem.status, problem.code) == (403, "forbidden")
            assert "anna has kept" in problem.detail
        assert client.get(URL, params={"model": MODEL}).json()["cases"] == [case]
        client.headers.update(headers["anna, at home"])
        assert keep(client, toy_scan(), answer).json()["key"] == "anna"
        assert client.delete(path, headers=headers["admin"]).status_code == 204
        assert problem_of(client.delete(path)).code == "unknown-case"


def test_key_that_fills_its_share_of_the_store_leaves_room_to_others(
    models: Path, tmp_path: Path
) -> None:
    keys = (f"anna:{KEYS['anna']}", f"bert:{KEYS['nameless']}")
    room = ByteSize(8 * FILE_BYTES)  # Of which one key may take three quarters.
    with running(
        toy_settings(models, store=tmp_path, api_keys=keys, store_max_bytes=room)
    ) as client:

        def keep_one(key: str, number: int) -> Response:
            client.headers.update({"Authorization": f"Bearer {key}"})
            scan = toy_scan((12, 14, 12 + number))
            return keep(client, scan, corrected(client, scan))

        assert [keep_one("anna", number).status_code for number in range(3)] == [201] * 3
        refused = problem_of(keep_one("anna", 3))
        assert (refused.status, refused.code) == (507, "not-stored")
        assert "delete cases" in refused.detail
        assert keep_one("nameless", 3).status_code == 201
