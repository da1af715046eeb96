"""Fixtures that several test files share."""

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Find the folder of real scans: LANDMARKD_DATA, else ../shared/data beside the checkout.

    Without it tests skip; in continuous integration (CI=true) they fail.
    """
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    folder = Path(os.environ.get("LANDMARKD_DATA", beside))
    if not folder.is_dir():
        reason = f"expected real scans in {folder}; set LANDMARKD_DATA to their folder"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    return folder
