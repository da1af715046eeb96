"""Scans that NiiVue does not read: the page draws what the service reads in them."""

import base64
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import nibabel as nib
import numpy as np
import pytest
from numpy.testing import assert_allclose

from app.io.volume import Selection, read_volume
from tests.support.browser import (
    SAME_GREY,
    SCAN,
    Browser,
    Page,
    Route,
    choose,
    compare_points,
    drawn,
    drop,
    hold,
    opened,
    text_of,
)
from tests.support.dicom_files import as_dicom, zipped
from tests.support.nifti_files import AFFINE, counting, nifti
from tests.support.scan_files import as_metaimage, as_mgh, as_nrrd
from tests.support.services import ServiceProcess

VOLUME = read_volume(SCAN)
VOXELS = np.rint(VOLUME.voxels).astype(np.int16)
SLICES = as_dicom(VOXELS, VOLUME.affine)
SCOUT = as_dicom(VOXELS[:, :, :2], VOLUME.affine, SeriesInstanceUID="1.2")
OVER: dict[str, Any] = {"viewport": {"width": 1300, "height": 850}}


def as_nifti_1(voxels: np.ndarray, affine: np.ndarray) -> bytes:
    """Write NIfTI-1, in mm."""
    image = nib.Nifti1Image(voxels, affine, dtype=voxels.dtype)
    image.header.set_xyzt_units("mm")
    content: bytes = image.to_bytes()
    return content


def shown(page: Page, name: str) -> np.ndarray:
    """Read how a scan is drawn where one landmark is chosen, without names."""
    page.wait_for_selector(f'#facts:text("{name}")')
    assert page.is_hidden("#unseen")
    page.uncheck("#names")
    choose(page, "ball")
    return drawn(page)


def edited(content: bytes, before: str, after: str) -> bytes:
    """Edit the header of a file whose voxels have no such bytes."""
    assert content.count(before.encode()) > 0
    return content.replace(before.encode(), after.encode())


class Plain(NamedTuple):
    """A page with a scan that NiiVue reads, and how it is drawn."""

    page: Page
    picture: np.ndarray


@pytest.fixture(scope="module")
def plain(browser: Browser, page_service: ServiceProcess) -> Iterator[Plain]:
    with opened(browser, page_service.url, **OVER) as page:
        asked = requests_of(page)
        drop(page, ("plain.nii", as_nifti_1(VOXELS, VOLUME.affine)))
        picture = shown(page, "plain.nii")
        assert asked == []
        yield Plain(page, picture)


def with_other_line_ends(voxels: np.ndarray, affine: np.ndarray) -> bytes:
    """Write MetaImage with the line ends of Windows, of which NiiVue takes some for voxels."""
    head, _, stored = as_metaimage(voxels, affine).partition(b"LOCAL\n")
    return head.replace(b"\n", b"\r\n") + b"LOCAL\r\n" + stored


SMALL_SCAN = counting()
BIG = SMALL_SCAN.astype(">i2")
READ = {
    "nifti": nifti(),
    "big-endian nifti": nifti(BIG, order=">"),
    "scaled nifti": nifti(scl_slope=0.5, scl_inter=-7),
    "metaimage": as_metaimage(),
    "metaimage of no order": as_metaimage(BinaryDataByteOrderMSB=None),
    "zipped metaimage": as_metaimage(zipped=True),
    "freesurfer with a history": as_mgh(behind=bytes(1000)),
    "nrrd": as_nrrd(),
    "big-endian nrrd": as_nrrd(BIG),
    "zipped nrrd": as_nrrd(encoding="gzip"),
}
"""Files that NiiVue reads as the service does."""
LEFT = {
    "vectors that are drawn as colours": nifti(counting((7, 5, 4, 3), "float32"), intent_code=2003),
    "labels, which are drawn in colours": nifti(intent_code=1002),
    "nifti of a wrong size of voxels": nifti(bitpix=8),
    "nifti of a negative length behind its axes": nifti(dim=[3, 7, 5, 4, -1, 1, 1, 1]),
    "infinite slope, as which none counts": nifti(scl_slope=np.inf),
    "infinite intercept, of no slope": nifti(scl_slope=0, scl_inter=np.inf),
    "freesurfer of a type without a sign": as_mgh(counting(dtype="uint16")),
    "freesurfer in gzip by its bytes alone": as_mgh(zipped=True),
    "big-endian metaimage": as_metaimage(BIG),
    "order of bytes of another name": as_metaimage(
        BIG, BinaryDataByteOrderMSB=None, ElementByteOrderMSB=True
    ),
    "order of bytes in a letter": as_metaimage(BIG, BinaryDataByteOrderMSB="t"),
    "line ends": with_other_line_ends(SMALL_SCAN, AFFINE),
    "no spaces in metaimage": edited(as_metaimage(), "DimSize = ", "DimSize="),
    "tabs in metaimage": edited(as_metaimage(), "7 5 4", "7\t5\t4"),
    "tabs in nrrd": edited(as_nrrd(), "7 5 4", "7\t5\t4"),
}
"""Files that it does not read, or otherwise, and that are converted."""


def requests_of(page: Page) -> list[str]:
    """List what the page asks for from now on to be converted, by its query."""
    asked: list[str] = []

    def note(url: str) -> None:
        _, found, query = url.partition("page/scan?")
        if found:
            asked.append(query)

    page.on("request", lambda request: note(request.url))
    return asked


def test_dicom_is_drawn_as_the_same_scan_in_nifti_and_sent_for_it_once(
    plain: Plain, answer: list[dict[str, Any]]
) -> None:
    page = plain.page
    asked = requests_of(page)
    drop(page, ("study.zip", zipped([*SCOUT, *SLICES])))
    page.wait_for_selector("#ask-choice", state="visible")
    page.click("#ask-choice button")
    assert np.abs(shown(page, "study.zip series 0") - plain.picture).mean() < SAME_GREY
    compare_points(page, [one for one in answer if one["ras_mm"]])
    page.click("#show-heatmap")
    page.wait_for_selector('#heatmap:text("from red to yellow")')
    page.click("#scans li:first-child")
    page.wait_for_selector('#facts:text("plain.nii")')
    page.click('#scans li:has-text("study.zip")')
    assert np.abs(shown(page, "study.zip series 0") - plain.picture).mean() < SAME_GREY
    assert asked == ["series=0"]


def test_viewer_reads_a_file_as_the_service_does_or_leaves_it_to_be_converted(
    answered: Page,
) -> None:
    read = """async (text) => {
        const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
        const entry = { file: new File([bytes], "scan"), choice: {} };
        const { signal } = new AbortController();
        const read = landmarkd.viewer.reader.read(entry, Promise.resolve(false), signal);
        const volume = await read.catch(({ message }) => {
            if (message !== "not read") throw new Error(message);
        });
        if (!volume) return null;
        const { dims, scl_slope, scl_inter } = volume.hdr;
        const values = Array.from(volume.img, (value) => value * scl_slope + scl_inter);
        return [[...dims].slice(1, 4), values];
    }"""

    def read_by_niivue(content: bytes) -> list[Any] | None:
        found: list[Any] | None = answered.evaluate(read, base64.b64encode(content).decode())
        return found

    for name, content in READ.items():
        volume, found = read_volume(content), read_by_niivue(content)
        assert found is not None, name
        assert tuple(found[0]) == volume.voxels.shape, name
        assert_allclose(found[1], volume.voxels.reshape(-1, order="F"), err_msg=name)
    for name, content in LEFT.items():
        read_volume(content, selection=Selection(frame=0))
        assert read_by_niivue(content) is None, name


def test_bytes_that_niivue_takes_for_voxels_are_not_drawn(plain: Plain) -> None:
    drop(plain.page, ("odd.mha", with_other_line_ends(VOXELS, VOLUME.affine)))
    assert np.abs(shown(plain.page, "odd.mha") - plain.picture).mean() < SAME_GREY


@pytest.mark.parametrize("write", [as_nifti_1, as_nrrd, as_metaimage])
def test_voxels_of_a_type_that_niivue_does_not_read_are_drawn_as_of_another(
    plain: Plain, write: Callable[..., bytes]
) -> None:
    # Values of a type without a sign.
    wide = write((VOXELS - VOXELS.min()).astype(np.uint64), VOLUME.affine)
    drop(plain.page, (f"wide {write.__name__}", wide))
    assert np.abs(shown(plain.page, f"wide {write.__name__}") - plain.picture).mean() < SAME_GREY


def test_scan_that_is_refused_is_only_sent_again_and_drawn_where_it_is_the_model_that_refuses_it(
    browser: Browser, page_service: ServiceProcess
) -> None:
    with opened(browser, page_service.url) as page:
        asked = requests_of(page)
        drop(page, ("broken.zip", zipped(SLICES)[:-40]))
        page.wait_for_selector("#problem", state="visible")
        page.wait_for_selector("#welcome", state="visible")
        assert page.is_hidden("#unseen")
        assert not asked
        coarse = as_dicom(VOXELS[::8, ::8, ::8], VOLUME.affine @ np.diag([40, 40, 40, 1]))
        drop(page, ("coarse.zip", zipped(coarse)))
        page.wait_for_selector("#views", state="visible")
        assert text_of(page, "#problem-title") == "This scan does not fit this model"
        assert page.is_hidden("#welcome")
        assert asked == [""]


def test_few_converted_files_are_kept(browser: Browser, page_service: ServiceProcess) -> None:
    study = zipped(as_dicom(VOXELS[::2, ::2, ::2], VOLUME.affine @ np.diag([2, 2, 2, 1])))
    with opened(browser, page_service.url) as page:
        asked = requests_of(page)
        for number in range(5):
            drop(page, (f"{number}.zip", study))
            page.wait_for_selector(f'#facts:text("{number}.zip")')
        assert len(asked) == 5
        for number, sent in ((3, 5), (1, 5), (0, 6)):
            page.click(f"#scans li:nth-child({number + 1})")
            page.wait_for_selector(f'#facts:text("{number}.zip")')
            assert page.is_hidden("#unseen")
            assert len(asked) == sent


def test_scan_that_one_leaves_is_not_waited_for(
    browser: Browser, page_service: ServiceProcess
) -> None:
    with opened(browser, page_service.url) as page:
        held = hold(page, "**/page/scan?*")
        drop(page, ("study.zip", zipped(SLICES)))
        page.wait_for_selector('#state:text-is("Drawing the scan…")')
        with page.expect_event("requestfailed"):  # As it is shown anew.
            page.dispatch_event("#model", "change")
        page.wait_for_selector('#state:text-is("Drawing the scan…")')
        assert page.is_hidden("#unseen")
        with page.expect_event("requestfailed"):
            drop(page, ("plain.nii", as_nifti_1(VOXELS, VOLUME.affine)))
        page.wait_for_selector('#facts:text("plain.nii")')
        assert page.is_hidden("#unseen")
        assert page.is_visible("#views")
        page.unroute("**/page/scan?*")
        page.click("#before")
        page.wait_for_selector('#facts:text("study.zip")')
        assert page.is_hidden("#unseen")
    assert len(held) == 2


def test_busy_service_is_asked_again_but_landmarks_do_not_wait_for_long(
    browser: Browser, page_service: ServiceProcess
) -> None:
    waits = ["3000", "1"]

    def answer_busy(route: Route) -> None:
        if waits:
            route.fulfill(status=429, headers={"Retry-After": waits.pop(0)})
        else:
            route.continue_()

    with opened(browser, page_service.url) as page:
        page.route("**/page/scan?*", answer_busy)
        drop(page, ("study.zip", zipped(SLICES)))
        page.wait_for_selector("#results", state="visible")
        assert text_of(page, "#unseen") == "The viewer cannot show this scan."
        page.click('[data-act="place"]')
        assert text_of(page, "#state") == "That takes the scan, which is not shown here."
        page.dispatch_event("#model", "change")
        page.wait_for_selector("#results", state="visible")
        assert page.is_hidden("#unseen")
        assert not waits
