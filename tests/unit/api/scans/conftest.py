"""An application that keeps jobs, for the tests of jobs and of the uploads of their files."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from tests.support.services import running, toy_models, toy_settings


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_models(tmp_path_factory.mktemp("scans"))


@pytest.fixture
def client(models: Path, tmp_path: Path) -> Iterator[TestClient]:
    with running(toy_settings(models, jobs=tmp_path / "kept")) as client:
        yield client
