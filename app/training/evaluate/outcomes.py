"""model + held-out scans -> Outcomes, through the very pipeline that serves."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import track

from app.errors import LandmarkdError
from app.geometry import transform
from app.inference import Detector, load_checked
from app.io import Volume, read_landmarks, read_volume
from app.training.data.specimens import pair_files
from app.training.options import Missing
from app.voting import Landmark, Point, Status

Pair = tuple[str, Path, Path]
"""Name, scan and landmark file of a specimen."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One landmark of one scan: what is true, and what was found.

    Attributes:
        scan: Name of the scan.
        landmark: Name of the landmark.
        present: Whether the scan shows it: its file has a point, which lies in the volume.
        known: Whether that is known. A landmark without a point may be there all the same; one
            whose point lies outside the volume is absent for certain.
        status: As answered.
        true_mm: In mm, RAS; None if it is not present.
        found_mm: In mm, RAS; None if the answer has no place.
        error_mm: Distance between the two; NaN unless there are both.
        error_voxels: The same in voxels of the scan.
        confidence: As answered.
        mass: As answered.
        coherence: As answered.
        region95_mm: As answered; None unless detected by a calibrated model.
        beyond_mm: How far outside the volume its point lies; infinite where the file has none.
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
    known: bool = True


def validate(
    folder: Path, pairs: Sequence[Pair], device: torch.device, missing: Missing = "unknown"
) -> tuple[Outcome, ...]:
    """Detect the landmarks of scans and compare them with the landmark files.

    Args:
        folder: The model folder.
        pairs: The specimens; none that the model was trained on.
        device: Where to run.
        missing: As in ``compare``.

    Returns:
        One outcome for each scan and landmark of the model.
    """
    detector = Detector(load_checked(folder, device))
    return tuple(outcome for pair in pairs for outcome in validate_scan(detector, pair, missing))


def validate_scan(
    detector: Detector, pair: Pair, missing: Missing = "unknown"
) -> tuple[Outcome, ...]:
    """Detect the landmarks of one scan and compare them with its landmark file.

    Args:
        detector: Of the model.
        pair: Name, scan and landmark file.
        missing: As in ``compare``.

    Returns:
        One outcome for each landmark of the model.

    Raises:
        LandmarkdError: The scan cannot be read or answered.
        ValueError: The landmark file cannot be read.
    """
    name, scan, landmarks = pair
    volume = read_volume(scan.read_bytes())
    truth = read_truth(landmarks)
    return compare(name, volume, truth, detector.detect(volume).landmarks, missing)


def measure(
    detector: Detector,
    pairs: Sequence[Pair],
    console: Console,
    missing: Missing = "unknown",
) -> tuple[tuple[Outcome, ...], list[str]]:
    """Run a model over scans; those that cannot be read are told of, and do not stop the others.

    Args:
        detector: The model.
        pairs: Name, scan and landmark file of each specimen.
        console: Shows the progress, and a warning of landmarks that the model does not know.
        missing: What a landmark is that a file does not have.

    Returns:
        The outcomes, and a line for each scan that failed.
    """
    names = [landmark.name for landmark in detector.model.manifest.landmarks]
    outcomes: list[Outcome] = []
    failures: list[str] = []
    strange: dict[str, None] = {}
    for pair in track(pairs, "Detecting", console=console):
        try:
            strange.update(dict.fromkeys(strange_names(pair, names)))
            outcomes.extend(validate_scan(detector, pair, missing))
        except (LandmarkdError, OSError, ValueError) as error:
            failures.append(f"{pair[0]}: {error}")
    if strange:
        told = f"the model does not know these landmarks of the files: {', '.join(strange)}"
        console.print(f"[yellow]{told}[/yellow]", highlight=False, soft_wrap=True)
    return tuple(outcomes), failures


def compare(
    name: str,
    volume: Volume,
    truth: Mapping[str, Point],
    found: Iterable[Landmark],
    missing: Missing = "unknown",
) -> tuple[Outcome, ...]:
    """Compare landmarks that were found with the truth.

    Args:
        name: Of the scan.
        volume: The scan.
        truth: Places of the landmarks in mm, RAS, by name; one that lies outside the volume is
            absent.
        found: One for each landmark of the model.
        missing: What a landmark is that the truth does not have: absent, or not known to be there
            or not, which says nothing of presence.

    Returns:
        One outcome for each of them.
    """
    to_voxels = np.linalg.inv(volume.affine[:3, :3])
    unknown = np.full(3, np.nan)
    outcomes = []
    for mark in found:
        true = truth.get(mark.name)
        beyond = math.inf if true is None else _distance_beyond(true, volume)
        known = true is not None or missing == "absent"
        true = true if beyond == 0 else None
        off = unknown if true is None or mark.ras_mm is None else mark.ras_mm - true
        outcomes.append(
            Outcome(
                scan=name,
                landmark=mark.name,
                present=true is not None,
                status=mark.status,
                true_mm=true,
                found_mm=mark.ras_mm,
                error_mm=float(np.linalg.norm(off)),
                error_voxels=float(np.linalg.norm(to_voxels @ off)),
                confidence=mark.confidence,
                mass=mark.mass,
                coherence=mark.coherence,
                region95_mm=mark.region95_mm,
                beyond_mm=beyond,
                known=known,
            )
        )
    return tuple(outcomes)


def _distance_beyond(point: Point, volume: Volume) -> float:
    """Measure how far a point lies outside a volume, in mm; 0 inside, up to its outer faces."""
    index = transform(np.linalg.inv(volume.affine), point)
    nearest = np.clip(index, -0.5, np.array(volume.voxels.shape) - 0.5)
    return float(np.linalg.norm(volume.affine[:3, :3] @ (index - nearest)))


def summary(outcomes: Sequence[Outcome]) -> str:
    """Say the mean, median, 95th percentile and the share beyond 1 mm, and what was missed."""
    errors = np.array([outcome.error_mm for outcome in outcomes])
    known = errors[np.isfinite(errors)]
    present = sum(outcome.present for outcome in outcomes)
    if not known.size:
        return f"no landmark found of {present}"
    missed = sum(outcome.present and outcome.found_mm is None for outcome in outcomes)
    absent = [outcome for outcome in outcomes if outcome.known and not outcome.present]
    false = sum(outcome.found_mm is not None for outcome in absent)
    return (
        f"mean {known.mean():.3f} mm, median {np.median(known):.3f}, "
        f"p95 {np.percentile(known, 95):.3f}, > 1 mm {100 * (known > 1).mean():.1f} %, "
        f"missed {missed} of {present}, false {false} of {len(absent)}"
    )


def choose_pairs(scans: Path, landmarks: Path, only: Sequence[str] = ()) -> list[Pair]:
    """Pair scans and landmark files by name, all or the named ones.

    Raises:
        ValueError: A folder or a landmark file is missing, or there is no scan of a name.
    """
    for folder in (scans, landmarks):
        if not folder.is_dir():
            raise ValueError(f"expected a folder, got {folder}")
    pairs = pair_files(scans, landmarks)
    unknown = set(only) - {pair[0] for pair in pairs}
    if unknown:
        raise ValueError(f"expected scans that are there, found none named {sorted(unknown)}")
    return [pair for pair in pairs if not only or pair[0] in only]


def read_truth(path: Path) -> dict[str, Point]:
    """Read a landmark file; see ``read_landmarks``.

    Raises:
        ValueError: It cannot be read, whatever is wrong with it.
    """
    try:
        return read_landmarks(path)
    except (KeyError, TypeError) as error:
        raise ValueError(f"expected a landmark file, but {path.name} lacks {error}") from error


def strange_names(pair: Pair, names: Sequence[str]) -> list[str]:
    """List the landmarks of a file that are none of a model's."""
    return [name for name in read_truth(pair[2]) if name not in names]
