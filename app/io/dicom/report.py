"""LandmarksAnswer -> a DICOM structured report: TID 1500, Measurement Report, with points in 3D.

It is a Comprehensive 3D SR of the study that the images are of. Each landmark is a measurement
group: with its point in the images' frame of reference (TID 1410), or without one if it was not
found (TID 1501). Each measurement is a group, too, that refers to its points. Each warning is a
comment among the qualitative evaluations. What DICOM has no code for is coded as 99LANDMARKD,
which is described in ``docs/http.md``.

It needs highdicom, an extra: import this module where a report is written.
"""

import io
import uuid
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any, Final, TypeAlias

import numpy as np
from highdicom import UID, PatientSexValues, sr
from pydicom import Dataset
from pydicom.sr.codedict import codes
from pydicom.sr.coding import Code
from pydicom.valuerep import DA, TM

from app.errors import UnknownFormat
from app.io.dicom.evidence import Evidence
from app.io.dicom.image import Uids
from app.io.schemas import LandmarkAnswer, LandmarksAnswer, MeasurementAnswer

Group: TypeAlias = (
    sr.PlanarROIMeasurementsAndQualitativeEvaluations | sr.MeasurementsAndQualitativeEvaluations
)

SCHEME: Final = "99LANDMARKD"
MAKER: Final = "landmarkd"
MEANING_LETTERS: Final = 64
"""Of the meaning of a code (VR LO)."""

UNITS: Final = {
    "mm": codes.UCUM.Millimeter, "deg": codes.UCUM.Degree, "": codes.UCUM.NoUnits,
}  # fmt: skip
STATUS: Final = Code("status", SCHEME, "Status of a landmark")
STATUSES: Final = {
    "detected": "Detected",
    "low_confidence": "Detected with low confidence",
    "not_found": "Not found",
    "out_of_field": "Outside of the scan",
}
CONFIDENCE: Final = Code("confidence", SCHEME, "Confidence that the landmark is there")
REGION95: Final = Code("region95", SCHEME, "Radius of the 95 % region of the position")
INTERVAL95: Final = (
    Code("interval95-low", SCHEME, "Lower bound of the 95 % interval"),
    Code("interval95-high", SCHEME, "Upper bound of the 95 % interval"),
)
EVALUATIONS: Final = Code("C0034375", "UMLS", "Qualitative Evaluations")
EMPTY: Final = (
    "PatientID", "PatientName", "PatientBirthDate", "PatientSex", "AccessionNumber", "StudyID",
    "StudyDate", "StudyTime", "ReferringPhysicianName",
)  # fmt: skip
"""Attributes that a report must have, and that may be empty."""

PARSERS: Final[dict[str, Callable[[Any], object]]] = {
    "PatientBirthDate": DA, "PatientSex": PatientSexValues, "StudyDate": DA, "StudyTime": TM,
}  # fmt: skip
"""Those of them that a report may have only as DICOM defines them, which many files do not."""


def write_report(answer: LandmarksAnswer, evidence: Evidence) -> bytes:
    """Write the answer to a scan that came as DICOM, with these images, as a DICOM file.

    Returns:
        The file; who is its patient it says only if ``evidence`` does.

    Raises:
        UnknownFormat: The images are of no standard class, or say of their patient or study what
            no report can.
    """
    images = [_reference(uids) for uids in evidence.uids]
    if evidence.head is not None:
        images[0] = evidence.head
    for name in EMPTY:
        if not _is_valid(images[0], name):
            setattr(images[0], name, None)
    content = sr.MeasurementReport(
        observation_context=_observer(answer),
        procedure_reported=codes.SCT.ImagingProcedure,
        imaging_measurements=_Content(answer, evidence.uids[0].frame_of_reference).groups(),
    )
    if answer.warnings:
        content[0].ContentSequence.append(_evaluations(answer.warnings))
    target = io.BytesIO()
    try:
        report = sr.Comprehensive3DSR(
            evidence=images,
            content=content,
            series_instance_uid=UID(),
            series_number=1,
            sop_instance_uid=UID(),
            instance_number=1,
            manufacturer=MAKER,
            manufacturer_model_name=answer.model.name,
            software_versions=[f"landmarkd {version(MAKER)}", answer.model.version],
            series_description="Landmarks",
            is_complete=True,
            specific_character_set="ISO_IR 192",
        )
        report.save_as(target)
    except (KeyError, TypeError, ValueError):  # Its message may quote what the images say.
        raise UnknownFormat(
            "expected images of a standard SOP class, with valid attributes of their patient and "
            "study, for format=dcm, which copies them; got others"
        ) from None
    return target.getvalue()


def _is_valid(image: Dataset, name: str) -> bool:
    """Say whether an image has an attribute, and a report may have it as it stands there."""
    try:
        PARSERS.get(name, str)(image[name].value)
    except (KeyError, ValueError):
        return False
    return True


class _Content:
    """Makes the measurement groups of a report."""

    def __init__(self, answer: LandmarksAnswer, frame_of_reference: str) -> None:
        self._answer = answer
        self._frame = frame_of_reference
        model = answer.model
        self._algorithm = sr.AlgorithmIdentification(
            name=model.name, version=model.version, parameters=[f"SHA-256 {model.digest}"]
        )
        self._places = {one.name: one.lps_mm for one in answer.landmarks}

    def groups(self) -> Sequence[Group]:
        """Make a group of each landmark, and of each measurement that has a value."""
        landmarks = [self._landmark(one) for one in self._answer.landmarks]
        measured = [
            self._measurement(one, one.value)
            for one in self._answer.measurements
            if one.value is not None
        ]
        return [*landmarks, *measured]

    def _landmark(self, landmark: LandmarkAnswer) -> Group:
        numbers = ((CONFIDENCE, landmark.confidence, ""), (REGION95, landmark.region95_mm, "mm"))
        common: dict[str, Any] = {
            "tracking_identifier": sr.TrackingIdentifier(identifier=landmark.name),
            "finding_type": self._code(landmark),
            "algorithm_id": self._algorithm,
            "measurements": [
                sr.Measurement(name, value, UNITS[unit])
                for name, value, unit in numbers
                if value is not None
            ],
            "qualitative_evaluations": [
                sr.QualitativeEvaluation(
                    STATUS, Code(landmark.status, SCHEME, STATUSES[landmark.status])
                )
            ],
        }
        if landmark.lps_mm is None:
            return sr.MeasurementsAndQualitativeEvaluations(**common)
        region = sr.ImageRegion3D("POINT", np.array([landmark.lps_mm]), self._frame)
        return sr.PlanarROIMeasurementsAndQualitativeEvaluations(referenced_region=region, **common)

    def _measurement(self, one: MeasurementAnswer, value: float) -> Group:
        points = [
            sr.CoordinatesForMeasurement3D("POINT", np.array([place]), self._frame)
            for place in map(self._places.get, one.points)
            if place is not None
        ]
        unit, name = UNITS[one.unit], self._code(one)
        numbers = [sr.Measurement(name, value, unit, referenced_coordinates=points)]
        bounds = zip(INTERVAL95, one.interval95 or (), strict=False)
        numbers += [sr.Measurement(bound, limit, unit) for bound, limit in bounds]
        return sr.MeasurementsAndQualitativeEvaluations(
            tracking_identifier=sr.TrackingIdentifier(identifier=one.name),
            finding_type=name,
            algorithm_id=self._algorithm,
            measurements=numbers,
        )

    def _code(self, one: LandmarkAnswer | MeasurementAnswer) -> sr.CodedConcept:
        """Code what the model names; a backslash would end a value, and a line none may hold."""
        description = " ".join(one.description.split())
        meaning = f"{one.name}: {description}" if description else one.name
        if len(meaning) > MEANING_LETTERS:
            meaning = meaning[: MEANING_LETTERS - 3] + "..."
        value = f"{self._answer.model.name}/{one.name}"
        return sr.CodedConcept(value.replace("\\", "/"), SCHEME, meaning.replace("\\", "/"))


def _evaluations(warnings: Sequence[str]) -> sr.ContainerContentItem:
    """Comment on the scan: rows 12 and 14 of TID 1500, which highdicom does not make."""
    relation = sr.RelationshipTypeValues.CONTAINS
    container = sr.ContainerContentItem(name=EVALUATIONS, relationship_type=relation)
    comments = [
        sr.TextContentItem(name=codes.DCM.Comment, value=warning, relationship_type=relation)
        for warning in warnings
    ]
    container.ContentSequence = sr.ContentSequence(comments)
    return container


def _observer(answer: LandmarksAnswer) -> sr.ObservationContext:
    """Say that the model has observed; its UID comes from its digest."""
    own = UID.from_uuid(str(uuid.uuid5(uuid.NAMESPACE_OID, answer.model.digest)))
    attributes = sr.DeviceObserverIdentifyingAttributes(
        uid=own, name=MAKER, manufacturer_name=MAKER, model_name=answer.model.name
    )
    context = sr.ObserverContext(
        observer_type=codes.DCM.Device, observer_identifying_attributes=attributes
    )
    return sr.ObservationContext(observer_device_context=context)


def _reference(uids: Uids) -> Dataset:
    """Make of an image what refers to it."""
    dataset = Dataset()
    dataset.SOPClassUID, dataset.SOPInstanceUID = uids.sop_class, uids.sop_instance
    dataset.StudyInstanceUID, dataset.SeriesInstanceUID = uids.study, uids.series
    return dataset
