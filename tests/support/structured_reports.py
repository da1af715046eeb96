"""A structured report, read by walking over its tree with nothing but pydicom."""

import io
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import pydicom
from pydicom import Dataset

COMPREHENSIVE_3D: Final = "1.2.840.10008.5.1.4.1.1.88.34"


@dataclass
class Group:
    """A measurement group: numbers, codes and texts by name, and the points of each number."""

    numbers: dict[str, tuple[float, str]] = field(default_factory=dict)
    words: dict[str, str] = field(default_factory=dict)
    point: tuple[float, ...] | None = None
    sources: list[tuple[float, ...]] = field(default_factory=list)


def read_report(content: bytes) -> tuple[Dataset, dict[str, Group]]:
    """Read a file: its elements, and its groups by tracking identifier."""
    dataset = pydicom.dcmread(io.BytesIO(content))
    assert dataset.SOPClassUID == dataset.file_meta.MediaStorageSOPClassUID == COMPREHENSIVE_3D
    assert dataset.ContentTemplateSequence[0].TemplateIdentifier == "1500"
    found = {}
    for item in _walk(dataset):
        if _name(item) == "Measurement Group":
            group = _read_group(item)
            found[group.words["Tracking Identifier"]] = group
    return dataset, found


def references(dataset: Dataset) -> list[tuple[str, str, str, str]]:
    """List the images that a report refers to: study, series, class and instance."""
    return [
        (
            study.StudyInstanceUID,
            series.SeriesInstanceUID,
            image.ReferencedSOPClassUID,
            image.ReferencedSOPInstanceUID,
        )
        for study in dataset.CurrentRequestedProcedureEvidenceSequence
        for series in study.ReferencedSeriesSequence
        for image in series.ReferencedSOPSequence
    ]


def frames_of_reference(dataset: Dataset) -> set[str]:
    """List what all points of a report are in."""
    points = (item for item in _walk(dataset) if item.get("ValueType") == "SCOORD3D")
    return {point.ReferencedFrameOfReferenceUID for point in points}


def comments(dataset: Dataset) -> list[str]:
    """List the comments among the qualitative evaluations of a report."""
    (evaluations,) = (
        item for item in dataset.ContentSequence if _name(item) == "Qualitative Evaluations"
    )
    assert {_name(item) for item in evaluations.ContentSequence} == {"Comment"}
    return [item.TextValue for item in evaluations.ContentSequence]


def _walk(item: Dataset) -> Iterator[Dataset]:
    yield item
    for child in item.get("ContentSequence", ()):
        yield from _walk(child)


def _read_group(item: Dataset) -> Group:
    group = Group()
    for child in item.ContentSequence:
        if child.ValueType == "NUM":
            measured = child.MeasuredValueSequence[0]
            unit = measured.MeasurementUnitsCodeSequence[0]
            assert unit.CodingSchemeDesignator == "UCUM"
            group.numbers[_name(child)] = float(measured.NumericValue), unit.CodeValue
            group.sources += [_point(source) for source in child.get("ContentSequence", ())]
        elif child.ValueType == "SCOORD3D":
            group.point = _point(child)
        elif child.ValueType == "CODE":
            code = child.ConceptCodeSequence[0]
            group.words[_name(child)] = code.get("CodeValue") or code.LongCodeValue
        elif child.ValueType == "TEXT":
            group.words[_name(child)] = child.TextValue
    return group


def _point(item: Dataset) -> tuple[float, ...]:
    assert (item.ValueType, item.GraphicType) == ("SCOORD3D", "POINT")
    return tuple(np.array(item.GraphicData, dtype=np.float64).tolist())


def _name(item: Dataset) -> str:
    names = item.get("ConceptNameCodeSequence") or [Dataset()]
    return str(names[0].get("CodeMeaning", ""))
