"""Where scans and points lie on the page: headers that are read in several ways, and the edge."""

import io
from collections.abc import Iterator
from typing import Any, NamedTuple

import nibabel as nib
import nrrd
import numpy as np
import pytest
from numpy.testing import assert_allclose

from app.geometry import LPS_FROM_RAS, is_inside, spacing_of, transform
from app.io.volume import read_volume
from tests.support.browser import (
    NEAR_MM,
    SAME_GREY,
    SCAN,
    Browser,
    Page,
    choose,
    chosen,
    compare_points,
    crosshair,
    drag,
    drawn,
    drop,
    landmark,
    mark_of,
    opened,
    text_of,
)
from tests.support.services import ServiceProcess

VOLUME = read_volume(SCAN)
COUNT_UPLOADS = """() => {
    window.sent = 0;
    const { nv } = landmarkd.viewer;
    const send = nv.refreshLayers.bind(nv);
    nv.refreshLayers = (...layer) => {
        window.sent += 1;
        return send(...layer);
    };
}"""
"""Lets the page count how often a scan is sent to the graphics card."""
VOXEL_MM = float(spacing_of(VOLUME.affine).min())
MIRROR = np.diag([-1.0, 1.0, 1.0, 1.0])


def written(per_mm: float = 1.0, unit: str = "mm", qform: np.ndarray | None = None) -> bytes:
    """Write the scan with lengths in a unit, and with a qform of a higher code than the sform."""
    to_unit = np.diag([per_mm, per_mm, per_mm, 1.0])
    image = nib.Nifti2Image(np.rint(VOLUME.voxels).astype(np.int16), to_unit @ VOLUME.affine)
    image.header.set_xyzt_units(unit)
    image.set_sform(to_unit @ VOLUME.affine, code=1)
    if qform is not None:
        image.set_qform(qform, code=2)
    content: bytes = image.to_bytes()
    return content


def frames_first() -> bytes:
    """Write an NRRD file of two frames, whose axis comes first, as in a sequence of 3D Slicer."""
    voxels = np.rint(VOLUME.voxels).astype(np.int16)
    world = LPS_FROM_RAS @ VOLUME.affine
    directions = np.vstack([np.full(3, np.nan), world[:3, :3].T])
    header = {
        "space": "left-posterior-superior",
        "space directions": directions,
        "space origin": world[:3, 3],
        "kinds": ["list", "domain", "domain", "domain"],
    }
    file = io.BytesIO()
    nrrd.write(file, np.stack([voxels[::-1], voxels]), header)
    return file.getvalue()


class Plain(NamedTuple):
    """A scan of which nothing is unusual, as it is drawn when it was opened.

    Attributes:
        page: Where it was opened, and others may be opened after it.
        picture: Its grey values.
        name: The landmark that is chosen at first.
        mark: Its ring in the axial plane.
    """

    page: Page
    picture: np.ndarray
    name: str
    mark: dict[str, Any]


@pytest.fixture(scope="module")
def plain(browser: Browser, page_service: ServiceProcess) -> Iterator[Plain]:
    with opened(browser, page_service.url) as page:
        drop(page, ("plain.nii", written()))
        page.wait_for_selector("#rows tr")
        name = chosen(page)
        yield Plain(page, drawn(page), name, mark_of(page, name, 0))


def open_after(plain: Plain, name: str, scan: bytes) -> None:
    """Open a scan, and check that it is drawn as the plain one."""
    drop(plain.page, (name, scan))
    plain.page.wait_for_selector(f'#facts:text("{name}")')
    compare_with(plain)


def compare_with(plain: Plain) -> None:
    """Check that the scan that was opened last is drawn as the plain one."""
    assert plain.page.is_hidden("#unseen")
    assert chosen(plain.page) == plain.name
    assert np.abs(drawn(plain.page) - plain.picture).mean() < SAME_GREY


@pytest.mark.parametrize(
    ("scan", "warning"),
    [
        (written(qform=MIRROR @ VOLUME.affine), "the qform disagrees"),
        (written(1e-3, "meter"), "metres"),
        (written(1e3, "micron"), "microns"),
    ],
    ids=["mirrored qform", "metres", "microns"],
)
def test_scan_is_shown_where_the_service_read_it(
    plain: Plain, answer: list[dict[str, Any]], scan: bytes, warning: str
) -> None:
    found = {one["name"]: one for one in answer if one["ras_mm"]}
    page, _, name, mark = plain
    open_after(plain, f"{warning}.nii", scan)
    assert warning in text_of(page, "#warnings")
    compare_points(page, list(found.values()))
    assert mark_of(page, name, 0) == pytest.approx(mark, abs=0.1)
    # A correction moves it by as many mm, and along the same axis.
    page.mouse.click(mark["x"], mark["y"])
    page.keyboard.press("Shift+ArrowRight")
    expected = np.array(found[name]["ras_mm"])
    expected[0] += spacing_of(VOLUME.affine).min()
    assert_allclose(landmark(page, name)["ras_mm"], expected, atol=NEAR_MM)
    assert_allclose(crosshair(page), expected, atol=NEAR_MM)
    voxel = np.linalg.inv(VOLUME.affine) @ [*expected, 1.0]
    assert_allclose(landmark(page, name)["ijk"], voxel[:3], atol=NEAR_MM)


def test_contrast_is_that_of_the_voxels_whatever_range_the_header_has(plain: Plain) -> None:
    image = nib.Nifti2Image.from_bytes(written())
    image.header["cal_min"], image.header["cal_max"] = (
        3,
        25500,
    )  # As of a scan before it was scaled.
    plain.page.evaluate(COUNT_UPLOADS)
    open_after(plain, "scaled.nii", image.to_bytes())
    assert plain.page.evaluate("sent") == 1


@pytest.mark.parametrize("value", [np.inf, -np.inf, 1e300, np.nan])
def test_voxels_that_are_not_finite_leave_the_others_their_contrast(
    plain: Plain, value: float
) -> None:
    voxels = np.rint(VOLUME.voxels).astype(np.float64)
    voxels[0, 0, 0] = voxels.max() + 100  # Where NiiVue does not look for their range.
    whole = [voxels.min(), voxels.max()]
    voxels[tuple(np.array(voxels.shape) // 2)] = value
    image = nib.Nifti1Image(voxels, VOLUME.affine)
    image.header.set_xyzt_units("mm")
    ends = "(({ cal_min, cal_max }) => [cal_min, cal_max])(landmarkd.viewer.nv.volumes[0])"
    open_after(plain, f"with {value}.nii", image.to_bytes())
    plain.page.click('[data-window="full"]')
    assert plain.page.evaluate(ends) == whole


def test_button_of_the_contrast_is_pressed_as_long_as_it_is_drawn(
    browser: Browser, page_service: ServiceProcess
) -> None:
    """Not after another one was dragged; a double click gives back that of the scan."""
    auto = '[data-window="auto"][aria-pressed="true"]'
    with opened(browser, page_service.url) as page:
        drop(page, ("a.nii.gz", SCAN))
        page.wait_for_selector("#rows tr")
        assert page.is_visible(auto)
        choose(page, "ball")
        mark = mark_of(page, "ball", 0)
        page.mouse.move(mark["x"], mark["y"])
        page.mouse.down(button="right")
        page.mouse.move(mark["x"] - 15, mark["y"] - 15)
        page.mouse.move(mark["x"] - 30, mark["y"] - 30)
        page.mouse.up(button="right")
        page.wait_for_selector('#views:not(:has([data-window][aria-pressed="true"]))')
        page.mouse.dblclick(mark["x"] - 15, mark["y"] - 15)
        page.wait_for_selector(auto)
        page.click('[data-window="bone"]')
        assert page.get_attribute('[data-window="bone"]', "aria-pressed") == "true"
        assert not page.is_visible(auto)


def test_ring_fades_only_beyond_the_thickness_of_its_slice(
    browser: Browser, page_service: ServiceProcess
) -> None:
    thick = np.diag([1.0, 2.0, 8.0, 1.0])
    image = nib.Nifti1Image(np.rint(VOLUME.voxels[:, ::2, ::8]).astype(np.int16), thick)
    image.header.set_xyzt_units("mm")
    opacity = """([plane, off]) => {
        const { viewer } = landmarkd;
        const at = [40, 50, 40];
        viewer.setLandmarks([{ name: "a", status: "detected", ras_mm: at, region95_mm: null }]);
        viewer.select(-1, at.map((mm, axis) => mm + off[axis]));
        return viewer.markers.marks.find((mark) => mark.plane === plane).opacity;
    }"""
    with opened(browser, page_service.url) as page:
        drop(page, ("thick.nii", image.to_bytes()))
        page.wait_for_selector("#rows tr")
        assert page.evaluate(opacity, [0, [0, 0, 3.9]]) == 1
        assert page.evaluate(opacity, [0, [0, 0, 4.1]]) < 1
        assert page.evaluate(opacity, [1, [0, 0.9, 0]]) == 1
        assert page.evaluate(opacity, [2, [0.6, 0, 0]]) < 1


def test_drag_ends_with_its_scan(
    browser: Browser, page_service: ServiceProcess, answer: list[dict[str, Any]]
) -> None:
    name = answer[0]["name"]
    with opened(browser, page_service.url) as page:
        drop(page, ("a.nii.gz", SCAN), ("b.nii.gz", SCAN))
        page.wait_for_selector('#scans li:nth-child(2)[data-state="done"]')
        page.wait_for_selector("#rows tr")
        choose(page, name)
        drag(page, name, 0, 9, 9)
        page.evaluate("document.getElementById('after').click()")
        page.wait_for_selector('#facts:text("b.nii.gz")')
        page.mouse.up()
        assert landmark(page, name) == answer[0]


def test_scan_is_sent_to_the_graphics_card_once(
    browser: Browser, page_service: ServiceProcess
) -> None:
    with opened(browser, page_service.url) as page:
        page.evaluate(COUNT_UPLOADS)
        for number, name in enumerate(("a.nii.gz", "b.nii.gz"), start=1):
            drop(page, (name, SCAN))
            page.wait_for_selector(f'#facts:text("{name}")')
            page.wait_for_selector("#rows tr")
            assert page.evaluate("landmarkd.viewer.nv.meshes.length") == 1
            assert page.evaluate("sent") == number
        page.click('[data-window="full"]')
        assert page.evaluate("sent") == number + 1


def test_colors_of_balls_are_no_numbers_that_browsers_change(
    browser: Browser, page_service: ServiceProcess
) -> None:
    """NiiVue copies them as floats: what is NaN then, such as green, was dark blue in Firefox."""
    with opened(browser, page_service.url) as page:
        drop(page, ("a.nii.gz", SCAN))
        page.wait_for_selector('#facts:text("a.nii.gz")')
        page.wait_for_selector("#rows tr")
        sent = page.evaluate("""() => {
            const { gl, meshes: [mesh] } = landmarkd.viewer.nv;
            const [send, sent] = [gl.bufferData, []];
            gl.bufferData = (target, data, use) => {
                sent.push(Array.from(data));
                send.call(gl, target, data, use);
            };
            mesh.updateMesh(gl);
            return sent.map((data) => [data.length > 1000, data.some(Number.isNaN)]);
        }""")
        assert sent == [[True, False], [True, False]]  # Triangles, and points with their colors.


def test_scan_of_which_the_viewer_takes_frames_for_an_axis_is_converted(
    plain: Plain, answer: list[dict[str, Any]]
) -> None:
    page = plain.page
    drop(page, ("sequence.seq.nrrd", frames_first()))
    page.wait_for_selector("#ask-choice", state="visible")
    page.fill("#choice", "1")
    page.keyboard.press("Enter")
    page.wait_for_selector('#facts:text("sequence.seq.nrrd frame 1")')
    compare_with(plain)
    for one in answer:
        if one["ras_mm"]:
            found = landmark(page, one["name"])["ras_mm"]
            assert_allclose(found, one["ras_mm"], atol=VOXEL_MM)


def test_rings_are_faint_by_their_distance_from_the_slice_that_is_drawn_of_an_oblique_scan(
    browser: Browser, page_service: ServiceProcess
) -> None:
    """It is one of the scan: 50 voxels beside the crosshair, it lies 17 mm above the plane."""
    rotation = np.array([[1.0, 0.0, 0.0], [0.0, 0.94, -0.34], [0.0, 0.34, 0.94]])
    oblique = np.eye(4)
    oblique[:3, :3] = rotation
    image = nib.Nifti1Image(np.rint(VOLUME.voxels).astype(np.int16), oblique)
    image.header.set_xyzt_units("mm")
    at, beside = (
        transform(oblique, np.array(ijk, dtype=np.float64)) for ijk in ([40, 10, 40], [40, 60, 40])
    )
    level = [*beside[:2], at[2]]
    opacity = """([at, mm]) => {
        const { viewer } = landmarkd;
        viewer.setLandmarks([{ name: "a", status: "detected", ras_mm: mm, region95_mm: null }]);
        viewer.select(-1, at);
        return viewer.markers.marks.find((mark) => mark.plane === 0)?.opacity ?? 0;
    }"""
    with opened(browser, page_service.url, has_touch=True) as page:
        drop(page, ("oblique.nii", image.to_bytes()))
        page.wait_for_selector('#facts:text("oblique.nii")')
        assert page.evaluate(opacity, [at.tolist(), beside.tolist()]) == 1
        assert page.evaluate(opacity, [at.tolist(), [float(mm) for mm in level]]) == 0
        # What one places there by hand lies in that slice, too.
        page.evaluate(opacity, [at.tolist(), beside.tolist()])
        mark = mark_of(page, "a", 0)
        page.keyboard.press("p")
        page.touchscreen.tap(mark["x"], mark["y"])
        page.wait_for_selector("#decided:not(:empty)")
        placed = page.evaluate("landmarkd.viewer.crosshair")
        assert_allclose(placed, beside, atol=1.5)


def test_point_that_is_dragged_out_of_the_scan_stays_at_its_edge(
    page: Page, answer: list[dict[str, Any]]
) -> None:
    name = answer[0]["name"]
    choose(page, name)
    drag(page, name, 0, 600, -9)
    page.mouse.up()
    after = landmark(page, name)
    volume = page.evaluate("landmarkd.queue.current.edits.original.volume")
    ijk, shape = np.array(after["ijk"], dtype=np.float64), volume["shape"]
    assert is_inside(ijk, shape)
    assert not is_inside(ijk + 0.01, shape) or not is_inside(ijk - 0.01, shape)
    where = transform(np.array(volume["affine"]), ijk)
    assert_allclose(after["ras_mm"], where, atol=NEAR_MM)
    assert_allclose(crosshair(page), where, atol=NEAR_MM)
    assert mark_of(page, name, 0)["radius"] > 0  # It is still seen, and can be dragged back.
