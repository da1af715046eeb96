"""Sinks: where the body of an upload goes as it arrives, until it is the file.

A body that is the file goes into one buffer, which the reader of the file uses without a copy.
Starlette's own form parser spools to disk through a thread pool; the one here collects one part, or
the two that a route asks for.
"""

import numpy as np
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from app.api.upload.kinds import UploadKind
from app.errors import BadParameter, RequestError, UnsupportedMediaType
from app.io import GZIP_MAGIC


class BufferSink:
    """A body that is the file.

    Args:
        length: Of the body, or the largest one allowed: pages take no memory until they are filled.
    """

    def __init__(self, length: int) -> None:
        # Not zeroed: only bytes that have been received are ever returned.
        self._buffer = np.empty(length, dtype=np.uint8).data
        self._filled = 0

    def write(self, chunk: bytes) -> None:
        """Take the next chunk of the body."""
        end = self._filled + len(chunk)
        self._buffer[self._filled : end] = chunk
        self._filled = end

    def head(self, size: int) -> memoryview | None:
        """Return the first ``size`` bytes of the file; None until they have arrived."""
        return self._buffer[:size] if self._filled >= size else None

    def close(self) -> tuple[memoryview]:
        """Return the file."""
        return (self._buffer[: self._filled],)


class MultipartSink:
    """A multipart body whose only part is the file, or with a second one beside it.

    Raises:
        RequestError: The boundary is too long.
    """

    def __init__(self, boundary: bytes, kind: UploadKind) -> None:
        self._fields = kind.fields
        self._parts: dict[str, bytearray] = {}
        self._header_name = self._header_value = b""
        self._part: bytearray | None = None
        self._ended = False
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._on_part_begin,
                    "on_header_field": self._on_header_field,
                    "on_header_value": self._on_header_value,
                    "on_header_end": self._on_header_end,
                    "on_headers_finished": self._on_headers_finished,
                    "on_part_data": self._on_part_data,
                    "on_end": self._on_end,
                },
            )
        except FormParserError as error:
            raise _malformed() from error

    def write(self, chunk: bytes) -> None:
        """Take the next chunk of the body.

        Raises:
            BadParameter: There is another field.
            UnsupportedMediaType: The form is compressed as a whole.
            RequestError: The body is malformed.
        """
        try:
            self._parser.write(chunk)
        except FormParserError as error:
            if not self._parts and chunk.startswith(GZIP_MAGIC):
                raise UnsupportedMediaType(
                    "expected a form that is not compressed, though its file may be; got a gzip "
                    "file that the whole form is in"
                ) from error
            raise _malformed() from error

    def head(self, size: int) -> bytes | None:
        """Return the first ``size`` bytes of the file; None until they have arrived."""
        content = self._parts.get(self._fields[0], b"")
        return bytes(content[:size]) if len(content) >= size else None

    def close(self) -> tuple[bytearray, ...]:
        """Return the contents of all fields, that of the file first.

        Raises:
            BadParameter: A field is missing.
            RequestError: The last boundary is missing.
        """
        missing = [field for field in self._fields if field not in self._parts]
        if missing and (self._ended or not self._parts):
            raise BadParameter(f"expected a form field {missing[0]!r}, got none")
        if not self._ended:
            raise _malformed()
        return tuple(self._parts[field] for field in self._fields)

    def _on_part_begin(self) -> None:
        self._part = None
        if len(self._parts) == len(self._fields):
            count = "one form field" if len(self._fields) == 1 else "two form fields"
            named = " and ".join(map(repr, self._fields))
            raise BadParameter(
                f"expected {count}, {named}, got more (parameters go into the query)"
            )

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _on_header_end(self) -> None:
        name, value = self._header_name, self._header_value
        self._header_name = self._header_value = b""
        if name.lower() != b"content-disposition":
            return
        got = parse_options_header(value)[1].get(b"name", b"").decode("utf-8", "replace")
        missing = [field for field in self._fields if field not in self._parts]
        if got not in missing:
            expected = " or ".join(map(repr, missing))
            raise BadParameter(
                f"expected a form field {expected}, got {got[:64]!r} (parameters go into the query)"
            )
        self._part = self._parts[got] = bytearray()

    def _on_headers_finished(self) -> None:
        if self._part is None:
            raise BadParameter(f"expected a form field {self._fields[0]!r}, got one without a name")

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._part is not None:  # Its headers have been read.
            self._part += data[start:end]

    def _on_end(self) -> None:
        self._ended = True


def _malformed() -> RequestError:
    return RequestError("expected a well-formed multipart/form-data body, got a broken one")
