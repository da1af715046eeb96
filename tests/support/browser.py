"""The page in a Chromium: opened, given files, and read."""

import base64
import io
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
from numpy.testing import assert_allclose
from PIL import Image

from app.phantom import make_phantom, scan_bytes

if TYPE_CHECKING:  # Not everybody has playwright.
    from playwright import sync_api

Browser: TypeAlias = "sync_api.Browser"
Page: TypeAlias = "sync_api.Page"
Route: TypeAlias = "sync_api.Route"

# With the one without windows, the page's tests take a quarter less of the processor's time.
PROGRAMS: Final = ("chromium-headless-shell", "chromium", "chromium-browser", "chrome")
CHROMIUM: Final = next(filter(None, map(shutil.which, PROGRAMS)), None)
# WebGL 2 without a graphics card, which draws the picture only, not the page around it, for a
# quarter less of the processor's time; the sandbox does not work for root.
FLAGS: Final = ("--no-sandbox", "--enable-unsafe-swiftshader")
# Every pixel is drawn by the processor here.
SMALL: Final["sync_api.ViewportSize"] = {"width": 640, "height": 480}
KEY: Final = "correct horse"
BEARER: Final = {"Authorization": f"Bearer {KEY}"}
SAMPLE: Final = "https://scans.test/phantom.nii.gz?version=2"
# Phantoms of a third of the usual voxels, which are sent, converted and drawn so often.
SCAN: Final = scan_bytes(make_phantom(18806))
OTHER_SCAN: Final = scan_bytes(make_phantom(8152))
ABSENT: Final = "ring"
"""From both scans."""
MISSING: Final = "\N{EN DASH}"
NEAR_MM: Final = 1e-3
SAME_GREY: Final = 1.0
"""Of 255, in the mean; another frame or side differs by several times as much."""


@contextmanager
def opened(browser: Browser, url: str, before: str = "", **context: Any) -> Iterator[Page]:
    """Open the page and enter the key; afterwards check that it requested nothing elsewhere."""
    page = browser.new_page(**({"viewport": SMALL} | context))
    page.set_default_timeout(60_000)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.add_init_script(before)
    enter(page, url)
    yield page
    page.close()
    assert [each for each in asked if not each.startswith((url, "data:", "blob:"))] == []


def enter(page: Page, url: str) -> None:
    """Go to the page and enter the key."""
    page.goto(url)
    page.wait_for_selector("body[data-ready]")
    page.fill("#key", KEY)
    page.keyboard.press("Enter")
    page.wait_for_selector("#ask-key", state="hidden")


def hold(page: Page, pattern: str) -> list[Route]:
    """Hold back requests for addresses of a pattern; the list gets each that is made."""
    held: list[Route] = []

    def keep(route: Route) -> None:
        held.append(route)

    page.route(pattern, keep)
    return held


def stop_clock(page: Page) -> None:
    """Let time stand still for the page: on a busy machine, waits would end by themselves."""
    page.clock.install(time=0)
    page.clock.pause_at(3_600_000)


def drop(page: Page, *files: tuple[str, bytes]) -> None:
    """Drop files, given by name and content, on the page."""
    carried = page.evaluate_handle(
        """(files) => {
            const transfer = new DataTransfer();
            for (const [name, text] of files) {
                transfer.items.add(new File([Uint8Array.fromBase64(text)], name));
            }
            return transfer;
        }""",
        [[name, base64.b64encode(content).decode()] for name, content in files],
    )
    page.dispatch_event("#screen", "drop", {"dataTransfer": carried})


def drop_folder(page: Page, *files: tuple[str, bytes]) -> None:
    """Drop a folder of files on the page, beside a folder in it that cannot be read."""
    page.evaluate(
        """(files) => {
            const failing = { readEntries: (_, fail) => fail() };
            const unreadable = { isDirectory: true, name: "locked", createReader: () => failing };
            const entries = files.map(([name, text]) => {
                const file = (found) => found(new File([Uint8Array.fromBase64(text)], name));
                return { isFile: true, name, fullPath: `/study/${name}`, file };
            });
            const rest = [unreadable, ...entries];
            const reader = { readEntries: (found) => found(rest.splice(0, 2)) };
            const folder = { isDirectory: true, name: "study", createReader: () => reader };
            const dataTransfer = { items: [{ webkitGetAsEntry: () => folder }], files: [] };
            const event = Object.assign(new Event("drop", { bubbles: true }), { dataTransfer });
            document.getElementById("screen").dispatchEvent(event);
        }""",
        [[name, base64.b64encode(content).decode()] for name, content in files],
    )


def drawn(page: Page) -> np.ndarray:
    """Read the grey values of the viewer, without focus and pointer."""
    page.mouse.move(0, 0)
    page.evaluate("document.activeElement.blur()")
    return np.asarray(
        Image.open(io.BytesIO(page.locator("#canvas").screenshot())).convert("L"), float
    )


def compare_points(page: Page, found: list[dict[str, Any]]) -> None:
    """Check the points that NiiVue draws."""
    nodes = page.evaluate(
        "landmarkd.viewer.nv.meshes[0].nodes.map(({ name, x, y, z }) => [name, x, y, z])"
    )
    assert [node[0] for node in nodes] == [landmark["name"] for landmark in found]
    places = np.array([landmark["ras_mm"] for landmark in found])
    assert_allclose([node[1:] for node in nodes], places, atol=NEAR_MM)


def text_of(page: Page, selector: str) -> str:
    """Read the text of an element."""
    return page.text_content(selector) or ""


def chosen(page: Page) -> str:
    """Read the name in the selected row."""
    return text_of(page, '#rows tr[aria-selected="true"] td')


def rows(page: Page) -> list[list[str]]:
    """Read the table of landmarks."""
    texts = "[...row.cells].map((cell) => cell.textContent)"
    return list(page.evaluate(f"[...document.querySelector('#rows').rows].map((row) => {texts})"))


def row(page: Page, name: str) -> list[str]:
    """Read the row of a landmark."""
    return next(cells for cells in rows(page) if cells[0] == name)


def crosshair(page: Page) -> list[float]:
    """Read the position of NiiVue's crosshair, in mm, RAS."""
    script = (
        "() => { const { nv } = landmarkd.viewer; return [...nv.frac2mm(nv.scene.crosshairPos)]; }"
    )
    return list(page.evaluate(script))[:3]


def landmark(page: Page, name: str) -> dict[str, Any]:
    """Read a landmark of the scan that is looked at, as corrected."""
    found = "landmarkd.queue.current.edits.landmarks.find((one) => one.name === name)"
    return dict(page.evaluate(f"(name) => {found}", name))


def choose(page: Page, name: str) -> None:
    """Choose a landmark by its row."""
    page.click(f'#rows tr:has(td:text-is("{name}"))')


def mark_of(page: Page, name: str, plane: int) -> dict[str, Any]:
    """Find a landmark's ring in a plane: 0 axial, 1 coronal, 2 sagittal; x and y on the screen."""
    mark = page.evaluate(
        """([name, plane]) => {
            document.getElementById("canvas").scrollIntoView({ block: "center" });
            const shown = landmarkd.viewer.markers.marks;
            const mark = shown.find((one) => one.name === name && one.plane === plane);
            const { x, y } = document.getElementById("canvas").getBoundingClientRect();
            return { x: mark.x + x, y: mark.y + y, radius: mark.radius };
        }""",
        [name, plane],
    )
    return dict(mark)


def download(page: Page, selector: str) -> tuple[str, str]:
    """Press a button; return the name and the content of the file that it saves."""
    with page.expect_download() as saved:
        page.evaluate("(selector) => document.querySelector(selector).click()", selector)
    return saved.value.suggested_filename, Path(saved.value.path()).read_text(encoding="utf-8")


def drag(page: Page, name: str, plane: int, right: float, down: float) -> None:
    """Drag a landmark's ring by CSS pixels."""
    mark = mark_of(page, name, plane)
    page.mouse.move(mark["x"] + 1, mark["y"] + 2)
    page.mouse.down()
    page.mouse.move(mark["x"] + 1 + right / 2, mark["y"] + 2 + down)
    page.mouse.move(mark["x"] + 1 + right, mark["y"] + 2 + down)
