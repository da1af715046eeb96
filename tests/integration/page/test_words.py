"""Names and numbers on the page, in a real Chromium: they are whole, and widen nothing."""

from typing import Any

import pytest

from tests.support.browser import SCAN, Browser, drop, opened, text_of
from tests.support.services import ServiceProcess

DESK = {"viewport": {"width": 1400, "height": 900}}
PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}
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


@pytest.mark.parametrize("screen", [DESK, PHONE])
def test_long_name_of_a_file_widens_nothing(
    browser: Browser, page_service: ServiceProcess, screen: dict[str, Any]
) -> None:
    with opened(browser, page_service.url, **screen) as page:
        drop(page, (f"{'Oberschenkelhals_' * 12}.nii.gz", SCAN))
        page.wait_for_selector("#rows tr")
        for part in ("html", "aside"):
            sizes = "(one) => [one.scrollWidth, one.clientWidth]"
            needed, given = page.eval_on_selector(part, sizes)
            assert needed == given, part


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


@pytest.mark.parametrize("screen", [DESK, PHONE])
def test_paper_has_the_rings_where_they_are_on_the_screen_and_dark_words(
    browser: Browser, page_service: ServiceProcess, screen: dict[str, Any]
) -> None:
    with opened(browser, page_service.url, color_scheme="dark", **screen) as page:
        drop(page, ("a.nii.gz", SCAN))
        page.wait_for_selector("#rows tr")
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
