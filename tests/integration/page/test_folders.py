"""Folders that are opened on the page: scans below them, and series of DICOM files."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.testing import assert_allclose

from app.io.volume import read_volume
from tests.support.browser import (
    NEAR_MM,
    SCAN,
    Browser,
    download,
    drop,
    drop_folder,
    opened,
    text_of,
)
from tests.support.detached_files import write_hdr, write_mhd, write_nhdr
from tests.support.dicom_files import as_dicom, zipped
from tests.support.scan_files import as_nifti
from tests.support.services import ServiceProcess

ENTRIES = "landmarkd.queue.entries.map(({ name }) => name)"
REMOVE_FIRST = """{
    const read = Blob.prototype.arrayBuffer;
    Blob.prototype.arrayBuffer = async function () {
        if (this.name === "IM1") await remove();
        return read.call(this);
    };
}"""
"""Removes a file when the page is about to read it."""


def test_folder_is_searched_for_scans(
    browser: Browser, page_service: ServiceProcess, tmp_path: Path
) -> None:
    for name in ("a.nii.gz", "notes.txt", "more/b.nii.gz"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"neither is a scan")
    with opened(browser, page_service.url) as page:
        page.set_input_files("#folder", tmp_path)
        page.wait_for_selector('#scans li:nth-child(2)[data-state="problem"]')
        names = page.locator("#scans span:first-child").all_text_contents()
        folder = tmp_path.name
        assert sorted(names) == [f"{folder}/a.nii.gz", f"{folder}/more/b.nii.gz"]


def test_folder_of_dicom_files_is_one_scan(
    browser: Browser, page_service: ServiceProcess, answer: list[dict[str, Any]], tmp_path: Path
) -> None:
    volume = read_volume(SCAN)
    images = as_dicom(np.rint(volume.voxels).astype(np.int16), volume.affine)
    study = tmp_path / "study"
    (study / "series").mkdir(parents=True)
    (study / "notes.txt").write_text("nothing of it is sent")
    for number, image in enumerate(images):
        (study / "series" / f"IM{number}").write_bytes(image)
    with opened(browser, page_service.url) as page:
        page.set_input_files("#folder", study)
        page.wait_for_selector("#results", state="visible")
        assert page.evaluate("landmarkd.queue.current.name") == "study.zip"
        marks = page.evaluate("landmarkd.queue.current.edits.landmarks")
    for mark, expected in zip(marks, answer, strict=True):
        assert mark["name"] == expected["name"]
        if expected["ras_mm"]:
            assert_allclose(mark["ras_mm"], expected["ras_mm"], atol=NEAR_MM)


def test_dicom_files_without_their_folder_are_one_scan_chosen_or_dropped(
    browser: Browser, page_service: ServiceProcess, tmp_path: Path
) -> None:
    volume = read_volume(SCAN)
    images = as_dicom(np.rint(volume.voxels).astype(np.int16), volume.affine)
    names = [f"IM{number}.dcm" for number in range(len(images))]
    files = [("a.nii.gz", SCAN), *zip(names, images, strict=True)]
    for name, content in files:
        (tmp_path / name).write_bytes(content)
    with opened(browser, page_service.url) as page:
        page.set_input_files("#file", [tmp_path / name for name, _ in files])
        page.wait_for_selector('#scans li:nth-child(2)[data-state="done"]')
        assert page.evaluate(ENTRIES) == ["a.nii.gz", "IM0.zip"]
        drop(page, *files)
        page.wait_for_selector('#scans li:nth-child(4)[data-state="done"]')
        assert page.evaluate(ENTRIES) == ["a.nii.gz", "IM0.zip"] * 2
        found = page.locator("#scans span:last-child").all_text_contents()
    assert found == ["5 of 6 found"] * 4


def test_headers_are_joined_with_their_voxels(
    browser: Browser, page_service: ServiceProcess, answer: list[dict[str, Any]], tmp_path: Path
) -> None:
    """NRRD's may say so in the middle; NIfTI has two versions, and orders of bytes."""
    volume = read_volume(SCAN)
    folder = tmp_path / "study"
    folder.mkdir()
    array, affine = volume.voxels.astype(np.float32), volume.affine
    for name, packed in (("plain", False), ("Schädel", True)):
        voxels = write_mhd(folder / f"{name}.mhd", f"{name}.raw", array, affine, zipped=packed)
        (folder / f"{name}.raw").write_bytes(voxels)
    write_nhdr(folder / "last.nhdr", "gzip", array, affine)
    write_nhdr(folder / "middle.nhdr", "raw", array, affine)
    first, *others = (folder / "middle.nhdr").read_bytes().strip().split(b"\n")
    others.sort(key=lambda line: not line.startswith(b"data"))
    (folder / "middle.NHDR").write_bytes(b"\n".join([first, *others]))
    (folder / "middle.nhdr").unlink()
    write_hdr(folder / "little.hdr", array, affine)
    write_hdr(folder / "big.hdr", array, affine, order=">", offset=560, version=2)
    (folder / "left.raw").touch()
    names = ["Schädel.mhd", "big.hdr", "last.nhdr", "little.hdr", "middle.NHDR", "plain.mhd"]
    with opened(browser, page_service.url) as page:
        page.set_input_files("#file", sorted(folder.iterdir()))
        page.wait_for_selector('#scans li:nth-child(6)[data-state="done"]')
        assert page.evaluate(ENTRIES) == names
        assert text_of(page, "#left-out") == "Left out: left.raw."
        page.set_input_files("#folder", folder)
        page.wait_for_selector('#scans li:nth-child(12)[data-state="done"]')
        assert sorted(page.evaluate(ENTRIES)[6:]) == [f"study/{name}" for name in names]
        for marks in page.evaluate("landmarkd.queue.entries.map(({ edits }) => edits.landmarks)"):
            for mark, expected in zip(marks, answer, strict=True):
                if expected["ras_mm"]:
                    assert_allclose(mark["ras_mm"], expected["ras_mm"], atol=NEAR_MM)


def test_dicom_file_that_is_removed_while_its_folder_is_packed_is_not_readable(
    browser: Browser, page_service: ServiceProcess, tmp_path: Path
) -> None:
    images = [tmp_path / "study" / f"IM{number}" for number in range(2)]
    images[0].parent.mkdir()
    for path, image in zip(images, as_dicom()[:2], strict=True):
        path.write_bytes(image)
    with opened(browser, page_service.url, before=REMOVE_FIRST) as page:
        page.expose_function("remove", partial(images[1].unlink))
        page.set_input_files("#folder", images[0].parent)
        page.wait_for_selector('#problem-title:text("File not readable")', timeout=20_000)
        assert page.evaluate("landmarkd.queue.current.name") == "study.zip"


def test_dropped_folder_is_searched(browser: Browser, page_service: ServiceProcess) -> None:
    with opened(browser, page_service.url) as page:
        drop_folder(page, ("notes.txt", b"no scan"), (".hidden.nii", b"no scan"))
        page.wait_for_selector('#problem-title:text("No scan found")')
        assert page.is_visible("#welcome")
        drop_folder(page, ("a.nii.gz", SCAN), ("notes.txt", b"no scan"), ("b.dcm", as_dicom()[0]))
        page.wait_for_selector("#rows tr")
        assert page.is_hidden("#problem")
        assert page.evaluate("landmarkd.queue.entries.length") == 1
        assert page.evaluate("landmarkd.queue.current.name") == "study/a.nii.gz"


def test_list_scrolls_to_the_scan_that_is_looked_at(
    browser: Browser, page_service: ServiceProcess
) -> None:
    beyond = """(box) => {
        const [list, row] = [box, box.querySelector("[aria-selected=true]")].map((one) =>
            one.getBoundingClientRect());
        return Math.max(row.bottom - list.bottom, list.top - row.top);
    }"""
    with opened(browser, page_service.url) as page:
        drop(page, *[(f"{number}.nii", b"no scan") for number in range(30)])
        page.wait_for_selector("#scans li:nth-child(30)")
        assert page.eval_on_selector("#scans", beyond) <= 0
        drop(page, ("added.nii", b"no scan"))
        page.wait_for_selector('#scans li:nth-child(31)[aria-selected="true"]')
        assert page.eval_on_selector("#scans", beyond) <= 0
        page.press("#scans li:nth-child(31)", "Home")
        assert page.eval_on_selector("#scans", beyond) <= 0


def test_what_is_no_scan_is_left_out_and_named_however_it_is_opened(
    browser: Browser, page_service: ServiceProcess, tmp_path: Path
) -> None:
    (tmp_path / "study").mkdir()
    names = ("a.pdf", "b.txt", "c.json", "d.png", ".DS_Store")
    files = [("scan.nii.gz", SCAN), *((name, b"no scan") for name in names)]
    for name, content in files:
        (tmp_path / "study" / name).write_bytes(content)
    paths = [tmp_path / "study" / name for name, _ in files]
    with opened(browser, page_service.url) as page:
        ways: dict[str, Callable[[], None]] = {
            "#file": lambda: page.set_input_files("#file", paths),
            "#folder": lambda: page.set_input_files("#folder", tmp_path / "study"),
            "dropped": lambda: drop(page, *files),
        }
        opened_before: list[str] = []
        for way, open_all in ways.items():
            open_all()
            page.wait_for_selector('#left-out:text("Left out: ")')
            page.wait_for_selector("#rows tr")
            added = page.evaluate(ENTRIES)[len(opened_before) :]
            assert [name.removeprefix("study/") for name in added] == ["scan.nii.gz"], way
            left_out = text_of(page, "#left-out").replace("study/", "")
            assert left_out.startswith("Left out: "), way
            assert left_out.endswith(" and 1 more."), way
            assert sum(name in left_out for name in names) == 3, way
            assert ".DS_Store" not in left_out, way
            drop(page, ("a.pdf", b"no scan"))
            page.wait_for_selector('#problem-title:text("No scan found")')
            assert text_of(page, "#left-out") == "Left out: a.pdf.", way
            drop(page, (f"after {way}.nii.gz", SCAN))
            page.wait_for_selector(f'#facts:text("after {way}.nii.gz")')
            assert text_of(page, "#left-out") == "", way
            opened_before = page.evaluate(ENTRIES)


def test_scan_without_a_suffix_is_known_by_its_first_bytes(
    browser: Browser, page_service: ServiceProcess
) -> None:
    volume = read_volume(SCAN)
    with opened(browser, page_service.url) as page:
        drop(page, ("T1w", as_nifti(volume.voxels, volume.affine)), ("notes", b"no scan"))
        page.wait_for_selector("#rows tr")
        assert text_of(page, "#left-out") == "Left out: notes."


def test_another_model_writes_a_long_list_anew_a_few_times(
    browser: Browser, page_service: ServiceProcess
) -> None:
    scans = 40
    with opened(browser, page_service.url) as page:
        drop(page, *((f"{number}.nii", b"no scan") for number in range(scans)))
        page.wait_for_selector(f'#scans li:nth-child({scans})[data-state="problem"]')
        page.route("**/v1/landmarks?*", lambda _: None)  # answers nothing
        written = page.evaluate("""async () => {
            const watch = new MutationObserver(() => {});
            watch.observe(document.getElementById("scans"), { childList: true, subtree: true });
            document.getElementById("model").dispatchEvent(new Event("change"));
            return watch.takeRecords().length;
        }""")
        assert page.locator('#scans [data-state="problem"]').count() == 0
    # Two texts of each scan, whenever the list is written.
    assert 0 < written <= 10 * scans


def test_series_of_one_folder_are_told_apart_by_their_names(
    browser: Browser, page_service: ServiceProcess, tmp_path: Path
) -> None:
    """All were called as their folder, which has an unclear geometry, in files of answers, too."""
    volume = read_volume(SCAN)
    voxels = np.rint(volume.voxels).astype(np.int16)
    for uid in ("1.2", "1.3"):
        for number, image in enumerate(as_dicom(voxels, volume.affine, SeriesInstanceUID=uid)):
            (tmp_path / f"{uid}-{number}").write_bytes(image)
    titles = [f"{tmp_path.name}.zip series {number}" for number in (0, 1)]
    with opened(browser, page_service.url) as page:
        for number, title in enumerate(titles):
            page.set_input_files("#folder", tmp_path)
            page.wait_for_selector('#problem-title:text-is("Several series: choose one")')
            page.fill("#choice", str(number))
            page.keyboard.press("Enter")
            page.wait_for_selector(f'#facts:text("{title}")')
        assert page.locator("#scans span:first-child").all_text_contents() == titles
        name, table = download(page, '[data-format="json"]')[0], download(page, "#save-all")[1]
    assert name == f"{tmp_path.name} series 1.json"
    scans = {line.split(",")[0] for line in table.splitlines()[1:]}
    assert scans == {f"{tmp_path.name} series {number}" for number in (0, 1)}


def test_another_series_is_opened_beside_one_that_is_answered_and_corrected(
    browser: Browser, page_service: ServiceProcess
) -> None:
    """Who saw that it was the wrong one had to drop the whole study again."""
    volume = read_volume(SCAN)
    voxels = np.rint(volume.voxels).astype(np.int16)
    some = as_dicom(voxels[:, :, 4:], volume.affine, SeriesInstanceUID="1.2")
    asked = '#ask-choice:has-text("%s series")'
    with opened(browser, page_service.url) as page:
        drop(page, ("study.zip", zipped([*some, *as_dicom(voxels, volume.affine)])))
        page.wait_for_selector(asked % "Which", state="visible")
        page.press("#choice", "Enter")
        page.wait_for_selector('#facts:text("study.zip series 0")')
        page.keyboard.press("x")
        assert page.is_visible(asked % "Another")
        assert page.input_value("#choice") == "1"
        page.press("#choice", "Enter")
        page.wait_for_selector('#facts:text("study.zip series 1")')
        page.press("#choice", "Enter")
        page.wait_for_selector('#problem-detail:text("expected series from 0 to 1, got 2")')
        assert page.is_visible(asked % "Which")
        titles = page.locator("#scans span:first-child").all_text_contents()
        assert titles == [f"study.zip series {number}" for number in range(3)]
        assert text_of(page, "#scans span:last-child").endswith(", 1 by you")
        drop(page, ("head.nii.gz", SCAN))
        page.wait_for_selector('#facts:text("head.nii.gz")')
        assert page.is_hidden("#ask-choice")
