"""The page while its service is away, busy or killed, in a real Chromium."""

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from queue import SimpleQueue
from socketserver import StreamRequestHandler, ThreadingTCPServer
from threading import Thread
from typing import Any, cast

import pytest

from app.api.dependencies import hash_key
from tests.support import faulty_network as commands
from tests.support.browser import (
    ABSENT,
    KEY,
    MISSING,
    SCAN,
    SMALL,
    Browser,
    Page,
    choose,
    drop,
    enter,
    opened,
    stop_clock,
    text_of,
)
from tests.support.faulty_network import command_scan, faulty_models
from tests.support.faulty_service import Faulty
from tests.support.services import MODEL, ServiceProcess, ended, toy_models

FOUND = "3 of 3 found, 3 doubtful"
WAITS = 7  # between attempts


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return faulty_models(tmp_path_factory.mktemp("faulty"))


def wait_in_vain(page: Page, times: int) -> int:
    """Let the page, whose clock is stopped, try again so often; return when it does next."""
    until, at = "landmarkd.queue.current?.progress?.until", 0
    for ms in (0, *times * [60_000]):
        page.clock.fast_forward(ms)
        # The words of the wait before may still be there.
        at = page.wait_for_function(f"(last) => {until} > last && +{until}", arg=at).json_value()
    return at


@contextmanager
def serving(models: Path, port: int = 0) -> Iterator[Faulty]:
    """Serve, at a port that may be that of a service before, until the block ends."""
    with ended(Faulty(models, API_KEYS=hash_key(KEY), PORT=str(port))) as service:
        yield service


def states(page: Page) -> list[str]:
    """Read how far each scan of the list is."""
    return list(page.locator("#scans li span:last-child").all_text_contents())


def test_list_goes_on_when_the_service_is_back(browser: Browser, models: Path) -> None:
    with serving(models) as service, opened(browser, service.url) as page:
        held = command_scan(commands.HOLD)
        drop(page, ("a.nii", held), ("b.nii", held[:999]), ("c.nii", command_scan()))
        with service.gate.open("wb"):  # opens when the network waits
            service.kill()
        page.wait_for_selector('#stage-name:text("Trying again at")')
        assert text_of(page, "#problem-title") == "No answer"
        assert page.is_visible("#again")
        assert states(page) == ["No answer", "waiting", "waiting"]
        with serving(models, service.port) as again:
            with again.gate.open("wb"):
                assert page.is_hidden("#problem")
            page.wait_for_selector('#scans li:nth-child(3)[data-state="done"]')
        assert states(page) == [FOUND, "Broken volume", FOUND]
        assert page.is_hidden("#problem")


def test_scan_that_ends_the_service_fails_alone(browser: Browser, models: Path) -> None:
    with serving(models) as service, opened(browser, service.url) as page:
        drop(page, ("deadly.nii", command_scan(commands.KILL)), ("fine.nii", command_scan()))
        assert service.wait() == -9
        with serving(models, service.port) as second:
            assert second.wait() == -9
        with serving(models, service.port):
            page.wait_for_selector('#scans li:nth-child(2)[data-state="done"]')
        assert states(page) == ["No answer", FOUND]
        assert "while the service worked on this scan" in text_of(page, "#problem-detail")
        assert page.is_visible("#again")


class SilentEnd(StreamRequestHandler):
    """Says that it is ready, but reads a scan to its end and closes the connection."""

    def handle(self) -> None:
        length = 0
        if self.rfile.readline().startswith(b"GET"):
            self.tell_readiness()
            return
        while (line := self.rfile.readline().strip().lower()) != b"":
            if line.startswith(b"content-length:"):
                length = int(line.partition(b":")[2])
        self.rfile.read(length)
        cast("SilentServer", self.server).scans.put(length)

    def tell_readiness(self) -> None:
        self.wfile.write(b'HTTP/1.0 200 OK\r\n\r\n{"ready": true}')


class Away(SilentEnd):
    """Says that it is not ready, as a proxy does of a service that is away, and takes scans."""

    def tell_readiness(self) -> None:
        self.wfile.write(b'HTTP/1.0 503 Away\r\n\r\n{"ready": false}')


class Stuck(SilentEnd):
    """Does not say whether it is ready, as long as somebody waits for it."""

    def tell_readiness(self) -> None:
        cast("SilentServer", self.server).looks.put(None)
        self.rfile.read()


class SilentServer(ThreadingTCPServer):
    """Takes scans, and answers none."""

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, port: int, handler: type[SilentEnd]) -> None:
        super().__init__(("127.0.0.1", port), handler)
        self.scans, self.looks = SimpleQueue[int](), SimpleQueue[None]()


@contextmanager
def silent(page: Page, service: Faulty, handler: type[SilentEnd]) -> Iterator[SilentServer]:
    """Take scans in the place of a service, which is killed, and open one, until the block ends."""
    service.kill()
    with SilentServer(service.port, handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        drop(page, ("a.nii", command_scan()))
        yield server
        server.shutdown()


@contextmanager
def silenced(
    browser: Browser, models: Path, handler: type[SilentEnd]
) -> Iterator[tuple[Page, SilentServer]]:
    """Open the page of a service, and a scan on it once another has taken its place."""
    with (
        serving(models) as service,
        opened(browser, service.url) as page,
        silent(page, service, handler) as server,
    ):
        yield page, server


def test_scan_is_given_up_where_the_service_ends_twice_before_its_first_event(
    browser: Browser, models: Path
) -> None:
    with silenced(browser, models, SilentEnd) as (page, _):
        page.wait_for_selector('#stage-name:text("Trying again at")')
        page.wait_for_selector("#work", state="hidden", timeout=20_000)
        assert text_of(page, "#problem-title") == "No answer"
        assert "while the service worked on this scan" in text_of(page, "#problem-detail")


def test_scan_is_sent_again_as_long_as_a_proxy_takes_it_for_a_service_that_is_away(
    browser: Browser, models: Path
) -> None:
    with serving(models) as service, opened(browser, service.url) as page:
        with silent(page, service, Away) as proxy:
            for _ in range(3):
                proxy.scans.get(timeout=20)
        with serving(models, service.port):
            page.wait_for_selector("#rows tr")
        assert page.is_hidden("#problem")


def test_scan_is_cancelled_while_it_is_asked_whether_the_service_is_ready(
    browser: Browser, models: Path
) -> None:
    with silenced(browser, models, Stuck) as (page, proxy):
        proxy.looks.get(timeout=20)
        page.click("#cancel")
        page.wait_for_selector('#problem-title:text("Cancelled")', timeout=20_000)
        assert proxy.scans.qsize() == 1


def test_list_goes_on_though_it_is_not_said_whether_the_service_is_ready(
    browser: Browser, models: Path
) -> None:
    with silenced(browser, models, Stuck) as (_, proxy):
        for _ in range(2):
            proxy.scans.get(timeout=20)


def test_page_gives_up_after_some_minutes_and_goes_on_by_hand(
    browser: Browser, models: Path
) -> None:
    with serving(models) as service, opened(browser, service.url) as page:
        stop_clock(page)
        service.kill()
        drop(page, ("a.nii", command_scan()), ("b.nii", command_scan()))
        wait_in_vain(page, WAITS - 1)
        page.clock.fast_forward(60_000)
        page.wait_for_selector('#scans li:nth-child(2)[data-state="problem"]')
        assert states(page) == ["No answer", "No answer"]
        assert page.is_hidden("#work")
        with serving(models, service.port):
            page.click("#again")
            page.wait_for_selector('#scans li:nth-child(2)[data-state="done"]')
        assert states(page) == [FOUND, FOUND]


def test_page_asks_at_once_when_the_service_is_back(browser: Browser, models: Path) -> None:
    with serving(models) as service, opened(browser, service.url) as page:
        stop_clock(page)
        service.kill()
        drop(page, ("a.nii", command_scan()))
        next_attempt = wait_in_vain(page, WAITS - 1)
        page.clock.fast_forward(2_000)  # Looks, and finds it away.
        with serving(models, service.port):
            page.clock.resume()
            page.wait_for_selector("#rows tr")
        assert page.evaluate("Date.now()") < next_attempt


def test_page_waits_as_long_as_it_is_told_or_until_somebody_asks_again(
    browser: Browser, page_service: ServiceProcess
) -> None:
    busy: dict[str, Any] = {"status": 503, "headers": {"Retry-After": "3000"}}
    with opened(browser, page_service.url) as page:
        page.route("**/v1/landmarks?*", lambda route: route.fulfill(**busy, body="<html>"))
        drop(page, ("a.nii.gz", SCAN))
        page.wait_for_selector('#stage-name:text("Trying again at")')
        left = page.evaluate("landmarkd.queue.current.progress.until - Date.now()")
        assert 2_900_000 < left <= 3_000_000
        page.unroute("**/v1/landmarks?*")
        page.click("#again")
        page.wait_for_selector("#rows tr")
        assert page.is_hidden("#problem")


def test_page_of_a_proxy_is_no_answer(browser: Browser, page_service: ServiceProcess) -> None:
    shown = '#problem-title:text("Unexpected answer")'
    form: dict[str, Any] = {"body": "<html>\n\n<form>", "content_type": "text/html"}
    with opened(browser, page_service.url) as page:
        page.route("**/v1/landmarks?*", lambda route: route.fulfill(**form))
        drop(page, ("a.nii.gz", SCAN))
        page.wait_for_selector(shown, timeout=20_000)
        page.unroute("**/v1/landmarks?*")
        page.click("#again")
        page.wait_for_selector("#rows tr")
        page.route("**/page/landmarks?*", lambda route: route.fulfill(**form))
        page.click('[data-format="json"]')
        page.wait_for_selector(shown, timeout=20_000)


def test_chosen_model_stays_when_the_key_is_asked_for_again(
    browser: Browser, page_service: ServiceProcess
) -> None:
    names = [{"name": name, "version": "1", "landmarks": 3, "description": ""} for name in "ab"]
    listed = {"models": names, "keeps_cases": False}
    with opened(browser, page_service.url) as page:
        page.route("**/v1/models", lambda route: route.fulfill(json=listed))
        page.evaluate("document.getElementById('ask-key').hidden = false")
        for model in "ab":
            page.fill("#key", KEY)
            page.keyboard.press("Enter")
            page.wait_for_selector("#ask-key", state="hidden")
            assert page.input_value("#model") == model
            page.select_option("#model", "b")
            page.evaluate("document.getElementById('ask-key').hidden = false")
        page.reload()
        page.wait_for_selector("body[data-ready]")
        assert page.input_value("#model") == "b"


def test_key_is_asked_for_when_it_ends_while_another_scan_is_looked_at(
    browser: Browser, page_service: ServiceProcess
) -> None:
    words = {"code": "unauthorized", "title": "Unauthorized", "detail": "expected another key"}
    refusal: dict[str, Any] = {"status": 401, "json": words}
    with opened(browser, page_service.url) as page:
        drop(page, ("a.nii.gz", SCAN))
        page.wait_for_selector("#rows tr")
        page.route("**/v1/landmarks?*", lambda route: route.fulfill(**refusal))
        drop(page, ("b.nii.gz", SCAN), ("c.nii.gz", SCAN))
        page.click("#before")
        page.wait_for_selector("#ask-key", state="visible")
        assert page.is_hidden("#problem")
        page.unroute("**/v1/landmarks?*")
        page.fill("#key", KEY)
        page.keyboard.press("Enter")
        page.wait_for_selector('#scans:not(:has(li:not([data-state="done"])))')
        assert page.is_hidden("#ask-key")


def test_key_that_is_not_ascii_is_taken_as_its_hash_was_made(
    browser: Browser, tmp_path: Path
) -> None:
    digest = sha256("schl\xfcssel \u2013 1".encode()).hexdigest()
    with ended(ServiceProcess(toy_models(tmp_path), API_KEYS=digest)) as service:
        page = browser.new_page(viewport=SMALL)
        page.set_default_timeout(20_000)
        page.goto(service.url)
        page.fill("#key", "schl\xfcssel \u2013 2")
        page.keyboard.press("Enter")
        page.wait_for_selector('#problem-title:text("did not accept the key")')
        page.fill("#key", "schl\xfcssel \u2013 1")
        page.keyboard.press("Enter")
        page.wait_for_selector("#ask-key", state="hidden")
        assert page.input_value("#model") == MODEL
        page.close()


def test_a_wait_is_cancelled(browser: Browser, page_service: ServiceProcess) -> None:
    with opened(browser, page_service.url) as page:
        page.route("**/v1/landmarks?*", lambda route: route.abort())
        drop(page, ("a.nii.gz", SCAN))
        page.wait_for_selector('#stage-name:text("Trying again at")')
        page.click("#cancel")
        page.wait_for_selector('#problem-title:text("Cancelled")')
        assert page.is_hidden("#work")


def test_file_that_was_removed_is_no_outage(browser: Browser, models: Path, tmp_path: Path) -> None:
    folder = tmp_path / "scans"
    folder.mkdir()
    for name in ("a.nii", "b.nii"):
        (folder / name).write_bytes(command_scan(commands.HOLD))
    with serving(models) as service, opened(browser, service.url) as page:
        page.set_input_files("#folder", folder)
        page.wait_for_selector("#scans li:nth-child(2)")
        (tmp_path / text_of(page, "#scans li:nth-child(2) span")).unlink()
        service.gate.open("wb").close()
        page.wait_for_selector('#scans li:nth-child(2)[data-state="problem"]', timeout=20_000)
        assert states(page) == [FOUND, "File not readable"]


def test_scan_opened_while_the_service_starts_is_answered_by_the_chosen_model(
    browser: Browser, models: Path
) -> None:
    loading: dict[str, Any] = {"status": 503, "json": {"ready": False, "reason": "loading"}}
    with ended(Faulty(models)) as service:
        page = browser.new_page(viewport=SMALL)
        page.set_default_timeout(20_000)
        page.route("**/readyz", lambda route: route.fulfill(**loading))
        page.goto(service.url)
        page.wait_for_selector('#state:text("Waiting for the service: loading")')
        drop(page, ("a.nii", command_scan()))
        page.wait_for_selector("#work", state="visible")
        with page.expect_request("**/v1/landmarks?model=faulty*"):
            page.unroute("**/readyz")
        page.wait_for_selector("#rows tr")
        page.close()


def test_landmarks_are_listed_though_the_viewer_could_not_be_loaded(
    browser: Browser, page_service: ServiceProcess
) -> None:
    page = browser.new_page(viewport=SMALL)
    page.set_default_timeout(20_000)
    page.route("**/page/niivue.js", lambda route: route.abort())
    enter(page, page_service.url)
    assert "could not be loaded" in text_of(page, "#unseen")
    drop(page, ("a.nii.gz", SCAN))
    page.wait_for_selector("#rows tr")
    assert page.is_visible("#unseen")
    page.close()


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
