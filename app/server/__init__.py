"""app/server."""

from app.server.process import serve

__all__ = [
    "serve",
]
