"""What fails on the page while another scan is looked at, in a real Chromium."""

from collections.abc import Iterator

import pytest

from tests.support.browser import SCAN, Browser, Page, choose, drop, hold, opened, row, text_of
from tests.support.services import ServiceProcess


@pytest.fixture(scope="module")
def both(browser: Browser, page_service: ServiceProcess) -> Iterator[Page]:
    """The page with two answered scans."""
    with opened(browser, page_service.url) as page:
        drop(page, ("a.nii.gz", SCAN), ("b.nii.gz", SCAN))
        page.wait_for_selector('#scans li:nth-child(2)[data-state="done"]')
        yield page


@pytest.fixture
def pair(both: Page) -> Iterator[Page]:
    """The same, looked at the first one; afterwards with its correction undone."""
    both.click("#scans li:first-child")
    both.wait_for_selector('#facts:text("a.nii.gz")')
    both.wait_for_selector("#rows tr")
    yield both
    both.unroute_all()
    both.click("#scans li:first-child")
    both.wait_for_selector('#facts:text("a.nii.gz")')
    if both.is_enabled('[data-act="undo"]'):
        both.keyboard.press("Control+z")
        both.wait_for_selector('#measurements td:text(" mm")')


def test_failed_keep_is_told_at_its_own_scan(pair: Page) -> None:
    choose(pair, "ball")
    pair.keyboard.press("x")
    pair.eval_on_selector("#keeping", "(one) => (one.hidden = false)")
    held = hold(pair, "**/v1/cases*")
    with pair.expect_request("**/v1/cases*"):
        pair.click("#keep")
    pair.click("#after")
    pair.wait_for_selector('#facts:text("b.nii.gz")')
    held[0].abort()
    pair.wait_for_selector('#keep[aria-disabled="false"]')
    assert pair.is_hidden("#problem")
    assert text_of(pair, "#scans span:last-child") == "4 of 6 found, 1 by you, not kept"
    pair.click("#before")
    pair.wait_for_selector('#facts:text("a.nii.gz")')
    assert text_of(pair, "#problem-title") == "No answer"
    assert pair.is_visible("#problem")
    assert pair.is_hidden("#again")  # It would forget the corrections.
    assert row(pair, "ball")[1] == "absent"


def test_failed_measuring_is_not_told_under_another_scan(pair: Page) -> None:
    choose(pair, "ball")
    held = hold(pair, "**/page/landmarks?*")
    with pair.expect_request("**/page/landmarks?*"):
        pair.keyboard.press("x")
    pair.click("#after")
    pair.wait_for_selector('#facts:text("b.nii.gz")')
    with pair.expect_event("requestfailed"):
        held[0].abort()
    pair.wait_for_function("new Promise((resolve) => setTimeout(() => resolve(true)))")
    assert pair.is_hidden("#problem")
    with pair.expect_event("requestfailed"), pair.expect_request("**/page/landmarks?*"):
        pair.unroute("**/page/landmarks?*")
        pair.route("**/page/landmarks?*", lambda route: route.abort())
        pair.click("#before")
    pair.wait_for_selector("#problem", state="visible")
    assert text_of(pair, "#measurements td:last-child") == "not computed"


def test_failed_download_is_told_at_its_own_scan(pair: Page) -> None:
    held = hold(pair, "**/page/landmarks?*")
    with pair.expect_request("**/page/landmarks?*"):
        pair.click('[data-format="json"]')
    pair.click("#after")
    pair.wait_for_selector('#facts:text("b.nii.gz")')
    held[0].abort()
    pair.wait_for_selector('#scans span:text("5 of 6 found, not downloaded")')
    assert pair.is_hidden("#problem")
    pair.click("#before")
    pair.wait_for_selector('#problem-title:text("No answer")')
    pair.unroute("**/page/landmarks?*")
    with pair.expect_download():
        pair.click('[data-format="json"]')
    assert text_of(pair, "#scans span:last-child") == "5 of 6 found"
    assert pair.is_hidden("#problem")
