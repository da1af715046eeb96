"""The page on tablets and phones: under fingers, and without graphics, in a real Chromium."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

from tests.support.browser import (
    NEAR_MM,
    SAME_GREY,
    SCAN,
    Browser,
    Page,
    choose,
    drawn,
    drop,
    landmark,
    mark_of,
    opened,
)
from tests.support.services import ServiceProcess

SCREENS = ((768, 1024), (1024, 768), (360, 740))
FINGER_PX = 40
NEAR_PX = 9
STAGE = 0.54
"""Of the height of a screen that is held upright."""
UNREACHED = """(least) => {
    const touched = "button, select, summary, #scans li, #rows tr, #views label, header a";
    const shown = [...document.querySelectorAll(touched)].filter((one) => one.checkVisibility());
    return shown.filter((one) => {
        const { width, height } = one.getBoundingClientRect();
        return height < least || (one.localName === "button" && width < least);
    }).map((one) => one.id || one.textContent);
}"""


def held(width: int, height: int) -> dict[str, Any]:
    """Describe a screen that is touched."""
    size = {"width": width, "height": height}
    return {"viewport": size, "has_touch": True, "is_mobile": True}


def overflow(page: Page) -> int:
    """Measure how much wider the page is than the screen."""
    return int(page.evaluate("document.documentElement.scrollWidth - innerWidth"))


def test_whatever_is_touched_is_as_large_as_a_finger(
    browser: Browser, page_service: ServiceProcess
) -> None:
    with opened(browser, page_service.url, **held(*SCREENS[0])) as page:

        def compare_with_finger(width: int, height: int) -> None:
            page.set_viewport_size({"width": width, "height": height})
            page.wait_for_function("(width) => innerWidth === width", arg=width)
            assert page.evaluate(UNREACHED, FINGER_PX) == [], (width, height)
            assert overflow(page) == 0, (width, height)

        for size in SCREENS:
            compare_with_finger(*size)
        drop(page, ("a.nii.gz", SCAN), ("b.nii.gz", SCAN))
        page.wait_for_selector("#rows tr")
        page.click("#more summary")
        for width, height in SCREENS:
            compare_with_finger(width, height)
            if width < height:
                stage = page.locator("#stage").bounding_box()
                assert stage is not None
                assert stage["height"] <= STAGE * height + 1, (width, height)


@pytest.fixture(scope="module")
def upright(browser: Browser, page_service: ServiceProcess) -> Iterator[Page]:
    """The page on a tablet that is held upright, with one answered scan."""
    with opened(browser, page_service.url, **held(768, 1024)) as page:
        drop(page, ("a.nii.gz", SCAN))
        page.wait_for_selector("#rows tr")
        yield page


def test_four_views_of_an_upright_tablet_are_two_by_two(upright: Page) -> None:
    tops = "(all) => all.map((one) => one.getAttribute('y'))"
    first, second, third, fourth = sorted(
        float(top) for top in upright.eval_on_selector_all("#labels svg svg", tops)
    )
    assert second - first < NEAR_PX < third - second
    assert fourth - third < NEAR_PX


def test_second_finger_does_not_move_the_point_that_the_first_one_holds(
    upright: Page, answer: list[dict[str, Any]]
) -> None:
    name = answer[0]["name"]
    choose(upright, name)
    mark = mark_of(upright, name, 0)
    protocol = upright.context.new_cdp_session(upright)

    def touch(kind: str, *aside: float) -> None:
        points = [{"x": mark["x"] + x, "y": mark["y"], "id": at} for at, x in enumerate(aside)]
        protocol.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

    touch("touchStart", 0)
    touch("touchMove", 20)
    moved = upright.evaluate("landmarkd.viewer.crosshair")
    touch("touchStart", 20, 120)
    for aside in (150, 160):  # The browser tells of one when the next is there.
        touch("touchMove", 20, aside)
    assert_allclose(upright.evaluate("landmarkd.viewer.crosshair"), moved, atol=NEAR_MM)
    touch("touchEnd")
    upright.wait_for_selector("#decided:not(:empty)")
    assert_allclose(landmark(upright, name)["ras_mm"], moved, atol=NEAR_MM)


def test_scan_is_drawn_again_when_the_browser_gives_its_graphics_back(
    browser: Browser, page_service: ServiceProcess
) -> None:
    with opened(browser, page_service.url) as page:
        drop(page, ("a.nii.gz", SCAN))
        page.wait_for_selector("#rows tr")
        before = drawn(page)
        graphics = page.evaluate_handle("landmarkd.viewer.nv.gl.getExtension('WEBGL_lose_context')")
        graphics.evaluate("(graphics) => graphics.loseContext()")
        page.wait_for_function("() => landmarkd.viewer.nv.gl.isContextLost()")
        assert np.abs(drawn(page) - before).mean() > SAME_GREY
        assert page.is_visible('#lost:has-text("reload the page")')
        page.evaluate("window.lost = landmarkd.viewer.nv.meshes")
        graphics.evaluate("(graphics) => graphics.restoreContext()")
        page.wait_for_function(
            "() => (({ meshes }) => meshes !== lost && meshes.length)(landmarkd.viewer.nv)"
        )
        page.wait_for_selector("#lost", state="hidden")
        assert np.abs(drawn(page) - before).mean() < SAME_GREY
