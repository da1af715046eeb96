"""DICOM: a ZIP archive of one series, or a single file -> its header and its voxels.

archive    the files of an upload, each opened as a stream, inflated within bounds
elements   the data elements that say what the images of a file are, and where
image      those elements -> a file's planes in space, and the type of its pixels
codestream what a compressed image declares, before anything decodes it
pixels     a file's stored pixels -> voxels, decompressed if need be
stack      planes of one orientation -> sorted, with their affine
series     all planes of an upload -> one series, and its voxels
evidence   what identifies the images of a series
report     an answer -> a structured report on these images; needs the extra ``dicom``

Nothing is written to disk, no name in an archive is used, and no element that is text leaves this
package in an error or a warning, but for SeriesDescription: where one of several series has to be
chosen, the error lists them by it. It goes to whoever has sent them, and is never logged. A report
has the UIDs of images, and says whose they are only where its caller asks for it, which a service
does not.
"""

from typing import Final

from app.io.dicom.archive import (
    StoredFile,
    check_start,
    count_entries,
    is_dicom,
    is_own_report,
    list_files,
)
from app.io.dicom.evidence import Evidence, find_evidence
from app.io.dicom.series import Series, check_series, find_series

SEARCH_BYTES: Final = 48 << 20
"""That finding a series takes at most: what is known of its images, and the head of one file."""

__all__ = [
    "SEARCH_BYTES", "Evidence", "Series", "StoredFile", "check_series", "check_start",
    "count_entries", "find_evidence", "find_series", "is_dicom", "is_own_report", "list_files",
]  # fmt: skip
