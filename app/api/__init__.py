"""app/api."""

from app.api.app import create_app
from app.api.dependencies import Shared, SharedDep
from app.api.middleware import ID_HEADER
from app.api.upload.direct import EXTENSION

__all__ = [
    "EXTENSION",
    "ID_HEADER",
    "Shared",
    "SharedDep",
    "create_app",
]
