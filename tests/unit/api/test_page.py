"""What is served for the page; tests/integration/page looks at it in a browser."""

import gzip
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, BrokenBarrierError

import numpy as np
import pytest
from fastapi.testclient import TestClient
from numpy.testing import assert_allclose, assert_array_equal

from app.api.corrections import MAX_ANSWER_BYTES
from app.api.dependencies import hash_key
from app.api.ui import page as page_module
from app.api.ui.page import WEB, export_niivue, page_files
from app.engine.engine import COMPUTE_THREADS
from app.io import write_gzip, write_nifti
from app.io.formats import FORMATS
from app.io.schemas import LandmarksAnswer
from app.io.volume import read_volume
from app.phantom import Phantom, make_phantom, scan_bytes
from tests.support.dicom_files import PATIENT, PLACE, as_dicom, zipped
from tests.support.services import (
    RAW,
    problem_of,
    running,
    shared_of,
    toy_models,
    toy_scan,
    toy_settings,
)

SEED = 6
KEY = "correct horse"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    with running(toy_settings(toy_models(tmp_path_factory.mktemp("page")))) as made:
        yield made


def test_page_is_served_with_a_policy_that_allows_no_other_host(client: TestClient) -> None:
    response = client.get("/")
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    policy = response.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'")
    assert "http" not in policy
    assert "unsafe" not in policy
    assert response.headers["x-content-type-options"] == "nosniff"
    assert 'data-viewer="present"' in response.text


@pytest.mark.parametrize("name", sorted(path.name for path in WEB.iterdir()))
def test_files_of_the_page_name_no_other_host(name: str) -> None:
    text = (WEB / name).read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
    assert "//" not in text.replace("// ", "")


@pytest.mark.parametrize(
    ("name", "media_type"),
    [
        ("page.js", "text/javascript"),
        ("page.css", "text/css"),
        ("icon.svg", "image/svg+xml"),
        ("niivue.js", "text/javascript"),
        ("swagger-ui.js", "text/javascript"),
        ("swagger-ui.css", "text/css"),
    ],
)
def test_file_is_sent_once_and_then_answered_304(
    client: TestClient, name: str, media_type: str
) -> None:
    first = client.get(f"/page/{name}")
    assert first.status_code == 200
    assert first.headers["content-type"].startswith(media_type)
    again = client.get(f"/page/{name}", headers={"If-None-Match": first.headers["etag"]})
    assert again.status_code == 304
    assert not again.content
    assert again.headers["etag"] == first.headers["etag"]


def test_viewer_is_sent_compressed_to_those_who_can_read_it(client: TestClient) -> None:
    sizes, texts = [], []
    for encoding in ("gzip, br", "identity"):
        with client.stream(
            "GET", "/page/niivue.js", headers={"Accept-Encoding": encoding}
        ) as response:
            sizes.append(int(response.headers["content-length"]))
            assert response.headers["vary"] == "Accept-Encoding"
            texts.append(response.read())
    assert texts[0] == texts[1]
    assert 2 * sizes[0] < sizes[1] == len(texts[1])


@pytest.mark.parametrize(
    ("accepted", "coding"),
    [
        ("GZIP", "gzip"),
        ("br;q=1.0, gzip;q=0.001", "gzip"),
        ("gzip;q=0", None),
        ("br, gzip ; q=0.000, *", None),
        ("gzip;Q=0", None),
        ("not-known, gzips", None),
        ("*;q=0", None),
    ],
)
def test_file_is_compressed_only_for_those_who_accept_it(
    client: TestClient, accepted: str, coding: str | None
) -> None:
    response = client.get("/page/page.js", headers={"Accept-Encoding": accepted})
    assert response.headers.get("content-encoding") == coding
    assert response.content == (WEB / "page.js").read_bytes()


def test_copy_is_current_whatever_a_proxy_has_made_of_its_tag(client: TestClient) -> None:
    tag = client.get("/page/page.js").headers["etag"]
    strong = tag.removeprefix("W/")
    assert strong != tag

    def status(copies: str) -> int:
        return client.get("/page/page.js", headers={"If-None-Match": copies}).status_code

    assert [status(one) for one in (strong, f'"other", {strong}', f'{tag},"other"', "*")] == [
        304
    ] * 4
    assert [status(one) for one in ('"other"', strong.strip('"'), strong[:-2] + '"')] == [200] * 3


@pytest.mark.parametrize("name", ["none.js", "..%2fpage.py", "%2e%2e/page.py", "page.py"])
def test_other_files_are_not_served(client: TestClient, name: str) -> None:
    assert problem_of(client.get(f"/page/{name}")).status == 404


def test_files_are_read_once(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    first = client.get("/")
    monkeypatch.setattr(Path, "read_bytes", lambda path: pytest.fail(f"read {path.name} again"))
    again = client.get("/")
    assert (again.content, again.headers["etag"]) == (first.content, first.headers["etag"])
    assert client.get("/page/niivue.js").status_code == 200
    assert client.get("/docs").status_code == 200


@pytest.fixture
def without_packages(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    page_files.cache_clear()
    monkeypatch.setattr(page_module, "PACKAGE_FILES", {"niivue.js": ("not-installed", "")})
    yield
    page_files.cache_clear()


@pytest.mark.usefixtures("without_packages")
def test_page_without_niivue_has_no_viewer(client: TestClient) -> None:
    assert 'data-viewer="absent"' in client.get("/").text
    assert client.get("/page/niivue.js").status_code == 404
    # Not from elsewhere, either.
    docs = client.get("/docs")
    assert docs.status_code == 404
    assert "pip install 'landmarkd[page]'" in docs.json()["detail"]


def test_niivue_is_exported_from_its_bundle_or_counts_as_absent(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert page_files()["niivue.js"].content.rstrip().endswith(b"as Niivue };")
    assert export_niivue(b"var A = class extends EventTarget {}") is None
    assert "no NiiVue class" in caplog.text


def test_docs_load_nothing_from_other_hosts(client: TestClient) -> None:
    docs = client.get("/docs")
    assert "page/swagger-ui.js" in docs.text
    assert "https:" not in docs.text
    described = client.get("/openapi.json", headers={"Host": "localhost:8123"}).json()
    assert "'http://localhost:8123/v1/landmarks?model=" in described["info"]["description"]
    behind_tls = {"Host": "localhost:8123", "X-Forwarded-Proto": "https"}
    described = client.get("/openapi.json", headers=behind_tls).json()
    assert "'https://localhost:8123/v1/landmarks?model=" in described["info"]["description"]
    assert client.get("/redoc").status_code == 404


def test_an_answer_is_written_in_every_format_as_the_service_writes_it(client: TestClient) -> None:
    answer = client.post("/v1/landmarks", content=toy_scan(), headers=RAW)
    for form in FORMATS:
        written = client.post(f"/page/landmarks?format={form.name}", content=answer.content)
        assert written.content == form.write(LandmarksAnswer.model_validate_json(answer.content))
        assert written.headers["content-type"].startswith(form.media_type)


def test_the_page_offers_every_format() -> None:
    script = (WEB / "downloads.js").read_text(encoding="utf-8")
    for form in FORMATS:
        assert f'"{form.name}": "' in script


def test_invalid_answer_is_refused(client: TestClient) -> None:
    assert problem_of(client.post("/page/landmarks", content=b"{}")).code == "bad-parameter"
    assert problem_of(client.post("/page/landmarks?format=x", content=b"{}")).status == 406
    large = b" " * (MAX_ANSWER_BYTES + 1)
    assert problem_of(client.post("/page/landmarks", content=large)).code == "too-large"


@pytest.mark.parametrize(("kind", "shown"), [("int16", "int16"), ("uint32", "float32")])
def test_a_dicom_series_is_written_for_the_viewer_without_a_word_of_its_text(
    client: TestClient, kind: str, shown: str
) -> None:
    voxels = np.arange(4 * 5 * 6).reshape(4, 5, 6).astype(kind)
    others = as_dicom(voxels[:, :, :2], SeriesInstanceUID="1.2")
    archive = zipped([*as_dicom(voxels, PatientName=PATIENT), *others])
    assert problem_of(client.post("/page/scan", content=archive)).code == "bad-geometry"
    written = client.post("/page/scan?series=0", content=archive, headers=RAW)
    content = gzip.decompress(written.content)
    assert PATIENT.encode() not in content
    volume = read_volume(content)
    assert volume.voxels.dtype == shown
    assert_array_equal(volume.voxels, voxels)
    assert_allclose(volume.affine, PLACE, atol=1e-5)


def test_scan_of_small_values_is_converted_where_large_ones_would_not_fit(tmp_path: Path) -> None:
    settings = toy_settings(toy_models(tmp_path), memory=512 << 20)
    with running(settings) as client:
        for dtype, status in ((np.int16, 200), (np.float64, 413)):
            scan = write_gzip([write_nifti(np.zeros((256, 256, 256), dtype, order="F"), PLACE)])
            assert client.post("/page/scan", content=scan, headers=RAW).status_code == status


def test_page_needs_no_key_but_its_computations_do(tmp_path: Path) -> None:
    settings = toy_settings(toy_models(tmp_path), api_keys=(hash_key(KEY),))
    with running(settings) as client:
        for path in ("/", "/page/page.js"):
            assert client.get(path).status_code == 200
        assert problem_of(client.get("/page/phantom.nii.gz")).code == "unauthorized"
        for path in ("/page/landmarks", "/page/scan"):
            assert problem_of(client.post(path, content=b"{}")).code == "unauthorized"
        scan = client.get("/page/phantom.nii.gz", headers={"Authorization": f"Bearer {KEY}"})
        assert scan.content == scan_bytes(make_phantom(SEED))


def test_scans_are_generated_by_no_more_threads_than_other_work(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    too_many = Barrier(COMPUTE_THREADS + 1)
    met = []

    def make(seed: int) -> Phantom:
        try:
            too_many.wait(timeout=0.3)
            met.append(seed)
        except BrokenBarrierError:
            too_many.reset()
        return make_phantom(seed)

    monkeypatch.setattr(page_module, "make_phantom", make)
    paths = [f"/page/phantom.nii.gz?seed={seed}" for seed in range(COMPUTE_THREADS + 2)]
    with ThreadPoolExecutor(len(paths)) as pool:
        answers = list(pool.map(client.get, paths))
    assert [answer.status_code for answer in answers] == [200] * len(paths)
    assert not met


def test_scan_that_is_generated_takes_no_place_of_uploads(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    admission = shared_of(client).engine.admission
    places = []

    def make(seed: int) -> Phantom:
        places.append((admission.receiving.used, admission.working.used))
        return make_phantom(seed)

    monkeypatch.setattr(page_module, "make_phantom", make)
    assert client.get("/page/phantom.nii.gz").status_code == 200
    assert places == [(0, 1)]
