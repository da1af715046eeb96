"""What a server may offer for large bodies: to receive them straight into memory of the handler's.

Two keys of ASGI's ``scope["extensions"]``; a server that knows neither is served all the same.
"""

from collections.abc import Callable
from typing import Final, Protocol, cast, runtime_checkable

import numpy as np
from starlette.types import Scope

EXTENSION: Final = "landmarkd.body"
"""Of ASGI: key of a ``FillBody`` in ``scope["extensions"]``."""

MEMORY: Final = "landmarkd.memory"
"""Of ASGI: key of what reserves memory for a body, which is as ``Buffers.reserve``."""


@runtime_checkable
class FillBody(Protocol):
    """Receives what is left of a body; as an ASGI server offers it."""

    async def __call__(self, rest: memoryview, count: Callable[[int], None]) -> None:
        """Fill ``rest`` with the bytes that follow those which ``receive`` has given.

        Args:
            rest: As long as what is left of the body, and not empty.
            count: Is told how many more bytes have come, now and then; must not raise.

        Raises:
            ValueError: ``rest`` is not as long as what is left.
            ClientDisconnect: The client closed the connection before all had come.
        """


def fill_body_of(scope: Scope) -> FillBody | None:
    """Return what fills memory with the rest of a request's body; None if the server cannot."""
    return cast("FillBody | None", scope.get("extensions", {}).get(EXTENSION))


def reserve_of(scope: Scope) -> Callable[[int], memoryview]:
    """Return what reserves memory for a request's body: fresh memory if the server keeps none."""
    kept = scope.get("extensions", {}).get(MEMORY, fresh_buffer)
    return cast("Callable[[int], memoryview]", kept)


def fresh_buffer(length: int) -> memoryview:
    """Reserve memory, which is not touched."""
    return np.empty(length, dtype=np.uint8).data
