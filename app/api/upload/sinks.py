"""Multipart body, piece by piece -> the file in its one field."""

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from app.api.upload.raw import head_of
from app.errors import BadParameter, RequestError


class MultipartFile:
    """A multipart body whose one part is the file.

    Starlette's own form parser spools to disk through a thread pool; this one keeps the chunks.
    """

    def __init__(self, boundary: bytes, field: str) -> None:
        """Args: the boundary of the Content-Type header, and the name that the part must have.

        Raises:
            RequestError: The boundary is too long.
        """
        self._field = field
        self._chunks: list[bytes] = []
        self._header: list[bytes] = [b"", b""]
        self._parts = 0
        self._named = False
        self._ended = False
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._begin_part,
                    "on_header_field": self._add_field,
                    "on_header_value": self._add_value,
                    "on_header_end": self._end_header,
                    "on_headers_finished": self._end_headers,
                    "on_part_data": self._add_data,
                    "on_end": self._end,
                },
            )
        except FormParserError as error:
            raise _malformed() from error

    def write(self, chunk: bytes) -> None:
        """Take the next piece of the body.

        Raises:
            BadParameter: There is another field.
            RequestError: The body is malformed.
        """
        try:
            self._parser.write(chunk)
        except FormParserError as error:
            raise _malformed() from error

    def close(self) -> bytes:
        """Return the file.

        Raises:
            BadParameter: There was no field.
            RequestError: The last boundary is missing.
        """
        if self._parts == 0:
            raise BadParameter(f"expected a form field {self._field!r}, got none")
        if not self._ended:
            raise _malformed()
        return b"".join(self._chunks)

    def head(self, size: int) -> bytes | None:
        """Return the first bytes of the file, once that many have come."""
        return head_of(self._chunks, size)

    def _begin_part(self) -> None:
        self._parts += 1
        self._named = False
        if self._parts > 1:
            raise BadParameter(
                f"expected one form field, {self._field!r}, got more (parameters go into the query)"
            )

    def _add_field(self, data: bytes, start: int, end: int) -> None:
        self._header[0] += data[start:end]

    def _add_value(self, data: bytes, start: int, end: int) -> None:
        self._header[1] += data[start:end]

    def _end_header(self) -> None:
        name, value = self._header
        self._header = [b"", b""]
        if name.lower() != b"content-disposition":
            return
        got = parse_options_header(value)[1].get(b"name", b"")
        self._named = got == self._field.encode()
        if not self._named:
            raise BadParameter(
                f"expected a form field {self._field!r}, "
                f"got {got[:64].decode('utf-8', 'replace')!r}"
            )

    def _end_headers(self) -> None:
        if not self._named:
            raise BadParameter(f"expected a form field {self._field!r}, got one without a name")

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        self._chunks.append(data[start:end])

    def _end(self) -> None:
        self._ended = True


def _malformed() -> RequestError:
    return RequestError("expected a well-formed multipart/form-data body, got a broken one")
