"""Model + held-out scans -> Outcomes, computed by the same pipeline that serves."""

import json
import math
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import torch
from rich.console import Console

from app.durable import replacing
from app.errors import BadParameter, LandmarkdError
from app.geometry import distance_beyond, distance_inside
from app.inference import Detector, load_checked
from app.io import Status, Volume
from app.training.data.check_frames import read_in_frame
from app.training.data.issues import print_warning
from app.training.data.specimens import SpecimenFiles
from app.training.evaluate.digits import format_number
from app.training.files import OUTCOMES, refuse_damaged
from app.training.options import Missing
from app.voting import Landmark, Point, positions_of

POSITIONS: Final = ("true_mm", "found_mm")

IDENTIFIED_MM: Final = 20.0
"""Of the identification rate for vertebrae: Glocker et al., MICCAI 2012."""


NO_GROUPS: Final[Mapping[str, str]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Outcome:
    """One landmark of one scan: the truth and the answer; field names are keys of outcomes.json.

    Confidence, mass, coherence, spread and status are as answered.

    Attributes:
        scan: Name of the scan.
        landmark: Name of the landmark.
        present: Whether the scan shows it: its file has a point, which lies in the volume.
        known: Whether that is known. A landmark without a point may be present all the same; one
            whose point lies outside the volume is absent for certain.
        true_mm: In mm, RAS; None if it is not present.
        found_mm: In mm, RAS; None if the answer has no position.
        error_mm: Distance between the two; NaN unless there are both.
        error_voxels: The same in voxels of the scan.
        region95_mm: None unless detected by a calibrated model.
        beyond_mm: How far outside the volume its point lies; infinite where the file has none.
        inside_mm: How far the answer's position lies from the scan's border; NaN without position.
        from_shape_mm: How far it lies from where the fitted shape expects it; None if it does not.
        group: Of the landmark, as in the manifest.
        identified: Whether the answer's position lies nearer to this landmark's point than to that
            of any other of its group, and within ``IDENTIFIED_MM``: not mistaken for a look-alike.
        warnings: Of the answer to the scan.
    """

    scan: str
    landmark: str
    present: bool
    status: Status
    true_mm: Point | None
    found_mm: Point | None
    error_mm: float
    error_voxels: float
    confidence: float
    mass: float
    coherence: float
    region95_mm: float | None
    beyond_mm: float = math.inf
    inside_mm: float = math.nan
    from_shape_mm: float | None = None
    spread_mm: float | None = None
    known: bool = True
    group: str = ""
    identified: bool = False
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Measurement:
    """Outcomes of a model on several scans.

    Attributes:
        outcomes: One for each scan and landmark.
        failures: A line for each scan that could not be read or answered.
        seconds: Median time of a scan, its file read; None if it was not taken.
    """

    outcomes: tuple[Outcome, ...]
    failures: tuple[str, ...]
    seconds: float | None = None


def validate(
    folder: Path, specimens: Sequence[SpecimenFiles], device: torch.device
) -> tuple[Outcome, ...]:
    """Answer scans that a model was not trained on, and compare with their landmark files.

    Raises:
        BadParameter: One cannot be read or is not answered.
    """
    measured = measure(Detector(load_checked(folder, device)), specimens, Console(quiet=True))
    if measured.failures:
        raise BadParameter(
            f"expected held-out scans that {folder} answers, got {'; '.join(measured.failures)}"
        )
    return measured.outcomes


def validate_scan(
    detector: Detector,
    name: str,
    volume: Volume,
    truth: Mapping[str, Point | None],
    missing: Missing = "unknown",
) -> tuple[Outcome, ...]:
    """Detect the landmarks of one scan and compare them with the truth, as ``compare`` takes it.

    Raises:
        LandmarkdError: The scan is not answered.
    """
    groups = {spec.name: spec.group for spec in detector.model.manifest.landmarks}
    answer = detector.detect(volume)
    outcomes = compare(name, volume, truth, answer.landmarks, missing, groups)
    return tuple(replace(one, warnings=answer.warnings) for one in outcomes)


def measure(
    detector: Detector,
    specimens: Iterable[SpecimenFiles],
    console: Console,
    missing: Missing = "unknown",
) -> Measurement:
    """Run a model over scans; one that fails does not stop the others.

    Landmarks of the files that the model does not know are named in a warning; a file that lists
    only such is taken for one of other names, with which nothing could be compared.
    """
    names = {landmark.name for landmark in detector.model.manifest.landmarks}
    outcomes: list[Outcome] = []
    failures: list[str] = []
    unknown: dict[str, None] = {}
    seconds: list[float] = []
    for files in specimens:
        try:
            begin = time.perf_counter()
            volume, truth = read_in_frame(files)
            unknown.update(dict.fromkeys(label for label in truth if label not in names))
            _check_names(truth, names, files)
            outcomes.extend(validate_scan(detector, files.name, volume, truth, missing))
            seconds.append(time.perf_counter() - begin)
        except (LandmarkdError, OSError, ValueError) as error:
            failures.append(f"{files.name}: {error}")
    if unknown:
        message = f"the model does not know these landmarks of the files: {', '.join(unknown)}"
        print_warning(message, console)
    taken = statistics.median(seconds) if seconds else None
    return Measurement(tuple(outcomes), tuple(failures), taken)


def _check_names(truth: Mapping[str, Point | None], names: Set[str], files: SpecimenFiles) -> None:
    if truth and not names & truth.keys():
        raise ValueError(f"expected landmarks of the model in {files.landmarks.name}, got none")


def compare(
    name: str,
    volume: Volume,
    truth: Mapping[str, Point | None],
    found: Sequence[Landmark],
    missing: Missing = "unknown",
    groups: Mapping[str, str] = NO_GROUPS,
) -> tuple[Outcome, ...]:
    """Compare all landmarks of a model in a named scan with their true positions in mm, RAS.

    A landmark is absent if that is None or outside the volume; ``missing`` says how one counts that
    the truth does not have, ``groups`` in which group it is, if in any.
    """
    affine, shape = volume.affine, volume.voxels.shape
    to_voxels = np.linalg.inv(affine[:3, :3])
    outcomes = []
    for landmark, at in zip(found, positions_of(found), strict=True):
        true = truth.get(landmark.name)
        beyond = math.inf if true is None else float(distance_beyond(true, affine, shape))
        true = true if beyond == 0 else None
        off = np.full(3, np.nan) if true is None else at - true
        outcomes.append(
            Outcome(
                scan=name,
                landmark=landmark.name,
                present=true is not None,
                status=landmark.status,
                true_mm=true,
                found_mm=landmark.ras_mm,
                error_mm=float(np.linalg.norm(off)),
                error_voxels=float(np.linalg.norm(to_voxels @ off)),
                confidence=landmark.confidence,
                mass=landmark.mass,
                coherence=landmark.coherence,
                region95_mm=landmark.region95_mm,
                beyond_mm=beyond,
                inside_mm=float(distance_inside(at, affine, shape)),
                from_shape_mm=landmark.from_shape_mm,
                spread_mm=landmark.spread_mm,
                known=landmark.name in truth or missing == "absent",
                group=groups.get(landmark.name, ""),
            )
        )
    return tuple(replace(one, identified=_is_identified(one, outcomes)) for one in outcomes)


def _is_identified(outcome: Outcome, others: Sequence[Outcome]) -> bool:
    """Return whether an answer is nearer to its own true point than to any other of its group."""
    if not outcome.error_mm <= IDENTIFIED_MM:  # NaN, too
        return False
    return all(
        other.true_mm is None
        or other.group != outcome.group
        or outcome.error_mm <= np.linalg.norm(outcome.found_mm - other.true_mm)
        for other in others
    )


def summarise_errors(outcomes: Sequence[Outcome]) -> str:
    """Describe the errors in one line: mean, percentiles, the share above 1 mm, presence."""
    errors = np.array([outcome.error_mm for outcome in outcomes])
    known = errors[np.isfinite(errors)]
    present = sum(outcome.present for outcome in outcomes)
    if not known.size:
        return f"no landmark found of {present}"
    lost = sum(outcome.present and outcome.found_mm is None for outcome in outcomes)
    absent = [outcome for outcome in outcomes if outcome.known and not outcome.present]
    false = sum(outcome.found_mm is not None for outcome in absent)
    return (
        f"mean {format_number(known.mean())} mm, median {format_number(np.median(known))}, "
        f"p95 {format_number(np.percentile(known, 95))}, > 1 mm {100 * (known > 1).mean():.1f} %, "
        f"not found {lost} of {present}, false {false} of {len(absent)}"
    )


def write_outcomes(folder: Path, measured: Measurement) -> None:
    """Write ``outcomes.json``, atomically and without any rounding."""
    table = {
        "failures": measured.failures,
        "outcomes": [asdict(outcome) for outcome in measured.outcomes],
    }
    with replacing(folder / OUTCOMES) as path:
        # Python writes floats with as many digits as distinguish them, and also NaN and Infinity.
        path.write_text(json.dumps(table, default=np.ndarray.tolist) + "\n", encoding="utf-8")


def read_outcomes(folder: Path) -> Measurement | None:
    """Read ``outcomes.json``; None if there is none.

    Raises:
        StartupError: It is damaged.
    """
    path = folder / OUTCOMES
    if not path.exists():
        return None
    with refuse_damaged(path):
        table = json.loads(path.read_text(encoding="utf-8"))
        return Measurement(tuple(map(_outcome, table["outcomes"])), tuple(table["failures"]))


def _outcome(row: dict[str, Any]) -> Outcome:
    """Make an outcome of what was written of it."""
    points = {name: None if row[name] is None else np.array(row[name]) for name in POSITIONS}
    warnings = tuple(row.get("warnings", ()))  # Of an older release: none.
    return Outcome(**(row | points | {"warnings": warnings}))
