"""Scans for which memory, or room in a service, is short."""

import csv
import resource
from pathlib import Path
from threading import Thread

import httpx
import numpy as np
import pytest
from typer.testing import CliRunner

from app.cli.client import Client
from app.cli.main import app
from tests.support.dicom_files import as_dicom
from tests.support.services import ServiceProcess, toy_scan, until


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        (
            "4GiB",
            "huge.nii: expected at most 4,294,967,296 bytes, got 1,099,511,627,776; the limit is "
            "LANDMARKD_MAX_INFLATED_BYTES",
        ),
        ("4TiB", "huge.nii: expected a scan that fits the memory"),
    ],
)
def test_a_scan_larger_than_the_memory_does_not_stop_the_others(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, message: str
) -> None:
    scans = tmp_path / "scans"
    scans.mkdir()
    for name in ("a", "z"):
        (scans / f"{name}.nii").write_bytes(toy_scan((24, 26, 18)))
    with (scans / "huge.nii").open("wb") as file:
        file.truncate(1 << 40)  # It takes no room on the disk.
    monkeypatch.setenv("LANDMARKD_MAX_INFLATED_BYTES", limit)
    words = ("detect", scans, "-o", tmp_path / "all.csv", "--models-dir", models)
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (1 << 39, before[1]))
    try:
        result = CliRunner().invoke(app, [str(word) for word in words])
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert result.exit_code == 1
    assert message in result.stderr
    with (tmp_path / "all.csv").open(encoding="utf-8", newline="") as file:
        assert {row["scan"] for row in csv.DictReader(file)} == {"a", "z"}


def test_a_folder_larger_than_allowed_is_refused_before_it_is_read(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a whole study: it was packed in memory, which ended a batch where it did not fit."""
    for name, size in (("large", 1 << 20), ("small", 0)):
        (tmp_path / name).mkdir()
        for number, content in enumerate(as_dicom(np.ones((20, 18, 24), np.int16))):
            (tmp_path / name / f"I{number}").write_bytes(content.ljust(size, b"\0"))
    monkeypatch.setenv("LANDMARKD_MAX_INFLATED_BYTES", "1MiB")
    words = ("detect", tmp_path / "large", tmp_path / "small", "-o", tmp_path / "all.csv")
    result = CliRunner().invoke(app, [*map(str, words), "--models-dir", str(models)])
    assert result.exit_code == 1
    message = "large: expected at most 1,048,576 bytes, got 25,165,824; the limit is LANDMARKD_MAX"
    assert message in result.stderr
    with (tmp_path / "all.csv").open(encoding="utf-8", newline="") as file:
        assert {row["scan"] for row in csv.DictReader(file)} == {"small"}


def test_scans_wait_for_room_in_a_service(models: Path, tmp_path: Path) -> None:
    (tmp_path / "scan.nii").write_bytes(toy_scan((24, 26, 18)))
    service = ServiceProcess(models, MAX_IN_FLIGHT="1")
    large = toy_scan((150, 140, 120))
    with Client(service.url) as other:
        thread = Thread(target=other.detect, args=(large,))
        try:
            thread.start()
            until(lambda: "requests_in_flight 1.0" in httpx.get(f"{service.url}/metrics").text)
            words = ("detect", str(tmp_path / "scan.nii"), "--url", service.url)
            result = CliRunner().invoke(app, [*words, "-o", str(tmp_path / "scan.json")])
            thread.join()
        finally:
            service.kill()
    assert result.exit_code == 0, result.output
