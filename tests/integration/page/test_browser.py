"""The page in a real Chromium with a real service: what it shows, and lists of scans."""

import csv
import io
import json
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest
from numpy.testing import assert_allclose

from app.io.volume import read_volume
from tests.support.browser import (
    ABSENT,
    BEARER,
    KEY,
    MISSING,
    NEAR_MM,
    OTHER_SCAN,
    SAME_GREY,
    SAMPLE,
    SCAN,
    SMALL,
    Browser,
    Page,
    choose,
    chosen,
    compare_points,
    crosshair,
    download,
    drawn,
    drop,
    mark_of,
    opened,
    row,
    rows,
    text_of,
)
from tests.support.dicom_files import as_dicom, zipped
from tests.support.scan_files import as_metaimage, as_mgh, as_nifti, as_nrrd
from tests.support.services import RAW, ServiceProcess

WITHOUT_WEBGL = "HTMLCanvasElement.prototype.getContext = () => null"
PHONE: dict[str, Any] = {
    "viewport": {"width": 390, "height": 844},
    "has_touch": True,
    "is_mobile": True,
}


class Pane(NamedTuple):
    """Where a plane or the view in 3D is drawn, in pixels."""

    width: float
    height: float

    @property
    def area(self) -> float:
        """Of the screen."""
        return self.width * self.height


def panes(page: Page) -> list[Pane]:
    """List what the viewer draws."""
    script = "all => all.map(each => [each.getAttribute('width'), each.getAttribute('height')])"
    sizes = page.eval_on_selector_all("#labels svg svg", script)
    return [Pane(float(width), float(height)) for width, height in sizes]


def compare_rows(page: Page, answer: list[dict[str, Any]]) -> None:
    """Check the rows of the table."""
    for cells, one in zip(rows(page), answer, strict=True):
        mm = one["ras_mm"] or [MISSING] * 3
        assert cells[:2] == [one["name"], one["status"].replace("_", " ")]
        assert cells[2:5] == [at if at == MISSING else f"{at:.2f}" for at in mm]


def move_through_rows(page: Page, answer: list[dict[str, Any]]) -> None:
    """Move through the rows by keyboard, and check that the crosshair follows."""
    page.focus('#rows tr[tabindex="0"]')
    page.keyboard.press("Home")
    page.keyboard.press("ArrowDown")
    assert chosen(page) == answer[1]["name"]
    assert_allclose(crosshair(page), answer[1]["ras_mm"], atol=NEAR_MM)
    apart = np.linalg.norm(np.subtract(answer[1]["ras_mm"], answer[0]["ras_mm"]))
    told = text_of(page, "#chosen")
    assert f"{apart:.2f} mm from {answer[0]['name']}, chosen before." in told
    page.keyboard.press("End")
    assert_allclose(crosshair(page), answer[-1]["ras_mm"], atol=NEAR_MM)


def point_at_all(page: Page) -> None:
    """Check that whatever is drawn highlights its row, and that a click selects it."""
    shown = page.evaluate("landmarkd.viewer.markers.marks.map(({ x, y, name }) => [x, y, name])")
    for x, y, name in shown:
        page.hover("#canvas", position={"x": x, "y": y})
        assert page.text_content("#rows tr.near td") == name
    x, y, name = shown[0]
    page.click("#canvas", position={"x": x, "y": y})
    assert chosen(page) == name


def test_model_says_where_to_get_a_public_scan(
    browser: Browser, page_service: ServiceProcess
) -> None:
    with opened(browser, page_service.url) as page:
        page.wait_for_selector("#about-sample:not([hidden])")
        assert page.get_attribute("#about-sample a", "href") == SAMPLE


def test_dropped_scan_is_shown_with_its_landmarks(
    browser: Browser, page_service: ServiceProcess, answer: list[dict[str, Any]]
) -> None:
    found = [landmark for landmark in answer if landmark["ras_mm"]]
    complaints: list[str] = []
    with opened(browser, page_service.url) as page:
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
        drop(page, ("head.nii.gz", SCAN))
        page.wait_for_selector("#rows tr")
        assert any("tile" in text for text in page.evaluate("told"))

        middle = np.mean([landmark["ras_mm"] for landmark in found], axis=0)
        distances = [np.linalg.norm(np.subtract(one["ras_mm"], middle)) for one in found]
        assert chosen(page) == found[int(np.argmin(distances))]["name"]
        page.keyboard.press("n")
        assert chosen(page) == ABSENT  # the most doubtful, whatever was chosen at first
        compare_rows(page, answer)
        compare_points(page, found)
        move_through_rows(page, answer)
        point_at_all(page)
        name, content = download(page, '[data-format="mrk.json"]')
        assert name == "head.mrk.json"
        assert len(json.loads(content)["markups"][0]["controlPoints"]) == len(answer)
    assert [each for each in complaints if "GPU stall due to ReadPixels" not in each] == []


def test_several_scans_are_a_list(browser: Browser, page_service: ServiceProcess) -> None:
    with opened(browser, page_service.url) as page:
        drop(page, ("a.nii.gz", SCAN), ("b.nii.gz", SCAN[:999]), ("c, d.nii", OTHER_SCAN))
        page.wait_for_selector('#scans li:nth-child(3)[data-state="done"]')
        assert (
            page.text_content("#queue-title")
            == "3 scans \N{MIDDLE DOT} 2 answered \N{MIDDLE DOT} 1 failed"
        )
        states = page.locator("#scans span:last-child").all_text_contents()
        assert states == ["5 of 6 found", "Broken volume", "5 of 6 found"]
        page.wait_for_selector("#rows tr")  # All may be answered before the first one is drawn.
        page.keyboard.press("x")
        first = chosen(page)
        page.click("#after")
        page.wait_for_selector("#problem:not([hidden])")
        page.click("#after")
        page.wait_for_selector("#rows tr")
        assert text_of(page, "#facts").startswith("c, d.nii")
        assert page.is_disabled("#after")
        page.click("#scans li:first-child")
        page.wait_for_selector('#facts:text("a.nii.gz")')
        assert row(page, first)[1] == "absent"
        assert page.text_content("#scans span:last-child") == "4 of 6 found, 1 by you"
        name, content = download(page, "#save-all")
        table = list(csv.DictReader(io.StringIO(content)))
        assert name == "phantom-landmarks.csv"
        assert {each["scan"] for each in table} == {"a", "c, d"}
        _, single = download(page, '[data-format="long"]')
        columns = next(csv.reader(io.StringIO(single)))
        assert list(table[0]) == ["scan", *columns, "model", "version"]
        (made,) = {f"{each['model']} {each['version']}" for each in table}
        assert f"voxels \N{MIDDLE DOT} {made} " in text_of(page, "#facts")
        for ours, theirs in zip(table, csv.DictReader(io.StringIO(single)), strict=False):
            assert ours["ras_x_mm"] == theirs["ras_x_mm"]
            assert ours["decided_by"] == theirs["decided_by"]
            assert ours["warnings"] == theirs["warnings"]


def test_page_ends_with_its_content_on_a_phone(
    browser: Browser, page_service: ServiceProcess
) -> None:
    with opened(browser, page_service.url, **PHONE) as page:
        drop(page, ("head.nii.gz", SCAN))
        page.wait_for_selector("#rows tr")
        sizes = page.evaluate(
            """() => {
                const { scrollWidth, scrollHeight } = document.documentElement;
                const bottom = document.querySelector("main").getBoundingClientRect().bottom;
                return [scrollWidth, Math.abs(scrollHeight - bottom - window.scrollY) < 2];
            }"""
        )
        assert sizes == [390, True]
        page.evaluate("window.scrollTo(0, document.documentElement.scrollHeight)")
        assert page.evaluate("document.getElementById('stage').getBoundingClientRect().top") == 0
        # A finger drags, too, and the page stays where it is.
        choose(page, "ball")
        mark = mark_of(page, "ball", 0)
        touch = page.context.new_cdp_session(page)
        for kind, shift in (("Start", 0), ("Move", 9), ("Move", 18), ("End", 18)):
            points = [] if kind == "End" else [{"x": mark["x"] + shift, "y": mark["y"]}]
            touch.send("Input.dispatchTouchEvent", {"type": f"touch{kind}", "touchPoints": points})
        assert row(page, "ball")[1] == "placed"
        assert mark_of(page, "ball", 0)["x"] == pytest.approx(mark["x"] + 18, abs=0.5)


def test_frame_is_remembered(browser: Browser, page_service: ServiceProcess) -> None:
    with opened(browser, page_service.url) as page:
        page.eval_on_selector('[data-frame="LPS"]', "(one) => one.click()")
        page.reload()
        page.wait_for_selector("body[data-ready]")
        assert page.get_attribute('[data-frame="LPS"]', "aria-pressed") == "true"


@pytest.mark.parametrize("viewport", [(1300, 700), (390, 844)])
def test_the_widest_plane_of_a_flat_scan_has_most_of_the_room(
    browser: Browser, page_service: ServiceProcess, viewport: tuple[int, int]
) -> None:
    """As of a spine, whose sagittal plane shows all and the others a strip each."""
    flat = as_nifti(np.full((20, 60, 60), 7, np.int16), np.diag([2.0, 2.0, 2.0, 1.0]))
    size = dict(zip(("width", "height"), viewport, strict=True))
    with opened(browser, page_service.url, viewport=size) as page:
        drop(page, ("flat.nii", flat))
        page.wait_for_selector("#results", state="visible")
        room = page.locator("#canvas").bounding_box()
        assert room is not None
        main, *others = panes(page)
        assert main.width == pytest.approx(main.height)
        assert main.width > 0.55 * min(room["width"], 2 * room["height"])
        assert len(others) == 3
        assert all(main.area > 3 * pane.area for pane in others[:2])
        page.click('[data-view="axial"]')
        assert len(panes(page)) == 1
        page.click('[data-view="all"]')
        assert panes(page) == [main, *others]
        drop(page, ("cube.nii", SCAN))
        page.wait_for_selector("#rows tr")
        areas = [pane.area for pane in panes(page)[:3]]
        assert max(areas) < 1.5 * min(areas)


def test_broken_file_is_explained(browser: Browser, page_service: ServiceProcess) -> None:
    with opened(browser, page_service.url) as page:
        drop(page, ("head.nii.gz", SCAN[: len(SCAN) // 2]))
        page.wait_for_selector("#problem:not([hidden])")
        assert page.inner_text("#problem-title") == "This scan is damaged or incomplete"
        assert "expected" in page.inner_text("#problem-detail")
        assert page.inner_text("#problem-id").startswith("Request id ")
        page.wait_for_selector("#welcome:not([hidden])")


@pytest.mark.parametrize("text", ['"description":"\u2028', ":\n\nevent: "])
def test_line_separators_in_words_and_comments_end_no_event(
    browser: Browser, page_service: ServiceProcess, text: str
) -> None:
    headers = RAW | BEARER | {"Accept": "text/event-stream"}
    url = f"{page_service.url}/v1/landmarks?model=phantom"
    events = httpx.post(url, content=SCAN, headers=headers, timeout=60).text
    body = events.replace(text.strip(":\n\u2028"), text)
    assert body != events
    answer: dict[str, Any] = {"body": body, "content_type": "text/event-stream"}
    with opened(browser, page_service.url) as page:
        page.route("**/v1/landmarks?*", lambda route: route.fulfill(**answer))
        drop(page, ("head.nii.gz", SCAN))
        page.wait_for_selector("#rows tr", timeout=20_000)


def test_without_webgl_landmarks_are_listed(browser: Browser, page_service: ServiceProcess) -> None:
    with opened(browser, page_service.url, before=WITHOUT_WEBGL) as page:
        assert "no WebGL 2" in page.inner_text("#unseen")
        page.click("#generate")
        page.wait_for_selector("#rows tr")
        assert page.locator("#rows tr").count() > 1
        page.keyboard.press("x")
        assert row(page, chosen(page))[1] == "absent"
        name, content = download(page, '[data-format="fcsv"]')
        assert name == "phantom-6.fcsv"
        assert "marked absent by a person" in content


@pytest.mark.parametrize(
    ("suffix", "write"),
    [("nrrd", as_nrrd), ("mha", as_metaimage), ("mgz", partial(as_mgh, zipped=True))],
)
def test_formats_that_the_viewer_reads_are_shown_where_the_service_found_them(
    browser: Browser, page_service: ServiceProcess, suffix: str, write: Callable[..., bytes]
) -> None:
    volume = read_volume(SCAN)
    voxels = np.rint(volume.voxels).astype(np.int16)
    with opened(browser, page_service.url) as page:
        drop(page, (f"scan.{suffix}", write(voxels, volume.affine)))
        page.wait_for_selector("#results", state="visible")
        assert page.is_hidden("#unseen")
        answer = page.evaluate("landmarkd.queue.current.edits.landmarks")
        compare_points(page, [landmark for landmark in answer if landmark["ras_mm"]])


def test_a_dicom_series_is_asked_for_by_number_and_its_landmarks_listed(
    browser: Browser, page_service: ServiceProcess
) -> None:
    volume = read_volume(SCAN)
    voxels = np.rint(volume.voxels).astype(np.int16)
    scout = as_dicom(voxels[:, :, :2], volume.affine, SeriesInstanceUID="1.2")
    with opened(browser, page_service.url) as page:
        drop(page, ("series.zip", zipped([*scout, *as_dicom(voxels, volume.affine)])))
        page.wait_for_selector("#ask-choice", state="visible")
        assert page.text_content("#choice-name") == "series"
        lines = page.inner_text("#problem-detail").splitlines()
        assert [line[:9] for line in lines[1:]] == ["series 0:", "series 1:"]
        page.click("#ask-choice button")
        page.wait_for_selector("#results", state="visible")
        assert page.is_hidden("#unseen")
        compare_rows(page, page.evaluate("landmarkd.queue.current.edits.landmarks"))


def test_the_frame_that_was_chosen_is_shown_under_its_landmarks(
    browser: Browser, page_service: ServiceProcess, answer: list[dict[str, Any]]
) -> None:
    volume = read_volume(SCAN)
    frames = np.stack([100 * volume.voxels[::-1], volume.voxels], axis=-1)
    with opened(browser, page_service.url) as page:
        drop(page, ("alone.nii", as_nifti(volume.voxels, volume.affine)))
        page.wait_for_selector("#rows tr")
        choose(page, ABSENT)
        page.focus("#canvas")
        page.keyboard.press("ArrowLeft")
        alone = drawn(page)
        drop(page, ("many.nii", as_nifti(frames, volume.affine)))
        page.fill("#choice", "2")
        page.keyboard.press("Enter")
        page.wait_for_selector('#problem-detail:text("expected frame from 0 to 1, got 2")')
        page.fill("#choice", "1")
        page.keyboard.press("Enter")
        page.wait_for_selector("#rows tr")
        compare_rows(page, answer)
        choose(page, ABSENT)
        page.hover("#canvas")
        page.focus("#canvas")
        page.keyboard.press("ArrowLeft")  # Of NiiVue's keys, that for the frame before.
        assert np.abs(drawn(page) - alone).mean() < SAME_GREY


@pytest.mark.parametrize("screen", [{"viewport": {"width": 1400, "height": 900}}, PHONE])
def test_long_names_and_measurements_have_their_room(
    browser: Browser, page_service: ServiceProcess, screen: dict[str, Any]
) -> None:
    lengthen = """() => {
        const { queue } = landmarkd;
        const { current } = queue;
        const [one] = current.edits.landmarks;
        const far = { name: "L1 posterior-superior", ras_mm: [-123.45, -123.45, -123.45] };
        current.edits.landmarks = Array(60).fill({ ...one, ...far });
        queue.current = null;
        queue.onShow(current);
    }"""
    size = "(id) => document.getElementById(id).%s"
    with opened(browser, page_service.url, **screen) as page:
        drop(page, ("head.nii.gz", SCAN))
        page.wait_for_selector("#rows tr")
        page.evaluate(lengthen)
        page.wait_for_selector("#rows tr:nth-child(60)")
        width = page.evaluate(size % "scrollWidth", "scroll")
        assert width <= page.evaluate(size % "clientWidth", "scroll")
        assert page.evaluate(size % "clientHeight", "measured") > 40
        assert page.eval_on_selector("#rows td", "(cell) => cell.scrollWidth <= cell.clientWidth")


def test_scan_opened_before_the_key_is_answered_by_the_chosen_model(
    browser: Browser, page_service: ServiceProcess
) -> None:
    page = browser.new_page(viewport=SMALL)
    page.set_default_timeout(60_000)
    page.goto(page_service.url)
    page.wait_for_selector("body[data-ready]")
    drop(page, ("head.nii.gz", SCAN))
    page.wait_for_selector("#problem:not([hidden])")
    with page.expect_request("**/v1/landmarks?model=phantom*"):
        page.fill("#key", KEY)
        page.keyboard.press("Enter")
    page.wait_for_selector("#rows tr")
    assert page.input_value("#model") == "phantom"
    page.close()
