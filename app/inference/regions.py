"""Landmarks of a scan -> the same, with 95 % regions as wide as the scan deserves, or without.

The radius of the manifest is that of a usual scan. Where a scan is more uncertain than half of
those that the radius was calibrated on, it grows, as errors do, by ``max(1, d / d0)`` times
``max(1, s / s0)`` (normalised conformal regions: Papadopoulos, Gammerman, Vovk, IASTED AIA 2008):

- d is how far its detected landmarks are from where the fitted shape expects them, as those of a
  subject that is unlike the ones that a network has learned from. The distance of one landmark
  alone does not tell: where a network errs, it often errs towards the shape.
- s is how far the votes for them scatter, as in noise, in blurred scans, or in another contrast:
  the voxels that vote are an ensemble, which disagrees where it errs.

Both are root mean squares over the scan, in mm; d0 and s0 are medians over the scans of the
calibration: ``[shape] region_scale_mm`` and ``[voting] region_spread_mm``.
"""

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np

from app.geometry import distance_inside
from app.io import Status, Volume
from app.model import Manifest
from app.voting import Landmark, positions_of

MAX_SCATTER: Final = 1.5
"""Votes that scatter more than this many times as far as usual are worth a warning. Those for
unseen spines of ``lumbar-mri`` do in 1 scan of 36; with noise of 4 standard deviations of its
values in 2 of 3, and in all that are smoothed by 16 mm."""


class Uncertainty(NamedTuple):
    """How far a landmark may be off, as far as the scan tells; or those of a scan.

    Attributes:
        from_shape_mm: How far it is from where the fitted shape expects it; None without a shape.
        spread_mm: How far its votes scatter; None of networks that answer coordinates alone.
    """

    from_shape_mm: float | None
    spread_mm: float | None


def combine(landmarks: Iterable[tuple[Status, float | None, float | None]]) -> Uncertainty:
    """Compute the uncertainty of a scan: root mean squares over its detected landmarks.

    Args:
        landmarks: Status of each, and both numbers of its own uncertainty.
    """
    detected = [Uncertainty(*mm) for status, *mm in landmarks if status == "detected"]
    return Uncertainty(
        _root_mean_square(one.from_shape_mm for one in detected),
        _root_mean_square(one.spread_mm for one in detected),
    )


def growth(uncertainty: Uncertainty, usual: Uncertainty) -> float:
    """Compute by how much the regions of a scan grow; what is not known of both does not count."""
    pairs = zip(uncertainty, usual, strict=True)
    return math.prod(max(1.0, mm / of) for mm, of in pairs if mm is not None and of is not None)


def settle_regions(
    landmarks: tuple[Landmark, ...], volume: Volume, manifest: Manifest
) -> tuple[tuple[Landmark, ...], tuple[str, ...]]:
    """Widen the regions of an uncertain scan, and withhold those too near to its border.

    The manifest is that of the network that has answered.

    Returns:
        The landmarks, and a warning if votes scatter much more than usual.
    """
    shape, voting = manifest.shape, manifest.voting
    usual = Uncertainty(shape.region_scale_mm if shape else None, voting.region_spread_mm)
    uncertainty = combine((one.status, one.from_shape_mm, one.spread_mm) for one in landmarks)
    factor = growth(uncertainty, usual)
    inside_mm = distance_inside(positions_of(landmarks), volume.affine, volume.voxels.shape)
    settled = []
    for one, mm in zip(landmarks, inside_mm, strict=True):
        radius_mm = one.region95_mm
        if radius_mm is not None:  # Nearer to the border, too few errors are known.
            radius_mm = None if mm < voting.region_margin_mm else factor * radius_mm
        settled.append(replace(one, region95_mm=radius_mm))
    scatter = growth(uncertainty._replace(from_shape_mm=None), usual)
    if scatter <= MAX_SCATTER:
        return tuple(settled), ()
    warning = (
        f"Votes scatter {scatter:.1f} times as far as usual, so landmarks may be further off: is "
        "the scan noisier, less sharp or of another contrast than those that the model is for?"
    )
    return tuple(settled), (warning,)


def _root_mean_square(lengths_mm: Iterable[float | None]) -> float | None:
    known = [mm for mm in lengths_mm if mm is not None]
    return float(np.sqrt(np.mean(np.square(known)))) if known else None
