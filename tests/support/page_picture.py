"""The picture of the page in the README, made anew: ``python -m tests.support.page_picture``.

A real service finds the landmarks of a mouse skull, a real Chromium shows them, and one of them is
accepted.
"""

from typing import Any, Final

import httpx
from playwright.sync_api import sync_playwright

from tests.benchmarks.scans import real_scans
from tests.support.browser import CHROMIUM, FLAGS, choose, drop
from tests.support.documents import DOCS
from tests.support.services import ServiceProcess, ended
from tests.support.skulls import MODEL, SKULLS, scan_path

WINDOW: Final[Any] = {"width": 1400, "height": 900}
ACCEPTED: Final = "41"


def main() -> None:
    """Make the picture."""
    data = real_scans()
    if data is None:
        raise SystemExit("expected real scans in LANDMARKD_DATA, found none")
    scan = scan_path(data, SKULLS[-1])
    with ended(ServiceProcess(MODEL.parent)) as service, sync_playwright() as playwright:
        # The first scan takes longer, as its batch size is being measured.
        httpx.post(f"{service.url}/v1/landmarks", content=scan.read_bytes(), timeout=300)
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = browser.new_page(viewport=WINDOW, color_scheme="dark")
        page.set_default_timeout(300_000)
        page.goto(service.url)
        page.wait_for_selector("body[data-ready]")
        page.select_option("#model", MODEL.name)
        drop(page, (scan.name, scan.read_bytes()))
        page.wait_for_selector("#rows tr")
        choose(page, ACCEPTED)
        page.keyboard.press("a")
        page.uncheck("#names")  # With 45 names there is less to see.
        page.wait_for_selector('#measurements[aria-busy="false"]')
        page.mouse.move(0, 0)
        page.screenshot(path=DOCS / "images" / "page.png")
        browser.close()


if __name__ == "__main__":
    main()
