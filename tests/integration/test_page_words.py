"""Names and numbers on the page, in a real Chromium: they are whole, and widen nothing."""

from typing import Any

import pytest

from tests.support.browser import SCAN, Browser, drop, opened
from tests.support.services import ServiceProcess

DESK = {"viewport": {"width": 1400, "height": 900}}
PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}


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
