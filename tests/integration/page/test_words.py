"""Names and numbers on the page, in a real Chromium: they are whole, and widen nothing."""

import json
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from tests.support.browser import (
    ABSENT,
    KEY,
    SCAN,
    SMALL,
    Browser,
    Page,
    Route,
    choose,
    drop,
    hold,
    opened,
    row,
    text_of,
)
from tests.support.services import ServiceProcess

DESK: dict[str, Any] = {"viewport": {"width": 1400, "height": 900}}
PHONE: dict[str, Any] = {
    "viewport": {"width": 390, "height": 844},
    "has_touch": True,
    "is_mobile": True,
}
NARROW = (320, 568)
PER_MM = 1e-3
SEEN = """() => {
    const box = (of) => of.getBoundingClientRect();
    const canvas = box(document.getElementById("canvas"));
    const middle = ({ left, top, width, height }) => [
        (left + width / 2 - canvas.left) / canvas.width,
        (top + height / 2 - canvas.top) / canvas.height,
    ];
    return {
        text: getComputedStyle(document.getElementById("rows")).color,
        rings: [...document.querySelectorAll("#labels .ring")].map((ring) => middle(box(ring))),
    };
}"""
"""The colour of the table, and where rings are, as parts of the canvas."""


class Screen(NamedTuple):
    """The page with an answered scan whose file has a long name, dark, on a screen of its own."""

    page: Page
    touched: bool


@pytest.fixture(scope="module", params=[DESK, PHONE], ids=["desk", "phone"])
def screen(
    request: pytest.FixtureRequest, browser: Browser, page_service: ServiceProcess
) -> Iterator[Screen]:
    with opened(browser, page_service.url, color_scheme="dark", **request.param) as page:
        drop(page, (f"{'Oberschenkelhals_' * 12}.nii.gz", SCAN))
        page.wait_for_selector("#rows tr")
        yield Screen(page, request.param is PHONE)


def test_long_name_of_a_file_widens_nothing(screen: Screen) -> None:
    size = screen.page.viewport_size
    assert size is not None
    for width, height in [(size["width"], size["height"]), *([NARROW] if screen.touched else [])]:
        screen.page.set_viewport_size({"width": width, "height": height})
        screen.page.wait_for_function("(width) => innerWidth === width", arg=width)
        for part in ("html", "aside"):
            sizes = "(one) => [one.scrollWidth, one.clientWidth]"
            needed, given = screen.page.eval_on_selector(part, sizes)
            assert needed == given, (part, width)
    screen.page.set_viewport_size(size)


def test_bounds_of_a_ratio_are_as_fine_as_its_value(
    browser: Browser, page_service: ServiceProcess
) -> None:
    replace = """() => {
        const { queue } = landmarkd;
        const { current } = queue;
        const known = { value: 0.5123, interval95: [0.4987, 0.5261], reason: null };
        current.edits.original.measurements = [{ name: "ratio", unit: "", points: [], ...known }];
        queue.current = null;
        queue.onShow(current);
    }"""
    with opened(browser, page_service.url) as page:
        drop(page, ("head.nii.gz", SCAN))
        page.wait_for_selector("#rows tr")
        page.evaluate(replace)
        page.wait_for_selector('#measurements td:text("ratio")')
        assert text_of(page, "#measurements tr") == "ratio0.5120.499 \N{EN DASH} 0.526"


def test_lengths_are_as_fine_as_the_voxels(
    browser: Browser, page_service: ServiceProcess, answer: list[dict[str, Any]]
) -> None:
    def shrink(route: Route) -> None:
        """Answer as of a cell, whose voxels have two micrometres."""
        start, _, text = route.fetch().text().partition("event: answer\ndata: ")
        shrunk = json.loads(text)
        volume = shrunk["volume"]
        volume["spacing_mm"] = [PER_MM * mm for mm in volume["spacing_mm"]]
        volume["affine"][:3] = [[PER_MM * mm for mm in line] for line in volume["affine"][:3]]
        for one in shrunk["landmarks"]:
            one["region95_mm"] = 0.00123
            for frame in ("ras_mm", "lps_mm"):
                one[frame] = one[frame] and [PER_MM * mm for mm in one[frame]]
        shrunk["measurements"][0] |= {"value": 0.01234, "interval95": [0.01198, 0.0127]}
        body = f"{start}event: answer\ndata: {json.dumps(shrunk)}\n\n"
        route.fulfill(body=body, content_type="text/event-stream")

    first, second = [one for one in answer if one["name"] != ABSENT][:2]
    with opened(browser, page_service.url) as page:
        page.route("**/v1/landmarks?*", shrink)
        drop(page, ("cell.nii.gz", SCAN))
        page.wait_for_selector("#rows tr")
        places = [f"{PER_MM * mm:.4f}" for mm in first["ras_mm"]]
        assert row(page, first["name"])[2:5] == places
        assert row(page, first["name"])[6] == "0.0012"
        assert text_of(page, "#measurements tr") == "width0.012 mm0.012 \N{EN DASH} 0.013"
        choose(page, first["name"])
        choose(page, second["name"])
        apart = PER_MM * math.dist(first["ras_mm"], second["ras_mm"])
        assert f"{apart:.4f} mm from {first['name']}" in text_of(page, "#chosen")
        page.click("#show-heatmap")
        page.wait_for_selector('#heatmap:text("from red to yellow")')
        off = text_of(page, "#heatmap").removesuffix(" mm from the point found.").split()[-1]
        assert 0 < float(off) < 0.1
        assert len(off) == len("0.0000")


def test_answer_that_waits_for_the_viewer_says_so(
    browser: Browser, page_service: ServiceProcess
) -> None:
    page = browser.new_page(viewport=SMALL)
    held = hold(page, "**/page/niivue.js")
    page.goto(page_service.url)
    page.fill("#key", KEY)
    page.keyboard.press("Enter")
    page.wait_for_selector("#ask-key", state="hidden")
    drop(page, ("a.nii.gz", SCAN))
    page.wait_for_selector('#state:text-is("Drawing the scan…")')
    held[0].continue_()
    page.wait_for_selector("#rows tr")
    assert text_of(page, "#state") == ""
    page.close()


def test_scan_that_is_being_generated_is_said_to_be(
    browser: Browser, page_service: ServiceProcess
) -> None:
    """Over a slow line, nothing was seen to happen for half a minute."""
    with opened(browser, page_service.url) as page:
        held = hold(page, "**/page/phantom.nii.gz?*")
        page.click("#generate")
        page.wait_for_selector('#state:text-is("Generating a scan…")')
        held[0].abort()
        page.wait_for_selector("#problem", state="visible")
        assert text_of(page, "#state") == ""


def test_paper_has_the_rings_where_they_are_on_the_screen_and_dark_words(screen: Screen) -> None:
    page = screen.page
    page.wait_for_selector("#labels .ring", state="attached")
    page.evaluate(f"""{{
        window.seen = {SEEN};
        const printing = matchMedia("print");
        printing.onchange = () => {{ if (printing.matches) window.printed = seen(); }};
    }}""")
    page.pdf()
    shown, printed = page.evaluate("[seen(), printed]")
    assert printed["text"] == "rgb(0, 0, 0)"
    assert len(shown["rings"]) > 0
    assert printed["rings"] == [pytest.approx(ring, abs=0.01) for ring in shown["rings"]]


def test_columns_are_explained_and_placing_is_told_for_fingers_where_nothing_hovers(
    screen: Screen,
) -> None:
    page, touched = screen
    assert ("Conf.: confidence, 0 to 1." in page.inner_text("#results")) is touched
    page.click('[data-act="place"]')
    told = page.inner_text("#placing")
    page.click('[data-act="place"]')
    assert told.startswith("Tap where it is" if touched else "Click where it is")
    assert ("Esc" in told) is not touched
