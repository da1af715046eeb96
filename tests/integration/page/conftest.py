"""A browser and a service for the tests of the page.

They are made once for all of its files, and end with the last: while a browser is driven, no other
test can run an event loop in its thread.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.api.dependencies import hash_key
from tests.support.browser import (
    ABSENT,
    BEARER,
    CHROMIUM,
    FLAGS,
    KEY,
    SAMPLE,
    SCAN,
    Browser,
    Page,
    drop,
    opened,
)
from tests.support.required import skip_unless_ci
from tests.support.services import RAW, ServiceProcess

PHANTOM = Path(__file__).resolve().parents[3] / "models" / "phantom"
WIDTH = '[[measurements]]\nname = "width"\nkind = "distance"\npoints = ["ball", "dumbbell"]\n'


@pytest.fixture(scope="package")
def page_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    """A service with the phantom's model, which measures, too, and says where to get a scan."""
    models = tmp_path_factory.mktemp("models")
    shutil.copytree(PHANTOM, models / PHANTOM.name)
    manifest = models / PHANTOM.name / "model.toml"
    text = manifest.read_text(encoding="utf-8")
    manifest.write_text(f'sample = "{SAMPLE}"\n{text}\n{WIDTH}', encoding="utf-8")
    process = ServiceProcess(models, BATCH_SIZE="2", API_KEYS=hash_key(KEY))
    yield process
    process.kill()


@pytest.fixture(scope="package")
def answer(page_service: ServiceProcess) -> list[dict[str, Any]]:
    """The landmarks of the scan, as the service finds them."""
    url = f"{page_service.url}/v1/landmarks?model=phantom"
    made = httpx.post(url, content=SCAN, headers=RAW | BEARER, timeout=60).json()["landmarks"]
    assert [each["name"] for each in made if not each["ras_mm"]] == [ABSENT]
    return list(made)


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """A Chromium of the system; without one tests skip, in continuous integration they fail."""
    if CHROMIUM is None:
        skip_unless_ci("expected a Chromium, such as Debian's package")
    from playwright import sync_api  # noqa: PLC0415 - other tests here do without

    with sync_api.sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield made
        made.close()


@pytest.fixture(scope="module")
def answered(browser: Browser, page_service: ServiceProcess) -> Iterator[Page]:
    """The page with one scan, whose landmarks are found."""
    with opened(browser, page_service.url) as page:
        drop(page, ("head.nii.gz", SCAN))
        page.wait_for_selector("#rows tr")
        yield page


@pytest.fixture
def page(answered: Page) -> Iterator[Page]:
    """The same, afterwards with all corrections undone."""
    yield answered
    while answered.is_enabled('[data-act="undo"]'):
        answered.keyboard.press("Control+z")
    answered.keyboard.press("Escape")
