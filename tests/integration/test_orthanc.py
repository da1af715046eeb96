"""A real Orthanc, set as docs/orthanc.md has it: a series arrives, and its report is beside it."""

import io
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
import pydicom
import pytest

from app.io.volume import read_volume
from tests.benchmarks.servers import free_port
from tests.support.dicom_files import STUDY, as_dicom, zipped
from tests.support.required import needs_reports
from tests.support.services import ServiceProcess, ended, toy_models, toy_scan, until

ORTHANC: Final = shutil.which("Orthanc")
ROOT: Final = Path(__file__).parents[2]
SCRIPT: Final = ROOT / "clients" / "orthanc" / "landmarkd.lua"
SUBJECT: Final = {
    "PatientName": "Müller^Jörg",
    "PatientID": "4711",
    "StudyDate": "20250102",
    "AccessionNumber": "A1",
    "SpecificCharacterSet": "ISO_IR 100",
}

pytestmark = [pytest.mark.skipif(ORTHANC is None, reason="needs Orthanc"), needs_reports]


def documented(url: str) -> dict[str, Any]:
    """Return the configuration of the documentation, for a service with the toy model."""
    text = (ROOT / "docs" / "orthanc.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```json\n(.*?)```", text, re.DOTALL)
    settings: dict[str, Any] = json.loads(block)
    settings["LuaScripts"] = [str(SCRIPT)]
    settings["Landmarkd"]["Url"] = url
    for rule in settings["Landmarkd"]["Models"]:
        rule["Model"] = "toy"
    return settings


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    with ended(ServiceProcess(toy_models(tmp_path_factory.mktemp("orthanc")))) as process:
        yield process


@pytest.fixture
def orthanc(service: ServiceProcess, tmp_path: Path) -> Iterator[httpx.Client]:
    assert ORTHANC is not None
    port = free_port()
    store = str(tmp_path / "orthanc")
    settings = documented(service.url) | {"ExecuteLuaEnabled": True, "Plugins": []}
    settings |= {"HttpPort": port, "DicomServerEnabled": False, "StableAge": 1}
    settings |= {"StorageDirectory": store, "IndexDirectory": store}
    (tmp_path / "orthanc.json").write_text(json.dumps(settings))
    log = (tmp_path / "log").open("wb")
    process = subprocess.Popen(
        [ORTHANC, tmp_path / "orthanc.json"], stdout=log, stderr=subprocess.STDOUT
    )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            until(lambda: is_there(client))
            yield client
    finally:
        process.terminate()
        process.wait(30)
        log.close()


def is_there(client: httpx.Client) -> bool:
    try:
        return client.get("/system").is_success
    except httpx.TransportError:
        return False


def images(**elements: Any) -> list[bytes]:
    volume = read_volume(toy_scan())
    return as_dicom(np.rint(volume.voxels).astype(np.int16), volume.affine, **SUBJECT | elements)


def send(orthanc: httpx.Client, files: list[bytes]) -> str:
    """Send images to Orthanc; returns its identifier of their series."""
    for content in files:
        answer = orthanc.post("/instances", content=content).raise_for_status().json()
    series: str = answer["ParentSeries"]
    return series


def reports(orthanc: httpx.Client) -> list[pydicom.Dataset]:
    found: list[pydicom.Dataset] = []
    for series in orthanc.get("/series?expand").json():
        if series["MainDicomTags"]["Modality"] == "SR":
            (one,) = series["Instances"]
            content = orthanc.get(f"/instances/{one}/file").content
            found.append(pydicom.dcmread(io.BytesIO(content)))
    return found


def test_series_that_arrives_gets_a_report_in_its_study(
    orthanc: httpx.Client, service: ServiceProcess
) -> None:
    files = images()
    send(orthanc, files)
    until(lambda: [str(one.PatientID) for one in reports(orthanc)] == [SUBJECT["PatientID"]])
    (report,) = reports(orthanc)
    assert {
        name: str(report[name].value) for name in SUBJECT if name != "SpecificCharacterSet"
    } == {name: value for name, value in SUBJECT.items() if name != "SpecificCharacterSet"}
    assert report.StudyInstanceUID == STUDY
    assert len(orthanc.get("/patients").json()) == len(orthanc.get("/studies").json()) == 1
    url = f"{service.url}/v1/landmarks?format=dcm"
    expected = pydicom.dcmread(io.BytesIO(httpx.post(url, content=zipped(files)).content))
    assert len(report.ContentSequence) == len(expected.ContentSequence) > 0
    assert positions(report) == positions(expected) != []


def positions(report: pydicom.Dataset) -> list[list[float]]:
    return [list(element.value) for element in report.iterall() if element.keyword == "GraphicData"]


def test_series_of_other_kinds_are_left_alone_and_refused_ones_stop_no_others(
    orthanc: httpx.Client, tmp_path: Path
) -> None:
    other = send(orthanc, images(Modality="MR", SeriesDescription="localizer"))
    first, _missing, *others = images(SeriesInstanceUID="1.2")
    send(orthanc, [first, *others])
    until(lambda: "no landmarks of series" in (tmp_path / "log").read_text())
    send(orthanc, images(SeriesInstanceUID="1.4", Modality="MR", SeriesDescription="T2 SAG"))
    until(lambda: len(reports(orthanc)) == 1)
    assert orthanc.get(f"/series/{other}").json()["IsStable"]
    asked = orthanc.post("/tools/execute-script", content=f"print(FindLandmarks('{other}', 'toy'))")
    assert asked.text.strip() in orthanc.get("/instances").json()
    assert len(reports(orthanc)) == 2
