"""The files of a kept case: a scan as NIfTI, and a landmark file that says who decided each point.

The landmark file is one of Slicer's. What its schema has no key for stands under one of our own,
which Slicer passes over: in the list, what was kept when; in a point, who decided it.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import nibabel as nib
import numpy as np

from app.errors import BadParameter
from app.geometry import LPS_FROM_RAS, Affine, spacing_of, transform
from app.io.dicom import is_dicom
from app.io.gzip_stream import CHUNK_BYTES, GZIP_MAGIC, Content, FileStream, write_gzip
from app.io.nifti_header import read_nifti_header
from app.io.schemas import CaseAnswer, LandmarkAnswer, LandmarksAnswer
from app.io.slicer import OWN_KEY, RasPoint, read_points, write_mrk_json
from app.io.volume import Volume, choose_reader

JUDGEMENT: Final = {"status", "decided_by", "confidence", "region95_mm"}
"""What a kept point says of itself besides its position."""

SAME_MM: Final = 1e-3
SAME_VOXELS: Final = 0.1
"""A person who gives the position of the network, as far as files round it, has accepted it; but
in a scan of voxels of a micrometre, not one who moves it by a voxel."""


PIECE_VOXELS: Final = 1 << 17
"""Written at a time: a MiB of the largest values."""

WIDENED: Final = {np.dtype(bool): np.uint8, np.dtype(np.float16): np.float32}
"""Types that NIfTI lacks, such as of masks, and those that hold all their values."""


def write_nifti(voxels: np.ndarray, affine: Affine) -> bytes:
    """Write a NIfTI-1 file, not compressed, whose affine is in mm, RAS."""
    return b"".join(_nifti_pieces(voxels, affine))


def write_nifti_start(shape: tuple[int, ...], affine: Affine, dtype: np.dtype[Any]) -> bytes:
    """Write what comes before the voxels of a NIfTI-1 file; the affine is in mm, RAS."""
    # nibabel gets no voxels, all of which it would copy, without an end before.
    nothing = np.broadcast_to(np.zeros((), dtype), shape)
    header = nib.Nifti1Image(nothing, affine, dtype=dtype).header
    header.set_xyzt_units("mm")
    header.set_slope_inter(1, 0)
    header.set_data_offset(header.single_vox_offset)
    return bytes(header.binaryblock.ljust(header.single_vox_offset, b"\0"))


def _nifti_pieces(
    voxels: np.ndarray, affine: Affine, dtype: type[np.generic] | None = None
) -> Iterator[bytes]:
    """Write a NIfTI-1 file as its header, then voxels of a type, or of one that NIfTI has."""
    own = voxels.dtype.newbyteorder("=")  # A float16 of the other order is another key.
    kind = np.dtype(dtype or WIDENED.get(own) or own)
    yield write_nifti_start(voxels.shape, affine, kind)
    values = voxels.reshape(-1, order="F")
    for first in range(0, values.size, PIECE_VOXELS):
        yield values[first : first + PIECE_VOXELS].astype(kind, copy=False).tobytes()


def pack_scan(
    content: Content,
    volume: Volume,
    check_cancelled: Callable[[], None],
    *,
    as_uploaded: bool,
    dtype: type[np.generic] | None = None,
) -> Content:
    """Make the ``.nii.gz`` of a scan.

    Args:
        content: The file as it was uploaded.
        volume: The scan that was read from it.
        check_cancelled: Called before every piece; ends the work by raising.
        as_uploaded: Whether the file is to be kept as it is if it is NIfTI; else, and of other
            formats, voxels and affine alone are.
        dtype: Of these voxels, if not that of the scan.
    """
    pieces: Iterable[bytes | memoryview] = _nifti_pieces(volume.voxels, volume.affine, dtype)
    if as_uploaded and _is_nifti(content):
        if content[:2] == GZIP_MAGIC:
            return content
        view = memoryview(content)
        pieces = (view[at : at + CHUNK_BYTES] for at in range(0, len(view), CHUNK_BYTES))

    def checked() -> Iterator[bytes | memoryview]:
        for piece in pieces:
            check_cancelled()
            yield piece

    return write_gzip(checked())


def correct(
    answer: LandmarksAnswer, points: Mapping[str, RasPoint | Sequence[float] | None]
) -> LandmarksAnswer:
    """Correct an answer as a person does.

    Args:
        answer: Of the service.
        points: What the person says of each landmark that was looked at: its position in mm, RAS,
            or None if it is not in the scan. One that lies where the network put it is accepted.

    Returns:
        The answer with these points, without measurements: they would be those of the old ones.

    Raises:
        BadParameter: There is no such landmark, or a position is not three finite numbers.
    """
    unknown = sorted(points.keys() - {landmark.name for landmark in answer.landmarks})
    if unknown:
        raise BadParameter(f"expected landmarks of {answer.model.name}, got {unknown[0]!r}")
    affine = np.array(answer.volume.affine)
    landmarks = [
        _judge(one, points[one.name], affine) if one.name in points else one
        for one in answer.landmarks
    ]
    return answer.model_copy(update={"landmarks": landmarks, "measurements": []})


def write_case(answer: LandmarksAnswer, case: CaseAnswer) -> bytes:
    """Write the landmark file of a case: a Slicer Markups file.

    A doubtful point that nobody has judged has no position there, as nothing should be learned
    from it.
    """
    points = [
        one
        if one.decided_by == "person" or one.status == "detected"
        else one.model_copy(update={"lps_mm": None})
        for one in answer.landmarks
    ]
    document = json.loads(write_mrk_json(answer.model_copy(update={"landmarks": points})))
    (markup,) = document["markups"]
    markup[OWN_KEY] = case.model_dump(mode="json")
    for point, landmark in zip(markup["controlPoints"], answer.landmarks, strict=True):
        point[OWN_KEY] = landmark.model_dump(include=JUDGEMENT)
    return json.dumps(document, indent=1).encode()


def read_case(path: Path) -> CaseAnswer:
    """Read what the landmark file of a case says of it as a whole."""
    (markup,) = json.loads(path.read_bytes())["markups"]
    return CaseAnswer.model_validate(markup[OWN_KEY])


def read_truth(path: Path) -> dict[str, RasPoint | None]:
    """Read the points of a landmark file, and which are known to be absent.

    Returns:
        Position in mm, RAS, by landmark name; None of one that a person, here or in Slicer, has
        marked as not in the scan. Of others without a position nothing is known.

    Raises:
        ValueError: As ``read_landmarks``.
    """
    known = read_points(path).items()
    return {name: at.ras_mm for name, at in known if at.absent or at.ras_mm is not None}


def read_placed(path: Path, version: str) -> frozenset[str] | None:
    """List the points of a case that a person has placed, if another version answered it.

    Points that nobody has moved are the answers of that version, and favour what answers alike.

    Returns:
        Their names; None if this version answered, or the file does not say which: all points say
        something of it.
    """
    if not path.name.lower().endswith(".mrk.json"):
        return None
    markups = json.loads(path.read_text(encoding="utf-8-sig"))["markups"]
    case = markups[0].get(OWN_KEY)
    if not case or case["model"]["version"] == version:
        return None
    points = (point for markup in markups for point in markup["controlPoints"])
    return frozenset(str(one["label"]) for one in points if not _is_left(one.get(OWN_KEY)))


def _is_left(judgement: Mapping[str, Any] | None) -> bool:
    """Return whether a person has left a point where the network put it."""
    if not judgement:
        return False
    return judgement["decided_by"] == "network" or judgement["confidence"] is not None


def _judge(
    landmark: LandmarkAnswer, point: RasPoint | Sequence[float] | None, affine: Affine
) -> LandmarkAnswer:
    """Say of a landmark what a person says: that it is at a point in mm, RAS, or absent."""
    if point is None:
        return _unknown(landmark, status="not_found")
    ras = np.asarray(point, dtype=np.float64)
    if ras.shape != (3,) or not np.isfinite(ras).all():
        raise BadParameter(f"{landmark.name}: expected x, y, z in mm, RAS, or None; got {point}")
    found = landmark.ras_mm
    same_mm = min(SAME_MM, SAME_VOXELS * spacing_of(affine).min())
    if found is not None and np.abs(ras - found).max() <= same_mm:
        return landmark.model_copy(update={"decided_by": "person", "status": "detected"})
    return _unknown(
        landmark,
        status="detected",
        ijk=tuple(transform(np.linalg.inv(affine), ras).tolist()),
        ras_mm=tuple(ras.tolist()),
        lps_mm=tuple(transform(LPS_FROM_RAS, ras).tolist()),
    )


def _unknown(landmark: LandmarkAnswer, **known: Any) -> LandmarkAnswer:
    """Make a landmark of which only what a person says is known."""
    kept = {"name": landmark.name, "description": landmark.description, "decided_by": "person"}
    nothing = dict.fromkeys(LandmarkAnswer.model_fields)
    return LandmarkAnswer.model_validate(nothing | kept | known)


def _is_nifti(content: Content) -> bool:
    return not is_dicom(content) and choose_reader(FileStream(content)) is read_nifti_header
