"""The page whose key has been replaced at the service, in a real Chromium."""

from collections.abc import Iterator

import pytest

from tests.support.browser import KEY, SCAN, Browser, Page, choose, drop, opened, text_of
from tests.support.services import ServiceProcess

FORGET = """async () => (await import("/page/service.js")).setKey("one that was replaced")"""


@pytest.fixture
def outdated(browser: Browser, page_service: ServiceProcess) -> Iterator[Page]:
    """The page with one answered scan, and with a key that the service does not know any more."""
    with opened(browser, page_service.url) as page:
        drop(page, ("head.nii.gz", SCAN))
        page.wait_for_selector("#rows tr")
        choose(page, "ball")
        page.evaluate(FORGET)
        yield page


def test_key_is_asked_for_by_a_heatmap(outdated: Page) -> None:
    outdated.keyboard.press("h")
    outdated.wait_for_selector('#heatmap:text("No heatmap of ball")')
    assert outdated.is_visible("#ask-key")
    outdated.fill("#key", KEY)
    outdated.keyboard.press("Enter")
    outdated.wait_for_selector("#ask-key", state="hidden")
    outdated.click("#show-heatmap")
    outdated.wait_for_selector('#heatmap:text("its highest value is")')


def test_measurements_are_computed_once_the_key_is_known(outdated: Page) -> None:
    before = text_of(outdated, "#measurements td:nth-child(2)")
    outdated.focus("#canvas")
    outdated.keyboard.press("Shift+ArrowRight")
    outdated.wait_for_selector("#ask-key", state="visible")
    assert before.endswith(" mm")
    assert not text_of(outdated, "#measurements td:nth-child(2)").endswith(" mm")
    outdated.fill("#key", KEY)
    outdated.keyboard.press("Enter")
    outdated.wait_for_selector('#measurements td:text(" mm")')
    assert outdated.is_hidden("#problem")
