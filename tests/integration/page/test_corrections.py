"""Corrections on the page, in a real Chromium with a real service: by mouse, finger and keys."""

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

from app.api.dependencies import hash_key
from app.geometry import Points, transform
from app.io import read_case, read_landmarks, read_truth
from app.training.data.specimens import pair_files
from tests.integration.page.conftest import PHANTOM
from tests.support.browser import (
    ABSENT,
    KEY,
    MISSING,
    NEAR_MM,
    SCAN,
    Browser,
    Page,
    choose,
    chosen,
    crosshair,
    download,
    drag,
    drop,
    hold,
    landmark,
    mark_of,
    opened,
    row,
    text_of,
)
from tests.support.services import ServiceProcess

LEAVING = "!window.dispatchEvent(new Event('beforeunload', { cancelable: true }))"
"""Whether the page asks before it is left."""

SEEN = ("ball", "dumbbell", ABSENT)  # whose heatmaps a test looks at; the page keeps them
HEATMAP = "#show-heatmap"


def highest_voxel(page: Page) -> tuple[Points, float]:
    """Read where the heatmap over the scan is highest, in mm, and its value there."""
    at, value, shape, affine = page.evaluate(
        """() => {
            const [, { img, hdr, cal_max }] = landmarkd.viewer.nv.volumes;
            return [img.indexOf(cal_max), cal_max, hdr.dims.slice(1, 4), hdr.affine];
        }"""
    )
    ijk = np.unravel_index(at, shape, order="F")
    return transform(np.array(affine), np.array(ijk, dtype=np.float64)), value


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
    said = text_of(page, "#chosen")
    assert "Marked absent by you." in said
    assert "was not found" not in said
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
    page.click("#canvas", position={"x": box[0] + box[2] * 0.4, "y": box[1] + box[3] * 0.3})
    assert page.is_hidden("#placing")
    after = landmark(page, ABSENT)
    assert_allclose(crosshair(page), after["ras_mm"], atol=0.05)  # NiiVue counts in float32
    assert row(page, ABSENT)[1] == "placed"
    page.keyboard.press("Control+z")
    assert row(page, ABSENT)[1] == "not found"
    page.keyboard.press("p")
    page.keyboard.press("Enter")  # without a mouse
    assert_allclose(landmark(page, ABSENT)["ras_mm"], crosshair(page), atol=0.05)


def test_heatmap_is_laid_over_the_scan_when_asked_for(page: Page) -> None:
    first, second, third = (landmark(page, name) for name in SEEN)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    for one in (first, second, first):
        choose(page, one["name"])
        assert page.get_attribute(HEATMAP, "aria-pressed") == "false"
        page.keyboard.press("h")
        page.wait_for_selector(f'#heatmap:text-matches("^Heatmap of {one["name"]}")')
        assert page.get_attribute(HEATMAP, "aria-pressed") == "true"
        at, highest = highest_voxel(page)
        words = text_of(page, "#heatmap")
        assert np.linalg.norm(np.subtract(at, one["ras_mm"])) < 2.0  # mm, as is a voxel
        assert f" is {highest:.2f} of 1 at voxel " in words
        assert words.endswith(" mm from the point found.")
    assert sum("heatmaps" in url for url in asked) == 2  # the first one was kept
    page.click(HEATMAP)
    assert page.text_content("#heatmap") == ""
    assert page.evaluate("landmarkd.viewer.nv.volumes.length") == 1
    choose(page, third["name"])
    page.click(HEATMAP)
    page.wait_for_selector(f'#heatmap:text-matches("^Heatmap of {third["name"]}")')
    assert_allclose(crosshair(page), highest_voxel(page)[0], atol=0.05)
    page.click(HEATMAP)


def test_heatmap_is_given_up_with_its_landmark(page: Page, answer: list[dict[str, Any]]) -> None:
    page.route("**/v1/heatmaps?*", lambda _: None)  # never answered
    choose(page, answer[0]["name"])
    for leave in (partial(choose, page, answer[1]["name"]), partial(page.keyboard.press, "h")):
        with page.expect_event("requestfailed"):
            with page.expect_request("**/v1/heatmaps?*"):
                page.keyboard.press("h")
            assert text_of(page, "#heatmap").startswith("Making the heatmap of")
            leave()
        assert page.text_content("#heatmap") == ""
    page.unroute("**/v1/heatmaps?*")


def test_page_says_why_the_service_makes_no_heatmap(
    page: Page, answer: list[dict[str, Any]]
) -> None:
    choose(page, next(one["name"] for one in answer if one["name"] not in SEEN))
    page.evaluate("landmarkd.queue.current.model = 'gone'")
    page.keyboard.press("h")
    page.wait_for_selector('#heatmap:text("No heatmap of ")')
    page.evaluate("landmarkd.queue.current.model = 'phantom'")
    assert "'gone'" in text_of(page, "#heatmap")
    assert page.is_hidden("#problem")
    assert page.get_attribute(HEATMAP, "aria-pressed") == "false"


def test_scan_that_was_written_again_is_named_where_it_cannot_be_sent_again(
    browser: Browser, page_service: ServiceProcess, tmp_path: Path
) -> None:
    scan = tmp_path / "head.nii.gz"
    scan.write_bytes(SCAN)
    os.utime(scan, (1, 1))  # In a form, Chromium sends a file that is up to 1 s newer as it is.
    with opened(browser, page_service.url) as page:
        page.set_input_files("#file", scan)
        page.wait_for_selector("#rows tr")
        scan.write_bytes(SCAN + bytes(1))
        page.click(HEATMAP)
        page.wait_for_selector('#heatmap:text("It was changed, moved or removed")')
        # As a service with a store would offer it.
        page.eval_on_selector("#keeping", "(one) => (one.hidden = false)")
        page.click("#keep")
        page.wait_for_selector('#problem-title:text("File not readable")')


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
    assert text_of(page, "#measurements td:last-child") == "not found: ball"
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


def test_contrast_is_chosen(page: Page) -> None:
    ranges = {}
    for name in ("bone", "full", "auto"):
        page.click(f'[data-window="{name}"]')
        volume = "landmarkd.viewer.nv.volumes[0]"
        ranges[name] = page.evaluate(f"[{volume}.cal_min, {volume}.cal_max]")
    assert ranges["full"][0] <= ranges["auto"][0] < ranges["bone"][0]
    assert ranges["bone"][1] <= ranges["auto"][1] <= ranges["full"][1]


def test_corrections_are_not_lost_unasked(page: Page, answer: list[dict[str, Any]]) -> None:
    choose(page, answer[0]["name"])
    assert page.evaluate(LEAVING) is False
    page.keyboard.press("x")
    assert page.evaluate(LEAVING) is True
    page.dispatch_event("#model", "change")
    page.wait_for_selector("#rows tr")
    assert page.evaluate(LEAVING) is True
    assert landmark(page, answer[0]["name"])["decided_by"] == "person"
    download(page, '[data-format="json"]')
    assert page.evaluate(LEAVING) is False
    choose(page, answer[1]["name"])
    page.keyboard.press("a")
    assert page.evaluate(LEAVING) is True
    for form in ("measurements", "wide"):  # They have no positions.
        download(page, f'[data-format="{form}"]')
    assert page.evaluate(LEAVING) is True


def test_corrections_stay_unsaved_whatever_is_looked_at_or_fails(
    browser: Browser, page_service: ServiceProcess
) -> None:
    with opened(browser, page_service.url) as page:
        drop(page, ("a.nii.gz", SCAN), ("b.nii.gz", SCAN))
        page.wait_for_selector('#scans li:nth-child(2)[data-state="done"]')
        choose(page, ABSENT)
        page.keyboard.press("x")
        for number in (2, 1):
            page.click(f"#scans li:nth-child({number})")
            page.wait_for_selector("#rows tr")
        assert page.evaluate(LEAVING) is True
        page.route("**/page/landmarks?*", lambda route: route.abort())
        page.click('[data-format="json"]')
        page.wait_for_selector("#problem:not([hidden])")
        assert page.evaluate(LEAVING) is True
        page.unroute("**/page/landmarks?*")
        download(page, '[data-format="json"]')
        assert page.is_hidden("#problem")
        assert page.evaluate(LEAVING) is False


def test_service_without_a_store_offers_to_keep_nothing(page: Page) -> None:
    assert page.text_content("#keeps") == ", and not stored"
    assert page.is_hidden("#keep")


def test_corrected_case_is_kept(browser: Browser, tmp_path: Path) -> None:
    store = tmp_path / "store"
    named = f"anna:{hash_key(KEY)}"
    service = ServiceProcess(PHANTOM.parent, STORE=str(store), API_KEYS=named, THREADS="1")
    try:
        with opened(browser, service.url) as page:
            assert page.text_content("#keeps") == ", and stored there only if you press Keep"
            page.select_option("#model", "phantom")
            drop(page, ("head.nii.gz", SCAN))
            page.wait_for_selector("#rows tr")
            name = page.evaluate("landmarkd.queue.current.edits.landmarks[0].name")
            choose(page, name)
            drag(page, name, 0, 12, -8)
            page.mouse.up()
            choose(page, ABSENT)
            page.keyboard.press("x")
            moved = landmark(page, name)["ras_mm"]
            page.route("**/v1/cases?*", lambda route: route.abort())
            page.click("#keep")
            page.wait_for_selector("#problem:not([hidden])")
            assert page.is_hidden("#again")  # It would forget the corrections.
            page.unroute("**/v1/cases?*")
            page.click("#keep")
            page.wait_for_selector('#state:text("Kept as case")')
            assert page.evaluate(LEAVING) is False
            held = hold(page, "**/v1/cases?*")
            page.click("#keep")
            drop(page, ("other.nii.gz", SCAN))
            page.wait_for_selector('#scans li:nth-child(2)[data-state="done"]')
            (route,) = held
            with page.expect_response("**/v1/cases?*"):
                route.continue_()
            page.wait_for_selector('#keep[aria-disabled="false"]')
            assert text_of(page, "#state") == ""  # The other scan is not kept.
    finally:
        service.kill()
    (files,) = pair_files(store / "phantom" / "scans", store / "phantom" / "landmarks")
    assert files.scan.read_bytes() == SCAN
    truth = read_truth(files.landmarks)
    assert truth[ABSENT] is None
    assert_allclose(read_landmarks(files.landmarks)[name], moved, atol=NEAR_MM)
    case = read_case(files.landmarks)
    assert (case.key, case.placed, case.absent) == ("anna", 1, 1)
