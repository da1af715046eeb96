"""Detection -> LandmarksAnswer: the JSON that clients get."""

import math
import time
from collections.abc import Sequence
from dataclasses import asdict

import numpy as np

from app.geometry import LPS_FROM_RAS, axis_codes, spacing_of, transform
from app.inference.detector import Detection
from app.io import (
    CandidateAnswer,
    LandmarkAnswer,
    LandmarksAnswer,
    MeasurementAnswer,
    ModelRef,
    TimingAnswer,
    Triple,
    VolumeAnswer,
)
from app.measurements import Measurement, MeasurementSpec, measure_landmarks
from app.model import LoadedModel
from app.voting import Candidate, Landmark, Point


def answer_scan(
    detection: Detection,
    model: LoadedModel,
    *,
    request_id: str,
    receive_ms: float,
    start_s: float,
    candidates: bool,
) -> LandmarksAnswer:
    """Answer what a model has found in a scan; see ``build_answer``.

    ``start_s`` is when the request began, by ``time.perf_counter()``; its scan took ``receive_ms``
    of that to arrive.
    """
    return build_answer(
        detection,
        model=model_ref(model),
        request_id=request_id,
        timing=timing_of(detection, receive_ms=receive_ms, start_s=start_s),
        measurements=model.manifest.measurements,
        candidates=candidates,
    )


def build_answer(
    detection: Detection,
    *,
    model: ModelRef,
    request_id: str,
    timing: TimingAnswer,
    measurements: Sequence[MeasurementSpec] = (),
    candidates: bool = False,
) -> LandmarksAnswer:
    """Convert a detection to the answer for its client; numbers that are not finite are null.

    With ``candidates``, all modes of each landmark are listed.
    """
    volume = detection.volume
    landmarks = [_landmark(landmark, candidates) for landmark in detection.landmarks]
    return LandmarksAnswer(
        request_id=request_id,
        model=model,
        volume=VolumeAnswer(
            shape=volume.shape,
            spacing_mm=_triple(spacing_of(volume.affine)),
            orientation=axis_codes(volume.affine),
            affine=volume.affine.tolist(),
            digest=volume.digest,
        ),
        landmarks=landmarks,
        measurements=measure_answer(landmarks, measurements),
        warnings=list(detection.warnings),
        timing_ms=timing,
    )


def measure_answer(
    landmarks: Sequence[LandmarkAnswer], specs: Sequence[MeasurementSpec]
) -> list[MeasurementAnswer]:
    """Measure between the landmarks of an answer."""
    positions = {
        one.name: None if one.ras_mm is None else np.array(one.ras_mm, dtype=np.float64)
        for one in landmarks
    }
    regions = {one.name: one.region95_mm for one in landmarks}
    doubtful = {one.name for one in landmarks if one.status == "low_confidence"}
    measured = measure_landmarks(specs, positions, regions, doubtful)
    return [_measurement(one) for one in measured]


def timing_of(detection: Detection, *, receive_ms: float, start_s: float) -> TimingAnswer:
    """Add the times that only the HTTP side knows to those of the stages; see ``answer_scan``."""
    total_ms = 1e3 * (time.perf_counter() - start_s)
    return TimingAnswer(receive=receive_ms, total=total_ms, **asdict(detection.timing))


def model_ref(model: LoadedModel) -> ModelRef:
    """Say in an answer which model it is of."""
    manifest = model.manifest
    return ModelRef(
        name=manifest.name,
        version=manifest.version,
        digest=model.digest,
        precision=model.network.precision,
        description=manifest.description,
    )


def _landmark(landmark: Landmark, candidates: bool) -> LandmarkAnswer:
    modes = [_candidate(candidate) for candidate in landmark.candidates] if candidates else None
    return LandmarkAnswer(
        name=landmark.name,
        description=landmark.description,
        status=landmark.status,
        ijk=_finite_triple(landmark.ijk),
        ras_mm=_finite_triple(landmark.ras_mm),
        lps_mm=_lps(landmark.ras_mm),
        confidence=_finite(landmark.confidence),
        mass=_finite(landmark.mass),
        coherence=_finite(landmark.coherence),
        spread_mm=_finite(landmark.spread_mm),
        region95_mm=_finite(landmark.region95_mm),
        disagreement_mm=_finite(landmark.disagreement_mm),
        expected_ras_mm=_finite_triple(landmark.expected_ras_mm),
        candidates=modes,
    )


def _measurement(measured: Measurement) -> MeasurementAnswer:
    return MeasurementAnswer(
        name=measured.spec.name,
        description=measured.spec.description,
        points=list(measured.spec.points),
        unit=measured.spec.unit,
        value=measured.value,
        interval95=measured.interval95,
        reason=measured.reason,
    )


def _candidate(candidate: Candidate) -> CandidateAnswer:
    lps = transform(LPS_FROM_RAS, candidate.ras_mm)
    return CandidateAnswer(
        ijk=_triple(candidate.ijk),
        ras_mm=_triple(candidate.ras_mm),
        lps_mm=_triple(lps),
        mass=candidate.mass,
    )


def _finite(value: float | None) -> float | None:
    return float(value) if value is not None and math.isfinite(value) else None


def _triple(point: Point | tuple[float, ...]) -> Triple:
    # Adding zero turns -0.0, which a flipped axis gives, into 0.0.
    x, y, z = (float(value) + 0.0 for value in point)
    return x, y, z


def _finite_triple(point: Point | None) -> Triple | None:
    return _triple(point) if point is not None and all(map(math.isfinite, point)) else None


def _lps(ras_mm: Point | None) -> Triple | None:
    return None if ras_mm is None else _finite_triple(transform(LPS_FROM_RAS, ras_mm))
