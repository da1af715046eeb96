"""Files and wire formats: bytes -> Volume, and answers -> bytes. It imports neither torch nor HTTP.

gzip_stream       the bytes of an uploaded file, inflated within bounds and hashed
header            what a file declares about its voxels, and the checks that all formats share
nifti_header      what a NIfTI file declares, checked
nrrd_header       what an NRRD file declares, checked
metaimage_header  what a MetaImage file declares, checked
mgh_header        what a FreeSurfer file declares, checked
dicom             DICOM files, alone or in a ZIP archive -> one series: header and voxels
scan_archive      a ZIP archive of scans -> its scans, one by one
scan_file         the path of a scan -> its bytes, as one file of a format that is read
volume            the file of a scan -> Volume: voxels and affine
schemas           pydantic models of everything that crosses the wire
slicer            landmark files of 3D Slicer and spreadsheets, written and read
formats           the formats of an answer, and the choice among them
cases             the files of a case that is kept: a scan, and who decided its landmarks
"""

from app.io.cases import (
    correct,
    pack_scan,
    read_case,
    read_placed,
    read_truth,
    write_case,
    write_nifti,
    write_nifti_start,
)
from app.io.dicom import (
    SEARCH_BYTES,
    Evidence,
    check_start,
    find_evidence,
    is_dicom,
    is_own_report,
)
from app.io.formats import (
    FORMATS,
    REPORT,
    SCAN_FORMATS,
    WIDE_COLUMNS,
    AnswerFormat,
    Format,
    load_report_writer,
    negotiate_format,
    write_answer,
)
from app.io.gzip_stream import GZIP_MAGIC, Content, MemoryFile, write_gzip
from app.io.header import UNIT_WARNINGS, Header, check_spacing
from app.io.scan_archive import count_scans, find_scan
from app.io.scan_file import files_of, open_file, read_file
from app.io.schemas import (
    AliveAnswer,
    BatchInfo,
    CandidateAnswer,
    CaseAnswer,
    CasesAnswer,
    DeviceInfo,
    JobAnswer,
    JobsAnswer,
    JobSummary,
    LandmarkAnswer,
    LandmarkInfo,
    LandmarksAnswer,
    MeasurementAnswer,
    ModelInfo,
    ModelRef,
    ModelsAnswer,
    ModelSummary,
    Problem,
    ReadinessAnswer,
    Status,
    TimingAnswer,
    Triple,
    UploadsAnswer,
    UploadSummary,
    VolumeAnswer,
)
from app.io.slicer import (
    LONG_COLUMNS,
    MEASUREMENT_COLUMNS,
    RasPoint,
    csv_text,
    declared_frame,
    is_landmark_file,
    is_missing,
    landmark_stem,
    markups_json,
    read_landmarks,
)
from app.io.volume import (
    FLOAT32_MAX,
    HEAD_BYTES,
    MAX_REACH_MM,
    ONLY,
    SCAN_SUFFIXES,
    Selection,
    Volume,
    VolumeLimits,
    check_header,
    list_shown,
    name_in_utf8,
    read_volume,
    scan_stem,
)

__all__ = [
    "FLOAT32_MAX", "FORMATS", "GZIP_MAGIC", "HEAD_BYTES", "LONG_COLUMNS", "MAX_REACH_MM",
    "MEASUREMENT_COLUMNS", "ONLY", "REPORT", "SCAN_FORMATS", "SCAN_SUFFIXES", "SEARCH_BYTES",
    "UNIT_WARNINGS", "WIDE_COLUMNS", "AliveAnswer", "AnswerFormat", "BatchInfo", "CandidateAnswer",
    "CaseAnswer", "CasesAnswer", "Content", "DeviceInfo", "Evidence", "Format", "Header",
    "JobAnswer", "JobSummary", "JobsAnswer", "LandmarkAnswer", "LandmarkInfo", "LandmarksAnswer",
    "MeasurementAnswer", "MemoryFile", "ModelInfo", "ModelRef", "ModelSummary", "ModelsAnswer",
    "Problem", "RasPoint", "ReadinessAnswer", "Selection", "Status", "TimingAnswer", "Triple",
    "UploadSummary", "UploadsAnswer", "Volume", "VolumeAnswer", "VolumeLimits", "check_header",
    "check_spacing", "check_start", "correct", "count_scans", "csv_text", "declared_frame",
    "files_of", "find_evidence", "find_scan", "is_dicom", "is_landmark_file", "is_missing",
    "is_own_report", "landmark_stem", "list_shown", "load_report_writer", "markups_json",
    "name_in_utf8", "negotiate_format", "open_file", "pack_scan", "read_case", "read_file",
    "read_landmarks", "read_placed", "read_truth", "read_volume", "scan_stem", "write_answer",
    "write_case", "write_gzip", "write_nifti", "write_nifti_start",
]  # fmt: skip
