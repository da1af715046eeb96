"""The page while its service is away, busy or killed, in a real Chromium."""

from tests.support.browser import ABSENT, MISSING, SCAN, Browser, choose, drop, opened, text_of
from tests.support.services import ServiceProcess


def test_measurements_that_fail_are_not_those_of_before(
    browser: Browser, page_service: ServiceProcess
) -> None:
    values = "#measurements td:nth-child(2)"
    with opened(browser, page_service.url) as page:
        drop(page, ("a.nii.gz", SCAN))
        page.wait_for_selector("#rows tr")
        before = text_of(page, values)
        assert before.endswith(" mm")
        page.route("**/page/landmarks?*", lambda route: route.abort())
        choose(page, ABSENT)
        page.keyboard.press("x")
        page.wait_for_selector("#problem:not([hidden])")
        assert page.get_attribute("#measurements", "aria-busy") == "false"
        assert text_of(page, values) == MISSING
        page.unroute("**/page/landmarks?*")
        page.keyboard.press("Control+z")
        page.wait_for_selector(f'{values}:text-is("{before}")')
        assert page.is_hidden("#problem")
