"""Scans for which memory is short: their own failure, and that of no other."""

import csv
import resource
from pathlib import Path

import pytest
from typer.testing import CliRunner

from app.cli.main import app
from tests.support.services import toy_scan


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        (
            "4GiB",
            "huge.nii: expected at most 4,294,967,296 bytes (limit inflated_bytes), got 1,099,",
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
