"""What fails on the page while another scan is looked at, in a real Chromium."""

from tests.support.browser import SCAN, Browser, choose, drop, hold, opened, row, text_of
from tests.support.services import ServiceProcess


def test_failed_keep_is_told_at_its_own_scan(
    browser: Browser, page_service: ServiceProcess
) -> None:
    with opened(browser, page_service.url) as page:
        drop(page, ("a.nii.gz", SCAN), ("b.nii.gz", SCAN))
        page.wait_for_selector('#scans li:nth-child(2)[data-state="done"]')
        page.wait_for_selector("#rows tr")
        choose(page, "ball")
        page.keyboard.press("x")
        page.eval_on_selector("#keeping", "(one) => (one.hidden = false)")
        held = hold(page, "**/v1/cases*")
        with page.expect_request("**/v1/cases*"):
            page.click("#keep")
        page.click("#after")
        page.wait_for_selector('#facts:text("b.nii.gz")')
        held[0].abort()
        page.wait_for_selector('#keep[aria-disabled="false"]')
        assert page.is_hidden("#problem")
        assert text_of(page, "#scans span:last-child") == "4 of 6 found, 1 by you, not kept"
        page.click("#before")
        page.wait_for_selector('#facts:text("a.nii.gz")')
        assert text_of(page, "#problem-title") == "No answer"
        assert page.is_visible("#problem")
        assert page.is_hidden("#again")  # It would forget the corrections.
        assert row(page, "ball")[1] == "absent"


def test_failed_measuring_is_not_told_under_another_scan(
    browser: Browser, page_service: ServiceProcess
) -> None:
    with opened(browser, page_service.url) as page:
        drop(page, ("a.nii.gz", SCAN), ("b.nii.gz", SCAN))
        page.wait_for_selector('#scans li:nth-child(2)[data-state="done"]')
        page.wait_for_selector("#rows tr")
        choose(page, "ball")
        held = hold(page, "**/page/landmarks?*")
        with page.expect_request("**/page/landmarks?*"):
            page.keyboard.press("x")
        page.click("#after")
        page.wait_for_selector('#facts:text("b.nii.gz")')
        with page.expect_event("requestfailed"):
            held[0].abort()
        page.wait_for_function("new Promise((resolve) => setTimeout(() => resolve(true)))")
        assert page.is_hidden("#problem")
        with page.expect_event("requestfailed"), page.expect_request("**/page/landmarks?*"):
            page.unroute("**/page/landmarks?*")
            page.route("**/page/landmarks?*", lambda route: route.abort())
            page.click("#before")
        page.wait_for_selector("#problem", state="visible")
        assert text_of(page, "#measurements td:last-child") == "not computed"


def test_failed_download_is_told_at_its_own_scan(
    browser: Browser, page_service: ServiceProcess
) -> None:
    with opened(browser, page_service.url) as page:
        drop(page, ("a.nii.gz", SCAN), ("b.nii.gz", SCAN))
        page.wait_for_selector('#scans li:nth-child(2)[data-state="done"]')
        page.wait_for_selector("#rows tr")
        held = hold(page, "**/page/landmarks?*")
        with page.expect_request("**/page/landmarks?*"):
            page.click('[data-format="json"]')
        page.click("#after")
        page.wait_for_selector('#facts:text("b.nii.gz")')
        held[0].abort()
        page.wait_for_selector('#scans span:text("5 of 6 found, not downloaded")')
        assert page.is_hidden("#problem")
        page.click("#before")
        page.wait_for_selector('#problem-title:text("No answer")')
        page.unroute("**/page/landmarks?*")
        with page.expect_download():
            page.click('[data-format="json"]')
        assert text_of(page, "#scans span:last-child") == "5 of 6 found"
        assert page.is_hidden("#problem")
