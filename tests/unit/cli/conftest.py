"""A models folder for the tests of the command."""

from pathlib import Path

import pytest

from tests.support.services import toy_models


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_models(tmp_path_factory.mktemp("models"))
