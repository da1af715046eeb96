"""The page in a real Chromium with a real service; skipped without Chromium or playwright.

It takes `pip install playwright` and a Chromium of the system, such as Debian's.
"""

import base64
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.testing import assert_allclose

from app.api.dependencies import hash_key
from app.io.volume import read_volume
from app.phantom import make_phantom, scan_bytes
from tests.support.dicom_files import as_dicom, zipped
from tests.support.scan_files import as_metaimage, as_nrrd
from tests.support.services import RAW, ServiceProcess

sync_api = pytest.importorskip("playwright.sync_api", reason="expected playwright")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)
if CHROMIUM is None:
    pytest.skip("expected a Chromium", allow_module_level=True)

PHANTOM = Path(__file__).resolve().parents[2] / "models" / "phantom"
SEED = 6
SCAN = scan_bytes(make_phantom(SEED))
KEY = "correct horse"
BEARER = {"Authorization": f"Bearer {KEY}"}
# WebGL 2 without a graphics card; the sandbox does not work for root.
FLAGS = ("--no-sandbox", "--use-angle=swiftshader", "--enable-unsafe-swiftshader")
WITHOUT_WEBGL = "HTMLCanvasElement.prototype.getContext = () => null"
# Every pixel is drawn by the processor here.
SMALL = {"width": 640, "height": 480}
NEAR_MM = 1e-3
MISSING = "\N{EN DASH}"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    models = tmp_path_factory.mktemp("models")
    (models / PHANTOM.name).symlink_to(PHANTOM)
    process = ServiceProcess(models, BATCH_SIZE="2", API_KEYS=hash_key(KEY))
    yield process
    process.kill()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield made
        made.close()


@contextmanager
def opened(browser: Any, url: str, before: str = "") -> Iterator[Any]:  # noqa: ANN401
    """Open the page and enter the key; afterwards check that it requested nothing elsewhere."""
    page = browser.new_page(viewport=SMALL)
    page.set_default_timeout(60_000)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.add_init_script(before)
    page.goto(url)
    page.wait_for_selector("body[data-ready]")
    page.fill("#key", KEY)
    page.keyboard.press("Enter")
    page.wait_for_selector("#generate:not([hidden])")
    yield page
    page.close()
    assert [each for each in asked if not each.startswith((url, "data:", "blob:"))] == []


def drop(page: Any, content: bytes, name: str) -> None:  # noqa: ANN401
    """Drop a file on the page."""
    carried = page.evaluate_handle(
        """([text, name]) => {
            const transfer = new DataTransfer();
            const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
            transfer.items.add(new File([bytes], name));
            return transfer;
        }""",
        [base64.b64encode(content).decode(), name],
    )
    page.dispatch_event("#welcome", "drop", {"dataTransfer": carried})


def chosen(page: Any) -> str:  # noqa: ANN401
    """Read the name in the selected row."""
    return str(page.text_content('#rows tr[aria-selected="true"] td'))


def crosshair(page: Any) -> list[float]:  # noqa: ANN401
    """Read the position of NiiVue's crosshair, in mm, RAS."""
    script = (
        "() => { const { nv } = landmarkd.viewer; return [...nv.frac2mm(nv.scene.crosshairPos)]; }"
    )
    return list(page.evaluate(script))[:3]


def compare_rows(page: Any, answer: list[dict[str, Any]]) -> None:  # noqa: ANN401
    """Check the rows of the table."""
    cells = "[...document.querySelector('#rows').rows].map((row) => [...row.cells].map(textOf))"
    rows = page.evaluate(f"() => {{ const textOf = (cell) => cell.textContent; return {cells}; }}")
    assert [row[0] for row in rows] == [landmark["name"] for landmark in answer]
    words = [landmark["status"].replace("_", " ") for landmark in answer]
    assert [row[1] for row in rows] == words
    for row, landmark in zip(rows, answer, strict=True):
        mm = landmark["ras_mm"] or [MISSING] * 3
        assert row[2:5] == [at if at == MISSING else f"{at:.2f}" for at in mm]


def compare_points(page: Any, found: list[dict[str, Any]]) -> None:  # noqa: ANN401
    """Check the points that NiiVue draws."""
    nodes = page.evaluate(
        "landmarkd.viewer.nv.meshes[0].nodes.map(({ name, x, y, z }) => [name, x, y, z])"
    )
    assert [node[0] for node in nodes] == [landmark["name"] for landmark in found]
    places = np.array([landmark["ras_mm"] for landmark in found])
    assert_allclose([node[1:] for node in nodes], places, atol=NEAR_MM)


def move_through_rows(page: Any, answer: list[dict[str, Any]]) -> None:  # noqa: ANN401
    """Move through the rows by keyboard, and check that the crosshair follows."""
    page.focus('#rows tr[tabindex="0"]')
    page.keyboard.press("ArrowDown")
    assert chosen(page) == answer[1]["name"]
    assert_allclose(crosshair(page), answer[1]["ras_mm"], atol=NEAR_MM)
    page.keyboard.press("End")
    assert_allclose(crosshair(page), answer[-1]["ras_mm"], atol=NEAR_MM)


def point_at_the_first(page: Any, answer: list[dict[str, Any]]) -> None:  # noqa: ANN401
    """Check that pointing at a landmark highlights its row, and that a click selects it."""
    place = page.evaluate("landmarkd.viewer.screenPositions().find(({ index }) => index === 0)")
    at = {"x": place["x"], "y": place["y"]}
    page.hover("#canvas", position=at)
    assert page.text_content("#rows tr.near td") == answer[0]["name"]
    page.click("#canvas", position=at)
    assert chosen(page) == answer[0]["name"]


def test_dropped_scan_is_shown_with_its_landmarks(browser: Any, service: ServiceProcess) -> None:  # noqa: ANN401
    url = f"{service.url}/v1/landmarks?model=phantom"
    answer = httpx.post(url, content=SCAN, headers=RAW | BEARER, timeout=60).json()["landmarks"]
    found = [landmark for landmark in answer if landmark["ras_mm"]]
    assert len(found) < len(answer)
    complaints: list[str] = []
    with opened(browser, service.url) as page:
        page.on("console", lambda line: complaints.append(line.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.evaluate(
            """() => {
                window.told = [];
                const stage = document.getElementById("stage-name");
                new MutationObserver(() => told.push(stage.textContent))
                    .observe(stage, { childList: true });
            }"""
        )
        drop(page, SCAN, "head.nii.gz")
        page.wait_for_selector("#rows tr")
        assert any("tile" in text for text in page.evaluate("told"))

        compare_rows(page, answer)
        compare_points(page, found)
        move_through_rows(page, answer)
        point_at_the_first(page, answer)
        with page.expect_download() as download:
            page.click('[data-format="mrk.json"]')
        assert download.value.suggested_filename == "head.mrk.json"
        markups = json.loads(Path(download.value.path()).read_bytes())["markups"][0]
        assert len(markups["controlPoints"]) == len(answer)
    assert [each for each in complaints if "GPU stall due to ReadPixels" not in each] == []


def test_broken_file_is_explained(browser: Any, service: ServiceProcess) -> None:  # noqa: ANN401
    with opened(browser, service.url) as page:
        drop(page, SCAN[: len(SCAN) // 2], "head.nii.gz")
        page.wait_for_selector("#problem:not([hidden])")
        assert page.inner_text("#problem-title") == "This scan is damaged or incomplete"
        assert "expected" in page.inner_text("#problem-detail")
        assert page.inner_text("#problem-id").startswith("Request id ")
        page.wait_for_selector("#welcome:not([hidden])")


def test_without_webgl_landmarks_are_listed(browser: Any, service: ServiceProcess) -> None:  # noqa: ANN401
    with opened(browser, service.url, before=WITHOUT_WEBGL) as page:
        assert "no WebGL 2" in page.inner_text("#unseen")
        page.click("#generate")
        page.wait_for_selector("#rows tr")
        assert page.locator("#rows tr").count() > 1
        with page.expect_download() as download:
            page.click('[data-format="fcsv"]')
        assert download.value.suggested_filename == f"phantom-{SEED}.fcsv"


@pytest.mark.parametrize("suffix", ["nrrd", "mha"])
def test_formats_that_the_viewer_reads_are_shown_where_the_service_found_them(
    browser: Any,  # noqa: ANN401
    service: ServiceProcess,
    suffix: str,
) -> None:
    volume = read_volume(SCAN)
    voxels = np.rint(volume.voxels).astype(np.int16)
    write = as_nrrd if suffix == "nrrd" else as_metaimage
    with opened(browser, service.url) as page:
        drop(page, write(voxels, volume.affine), f"scan.{suffix}")
        page.wait_for_selector("#results", state="visible")
        assert page.is_hidden("#unseen")
        answer = page.evaluate("landmarkd.answer.landmarks")
        compare_points(page, [landmark for landmark in answer if landmark["ras_mm"]])


def test_a_dicom_series_is_asked_for_by_number_and_its_landmarks_listed(
    browser: Any,  # noqa: ANN401
    service: ServiceProcess,
) -> None:
    volume = read_volume(SCAN)
    voxels = np.rint(volume.voxels).astype(np.int16)
    scout = as_dicom(voxels[:, :, :2], volume.affine, SeriesInstanceUID="1.2")
    with opened(browser, service.url) as page:
        drop(page, zipped([*scout, *as_dicom(voxels, volume.affine)]), "series.zip")
        page.wait_for_selector("#ask-choice", state="visible")
        assert page.text_content("#choice-name") == "series"
        page.click("#ask-choice button")
        page.wait_for_selector("#results", state="visible")
        assert (
            page.text_content("#unseen") == "The viewer does not show DICOM. Landmarks are listed."
        )
        compare_rows(page, page.evaluate("landmarkd.answer.landmarks"))
