"""Fixtures that several test files share."""

import os
from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Toy networks gain nothing from threads, which on a busy machine wait for each other."""
    torch.set_num_threads(1)


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
