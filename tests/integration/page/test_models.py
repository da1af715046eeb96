"""Another model on the page, in a real Chromium with a real service: what was answered stays."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.integration.page.conftest import PHANTOM
from tests.support.browser import (
    ABSENT,
    MISSING,
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
from tests.support.scan_files import as_nifti
from tests.support.services import MODEL, ServiceProcess, ended, toy_models

LEAVING = "!window.dispatchEvent(new Event('beforeunload', { cancelable: true }))"
"""Whether the page asks before it is left."""


def answer_as_the_phantom(page: Page, name: str) -> list[str]:
    """Offer one more model, which finds what the phantom's does; the list gets what it is asked."""
    models = [
        {"name": each, "version": "1", "landmarks": 6, "description": ""}
        for each in ("phantom", name)
    ]
    listed = {"models": models, "keeps_cases": False}
    page.route("**/v1/models", lambda route: route.fulfill(json=listed))
    asked: list[str] = []

    def pass_on(route: Route) -> None:
        asked.append(route.request.url)
        route.continue_(url=route.request.url.replace(f"model={name}", "model=phantom"))

    page.route("**/v1/landmarks?*", pass_on)
    return asked


def test_answers_and_corrections_are_there_again_with_their_model(
    browser: Browser, page_service: ServiceProcess
) -> None:
    all_done = '#scans:not(:has(li:not([data-state="done"])))'
    with opened(browser, page_service.url) as page:
        asked = answer_as_the_phantom(page, "other")
        page.evaluate("document.getElementById('ask-key').requestSubmit()")
        page.wait_for_selector('#model option[value="other"]', state="attached")
        page.select_option("#model", "phantom")
        drop(page, ("a.nii.gz", SCAN), ("b.nii.gz", SCAN))
        page.wait_for_selector(all_done)
        page.wait_for_selector("#rows tr")
        choose(page, ABSENT)
        page.keyboard.press("x")
        page.select_option("#model", "other")
        page.wait_for_selector(all_done)
        page.wait_for_selector("#rows tr")
        assert row(page, ABSENT)[1] == "not found"
        assert page.evaluate(LEAVING) is True  # What was corrected is not lost, nor saved.
        assert len(asked) == 4
        page.select_option("#model", "phantom")
        page.wait_for_selector("#rows tr")
        assert row(page, ABSENT)[1] == "absent"
        assert page.text_content("#scans span:last-child") == "5 of 6 found, 1 by you"
        assert len(asked) == 4


def test_scan_opened_after_a_generated_one_is_for_the_model_that_was_chosen(
    browser: Browser, page_service: ServiceProcess
) -> None:
    """It went to the phantom's, whose name had taken the place of the one that was chosen."""
    with opened(browser, page_service.url) as page:
        answer_as_the_phantom(page, "other")
        page.evaluate("document.getElementById('ask-key').requestSubmit()")
        page.wait_for_selector('#model option[value="other"]', state="attached")
        page.select_option("#model", "other")
        page.dblclick("#generate")
        page.wait_for_selector("#rows tr")
        assert page.input_value("#model") == "phantom"
        drop(page, ("a.nii.gz", SCAN))
        page.wait_for_selector('#scans:not(:has(li:not([data-state="done"]))) li:nth-child(2)')
        assert page.input_value("#model") == "other"
        models = page.evaluate("landmarkd.queue.entries.map(({ model }) => model)")
        assert models == ["phantom", "other"]


def test_measurements_of_one_model_are_not_shown_as_those_of_another(
    browser: Browser, page_service: ServiceProcess
) -> None:
    value = "#measurements td:nth-child(2)"
    with opened(browser, page_service.url) as page:
        answer_as_the_phantom(page, "other")
        page.evaluate("document.getElementById('ask-key').requestSubmit()")
        page.wait_for_selector('#model option[value="other"]', state="attached")
        page.select_option("#model", "phantom")
        drop(page, ("a.nii.gz", SCAN))
        page.wait_for_selector("#rows tr")
        measured = text_of(page, value)
        choose(page, "ball")
        held = hold(page, "**/page/landmarks?*")
        with page.expect_request("**/page/landmarks?*"):
            page.keyboard.press("x")  # Of what is absent, nothing is measured.
        page.select_option("#model", "other")
        page.wait_for_selector("#results", state="visible")
        assert text_of(page, value) == measured
        with page.expect_event("requestfinished"):
            held[0].continue_()
        page.evaluate("new Promise((resolve) => setTimeout(resolve, 100))")
        assert text_of(page, value) == measured
        page.select_option("#model", "phantom")
        page.unroute("**/page/landmarks?*")
        page.wait_for_selector(f'{value}:text-is("{MISSING}")')


@pytest.fixture(scope="module")
def unkeyed(browser: Browser) -> Iterator[Page]:
    """A page to be opened several times, which no key is entered in."""
    page = browser.new_page(viewport=SMALL)
    yield page
    page.close()


@pytest.mark.parametrize(
    ("call", "refusal"),
    [
        ("v1/models", {"status": 502, "body": "Bad gateway"}),
        ("v1/models", {"status": 504, "body": "<html>", "content_type": "text/html"}),
        ("v1/models", {"status": 500, "json": {"code": "internal-error", "detail": "it failed"}}),
        ("v1/models", {"status": 503, "json": {"code": 503, "message": "no upstream"}}),
        ("readyz", {"status": 503, "json": {"message": "no upstream"}}),
    ],
)
def test_models_are_asked_for_again_if_the_service_was_away(
    unkeyed: Page, page_service: ServiceProcess, call: str, refusal: dict[str, Any]
) -> None:
    asked: list[str] = []

    def refuse_once(route: Route) -> None:
        asked.append(route.request.url)
        if len(asked) == 1:
            route.fulfill(**refusal)
        else:
            route.continue_()

    unkeyed.route(f"**/{call}", refuse_once)
    unkeyed.goto(page_service.url)
    unkeyed.wait_for_selector("#ask-key", state="visible")
    assert len(asked) == 2
    assert unkeyed.is_hidden("#problem")
    unkeyed.unroute(f"**/{call}")


def test_model_whose_folder_names_its_version_is_described_and_generates_scans(
    browser: Browser, tmp_path: Path
) -> None:
    """As one that was installed is.

    Its card was taken for that of another model, and no button offered a scan, as the model is not
    called ``phantom`` in the list.
    """
    models = toy_models(tmp_path)
    (models / MODEL).rename(models / f"{MODEL}@1.0.0")
    shutil.copytree(PHANTOM, models / "phantom@1.1.0")
    with ended(ServiceProcess(models)) as service:
        page = browser.new_page(viewport=SMALL)
        page.goto(service.url)
        page.wait_for_selector("body[data-ready]")
        page.select_option("#model", f"{MODEL}@1.0.0")
        page.wait_for_selector('#about-scan:text("Scans are resampled to")')
        page.wait_for_selector(f'#about-title:text-is("{MODEL} 1.0.0")')
        page.click("#generate")
        page.wait_for_selector("#rows tr")
        assert page.input_value("#model") == "phantom@1.1.0"
        page.close()


def test_scan_without_landmarks_may_be_for_another_model_if_there_is_one(
    browser: Browser, page_service: ServiceProcess
) -> None:
    blank = as_nifti(np.zeros((30, 32, 34), np.int16), np.diag([2.0, 2.0, 2.0, 1.0]))
    hint = '#warnings li:has-text("choose another model at the top of the page")'
    with opened(browser, page_service.url) as page:
        drop(page, ("blank.nii", blank))
        page.wait_for_selector("#warnings li")
        assert page.locator(hint).count() == 0
        answer_as_the_phantom(page, "other")
        page.evaluate("document.getElementById('ask-key').requestSubmit()")
        page.wait_for_selector('#model option[value="other"]', state="attached")
        page.select_option("#model", "other")
        page.wait_for_selector(hint)
        drop(page, ("head.nii.gz", SCAN))
        page.wait_for_selector('#facts:text("head.nii.gz")')
        assert page.locator(hint).count() == 0
