"""Tables of all scans of the page's list, in a real Chromium with a real service."""

import csv
import io
from pathlib import Path
from typing import Any

from app.cli.batch import LongTable
from app.io import LandmarksAnswer
from app.shapes import read_cohort
from tests.support.browser import OTHER_SCAN, SCAN, Browser, choose, download, drop, hold, opened
from tests.support.services import ServiceProcess


def test_scans_of_one_name_are_told_apart_in_the_table(
    browser: Browser, page_service: ServiceProcess, tmp_path: Path
) -> None:
    with opened(browser, page_service.url) as page:
        # As from three folders, whose names browsers do not tell of files.
        drop(page, ("head.nii.gz", SCAN), ("head.nii.gz", SCAN[:999]), ("head.nii", SCAN))
        page.wait_for_selector('#scans li:nth-child(3)[data-state="done"]')
        _, content = download(page, "#save-all")
    table = tmp_path / "landmarks.csv"
    table.write_text(content, encoding="utf-8")
    assert read_cohort(table).specimens == ("head", "head (3)")


def by_command(answers: list[tuple[Path, Any]], folder: Path) -> list[dict[str, str]]:
    """Read the table of answers that ``landmarkd detect --format wide`` writes."""
    target = folder / "wide.csv"
    sink = LongTable(target, {path: str(path) for path, _ in answers}, resume=False, form="wide")
    for path, answer in answers:
        sink.write(path, LandmarksAnswer.model_validate(answer))
    with target.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_measurements_of_all_scans_are_one_table_of_what_was_corrected(
    browser: Browser, page_service: ServiceProcess, tmp_path: Path
) -> None:
    """A row for each scan, as statistics programs read, and as the command writes it."""
    with opened(browser, page_service.url) as page:
        drop(page, ("a.nii.gz", SCAN), ("b.nii", SCAN[:999]), ("c.nii", OTHER_SCAN))
        page.wait_for_selector('#scans li:nth-child(3)[data-state="done"]')
        page.wait_for_selector("#rows tr")
        # As of a model that is calibrated.
        known = "{ interval95: [80.5, 99.25], reason: '' }"
        first = "landmarkd.queue.current.edits.original.measurements[0]"
        page.evaluate(f"Object.assign({first}, {known})")
        name, content = download(page, "#measure-all")
        assert name == "phantom-measurements.csv"
        table = list(csv.DictReader(io.StringIO(content)))
        assert [each["scan"] for each in table] == ["a", "c"]
        answers = page.evaluate("landmarkd.queue.answered.map(({ edits }) => edits.original)")
        assert table == by_command([(Path("a"), answers[0]), (Path("c"), answers[1])], tmp_path)
        assert float(table[0]["width_mm"]) > 0
        assert (table[0]["width_mm_low95"], table[0]["width_mm_high95"]) == ("80.5", "99.25")
        choose(page, "ball")
        page.keyboard.press("x")
        _, content = download(page, "#measure-all")
        again = list(csv.DictReader(io.StringIO(content)))
        assert [again[0][f"width_mm{which}"] for which in ("", "_low95", "_high95")] == [""] * 3
        assert again[0]["reasons"] == "width: not found: ball"
        assert again[1] == table[1]


def test_corrected_scans_are_measured_one_by_one(
    browser: Browser, page_service: ServiceProcess
) -> None:
    """Of many at once, a service refuses some, and then there was no table."""
    converting = "**/page/landmarks?*"
    with opened(browser, page_service.url) as page:
        drop(page, ("a.nii.gz", SCAN), ("b.nii", SCAN))
        page.wait_for_selector('#scans li:nth-child(2)[data-state="done"]')
        for number, name in enumerate(("a.nii.gz", "b.nii"), start=1):
            page.click(f"#scans li:nth-child({number})")
            page.wait_for_selector(f'#facts:text("{name}")')
            page.wait_for_selector("#rows tr")
            choose(page, "ball")
            with page.expect_response(converting):
                page.keyboard.press("x")
        held = hold(page, converting)
        page.click("#measure-all")
        page.wait_for_timeout(500)
        assert len(held) == 1
        page.route(converting, lambda route: route.continue_())
        with page.expect_download():
            held[0].continue_()


def test_buttons_say_of_how_many_scans_their_tables_are(
    browser: Browser, page_service: ServiceProcess
) -> None:
    """Pressed while some still waited, they saved fewer without a word."""
    words = "['save-all', 'measure-all'].map((id) => document.getElementById(id).textContent)"
    with opened(browser, page_service.url) as page:
        held = hold(page, "**/v1/landmarks?*")
        drop(page, ("a.nii.gz", SCAN), ("b.nii", SCAN))
        for number in (1, 2):
            page.wait_for_selector(f'#scans li:nth-child({number})[data-state="working"]')
            held[-1].continue_()
            page.wait_for_selector(f'#queue-title:text("{number} answered")')
            if number == 1:
                assert page.evaluate(words) == [
                    "Download 1 of 2, CSV",
                    "Measurements of 1 of 2, CSV",
                ]
                _, content = download(page, "#save-all")
                assert {each["scan"] for each in csv.DictReader(io.StringIO(content))} == {"a"}
        assert page.evaluate(words) == ["Download all, CSV", "All measurements, CSV"]
