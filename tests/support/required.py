"""What tests need that is not installed with the project."""

import os
import sys
from typing import Final, NoReturn

import pytest

needs_reports: Final = pytest.mark.skipif(
    sys.version_info >= (3, 14), reason="what writes DICOM reports has no wheels for Python 3.14"
)


def skip_unless_ci(reason: str) -> NoReturn:
    """Skip a test for which something is missing; in continuous integration (CI=true) it fails."""
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)
