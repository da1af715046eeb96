"""ASGI extension: a server that receives a body directly into a buffer of the application.

``app.server.http_protocol`` offers it. Under a server that does not, bodies are read by ``receive``
alone.
"""

from collections.abc import Callable
from typing import Final, Protocol, cast, runtime_checkable

from starlette.types import Scope

BODY_EXTENSION: Final = "landmarkd.body"
"""Key of a ``FillBody`` in ``scope["extensions"]``."""


@runtime_checkable
class FillBody(Protocol):
    """Receives the rest of a request's body."""

    async def __call__(self, rest: memoryview, count: Callable[[int], None]) -> None:
        """Fill a buffer with the bytes that follow those already returned by ``receive``.

        Args:
            rest: The buffer; exactly as long as the rest of the body, and not empty.
            count: Called with the number of bytes each time some have arrived; must not raise.

        Raises:
            ValueError: ``rest`` has another length than the rest of the body.
            ClientDisconnect: The client closed the connection before the body was complete.
        """


def fill_body_of(scope: Scope) -> FillBody | None:
    """Return the extension of a request's scope; None if the server does not offer it."""
    return cast("FillBody | None", scope.get("extensions", {}).get(BODY_EXTENSION))
