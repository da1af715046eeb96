"""Scan + landmark file -> SpecimenSummary: what is known of a specimen without its voxels."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from app.errors import LandmarkdError
from app.geometry import Affine, Points, distance_beyond, spacing_of
from app.io import UNIT_WARNINGS, RasPoint, Volume, read_file, read_truth, read_volume
from app.training.data.issues import Issue
from app.training.data.specimens import SpecimenFiles, rows_of

CONSTANT: Final = "all voxels have the same value"
"""A warning of ``read_volume``."""


@dataclass(frozen=True, slots=True)
class SpecimenSummary:
    """A specimen whose files can be read.

    Attributes:
        files: Its name, scan and landmark file.
        shape: Voxels along i, j and k.
        affine: Voxel index -> mm, RAS.
        digest: SHA-256 of the voxel values, hex, whatever the header says.
        extremes: The least and the largest voxel value.
        points: Landmarks by name, in mm, RAS.
        absent: Names of those that a person has marked as not in the scan.
    """

    files: SpecimenFiles
    shape: tuple[int, int, int]
    affine: Affine
    digest: str
    extremes: tuple[float, float]
    points: Mapping[str, RasPoint]
    absent: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        """File name without suffixes."""
        return self.files.name

    @property
    def extent_mm(self) -> np.ndarray:
        """Edges of the scan, in mm."""
        return np.asarray(self.shape * spacing_of(self.affine))

    @property
    def decimals(self) -> int:
        """With how many decimals positions in mm are compared: as many as tell tenths of voxels.

        Three where voxels are a micrometre or larger, as there are records with these.
        """
        finest = float(spacing_of(self.affine).min())
        return 3 if finest >= 1e-3 else 1 - math.floor(math.log10(finest))

    @property
    def positions(self) -> Points:
        """Positions of the landmarks that have one, in mm, RAS."""
        return np.array(list(self.points.values()), dtype=np.float64).reshape(-1, 3)

    @property
    def outside(self) -> list[str]:
        """Names of the landmarks that lie outside the scan."""
        beyond = distance_beyond(self.positions, self.affine, self.shape)
        return [name for name, mm in zip(self.points, beyond, strict=True) if mm != 0]

    def rows(self, names: Sequence[str]) -> Points:
        """List the named landmarks in this order, in mm, RAS; NaN where there is none."""
        return rows_of(self.points, names)


def summarise(files: SpecimenFiles) -> tuple[SpecimenSummary | None, list[Issue]]:
    """Read a scan and its landmark file.

    Returns:
        The summary, None if a file cannot be read; and the issues with the files.
    """
    issues: list[Issue] = []
    points: Mapping[str, RasPoint] = {}
    absent: frozenset[str] = frozenset()
    volume: Volume | None = None
    try:
        truth = read_truth(files.landmarks)
        points = {name: point for name, point in truth.items() if point is not None}
        absent = frozenset(truth.keys() - points.keys())
        if not points:
            issues.append(Issue("error", files.landmarks.name, "expected landmarks, got none"))
    except (ValueError, OSError) as error:
        issues.append(Issue("error", files.landmarks.name, str(error)))
    try:
        volume = read_volume(read_file(files.scan))
    except LandmarkdError as error:
        issues.append(Issue("error", files.scan.name, f"{error.title}: {error}"))
    except OSError as error:
        issues.append(Issue("error", files.scan.name, f"cannot be read: {error.strerror}"))
    if volume is None:
        return None, issues
    summary = None
    if points:
        i, j, k = volume.voxels.shape
        digest = _digest(volume.voxels)
        extremes = float(volume.voxels.min()), float(volume.voxels.max())
        summary = SpecimenSummary(files, (i, j, k), volume.affine, digest, extremes, points, absent)
    inside = summary is not None and not summary.outside
    issues += [_issue_of(files.name, warning, inside) for warning in volume.warnings]
    return summary, issues


def _issue_of(name: str, warning: str, inside: bool) -> Issue:
    """Turn a warning of ``read_volume`` into an issue.

    Nothing can be learned from a constant scan. Points in mm that lie inside confirm its unit.
    """
    if warning == CONSTANT:
        return Issue("error", name, warning)
    confirmed = inside and warning == UNIT_WARNINGS[""]
    return Issue("note" if confirmed else "warning", name, warning)


def _digest(voxels: np.ndarray) -> str:
    """Hash the values as float32, so that the stored data type and header make no difference."""
    values = np.ascontiguousarray(voxels, dtype=np.float32)
    return hashlib.sha256(str(values.shape).encode() + values.tobytes()).hexdigest()
