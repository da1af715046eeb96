"""scan + landmark file -> Facts: what can be said of a specimen without keeping its voxels."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from app.errors import LandmarkdError
from app.geometry import Affine, Points, spacing_of
from app.io import UNIT_WARNINGS, RasPoint, Volume, read_landmarks, read_volume
from app.training.data.issues import Finding
from app.training.data.specimens import inside_volume

CONSTANT: Final = "all voxels have the same value"
"""As the reader of scans says it."""


@dataclass(frozen=True, slots=True)
class Facts:
    """A specimen whose files can be read.

    Attributes:
        name: File name without endings.
        scan: The scan's file.
        landmarks: The landmark file.
        shape: Voxels along i, j and k.
        affine: Voxel index -> mm, RAS.
        digest: SHA-256 of the voxel values, hex, whatever the header says.
        points: Landmarks by name, in mm, RAS.
    """

    name: str
    scan: Path
    landmarks: Path
    shape: tuple[int, int, int]
    affine: Affine
    digest: str
    points: Mapping[str, RasPoint]

    @property
    def pair(self) -> tuple[str, Path, Path]:
        """Name, scan and landmark file, as the trainer passes them on."""
        return self.name, self.scan, self.landmarks

    @property
    def extent_mm(self) -> np.ndarray:
        """Edges of the scan, in mm."""
        return np.asarray(self.shape * spacing_of(self.affine))

    @property
    def placed(self) -> Points:
        """The landmarks that have a place, in mm, RAS."""
        return np.array(list(self.points.values()), dtype=np.float64).reshape(-1, 3)

    @property
    def outside(self) -> list[str]:
        """Names of the landmarks that lie outside the scan."""
        inside = inside_volume(self.placed, self.affine, self.shape)
        return [name for name, is_in in zip(self.points, inside, strict=True) if not is_in]

    def rows(self, names: Sequence[str]) -> Points:
        """List the landmarks in an order, in mm, RAS; NaN where there is none."""
        missing = np.full(3, np.nan)
        return np.stack([self.points.get(name, missing) for name in names])


def gather(pair: tuple[str, Path, Path]) -> tuple[Facts | None, list[Finding]]:
    """Read a scan and its landmark file.

    Args:
        pair: Name, scan and landmark file.

    Returns:
        What they hold, None if either cannot be read; and what was found on the way.
    """
    name, scan, landmarks = pair
    findings: list[Finding] = []
    points: Mapping[str, RasPoint] = {}
    volume: Volume | None = None
    try:
        points = read_landmarks(landmarks)
        if not points:
            findings.append(Finding("error", landmarks.name, "expected landmarks, got none"))
    except (ValueError, OSError) as error:
        findings.append(Finding("error", landmarks.name, str(error)))
    try:
        volume = read_volume(scan.read_bytes())
    except LandmarkdError as error:
        findings.append(Finding("error", scan.name, f"{error.title}: {error}"))
    except OSError as error:
        findings.append(Finding("error", scan.name, f"cannot be read: {error.strerror}"))
    if volume is None:
        return None, findings
    facts = None
    if points:
        i, j, k = volume.voxels.shape
        digest = _digest(volume.voxels)
        facts = Facts(name, scan, landmarks, (i, j, k), volume.affine, digest, points)
    inside = facts is not None and not facts.outside
    findings += [_remark(name, warning, inside) for warning in volume.warnings]
    return facts, findings


def _remark(name: str, warning: str, inside: bool) -> Finding:
    """Pass on what the reader of a scan warns of.

    Nothing can be learned from a constant one. Points in mm that lie inside show its unit.
    """
    if warning == CONSTANT:
        return Finding("error", name, warning)
    assumed = inside and warning == UNIT_WARNINGS[0]
    return Finding("note" if assumed else "warning", name, warning)


def _digest(voxels: np.ndarray) -> str:
    """Hash the values as numbers, so that another data type or header makes no difference."""
    values = np.ascontiguousarray(voxels, dtype=np.float32)
    return hashlib.sha256(str(values.shape).encode() + values.tobytes()).hexdigest()
