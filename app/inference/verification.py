"""How far a model's landmarks shift when its networks compute in a lower precision.

What ``[precision]`` of a model folder promises, and what ``LANDMARKD_PRECISION=auto`` relies on.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import torch

from app.compute import fast_precisions
from app.errors import ModelRefused
from app.inference.detector import Detector
from app.inference.load import load_checked
from app.io import Volume
from app.model import LOWER_PRECISIONS, LowerPrecision
from app.voting import Landmark

MAX_SHIFT: Final = 0.1
"""Of the model grid's finest spacing: a larger shift is no rounding error."""


@dataclass(frozen=True, slots=True)
class Verification:
    """What a precision did to the landmarks of some scans.

    Attributes:
        precision: What was compared with float32.
        shift_mm: Largest distance between a landmark detected in both; None if it is refused.
        reason: Why it is refused; empty if it is not.
    """

    precision: LowerPrecision
    shift_mm: float | None
    reason: str = ""


def verify_precisions(
    folder: Path,
    volumes: Callable[[], Iterable[Volume]],
    device: torch.device,
    *,
    allow_torchscript: bool = False,
) -> tuple[Verification, ...]:
    """Compare the landmarks of some scans in each lower precision with those in float32.

    Only in precisions that the device computes natively: in others a network may take hours.
    ``volumes`` gives the scans anew for each precision.

    Returns:
        What was found, for each lower precision; nothing if no landmark is detected in any scan.

    Raises:
        ModelRefused: The folder breaks the contract.
        LandmarkdError: A scan cannot be answered.
    """
    load = partial(load_checked, folder, device, allow_torchscript=allow_torchscript)
    exact = load()
    expected = [Detector(exact).detect(volume).landmarks for volume in volumes()]
    if not any(landmark.status == "detected" for found in expected for landmark in found):
        return ()
    limit_mm = MAX_SHIFT * min(exact.manifest.input.spacing_mm)

    def verify(precision: LowerPrecision) -> Verification:
        if precision not in fast_precisions(device):
            return Verification(precision, None, f"{device} does not compute in it natively")
        try:
            lower = Detector(load(precision))
        except ModelRefused as refusal:
            return Verification(precision, None, str(refusal))
        pairs = zip(expected, volumes(), strict=True)
        shift_mm = max(_shift_mm(found, lower.detect(volume).landmarks) for found, volume in pairs)
        if not shift_mm <= limit_mm:
            reason = f"expected landmarks within {limit_mm:.2g} mm, got {shift_mm:.2g} mm"
            return Verification(precision, None, reason)
        return Verification(precision, shift_mm)

    return tuple(verify(precision) for precision in LOWER_PRECISIONS)


def _shift_mm(expected: Sequence[Landmark], found: Sequence[Landmark]) -> float:
    """Measure how far the landmarks detected in both lie apart at most.

    Returns:
        Infinity if a landmark has a position in one only. Whether it is detected or of low
        confidence may differ: any rounding moves a landmark across a threshold now and then.
    """
    if [one.ras_mm is None for one in expected] != [one.ras_mm is None for one in found]:
        return float("inf")
    return max(
        (
            float(np.linalg.norm(one.ras_mm - other.ras_mm))
            for one, other in zip(expected, found, strict=True)
            if one.ras_mm is not None and other.ras_mm is not None
            if one.status == other.status == "detected"
        ),
        default=0.0,
    )
