"""A DICOM upload -> Evidence: the very images that a report on a scan refers to.

In a service this is what identifies images, and nothing else. At its user's side it may also be
what the images say about patient, study and scanner, which a report hands on.
"""

import io
import re
from collections.abc import Callable
from dataclasses import astuple, dataclass, fields
from typing import TYPE_CHECKING, Final

from app.errors import UnknownFormat
from app.io.dicom.archive import is_dicom
from app.io.dicom.image import Uids
from app.io.dicom.series import find_series
from app.io.gzip_stream import Content

if TYPE_CHECKING:
    from pydicom import Dataset

UID: Final = re.compile(r"(?=.{1,64}\Z)(?:0|[1-9][0-9]*)(?:\.(?:0|[1-9][0-9]*))*\Z")
"""PS3.5, 9.1."""

BASE_BYTES: Final = 8 << 20
GROUP_BYTES: Final = 160 << 10
IMAGE_BYTES: Final = 5 << 10
"""That writing a report takes at most: in all, and for each of its groups and images."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """The images of a scan.

    Attributes:
        uids: Of each file, in the order of the images; of one study and one frame of reference.
        head: The first file up to its pixels; None where nobody may see whose scan it is.
    """

    uids: tuple[Uids, ...]
    head: "Dataset | None" = None

    def report_bytes(self, groups: int) -> int:
        """Return the memory that writing a report of that many landmarks and measurements takes."""
        return BASE_BYTES + GROUP_BYTES * groups + IMAGE_BYTES * len(self.uids)


def find_evidence(
    content: Content,
    max_bytes: int,
    series: int | None = None,
    check_cancelled: Callable[[], None] = lambda: None,
    *,
    identified: bool = False,
) -> Evidence:
    """Find what identifies the images of a scan; arguments are those of ``find_series``.

    With ``identified``, what the first file says about patient, study and scanner is read, too.

    Returns:
        The images that the scan is read from, and no others of the upload.

    Raises:
        UnknownFormat: The upload is not DICOM, or does not identify its images.
        RequestError: As ``find_series``.
    """
    if not is_dicom(content):
        raise UnknownFormat(
            "expected a scan that came as DICOM for format=dcm, which refers to its images, got "
            "one of another format"
        )
    found = find_series(content, max_bytes, series, check_cancelled)
    used = list(dict.fromkeys(plane.file for plane in found.planes))
    uids = tuple(found.images[file].uids for file in used)
    _check_uids(uids)
    if not identified:
        return Evidence(uids)
    from pydicom import dcmread  # noqa: PLC0415 - an extra

    first = found.files[used[0]]
    data = first.open(check_cancelled).read(first.size)
    return Evidence(uids, dcmread(io.BytesIO(data), stop_before_pixels=True))


def _check_uids(uids: tuple[Uids, ...]) -> None:
    """Check that the images can be referred to; what they say is not quoted."""
    for image in uids:
        for field, uid in zip(fields(Uids), astuple(image), strict=True):
            if not UID.match(uid):
                raise _unfit(f"a valid UID of each image's {field.name.replace('_', ' ')}")
    if len({image.sop_instance for image in uids}) < len(uids):
        raise _unfit("images with UIDs of their own")
    if len({(image.study, image.frame_of_reference) for image in uids}) > 1:
        raise _unfit("images of one study and one frame of reference")


def _unfit(expected: str) -> UnknownFormat:
    return UnknownFormat(f"expected {expected} for format=dcm, which refers to them; got others")
