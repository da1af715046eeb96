"""landmarkd from Python: what programs import, and nothing else. It loads no PyTorch.

Finding landmarks by a service, correcting and keeping them, and what is done with them afterwards:
registration and shapes. ``landmarkd.voting`` reads landmarks from a network's output, with PyTorch.
"""

from importlib.metadata import version

from landmarkd.own_app import import_app

import_app()

from app.cli.client import Client, ProblemError, Unreachable
from app.errors import LandmarkdError
from app.io import (
    LandmarkAnswer,
    LandmarksAnswer,
    correct,
    read_landmarks,
    read_truth,
    write_answer,
)
from app.phantom import make_phantom, write_phantom
from app.shapes import (
    Registration,
    analyse_shapes,
    find_outliers,
    read_cohort,
    register,
)

__version__ = version("landmarkd")

__all__ = [
    "Client", "LandmarkAnswer", "LandmarkdError", "LandmarksAnswer", "ProblemError", "Registration",
    "Unreachable", "__version__", "analyse_shapes", "correct", "find_outliers", "make_phantom",
    "read_cohort", "read_landmarks", "read_truth", "register", "write_answer", "write_phantom",
]  # fmt: skip
