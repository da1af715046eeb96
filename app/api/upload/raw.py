"""Raw body, piece by piece -> the file that it is."""

from collections.abc import Sequence

import numpy as np

from app.errors import RequestError


class RawFile:
    """A body that is the file, kept in the pieces in which it comes."""

    def __init__(self) -> None:
        """Make one of unknown length."""
        self._chunks: list[bytes] = []

    def write(self, chunk: bytes) -> None:
        """Take the next piece of the body."""
        self._chunks.append(chunk)

    def close(self) -> bytes:
        """Return the file."""
        return b"".join(self._chunks)

    def head(self, size: int) -> bytes | None:
        """Return the first bytes of the file, once that many have come."""
        return head_of(self._chunks, size)


class SizedFile:
    """A body of known length that is the file, received into one buffer.

    Attributes:
        rest: The part of the buffer that is still to be filled; whoever fills it shortens it.
    """

    def __init__(self, length: int) -> None:
        # Not zeroed: only bytes that have been received are ever returned.
        self._memory = np.empty(length, dtype=np.uint8).data
        self.rest = self._memory

    def write(self, chunk: bytes) -> None:
        """Take the next piece of the body.

        Raises:
            RequestError: It is longer than was said.
        """
        if len(chunk) > len(self.rest):
            raise RequestError(
                f"expected {len(self._memory)} bytes, as Content-Length says, got more"
            )
        self.rest[: len(chunk)] = chunk
        self.rest = self.rest[len(chunk) :]

    def close(self) -> memoryview:
        """Return the file, in place."""
        return self._memory[: self._filled]

    def head(self, size: int) -> memoryview | None:
        """Return the first bytes of the file, once that many have come."""
        return self._memory[:size] if self._filled >= size else None

    @property
    def _filled(self) -> int:
        return len(self._memory) - len(self.rest)


def head_of(chunks: Sequence[bytes], size: int) -> bytes | None:
    """Join the first so many bytes; None if there are fewer."""
    head = b""
    for chunk in chunks:
        head += chunk[: size - len(head)]
        if len(head) == size:
            return head
    return None
