"""The page by keyboard, in a real Chromium with a real service: the focus, and what is seen."""

from tests.support.browser import (
    ABSENT,
    SCAN,
    Browser,
    Page,
    choose,
    chosen,
    drop,
    opened,
    rows,
)
from tests.support.services import ServiceProcess


def focused(page: Page) -> str:
    """Read the name in the row that has the focus; empty if none has."""
    script = "document.activeElement.closest('#rows tr')?.cells[0].textContent ?? ''"
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


def test_what_is_chosen_is_seen_in_forced_colours(
    browser: Browser, page_service: ServiceProcess
) -> None:
    groups = ("#rows tr", "#scans button", "[data-frame]", "[data-view]", "[data-window]")
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
