"""Doubtful landmarks on the page, in a real Chromium: what tells them from those that are sure."""

import json
from typing import Any

import httpx
import pytest

from tests.support.browser import (
    ABSENT,
    BEARER,
    SCAN,
    Browser,
    choose,
    drop,
    opened,
    rows,
    text_of,
)
from tests.support.services import RAW, ServiceProcess

REGION_MM = 9.0
SURE = "ball"
DASHES = """(name) => {
    const marks = landmarkd.viewer.markers.marks.filter(({ plane }) => plane !== undefined);
    const groups = document.querySelectorAll("#labels svg svg g:nth-child(2) g");
    const at = marks.findIndex((mark) => mark.name === name && mark.plane === 0);
    return getComputedStyle(groups[at].querySelector(".ring")).strokeDasharray;
}"""
"""How the ring of a landmark is dashed in the axial plane."""


@pytest.fixture(scope="module")
def doubted(page_service: ServiceProcess) -> str:
    """An event whose answer doubts all landmarks but one, which alone has a 95 % region."""
    url = f"{page_service.url}/v1/landmarks?model=phantom"
    answer = httpx.post(url, content=SCAN, headers=RAW | BEARER, timeout=60).json()
    for one in answer["landmarks"]:
        if one["name"] == SURE:
            one["region95_mm"] = REGION_MM
        elif one["name"] != ABSENT:
            one["status"] = "low_confidence"
    return f"event: answer\ndata: {json.dumps(answer)}\n\n"


def test_doubtful_landmarks_are_counted_until_a_person_decides_and_dashed_without_a_region(
    browser: Browser, page_service: ServiceProcess, doubted: str
) -> None:
    """A ring that is not of a region has a size that says nothing."""
    answer: dict[str, Any] = {"body": doubted, "content_type": "text/event-stream"}
    with opened(browser, page_service.url) as page:
        page.route("**/v1/landmarks?*", lambda route: route.fulfill(**answer))
        drop(page, ("a.nii.gz", SCAN), ("b.nii.gz", SCAN))
        page.wait_for_selector("#rows tr")
        page.wait_for_selector('#scans li:nth-child(2)[data-state="done"]')
        assert text_of(page, "#summary") == "5 of 6 landmarks found, 4 of them doubtful"
        told = page.locator("#scans span:last-child")
        assert told.all_text_contents() == ["5 of 6 found, 4 doubtful"] * 2
        for name, status, *_ in rows(page):
            if name != ABSENT:
                choose(page, name)
                assert (page.evaluate(DASHES, name) == "none") == (status == "detected"), name
        names = [name for name, status, *_ in rows(page) if status == "low confidence"]
        for name in names:
            choose(page, name)
            page.keyboard.press("a")
        assert text_of(page, "#summary") == "5 of 6 landmarks found"
        assert told.first.text_content() == "5 of 6 found, 4 by you"
