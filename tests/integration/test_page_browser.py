"""The page in a real Chromium with a real service; skipped where there is no Chromium."""

import csv
import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.testing import assert_allclose

from app.api.dependencies import hash_key
from app.phantom import make_phantom, scan_bytes
from tests.support.browser import (
    CHROMIUM,
    FLAGS,
    KEY,
    Page,
    choose,
    chosen,
    crosshair,
    drop,
    landmark,
    mark_of,
    opened,
    row,
    rows,
)
from tests.support.services import RAW, ServiceProcess

sync_api = pytest.importorskip("playwright.sync_api", reason="expected playwright")
if CHROMIUM is None:
    pytest.skip("expected a Chromium", allow_module_level=True)

PHANTOM = Path(__file__).resolve().parents[2] / "models" / "phantom"
WIDTH = '[[measurements]]\nname = "width"\nkind = "distance"\npoints = ["ball", "dumbbell"]\n'
SEED = 6
SCAN = scan_bytes(make_phantom(SEED))
ABSENT = "ring"  # from this scan
BEARER = {"Authorization": f"Bearer {KEY}"}
WITHOUT_WEBGL = "HTMLCanvasElement.prototype.getContext = () => null"
PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}
NEAR_MM = 1e-3
MISSING = "\N{EN DASH}"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    models = tmp_path_factory.mktemp("models")
    shutil.copytree(PHANTOM, models / PHANTOM.name)
    with (models / PHANTOM.name / "model.toml").open("a", encoding="utf-8") as manifest:
        manifest.write(f"\n{WIDTH}")
    process = ServiceProcess(models, BATCH_SIZE="2", API_KEYS=hash_key(KEY))
    yield process
    process.kill()


@pytest.fixture(scope="module")
def answer(service: ServiceProcess) -> list[dict[str, Any]]:
    """The landmarks of the scan, as the service finds them."""
    url = f"{service.url}/v1/landmarks?model=phantom"
    made = httpx.post(url, content=SCAN, headers=RAW | BEARER, timeout=60).json()["landmarks"]
    assert [each["name"] for each in made if not each["ras_mm"]] == [ABSENT]
    return list(made)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield made
        made.close()


@pytest.fixture(scope="module")
def answered(browser: Any, service: ServiceProcess) -> Iterator[Page]:  # noqa: ANN401
    """The page with one scan, whose landmarks are found."""
    with opened(browser, service.url) as page:
        drop(page, ("head.nii.gz", SCAN))
        page.wait_for_selector("#rows tr")
        yield page


@pytest.fixture
def page(answered: Page) -> Iterator[Page]:
    """The same, afterwards with all corrections undone."""
    yield answered
    while answered.is_enabled('[data-act="undo"]'):
        answered.keyboard.press("Control+z")
    answered.keyboard.press("Escape")


def compare_rows(page: Page, answer: list[dict[str, Any]]) -> None:
    """Check the rows of the table."""
    for cells, one in zip(rows(page), answer, strict=True):
        mm = one["ras_mm"] or [MISSING] * 3
        assert cells[:2] == [one["name"], one["status"].replace("_", " ")]
        assert cells[2:5] == [at if at == MISSING else f"{at:.2f}" for at in mm]


def compare_points(page: Page, found: list[dict[str, Any]]) -> None:
    """Check the points that NiiVue draws."""
    nodes = page.evaluate(
        "landmarkd.viewer.nv.meshes[0].nodes.map(({ name, x, y, z }) => [name, x, y, z])"
    )
    assert [node[0] for node in nodes] == [landmark["name"] for landmark in found]
    places = np.array([landmark["ras_mm"] for landmark in found])
    assert_allclose([node[1:] for node in nodes], places, atol=NEAR_MM)


def move_through_rows(page: Page, answer: list[dict[str, Any]]) -> None:
    """Move through the rows by keyboard, and check that the crosshair follows."""
    page.focus('#rows tr[tabindex="0"]')
    page.keyboard.press("Home")
    page.keyboard.press("ArrowDown")
    assert chosen(page) == answer[1]["name"]
    assert_allclose(crosshair(page), answer[1]["ras_mm"], atol=NEAR_MM)
    page.keyboard.press("End")
    assert_allclose(crosshair(page), answer[-1]["ras_mm"], atol=NEAR_MM)


def point_at_all(page: Page) -> None:
    """Check that whatever is drawn highlights its row, and that a click selects it."""
    shown = page.evaluate(
        "landmarkd.viewer.screenPositions().map(({ x, y, name }) => [x, y, name])"
    )
    for x, y, name in shown:
        page.hover("#canvas", position={"x": x, "y": y})
        assert page.text_content("#rows tr.near td") == name
    x, y, name = shown[0]
    page.click("#canvas", position={"x": x, "y": y})
    assert chosen(page) == name


def download(page: Page, selector: str) -> tuple[str, str]:
    """Press a button; return the name and the content of the file that it saves."""
    with page.expect_download() as saved:
        page.evaluate("(selector) => document.querySelector(selector).click()", selector)
    return saved.value.suggested_filename, Path(saved.value.path()).read_text(encoding="utf-8")


def drag(page: Page, name: str, plane: int, right: float, down: float) -> None:
    """Drag a landmark's ring by CSS pixels."""
    mark = mark_of(page, name, plane)
    page.mouse.move(mark["x"] + 1, mark["y"] + 2)
    page.mouse.down()
    page.mouse.move(mark["x"] + 1 + right / 2, mark["y"] + 2 + down)
    page.mouse.move(mark["x"] + 1 + right, mark["y"] + 2 + down)


def test_dropped_scan_is_shown_with_its_landmarks(
    browser: Any,  # noqa: ANN401
    service: ServiceProcess,
    answer: list[dict[str, Any]],
) -> None:
    found = [landmark for landmark in answer if landmark["ras_mm"]]
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
        drop(page, ("head.nii.gz", SCAN))
        page.wait_for_selector("#rows tr")
        assert any("tile" in text for text in page.evaluate("told"))

        middle = np.mean([landmark["ras_mm"] for landmark in found], axis=0)
        distances = [np.linalg.norm(np.subtract(one["ras_mm"], middle)) for one in found]
        assert chosen(page) == found[int(np.argmin(distances))]["name"]
        compare_rows(page, answer)
        compare_points(page, found)
        move_through_rows(page, answer)
        point_at_all(page)
        name, content = download(page, '[data-format="mrk.json"]')
        assert name == "head.mrk.json"
        assert len(json.loads(content)["markups"][0]["controlPoints"]) == len(answer)
    assert [each for each in complaints if "GPU stall due to ReadPixels" not in each] == []


def test_dragged_ring_takes_its_point_along(page: Page, answer: list[dict[str, Any]]) -> None:
    before = answer[0]
    name = before["name"]
    choose(page, name)
    for plane, through in ((0, 2), (2, 0)):
        start = mark_of(page, name, plane)
        drag(page, name, plane, 12, -8)
        page.keyboard.press("Escape")  # gives it up
        page.mouse.up()
        assert landmark(page, name) == before
        drag(page, name, plane, 12, -8)
        page.mouse.up()
        after = landmark(page, name)
        assert (after["status"], after["decided_by"]) == ("detected", "person")
        assert after["ras_mm"][through] == pytest.approx(before["ras_mm"][through], abs=NEAR_MM)
        assert np.linalg.norm(np.subtract(after["ras_mm"], before["ras_mm"])) > 1.0
        assert_allclose(np.array(after["lps_mm"]) * [-1, -1, 1], after["ras_mm"], atol=NEAR_MM)
        assert_allclose(crosshair(page), after["ras_mm"], atol=NEAR_MM)
        end = mark_of(page, name, plane)
        assert (end["x"], end["y"]) == pytest.approx((start["x"] + 12, start["y"] - 8), abs=0.1)
        assert row(page, name)[1:] == [
            "placed", *(f"{mm:.2f}" for mm in after["ras_mm"]), MISSING, MISSING,
        ]  # fmt: skip
        page.keyboard.press("Control+z")
        assert landmark(page, name) == before
        page.keyboard.press("Control+Shift+z")
        assert landmark(page, name) == after
        page.keyboard.press("Control+z")


def test_arrow_keys_move_by_a_tenth_of_a_voxel(page: Page, answer: list[dict[str, Any]]) -> None:
    before = answer[0]["ras_mm"]
    name = answer[0]["name"]
    choose(page, name)
    spacing = min(page.evaluate("landmarkd.queue.current.edits.original.volume.spacing_mm"))
    for plane, (right, up) in enumerate(((0, 1), (0, 2), (1, 2))):
        mark = mark_of(page, name, plane)
        page.mouse.click(mark["x"], mark["y"])
        for key, axis, voxels in (
            ("ArrowRight", right, 0.1),
            ("ArrowUp", up, 0.1),
            ("Shift+ArrowLeft", right, -1.0),
        ):
            page.keyboard.press(key)
            expected = np.array(before)
            expected[axis] += voxels * spacing
            assert_allclose(landmark(page, name)["ras_mm"], expected, atol=NEAR_MM)
            page.keyboard.press("Control+z")


def test_downloads_hold_what_a_person_decided(page: Page, answer: list[dict[str, Any]]) -> None:
    placed, accepted, absent, *_ = (one["name"] for one in answer if one["ras_mm"])
    choose(page, placed)
    drag(page, placed, 1, 9, 9)
    page.mouse.up()
    choose(page, accepted)
    page.keyboard.press("a")
    choose(page, absent)
    page.keyboard.press("x")
    assert [row(page, name)[1] for name in (placed, accepted, absent)] == [
        "placed", "accepted", "absent",
    ]  # fmt: skip
    assert page.text_content("#summary") == f"{len(answer) - 2} of {len(answer)} landmarks found"
    _, content = download(page, '[data-format="mrk.json"]')
    points = {one["label"]: one for one in json.loads(content)["markups"][0]["controlPoints"]}
    assert points[placed]["description"].endswith("placed by a person")
    assert points[placed]["position"] == landmark(page, placed)["lps_mm"]
    assert points[accepted]["description"].endswith("accepted by a person")
    assert points[absent]["positionStatus"] == "undefined"
    _, content = download(page, '[data-format="json"]')
    by = {one["name"]: one["decided_by"] for one in json.loads(content)["landmarks"]}
    assert {name for name, who in by.items() if who == "person"} == {placed, accepted, absent}


def test_missing_landmark_is_placed_by_a_click(page: Page) -> None:
    choose(page, ABSENT)
    box = page.evaluate("landmarkd.viewer.nv.screenSlices[0].leftTopWidthHeight")
    page.keyboard.press("p")
    assert page.is_visible("#placing")
    at = {"x": box[0] + box[2] * 0.4, "y": box[1] + box[3] * 0.3}
    page.click("#canvas", position=at)
    assert page.is_hidden("#placing")
    after = landmark(page, ABSENT)
    assert_allclose(crosshair(page), after["ras_mm"], atol=0.05)  # NiiVue counts in float32
    assert row(page, ABSENT)[1] == "placed"
    page.keyboard.press("Control+z")
    assert row(page, ABSENT)[1] == "not found"


def test_measurements_follow_corrections(page: Page, answer: list[dict[str, Any]]) -> None:
    ends = {one["name"]: np.array(one["ras_mm"]) for one in answer if one["ras_mm"]}
    values = "#measurements td:nth-child(2)"
    before = f"{np.linalg.norm(ends['ball'] - ends['dumbbell']):.1f} mm"
    assert page.text_content(values) == before
    choose(page, "ball")
    drag(page, "ball", 0, 20, 10)
    page.mouse.up()
    moved = np.array(landmark(page, "ball")["ras_mm"])
    expected = f"{np.linalg.norm(moved - ends['dumbbell']):.1f} mm"
    assert expected != before
    page.wait_for_selector(f'{values}:text-is("{expected}")')
    page.keyboard.press("x")
    page.wait_for_selector(f'{values}:text-is("{MISSING}")')
    page.keyboard.press("Control+z")
    page.keyboard.press("Control+z")
    page.wait_for_selector(f'{values}:text-is("{before}")')


def test_review_begins_with_what_is_in_doubt(page: Page, answer: list[dict[str, Any]]) -> None:
    def doubt(one: dict[str, Any]) -> tuple[int, float]:
        ranks = ["not_found", "low_confidence", "detected"]
        return ranks.index(one["status"]), one["confidence"] or 0.0

    order = [one["name"] for one in sorted(answer, key=doubt)]
    assert order[0] == ABSENT
    choose(page, order[-1])
    for name in [*order, order[0]]:
        page.keyboard.press("n")
        assert chosen(page) == name
    page.keyboard.press("a")
    choose(page, order[-1])
    page.keyboard.press("n")
    assert chosen(page) == order[1]  # the first one is decided
    assert page.text_content("#decided") == f"You have decided 1; {len(order) - 1} left."


def test_letters_in_a_field_are_text(page: Page) -> None:
    page.evaluate("document.getElementById('ask-key').hidden = false")
    page.focus("#key")
    page.keyboard.type("axpn")
    assert page.input_value("#key").endswith("axpn")
    assert page.is_disabled('[data-act="undo"]')
    page.evaluate("document.getElementById('ask-key').hidden = true")


def test_several_scans_are_a_list(browser: Any, service: ServiceProcess) -> None:  # noqa: ANN401
    other = scan_bytes(make_phantom(SEED + 1))
    with opened(browser, service.url) as page:
        drop(page, ("a.nii.gz", SCAN), ("b.nii.gz", SCAN[:999]), ("c, d.nii", other))
        page.wait_for_selector('#scans li:nth-child(3)[data-state="done"]')
        assert page.text_content("#queue-title") == "3 scans"
        states = page.locator("#scans span:last-child").all_text_contents()
        assert states == ["5 of 6 found", "Broken volume", "5 of 6 found"]
        page.keyboard.press("x")
        first = chosen(page)
        page.click("#after")
        page.wait_for_selector("#problem:not([hidden])")
        page.click("#after")
        page.wait_for_selector("#rows tr")
        assert page.text_content("#facts").startswith("c, d.nii")
        assert page.is_disabled("#after")
        page.click("#scans li:first-child button")
        page.wait_for_selector('#facts:text("a.nii.gz")')
        assert row(page, first)[1] == "absent"
        assert page.text_content("#scans span:last-child") == "4 of 6 found, 1 by you"
        name, content = download(page, "#save-all")
        table = list(csv.DictReader(io.StringIO(content)))
        assert name == "landmarks.csv"
        assert {each["scan"] for each in table} == {"a", "c, d"}
        _, single = download(page, '[data-format="long"]')
        columns = next(csv.reader(io.StringIO(single)))
        assert list(table[0]) == ["scan", *columns]
        for ours, theirs in zip(table, csv.DictReader(io.StringIO(single)), strict=False):
            assert ours["ras_x_mm"] == theirs["ras_x_mm"]
            assert ours["decided_by"] == theirs["decided_by"]


def test_frame_of_the_table_is_chosen(page: Page, answer: list[dict[str, Any]]) -> None:
    before = row(page, answer[0]["name"])
    page.click('[data-frame="LPS"]')
    assert page.locator("thead abbr").all_text_contents()[:3] == ["L", "P", "S"]
    after = row(page, answer[0]["name"])
    assert [float(mm) for mm in after[2:5]] == [
        -float(before[2]),
        -float(before[3]),
        float(before[4]),
    ]
    assert page.evaluate("localStorage.getItem('landmarkd.frame')") == "LPS"
    page.click('[data-frame="RAS"]')


def test_page_ends_with_its_content_on_a_phone(browser: Any, service: ServiceProcess) -> None:  # noqa: ANN401
    with opened(browser, service.url, **PHONE) as page:
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


def test_frame_is_remembered(browser: Any, service: ServiceProcess) -> None:  # noqa: ANN401
    with opened(browser, service.url) as page:
        page.evaluate("localStorage.setItem('landmarkd.frame', 'LPS')")
        page.reload()
        page.wait_for_selector("body[data-ready]")
        assert page.get_attribute('[data-frame="LPS"]', "aria-pressed") == "true"


def test_broken_file_is_explained(browser: Any, service: ServiceProcess) -> None:  # noqa: ANN401
    with opened(browser, service.url) as page:
        drop(page, ("head.nii.gz", SCAN[: len(SCAN) // 2]))
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
        page.keyboard.press("x")
        assert row(page, chosen(page))[1] == "absent"
        name, content = download(page, '[data-format="fcsv"]')
        assert name == f"phantom-{SEED}.fcsv"
        assert "marked absent by a person" in content
