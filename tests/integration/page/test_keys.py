"""The page whose key was replaced, and in two tabs of one browser, in a real Chromium."""

from collections.abc import Iterator

import pytest

from tests.support.browser import KEY, SCAN, SMALL, Browser, Page, choose, drop, opened, text_of
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


def test_what_one_tab_chooses_stays_there_and_is_the_first_choice_of_new_ones(
    browser: Browser, page_service: ServiceProcess
) -> None:
    names = [{"name": name, "version": "1", "landmarks": 3, "description": ""} for name in "ab"]
    listed = {"models": names, "keeps_cases": False}

    def chosen_at_first(page: Page) -> tuple[str, str]:
        page.goto(page_service.url)
        page.wait_for_selector("body[data-ready]")
        return page.input_value("#model"), text_of(page, '#frames [aria-pressed="true"]')

    with browser.new_context(viewport=SMALL) as context:
        context.set_default_timeout(20_000)
        context.route("**/v1/models", lambda route: route.fulfill(json=listed))
        one, other = context.new_page(), context.new_page()
        assert chosen_at_first(one) == chosen_at_first(other) == ("a", "RAS")
        other.select_option("#model", "b")
        other.eval_on_selector('[data-frame="LPS"]', "(one) => one.click()")
        assert chosen_at_first(one) == ("a", "RAS")
        assert chosen_at_first(other) == ("b", "LPS")
        assert chosen_at_first(context.new_page()) == ("b", "LPS")


def test_calls_are_listed_and_tried_with_the_key_that_is_asked_for(
    browser: Browser, page_service: ServiceProcess
) -> None:
    """The link to them led to a refusal in JSON."""
    start = browser.new_page(viewport=SMALL)
    start.goto(page_service.url)
    refused = "addEventListener('securitypolicyviolation', () => (window.refused = true))"
    start.context.add_init_script(refused)
    with start.expect_popup() as calls:  # What was opened stays where it is.
        start.click("header a")
    page = calls.value
    page.set_default_timeout(20_000)
    page.fill("#key", "another")
    page.keyboard.press("Enter")
    page.wait_for_selector('#problem:text("did not accept the key")')
    assert page.locator(".opblock").count() == 0
    page.fill("#key", KEY)
    page.keyboard.press("Enter")
    page.wait_for_selector("#ask-key", state="hidden")
    call = page.locator('.opblock:has([data-path="/v1/models"])')
    call.locator(".opblock-summary-control").click()
    call.locator(".try-out__btn").click()
    with page.expect_response("**/v1/models") as tried:
        call.locator(".execute").click()
    assert tried.value.status == 200
    call.locator(".responses-inner .microlight").first.wait_for()  # In its colours.
    assert page.evaluate("window.refused") is None
    start.context.close()
