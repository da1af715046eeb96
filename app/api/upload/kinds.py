"""The kinds of uploads, and whether the headers of a request are those of one.

The media type decides the framing (raw or multipart). The kind of file is recognised later, by its
bytes.
"""

from dataclasses import dataclass
from typing import Final

from python_multipart.multipart import parse_options_header
from starlette.datastructures import Headers

from app.errors import NotAnArchive, NotAVolume, RequestError, UnsupportedMediaType

MULTIPART: Final = "multipart/form-data"

CURL_TYPE: Final = "application/x-www-form-urlencoded"
"""What ``curl --data-binary`` sends by default."""


@dataclass(frozen=True, slots=True)
class UploadKind:
    """What a route expects to be uploaded.

    Attributes:
        name: For error messages.
        fields: Names of the fields that a multipart form must have; the first one is the file.
        media_types: Content-Types of a body that is the file itself; errors name the first two. A
            missing or empty Content-Type is accepted, too. None: only a form is accepted.
        encodings: Content-Encodings that the reader of the file undoes.
        empty_error: Raised when there is no file.
        max_bytes: Largest allowed body, framing included; None: that of any request.
    """

    name: str
    fields: tuple[str, ...]
    media_types: tuple[str, ...]
    encodings: tuple[str, ...]
    empty_error: type[RequestError]
    max_bytes: int | None = None


SCAN: Final = UploadKind(
    name="a scan",
    fields=("volume",),
    media_types=(
        "application/octet-stream",
        "application/gzip",
        "application/x-gzip",
        "application/x-nifti",
        "application/nifti",
        "application/x-nrrd",
        "application/x-metaimage",
        "application/x-mgh",
        "application/zip",
        "application/x-zip-compressed",
        "application/dicom",
    ),
    # A .nii.gz sent as gzip-encoded NIfTI is the same bytes; the reader looks at the magic number.
    encodings=("identity", "gzip", "x-gzip"),
    empty_error=NotAVolume,
)
ARRAYS: Final = UploadKind(
    name="a safetensors or npz file",
    fields=("votes",),
    media_types=("application/octet-stream", "application/zip", "application/x-npz"),
    encodings=("identity",),
    empty_error=NotAnArchive,
)
CASE: Final = UploadKind(
    name="a scan",
    fields=("volume", "answer"),
    media_types=(),
    encodings=("identity",),
    empty_error=NotAVolume,
)


def find_length(headers: Headers) -> int | None:
    """Return the length of a body; None if it is chunked.

    Raises:
        RequestError: Content-Length is not a number.
    """
    length = headers.get("content-length")
    length = length and length.strip()
    if length is not None and not (length.isascii() and length.isdigit()):
        raise RequestError(f"expected Content-Length to be a number, got {length[:32]!r}")
    return None if length is None else int(length)


def find_boundary(headers: Headers, kind: UploadKind) -> bytes | None:
    """Return the boundary of a multipart body; None if the body is the file itself.

    Raises:
        UnsupportedMediaType: The media type or content encoding is not accepted.
    """
    # Where a field is empty, as some clients send it, nothing is said either.
    encoding = headers.get("content-encoding", "").strip().lower() or "identity"
    if encoding not in kind.encodings:
        expected = "gzip or none" if "gzip" in kind.encodings else "none"
        raise UnsupportedMediaType(f"expected Content-Encoding {expected}, got {encoding[:64]!r}")
    content_type = headers.get("content-type", "").strip()
    if not content_type and kind.media_types:
        return None
    name, options = parse_options_header(content_type)
    media_type = name.decode("latin-1").strip().lower()
    if media_type == MULTIPART:
        if not options.get(b"boundary"):
            raise UnsupportedMediaType("expected a boundary in Content-Type, got none")
        return options[b"boundary"]
    if not kind.media_types:
        raise UnsupportedMediaType(
            f"expected Content-Type {MULTIPART} with the fields {' and '.join(kind.fields)}; "
            f"got {media_type[:64]!r}"
        )
    if media_type in (*kind.media_types, CURL_TYPE):
        return None
    raise UnsupportedMediaType(
        f"expected Content-Type {kind.media_types[0]}, {kind.media_types[1]} or {MULTIPART}; "
        f"got {media_type[:64]!r}"
    )
