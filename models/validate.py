"""model folder + held-out scans -> errors in mm, through the very pipeline that serves."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float64

from app.detector import Detector
from app.loading import load_checked
from app.volume import read_volume
from models.landmark_files import read_landmarks


@dataclass(frozen=True, slots=True)
class Errors:
    """Distances between found and true landmarks.

    Attributes:
        names: Scan names.
        mm: Distance in mm by scan and landmark; NaN where the truth or the answer is missing.
        found: Whether the service gave a position.
        detected: Whether the service was sure of it.
        true: Whether the truth has one.
    """

    names: tuple[str, ...]
    mm: Float64[np.ndarray, "scans landmarks"]
    found: np.ndarray
    detected: np.ndarray
    true: np.ndarray

    def summary(self) -> str:
        """Say the mean, median, 95th percentile and the share beyond 1 mm, and what was missed."""
        known = self.mm[np.isfinite(self.mm)]
        missed = int((self.true & ~self.found).sum())
        if not known.size:
            return f"no landmark found of {int(self.true.sum())}"
        return (
            f"mean {known.mean():.3f} mm, median {np.median(known):.3f}, "
            f"p95 {np.percentile(known, 95):.3f}, > 1 mm {100 * (known > 1).mean():.1f} %, "
            f"missed {missed} of {int(self.true.sum())}, "
            f"false {int((self.found & ~self.true).sum())} of {int((~self.true).sum())}"
        )


def validate(folder: Path, pairs: Sequence[tuple[str, Path, Path]], device: torch.device) -> Errors:
    """Detect the landmarks of scans and compare them with the landmark files.

    Args:
        folder: The model folder.
        pairs: Name, scan and landmark file of each specimen; none that the model was trained on.
        device: Where to run.

    Returns:
        The errors, by scan and landmark.
    """
    detector = Detector(load_checked(folder, device))
    names = [landmark.name for landmark in detector.model.manifest.landmarks]
    mm = np.full((len(pairs), len(names)), np.nan)
    found = np.zeros(mm.shape, dtype=bool)
    detected = np.zeros(mm.shape, dtype=bool)
    true = np.zeros(mm.shape, dtype=bool)
    for row, (_, scan, landmarks) in enumerate(pairs):
        truth = read_landmarks(landmarks)
        detection = detector.detect(read_volume(scan.read_bytes()))
        for column, landmark in enumerate(detection.landmarks):
            true[row, column] = landmark.name in truth
            found[row, column] = landmark.ras_mm is not None
            detected[row, column] = landmark.status == "detected"
            if landmark.ras_mm is not None and landmark.name in truth:
                mm[row, column] = np.linalg.norm(landmark.ras_mm - truth[landmark.name])
    return Errors(tuple(pair[0] for pair in pairs), mm, found, detected, true)
