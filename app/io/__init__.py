"""Files and wire formats: bytes -> Volume, and answers -> bytes. It imports neither torch nor HTTP.

gzip_stream   the bytes of an uploaded file, inflated within bounds and hashed
nifti_header  what a NIfTI file declares, checked
volume        NIfTI file -> Volume: voxels and affine
schemas       pydantic models of everything that crosses the wire
slicer        landmark files of 3D Slicer and spreadsheets, written and read
formats       the formats of an answer, and the choice among them
"""

from app.io.formats import FORMATS, AnswerFormat, Format, negotiate_format
from app.io.gzip_stream import Content
from app.io.nifti_header import UNIT_WARNINGS, check_spacing
from app.io.schemas import (
    AliveAnswer,
    BatchInfo,
    CandidateAnswer,
    DeviceInfo,
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
    Row,
    TimingAnswer,
    Triple,
    VolumeAnswer,
)
from app.io.slicer import (
    RasPoint,
    declared_frame,
    is_landmark_file,
    landmark_stem,
    markups_json,
    read_landmarks,
)
from app.io.volume import (
    FLOAT32_MAX,
    HEAD_BYTES,
    MAX_REACH_MM,
    Volume,
    VolumeLimits,
    check_header,
    read_volume,
)

__all__ = [
    "FLOAT32_MAX", "FORMATS", "HEAD_BYTES", "MAX_REACH_MM", "UNIT_WARNINGS", "AliveAnswer",
    "AnswerFormat", "BatchInfo", "CandidateAnswer", "Content", "DeviceInfo", "Format",
    "LandmarkAnswer", "LandmarkInfo", "LandmarksAnswer", "MeasurementAnswer", "ModelInfo",
    "ModelRef", "ModelSummary", "ModelsAnswer", "Problem", "RasPoint", "ReadinessAnswer", "Row",
    "TimingAnswer", "Triple", "Volume", "VolumeAnswer", "VolumeLimits", "check_header",
    "check_spacing", "declared_frame", "is_landmark_file", "landmark_stem", "markups_json",
    "negotiate_format", "read_landmarks", "read_volume",
]  # fmt: skip
