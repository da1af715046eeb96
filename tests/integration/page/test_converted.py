"""Scans that NiiVue does not read: the page draws what the service reads in them."""

from collections.abc import Callable
from typing import Any

import nibabel as nib
import numpy as np
import pytest

from app.io.volume import read_volume
from tests.support.browser import (
    SAME_GREY,
    SCAN,
    Browser,
    Page,
    choose,
    compare_points,
    drawn,
    drop,
    hold,
    opened,
    text_of,
)
from tests.support.dicom_files import as_dicom, zipped
from tests.support.scan_files import as_metaimage, as_nrrd
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


def with_other_line_ends(voxels: np.ndarray, affine: np.ndarray) -> bytes:
    """Write MetaImage with the line ends of Windows, of which NiiVue takes some for voxels."""
    head, _, stored = as_metaimage(voxels, affine).partition(b"LOCAL\n")
    return head.replace(b"\n", b"\r\n") + b"LOCAL\r\n" + stored


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
    browser: Browser, page_service: ServiceProcess, answer: list[dict[str, Any]]
) -> None:
    with opened(browser, page_service.url, **OVER) as page:
        asked = requests_of(page)
        drop(page, ("plain.nii", as_nifti_1(VOXELS, VOLUME.affine)))
        plain = shown(page, "plain.nii")
        assert asked == []
        drop(page, ("study.zip", zipped([*SCOUT, *SLICES])))
        page.wait_for_selector("#ask-choice", state="visible")
        page.click("#ask-choice button")
        assert np.abs(shown(page, "study.zip series 0") - plain).mean() < SAME_GREY
        compare_points(page, [one for one in answer if one["ras_mm"]])
        page.click("#show-heatmap")
        page.wait_for_selector('#heatmap:text("from red to yellow")')
        page.click("#before")
        page.wait_for_selector('#facts:text("plain.nii")')
        page.click("#after")
        assert np.abs(shown(page, "study.zip series 0") - plain).mean() < SAME_GREY
        assert asked == ["series=0"]


def test_bytes_that_niivue_takes_for_voxels_are_not_drawn(
    browser: Browser, page_service: ServiceProcess
) -> None:
    with opened(browser, page_service.url, **OVER) as page:
        drop(page, ("plain.nii", as_nifti_1(VOXELS, VOLUME.affine)))
        plain = shown(page, "plain.nii")
        drop(page, ("odd.mha", with_other_line_ends(VOXELS, VOLUME.affine)))
        assert np.abs(shown(page, "odd.mha") - plain).mean() < SAME_GREY


def test_scan_that_is_not_answered_is_not_sent_again(
    browser: Browser, page_service: ServiceProcess
) -> None:
    with opened(browser, page_service.url) as page:
        asked = requests_of(page)
        drop(page, ("broken.zip", zipped(SLICES)[:-40]))
        page.wait_for_selector("#problem", state="visible")
        page.wait_for_selector("#welcome", state="visible")
        assert page.is_hidden("#unseen")
        assert not asked


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


@pytest.mark.parametrize("write", [as_nifti_1, as_nrrd, as_metaimage])
def test_voxels_of_a_type_that_niivue_does_not_read_are_drawn_as_of_another(
    browser: Browser, page_service: ServiceProcess, write: Callable[..., bytes]
) -> None:
    with opened(browser, page_service.url, **OVER) as page:
        drop(page, ("plain.nii", as_nifti_1(VOXELS, VOLUME.affine)))
        plain = shown(page, "plain.nii")
        # Values of a type without a sign.
        drop(page, ("wide", write((VOXELS - VOXELS.min()).astype(np.uint64), VOLUME.affine)))
        assert np.abs(shown(page, "wide") - plain).mean() < SAME_GREY


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


def test_landmarks_are_listed_though_the_service_converts_no_scan(
    browser: Browser, page_service: ServiceProcess
) -> None:
    with opened(browser, page_service.url) as page:
        page.route("**/page/scan?*", lambda route: route.abort())
        drop(page, ("study.zip", zipped(SLICES)))
        page.wait_for_selector("#results", state="visible")
        assert text_of(page, "#unseen") == "The viewer cannot show this scan."
        page.click('[data-act="place"]')
        assert text_of(page, "#state") == "That takes the scan, which is not shown here."
