"""The page where a file or an answer is gone halfway, in a real Chromium: what it says of it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from socketserver import StreamRequestHandler, ThreadingTCPServer
from threading import Thread

import numpy as np

from app.io.volume import read_volume
from tests.support.browser import SCAN, Browser, Page, drop, opened, text_of
from tests.support.scan_files import as_metaimage
from tests.support.services import ServiceProcess

VOLUME = read_volume(SCAN)


class CutOff(StreamRequestHandler):
    """Reads a call to its end, and closes the connection in the middle of the answer."""

    def handle(self) -> None:
        length = 0
        while (line := self.rfile.readline().strip().lower()) != b"":
            if line.startswith(b"content-length:"):
                length = int(line.partition(b":")[2])
        self.rfile.read(length)
        self.wfile.write(b'HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n{"landmarks": [')


@contextmanager
def cut_off(page: Page, pattern: str) -> Iterator[None]:
    """Cut off the answers of calls whose addresses have a pattern, until the block ends."""
    with ThreadingTCPServer(("127.0.0.1", 0), CutOff) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}/"
        page.route(pattern, lambda route: route.continue_(url=url))
        yield
        page.unroute(pattern)
        server.shutdown()


def test_answer_that_breaks_off_is_told_in_words_and_can_be_asked_for_again(
    browser: Browser, page_service: ServiceProcess
) -> None:
    """The words were the browser's own: Failed to fetch."""
    with opened(browser, page_service.url) as page:
        drop(page, ("a.nii.gz", SCAN))
        page.wait_for_selector("#rows tr")
        with cut_off(page, "**/page/landmarks?*"):
            page.click('[data-format="json"]')
            page.wait_for_selector('#problem-title:text-is("Answer cut off")')
        assert "Please try again." in text_of(page, "#problem-detail")
        with page.expect_download():
            page.click('[data-format="json"]')
        assert page.is_hidden("#problem")
        with cut_off(page, "**/v1/heatmaps?*"):
            page.click("#show-heatmap")
            page.wait_for_selector('#heatmap:text("The connection was closed before")')
        # A picture is asked for again by itself.
        with cut_off(page, "**/page/scan?*"), page.expect_event("requestfailed"):
            drop(page, ("scan.mha", as_metaimage(VOLUME.voxels.astype(np.uint64), VOLUME.affine)))
        page.wait_for_selector('#facts:text("scan.mha")')
        assert page.is_hidden("#unseen")


def test_whole_answer_that_is_no_json_is_not_said_to_be_cut_off(
    browser: Browser, page_service: ServiceProcess
) -> None:
    """As of a proxy that answers 200 in words: no connection was closed."""
    with opened(browser, page_service.url) as page:
        page.route("**/v1/models", lambda route: route.fulfill(status=200, body="Please wait."))
        page.reload()
        page.wait_for_selector("text=Got HTTP status 200, not from the service itself")


def test_scan_whose_file_has_changed_is_not_drawn_and_is_said_to_have(
    browser: Browser, page_service: ServiceProcess, tmp_path: Path
) -> None:
    """As the page reads a file again whenever it is looked at; there was no reason."""
    removed, longer = tmp_path / "removed.nii.gz", tmp_path / "longer.nii.gz"
    for file in (removed, longer):
        file.write_bytes(SCAN)
    with opened(browser, page_service.url) as page:
        page.set_input_files("#file", [removed, longer])
        page.wait_for_selector('#scans li:nth-child(2)[data-state="done"]')
        drop(page, ("b.nii.gz", SCAN))
        page.wait_for_selector('#facts:text("b.nii.gz")')
        removed.unlink()
        longer.write_bytes(SCAN + b"more")
        for file in (removed, longer):
            page.click(f'#scans li:has-text("{file.name}")')
            page.wait_for_selector(f'#facts:text("{file.name}")')
            assert page.is_visible("#unseen"), file.name
            said = text_of(page, "#unseen")
            assert said.endswith("after it was opened. Please open it again."), file.name
            assert page.locator("#rows tr").count() == 6, file.name
