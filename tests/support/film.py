"""The film in ``docs/film.md``, made anew: ``python -m tests.support.film``.

A real service answers in a real Chromium. The shipped model of phantoms meets scans that are
blurred, as by another scanner, which it has never seen. Two points are corrected on the page, and
all points of as many more scans as learning takes are sent as their truth; then the model learns.
Seeds are fixed, and no scan is chosen by how it is answered. On two cores it takes some minutes.
"""

import io
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from string import Template
from tempfile import TemporaryDirectory
from typing import Any, Final

import httpx
import numpy as np
from PIL import Image
from playwright.sync_api import sync_playwright
from scipy.ndimage import gaussian_filter

from app.api.dependencies import hash_key
from app.phantom import Phantom, make_phantom, scan_bytes
from app.settings import API_KEY
from tests.integration.test_learn import corrected
from tests.support.browser import (
    BEARER,
    CHROMIUM,
    FLAGS,
    KEY,
    MISSING,
    Page,
    choose,
    drop,
    enter,
    landmark,
    rows,
)
from tests.support.documents import DOCS
from tests.support.services import RAW, ServiceProcess
from tests.support.training_data import landmarkd

MODEL: Final = Path(__file__).resolve().parents[2] / "models" / "phantom"
WINDOW: Final[Any] = {"width": 1200, "height": 760}
QUALITY: Final = 80
BLUR: Final = 2.0
"""Standard deviation in voxels."""

FIRST_SEED: Final = 2000
MORE_CASES: Final = 29
UNSEEN: Final = 12
STEPS: Final = 120
RATE: Final = 1e-3


def blurred(seeds: Iterator[int]) -> Iterator[Phantom]:
    """Make blurred phantoms, of the seeds whose structures are all there."""
    for seed in seeds:
        phantom = make_phantom(seed)
        if np.isfinite(phantom.points).all():
            voxels = gaussian_filter(phantom.volume.voxels.astype(np.float32), BLUR)
            volume = replace(phantom.volume, voxels=np.rint(voxels).astype(np.int16))
            yield replace(phantom, volume=volume)


class Film:
    """The page in a browser, and a service of which it is; pictures are numbered."""

    def __init__(self, page: Page, url: str) -> None:
        self.page = page
        self._http = httpx.Client(base_url=url, headers=BEARER, timeout=600)
        self._taken = 0

    def find(self, phantom: Phantom) -> dict[str, Any]:
        """Ask for the landmarks of a scan."""
        response = self._http.post("/v1/landmarks", content=scan_bytes(phantom), headers=RAW)
        answer: dict[str, Any] = response.raise_for_status().json()
        return answer

    def keep(self, phantom: Phantom) -> None:
        """Keep a scan with all its true landmarks."""
        answer = json.dumps(corrected(self.find(phantom), phantom))
        form = {"volume": scan_bytes(phantom), "answer": answer.encode()}
        self._http.post("/v1/cases", files=form).raise_for_status()

    def show(self, name: str, phantom: Phantom) -> None:
        """Drop a scan on the page, and wait for its landmarks."""
        drop(self.page, (name, scan_bytes(phantom)))
        self.page.wait_for_selector(f'#facts:text("{name}")')
        self.page.wait_for_selector("#rows tr")

    def place(self, name: str, ras_mm: np.ndarray) -> None:
        """Place a landmark as a person does: find it by clicks in two planes, then click on it."""
        choose(self.page, name)
        self._click(0, ras_mm)
        self._click(1, ras_mm)
        self.page.keyboard.press("p")
        self._click(0, ras_mm)
        self.page.wait_for_selector(f'#rows tr:has(td:text-is("{name}")):has-text("placed")')

    def _click(self, plane: int, ras_mm: np.ndarray) -> None:
        """Click where a position lies in a plane: 0 axial, 1 coronal."""
        x, y = self.page.evaluate(
            """([plane, mm]) => {
                const canvas = document.getElementById("canvas");
                canvas.scrollIntoView({ block: "center" });
                const scale = canvas.width / canvas.clientWidth;
                const tile = landmarkd.viewer.nv.screenSlices.find((one) => one.axCorSag === plane);
                const [left, top, width, height] =
                    tile.leftTopWidthHeight.map((each) => each / scale);
                const [across, up] = [[0, 1], [0, 2]][plane];
                const right = (mm[across] - tile.leftTopMM[0]) / tile.fovMM[0];
                const high = (mm[up] - tile.leftTopMM[1]) / tile.fovMM[1];
                const box = canvas.getBoundingClientRect();
                return [box.x + left + right * width, box.y + top + (1 - high) * height];
            }""",
            [plane, ras_mm.tolist()],
        )
        self.page.mouse.click(x, y)

    def take(self) -> None:
        """Take a picture."""
        self._taken += 1
        self.page.evaluate("window.scrollTo(0, 0)")
        picture = Image.open(io.BytesIO(self.page.screenshot()))
        picture.save(DOCS / "images" / f"film-{self._taken}.webp", quality=QUALITY, method=6)


def errors(answer: dict[str, Any], phantom: Phantom) -> list[float]:
    """Measure how far the landmarks are off, in mm; infinitely where they are missing."""
    truth = dict(zip(phantom.names, phantom.points, strict=True))
    return [
        float(np.linalg.norm(np.subtract(one["ras_mm"], truth[one["name"]])))
        if one["ras_mm"]
        else np.inf
        for one in answer["landmarks"]
    ]


def summary(film: Film, phantoms: list[Phantom]) -> dict[str, str]:
    """Count the landmarks that are found in scans, and measure them."""
    off = np.concatenate([errors(film.find(one), one) for one in phantoms])
    found = off[np.isfinite(off)]
    return {
        "found": f"{len(found)} of {len(off)}",
        "near": f"{int((off <= 2.0).sum())} of {len(off)}",
        "off": f"{np.median(found):.2f} mm",
    }


def correct_two(film: Film, phantom: Phantom) -> dict[str, float]:
    """Correct the two landmarks that are furthest off; returns how far all were, in that order."""
    truth = dict(zip(phantom.names, phantom.points, strict=True))
    names = [cells[0] for cells in rows(film.page)]
    found = {name: landmark(film.page, name)["ras_mm"] for name in names}
    off = {
        name: float(np.linalg.norm(np.subtract(place, truth[name]))) if place else np.inf
        for name, place in found.items()
    }
    worst = sorted(names, key=lambda name: off[name], reverse=True)
    for name in worst[:2]:
        film.place(name, truth[name])
    return {name: off[name] for name in worst}


def shoot(film: Film, model: Path, store: Path, url: str) -> dict[str, str]:
    """Make the pictures; returns the figures of the page."""
    first, following, *others = islice(blurred(count(FIRST_SEED)), 2 + MORE_CASES + UNSEEN)
    more, unseen = others[:MORE_CASES], others[MORE_CASES:]
    before = summary(film, [following]), summary(film, unseen)
    film.show("first.nii.gz", first)
    film.take()
    film.page.keyboard.press("n")
    film.take()
    off = correct_two(film, first)
    film.take()
    for name in [*off][2:]:
        choose(film.page, name)
        film.page.keyboard.press("a")
    film.page.click("#keep")
    film.page.wait_for_selector('#state:text("Kept as")')
    film.take()
    film.show("next.nii.gz", following)
    missing = next(cells[0] for cells in rows(film.page) if cells[2] == MISSING)
    choose(film.page, missing)
    film.take()
    for phantom in more:
        film.keep(phantom)
    words = ("--from", store / "phantom", "--steps", STEPS, "--rate", RATE, "--device", "cpu")
    said = landmarkd("learn", model, *words, "--url", url)
    film.show("next-again.nii.gz", following)
    choose(film.page, missing)
    film.take()
    figures = {"missing": missing, "two": " and ".join([*off][:2])}
    figures["left"] = f"{max([*off.values()][2:]):.1f} mm"
    figures["said"] = _verdict(said.replace(str(model), "models/phantom"))
    after = summary(film, [following]), summary(film, unseen)
    for when, (one, many) in (("before", before), ("after", after)):
        figures |= {f"one_{key}_{when}": value for key, value in one.items()}
        figures |= {f"many_{key}_{when}": value for key, value in many.items()}
    return figures


def _verdict(said: str) -> str:
    """Return what ``landmarkd learn`` has printed about the next version."""
    found = re.search(
        r"(On \d+ held-out cases.*? mm) (version \S+ is in place; .*? --back)",
        " ".join(said.split()),
    )
    if found is None:
        raise ValueError(f"expected a better version, got {said}")
    return "\n".join(found.groups())


def main() -> None:
    """Make the pictures, and the page with their figures."""
    template = Template((Path(__file__).parent / "film.md").read_text(encoding="utf-8"))
    os.environ[API_KEY] = KEY
    with TemporaryDirectory() as folder, sync_playwright() as playwright:
        model, store = Path(folder, "models", "phantom"), Path(folder, "store")
        shutil.copytree(MODEL, model)
        digest = hash_key(KEY)
        service = ServiceProcess(
            model.parent, STORE=str(store), API_KEYS=digest, ADMIN_KEY_HASH=digest
        )
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        try:
            page = browser.new_page(viewport=WINDOW, color_scheme="dark")
            page.set_default_timeout(300_000)
            enter(page, service.url)
            figures = shoot(Film(page, service.url), model, store, service.url)
        finally:
            browser.close()
            service.kill()
    figures |= {"cases": str(MORE_CASES), "scans": str(UNSEEN), "steps": str(STEPS)}
    figures["rate"] = f"{RATE:g}"
    (DOCS / "film.md").write_text(template.substitute(figures), encoding="utf-8")
    sys.stdout.write(re.sub(r"\n+", "\n", json.dumps(figures, indent=1)) + "\n")


if __name__ == "__main__":
    main()
