"""The page by keyboard, in a real Chromium with a real service: the focus, and what is seen."""

import itertools

import numpy as np
import pytest
from numpy.testing import assert_allclose

from tests.support.browser import (
    ABSENT,
    NEAR_MM,
    SCAN,
    Browser,
    Page,
    choose,
    chosen,
    crosshair,
    drop,
    hold,
    landmark,
    opened,
    rows,
    stop_clock,
    text_of,
)
from tests.support.scan_files import as_nifti
from tests.support.services import ServiceProcess


def focused(page: Page) -> str:
    """Read the name in the row that has the focus; empty if none has."""
    script = "document.activeElement.closest('#rows tr')?.cells[0].textContent ?? ''"
    return str(page.evaluate(script))


def holder(page: Page) -> str:
    """Read what has the focus once the page is drawn; ``body`` if nothing has."""
    script = """() => new Promise((resolve) => requestAnimationFrame(() => setTimeout(() => {
        const { id, dataset, localName } = document.activeElement;
        resolve(id || dataset.act || dataset.format || localName);
    })))"""
    return str(page.evaluate(script))


def test_focus_in_the_table_goes_along_with_the_chosen_row(page: Page) -> None:
    names = [cells[0] for cells in rows(page)]
    choose(page, names[0])
    assert focused(page) == names[0]
    for _ in names:
        page.keyboard.press("n")
        assert focused(page) == chosen(page)
    at = names.index(chosen(page))
    page.keyboard.press("ArrowUp" if at else "ArrowDown")
    assert focused(page) == chosen(page) == names[at - 1 if at else 1]


def test_undo_takes_the_focus_along(page: Page) -> None:
    names = [cells[0] for cells in rows(page)]
    choose(page, ABSENT)
    page.keyboard.press("a")
    choose(page, names[0])
    page.keyboard.press("Control+z")
    assert focused(page) == chosen(page) == ABSENT


def test_button_that_is_pressed_keeps_the_focus(page: Page) -> None:
    page.keyboard.press("n")  # The first time it goes to the most doubtful, chosen or not.
    page.focus('[data-act="next"]')
    before = chosen(page)
    page.keyboard.press("Enter")
    assert chosen(page) != before
    assert page.evaluate("document.activeElement.dataset.act") == "next"


def test_focus_follows_a_scan_through_cancel_and_try_again(
    browser: Browser, page_service: ServiceProcess
) -> None:
    with opened(browser, page_service.url) as page:
        held = hold(page, "**/v1/landmarks?*")
        drop(page, ("a.nii.gz", SCAN))
        page.wait_for_selector("#work", state="visible")
        page.focus("#cancel")
        page.keyboard.press("Enter")
        page.wait_for_selector('#problem-title:text("Cancelled")')
        assert holder(page) == "problem"
        page.keyboard.press("Tab")
        assert holder(page) == "again"
        with page.expect_request("**/v1/landmarks?*"):
            page.keyboard.press("Enter")
        assert holder(page) == "work"
        page.keyboard.press("Tab")
        assert holder(page) == "cancel"
        held[-1].continue_()
        page.wait_for_selector("#rows tr")
        assert holder(page) == "results"
        page.keyboard.press("Tab")
        assert holder(page) == "next"


@pytest.mark.parametrize(("button", "other"), [("after", "before"), ("before", "after")])
def test_focus_stays_at_the_ends_of_the_list(
    browser: Browser, page_service: ServiceProcess, button: str, other: str
) -> None:
    with opened(browser, page_service.url) as page:
        page.route("**/v1/landmarks?*", lambda _: None)
        drop(page, ("a.nii.gz", SCAN), ("b.nii.gz", SCAN))
        if button == "before":
            page.click("#after")
        page.focus(f"#{button}")
        for _ in range(2):
            page.keyboard.press("Enter")
            assert holder(page) == button
        assert page.is_disabled(f"#{button}")
        assert page.is_enabled(f"#{other}")


def test_focus_stays_where_nothing_is_left_to_undo_or_redo(page: Page) -> None:
    choose(page, ABSENT)
    page.keyboard.press("x")
    for act in ("undo", "redo"):
        page.focus(f'[data-act="{act}"]')
        page.keyboard.press("Enter")
        assert holder(page) == act
        assert page.is_disabled(f'[data-act="{act}"]')


def test_focus_stays_at_what_is_downloaded(page: Page) -> None:
    page.click("#more summary")
    page.focus('[data-format="tsv"]')
    with page.expect_download():
        page.keyboard.press("Enter")
    assert holder(page) == "tsv"


def test_focus_stays_at_keep(page: Page) -> None:
    page.eval_on_selector("#keeping", "(one) => (one.hidden = false)")
    page.route("**/v1/cases*", lambda route: route.abort())
    page.focus("#keep")
    page.keyboard.press("Enter")
    page.wait_for_selector("#problem", state="visible")
    assert holder(page) == "keep"
    page.unroute("**/v1/cases*")
    page.eval_on_selector("#keeping", "(one) => (one.hidden = true)")


def test_what_is_chosen_is_seen_in_forced_colours(
    browser: Browser, page_service: ServiceProcess
) -> None:
    groups = ("#rows tr", "#scans li", "[data-frame]", "[data-view]", "[data-window]")
    painted = "(all) => all.map((one) => getComputedStyle(one).backgroundColor)"
    with opened(browser, page_service.url, forced_colors="active") as page:
        drop(page, ("a.nii.gz", SCAN), ("b.nii.gz", SCAN))
        page.wait_for_selector("#rows tr")
        for group in groups:
            colours = page.locator(group).evaluate_all(painted)
            once = [colour for colour in colours if colours.count(colour) == 1]
            assert len(once) == (2 if len(colours) == 2 else 1), f"{group}: {colours}"


def test_esc_leaves_placing_after_a_press_that_ended_beyond_the_scan(page: Page) -> None:
    choose(page, ABSENT)
    page.keyboard.press("p")
    page.locator("#canvas").scroll_into_view_if_needed()
    box = page.locator("#canvas").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 4, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + 40, box["y"] + 60)
    page.mouse.move(box["x"] + 40, box["y"] - 20)
    page.mouse.up()
    page.keyboard.press("Escape")
    assert page.get_attribute('[data-act="place"]', "aria-pressed") == "false"
    assert page.is_hidden("#placing")


def test_headings_skip_no_level_and_what_scrolls_can_have_the_focus(
    browser: Browser, page_service: ServiceProcess
) -> None:
    headings = "h1:visible, h2:visible, h3:visible"
    unreachable = """() => [...document.querySelectorAll("main *")].filter((one) => {
        const inside = [one, ...one.querySelectorAll("*")];
        const scrolls = one.checkVisibility() && getComputedStyle(one).overflowY === "auto";
        const reached = inside.some(({ tabIndex }) => tabIndex >= 0);
        return scrolls && !reached && one.scrollHeight > one.clientHeight;
    }).map(({ id }) => id)"""
    with opened(browser, page_service.url, viewport={"width": 1000, "height": 60}) as page:
        page.click("#about-card summary")
        assert page.evaluate(unreachable) == []
        drop(page, ("a.nii.gz", SCAN), ("b.nii.gz", SCAN))
        page.wait_for_selector("#rows tr")
        assert page.evaluate(unreachable) == []
        names = page.locator(headings).evaluate_all("(all) => all.map((one) => one.localName)")
    levels = [int(name[1]) for name in names]
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))


def test_list_of_scans_is_one_stop_whose_arrows_choose(
    browser: Browser, page_service: ServiceProcess
) -> None:
    name = "document.activeElement.firstElementChild.textContent"
    with opened(browser, page_service.url) as page:
        page.route("**/v1/landmarks?*", lambda _: None)
        drop(page, *((f"{number}.nii", SCAN) for number in range(5)))
        page.wait_for_selector("#scans li:nth-child(5)")
        page.focus("#after")
        page.keyboard.press("Tab")
        assert page.evaluate(name) == "0.nii"  # Nothing is to be saved, so far.
        for key, expected in (("ArrowDown", 1), ("End", 4), ("ArrowDown", 4), ("ArrowUp", 3)):
            page.keyboard.press(key)
            assert page.evaluate(name) == f"{expected}.nii"
            assert page.evaluate("landmarkd.queue.current.name") == f"{expected}.nii"
        page.keyboard.press("Home")
        assert page.evaluate("landmarkd.queue.current.name") == "0.nii"
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.closest('#scans')") is None
        options = page.get_by_role("listbox", name="5 scans").get_by_role("option")
        assert options.count() == 5
        assert page.get_by_role("option", name="0.nii working…", selected=True).count() == 1
        assert page.get_by_role("option", name="4.nii waiting", selected=False).count() == 1


def test_focus_stays_in_the_table_when_another_scan_is_given_up(
    browser: Browser, page_service: ServiceProcess
) -> None:
    """The table was made anew when the service stayed away, and the focus went to the page."""
    with opened(browser, page_service.url) as page:
        drop(page, ("a.nii.gz", SCAN))
        page.wait_for_selector("#rows tr")
        stop_clock(page)
        for away in ("**/v1/landmarks?*", "**/readyz"):
            page.route(away, lambda route: route.abort())
        drop(page, ("b.nii.gz", SCAN), ("c.nii.gz", SCAN))
        page.click("#before")
        page.wait_for_selector("#rows tr")
        choose(page, ABSENT)
        while page.locator('#scans [data-state="problem"]').count() < 2:
            page.clock.run_for(60_000)
        assert focused(page) == ABSENT


def test_progress_and_problems_are_in_sight_on_a_low_screen(
    browser: Browser, page_service: ServiceProcess
) -> None:
    """As of a laptop that magnifies: they lay below the scan, and nothing was seen."""
    inside = """(id) => {
        const { top, bottom } = document.getElementById(id).getBoundingClientRect();
        return top >= 0 && Math.floor(bottom) <= innerHeight;
    }"""
    with opened(browser, page_service.url, viewport={"width": 853, "height": 400}) as page:
        held = hold(page, "**/v1/landmarks?*")
        drop(page, ("a.nii.gz", SCAN))
        page.wait_for_selector("#work", state="visible")
        assert page.evaluate(inside, "work")
        page.wait_for_selector("#hint", state="visible")
        assert page.evaluate(inside, "work")
        page.evaluate("scrollTo(0, 0)")
        held[0].fulfill(status=500, json={"code": "internal-error", "detail": "it failed"})
        page.wait_for_selector("#problem", state="visible")
        assert page.evaluate(inside, "problem")


def test_point_is_placed_and_moved_by_keys_in_the_plane_that_has_most_room(
    browser: Browser, page_service: ServiceProcess
) -> None:
    """As that of a spine, which is sagittal: without a click, they moved it in the axial plane."""
    flat = as_nifti(np.full((20, 60, 60), 7, np.int16), np.diag([2.0, 2.0, 2.0, 1.0]))
    with opened(browser, page_service.url) as page:
        drop(page, ("flat.nii", flat))
        page.wait_for_selector("#rows tr")
        page.focus('#rows tr[tabindex="0"]')
        page.keyboard.press("Enter")
        page.keyboard.press("p")
        assert "Enter takes the crosshair, arrow keys move its point" in text_of(page, "#placing")
        before = crosshair(page)
        for key in ("PageUp", "Shift+ArrowLeft"):
            page.keyboard.press(key)
        assert_allclose(np.subtract(crosshair(page), before), [2, -20, 0], atol=1.01)
        page.keyboard.press("Enter")
        at = landmark(page, chosen(page))["ras_mm"]
        assert_allclose(at, crosshair(page), atol=NEAR_MM)
        for key, axis in (("Shift+ArrowUp", 2), ("Shift+ArrowRight", 1)):
            page.keyboard.press(key)
            at[axis] += 2.0
            assert_allclose(landmark(page, chosen(page))["ras_mm"], at, atol=NEAR_MM)


def test_keys_move_through_slices_though_no_point_is_chosen(
    browser: Browser, page_service: ServiceProcess
) -> None:
    """Without a mouse, a scan in which nothing is found was seen in one slice only."""
    flat = as_nifti(np.full((40, 60, 60), 7, np.int16), np.diag([0.5, 2.0, 3.0, 1.0]))
    moves = (
        ("PageDown", [-0.5, 0, 0]),
        ("Shift+PageUp", [5, 0, 0]),
        ("Shift+PageDown", [-5, 0, 0]),
        ("ArrowRight", [0, 2, 0]),
        ("Shift+ArrowUp", [0, 0, 30]),
    )
    with opened(browser, page_service.url) as page:
        held = hold(page, "**/v1/landmarks?*")
        drop(page, ("flat.nii", flat))
        page.wait_for_selector("#hint", state="visible")
        for _ in range(2):
            page.focus("#canvas")
            page.keyboard.press("PageUp")  # From between two voxels to one.
            for key, by in moves:
                before = crosshair(page)
                page.keyboard.press(key)
                assert_allclose(np.subtract(crosshair(page), before), by, atol=NEAR_MM)
            if held:
                held.pop().continue_()
                page.wait_for_selector("#rows tr")
                assert page.evaluate("landmarkd.queue.current.selected") == -1


def test_slices_are_gone_through_without_moving_the_chosen_point(page: Page) -> None:
    choose(page, "ball")
    before = landmark(page, "ball")
    page.focus("#canvas")
    at = crosshair(page)
    page.keyboard.press("PageDown")
    assert crosshair(page) != at
    assert landmark(page, "ball") == before


def test_one_key_leads_past_all_buttons_to_the_chosen_row(page: Page) -> None:
    choose(page, "ball")
    page.focus("#canvas")
    page.keyboard.press("Tab")
    assert holder(page) == "to-rows"
    assert page.locator("#to-rows").evaluate("(one) => getComputedStyle(one).opacity") == "1"
    page.keyboard.press("Enter")
    assert focused(page) == "ball"
    assert page.locator("#to-rows").evaluate("(one) => getComputedStyle(one).opacity") == "0"


def test_answer_is_told_in_one_sentence_until_it_is_corrected(
    browser: Browser, page_service: ServiceProcess
) -> None:
    """Of the results that appear, a screen reader said nothing."""
    with opened(browser, page_service.url) as page:
        told = page.locator('[role="status"]:text("found")')
        held = hold(page, "**/v1/landmarks?*")
        drop(page, ("a.nii.gz", SCAN), ("b.nii.gz", SCAN))
        page.wait_for_selector("#hint", state="visible")
        page.focus("#canvas")
        assert told.count() == 0
        page.keyboard.press("Tab")
        assert holder(page) != "to-rows"  # So far there is no table.
        for name in ("a.nii.gz", "b.nii.gz"):
            page.wait_for_selector("#scans [data-state='working']")
            held.pop().continue_()
            page.wait_for_selector(f'#facts:text("{name}")')
            found = f"{name}: {text_of(page, '#summary')}"
            assert told.all_text_contents() == [found]
            page.keyboard.press("x")
            assert told.count() == 0
            page.evaluate("document.getElementById('after').click()")
