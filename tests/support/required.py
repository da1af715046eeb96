"""What tests need that is not installed with the project."""

import os
from typing import NoReturn

import pytest


def skip_unless_ci(reason: str) -> NoReturn:
    """Skip a test for which something is missing; in continuous integration (CI=true) it fails."""
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)
