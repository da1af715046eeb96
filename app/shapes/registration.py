"""Landmarks of two scans -> the transform between them, and its file.

Each pair of landmarks is weighted by how exactly both are known: their calibrated 95 % regions.
Files are ITK transforms, as registrations write them: they map points of the fixed scan to the
moving one, in mm, LPS. ITK and ANTs resample the moving scan onto the fixed one by such a file, and
3D Slicer, which inverts it as it reads it, moves nodes of the moving scan onto the fixed one.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import numpy as np
from jaxtyping import Float64

from app.errors import BadParameter
from app.geometry import LPS_FROM_RAS, Affine, Points, transform
from app.io import LandmarksAnswer, RasPoint
from app.measurements import REGION95_SIGMAS
from app.shapes.similarity import fit_similarity

Kind = Literal["rigid", "similarity", "affine"]
Landmarks = LandmarksAnswer | Mapping[str, RasPoint | Sequence[float] | None]
"""An answer, or positions in mm, RAS, by name, as ``read_landmarks`` and ``read_truth`` return
them; NaN or None where one is missing."""

MIN_PAIRS: Final[Mapping[Kind, int]] = {"rigid": 3, "similarity": 3, "affine": 4}
TRANSFORM_SUFFIXES: Final = (".tfm", ".txt", ".mat")
ITK_TYPE: Final = "AffineTransform_double_3_3"
FLAT: Final = 1e-3
"""Extent along an axis, over the largest one, from which points count as lying in a plane or on a
line: no rotation about a line is known, and no affine map across a plane."""


@dataclass(frozen=True, slots=True)
class Registration:
    """A transform fitted to two sets of landmarks.

    Attributes:
        kind: What it may do.
        fixed_to_moving: Maps mm, RAS, of the fixed scan to mm, RAS, of the moving one.
        residual_mm: Distance of each fitted landmark from its partner, by name, in the moving scan.
        rms_mm: Root mean square of these, weighted as the fit.
        left_out_mm: The same of each landmark in a fit without it: what to expect of other points
            among these. Infinite where those left determine no fit: too few, or on a line or, for
            an affine map, in a plane.
    """

    kind: Kind
    fixed_to_moving: Affine
    residual_mm: Mapping[str, float]
    rms_mm: float
    left_out_mm: float

    def write(self, path: Path) -> None:
        """Write an ITK transform file, LPS: text (``.tfm``, ``.txt``), or ``.mat`` as ANTs' own.

        Raises:
            BadParameter: The name ends in nothing of these, by which ITK knows how to read it.
        """
        if path.suffix not in TRANSFORM_SUFFIXES:
            expected = ", ".join(TRANSFORM_SUFFIXES)
            raise BadParameter(f"expected a name that ends in one of {expected}, got {path.name}")
        matrix = LPS_FROM_RAS @ self.fixed_to_moving @ LPS_FROM_RAS
        numbers = [*matrix[:3, :3].ravel().tolist(), *matrix[:3, 3].tolist()]
        if path.suffix == ".mat":
            path.write_bytes(_matlab_4({ITK_TYPE: numbers, "fixed": [0.0, 0.0, 0.0]}))
            return
        text = (
            f"#Insight Transform File V1.0\n#Transform 0\nTransform: {ITK_TYPE}\n"
            f"Parameters: {' '.join(map(repr, numbers))}\nFixedParameters: 0 0 0\n"
        )
        path.write_text(text, encoding="ascii")


def register(moving: Landmarks, fixed: Landmarks, kind: Kind = "rigid") -> Registration:
    """Fit the transform between the landmarks that two scans share.

    Args:
        moving: Those of the scan to be moved.
        fixed: Those of the scan it is moved onto.
        kind: ``rigid`` for one subject, ``similarity`` for two of different size.

    Returns:
        The fit with the least weighted square error. A landmark without a 95 % region counts as
        known as exactly as the median one of its scan. Where none of a scan has one, the regions
        of the other alone count, and all landmarks alike where neither has any.

    Raises:
        BadParameter: There is no such kind, a position is not x, y, z, they share too few
            landmarks, or these lie on a line or, for an affine map, in a plane.
    """
    if kind not in MIN_PAIRS:
        raise BadParameter(f"expected kind one of {', '.join(MIN_PAIRS)}; got {kind!r}")
    here, there = _positions(fixed), _positions(moving)
    names = [name for name in here if name in there]
    if len(names) < MIN_PAIRS[kind]:
        raise BadParameter(f"expected {MIN_PAIRS[kind]} common landmarks, got {len(names)}")
    source, target = (np.array([each[name] for name in names]) for each in (here, there))
    if _is_flat(source, kind) or _is_flat(target, kind):
        what = "in a plane" if kind == "affine" else "on a line"
        raise BadParameter(f"expected landmarks that do not lie {what}, got {len(names)} that do")
    variances = [one for each in (fixed, moving) if (one := _variance(each, names)) is not None]
    weight = 1 / sum(variances, np.zeros(len(names))) if variances else np.ones(len(names))
    affine = _fit(kind, source, target, weight)
    residual = _distances(affine, source, target)
    return Registration(
        kind=kind,
        fixed_to_moving=affine,
        residual_mm=dict(zip(names, residual.tolist(), strict=True)),
        rms_mm=_rms(residual, weight),
        left_out_mm=_rms(_leave_out(kind, source, target, weight), weight),
    )


def _matlab_4(columns: Mapping[str, list[float]]) -> bytes:
    """Write a MATLAB file of level 4: columns of little-endian doubles, by name."""
    parts = []
    for name, numbers in columns.items():
        text = f"{name}\0".encode()
        head = struct.pack("<5i", 0, len(numbers), 1, 0, len(text))
        parts += [head, text, struct.pack(f"<{len(numbers)}d", *numbers)]
    return b"".join(parts)


def _positions(landmarks: Landmarks) -> dict[str, RasPoint]:
    if isinstance(landmarks, LandmarksAnswer):
        return {
            one.name: np.array(one.ras_mm) for one in landmarks.landmarks if one.ras_mm is not None
        }
    points: dict[str, RasPoint] = {}
    for name, given in landmarks.items():
        if given is None:
            continue
        point = np.asarray(given, dtype=np.float64)
        if point.shape != (3,):
            raise BadParameter(f"{name}: expected x, y, z in mm, RAS, or None; got {given}")
        if np.isfinite(point).all():
            points[name] = point
    return points


def _variance(landmarks: Landmarks, names: list[str]) -> Float64[np.ndarray, " n"] | None:
    """Return the variance of each landmark along an axis, in mm²; None if that of none is known."""
    if not isinstance(landmarks, LandmarksAnswer):
        return None
    known = {one.name: one.region95_mm for one in landmarks.landmarks}
    regions = np.array([known[name] or np.nan for name in names])
    if not np.isfinite(regions).any():
        return None
    regions = np.nan_to_num(regions, nan=float(np.nanmedian(regions)))
    return np.asarray((regions / REGION95_SIGMAS) ** 2)


def _is_flat(points: Points, kind: Kind) -> bool:
    """Return whether points lie on a line or, for an affine map, in a plane."""
    extent = np.linalg.svd(points - points.mean(axis=0), compute_uv=False)
    return not extent[2 if kind == "affine" else 1] > FLAT * extent[0]


def _fit(kind: Kind, source: Points, target: Points, weight: Float64[np.ndarray, " n"]) -> Affine:
    if kind == "rigid":
        return fit_similarity(source, target, weight, scale_bounds=(1.0, 1.0)).affine
    if kind == "similarity":
        return fit_similarity(source, target, weight).affine
    root = np.sqrt(weight)[:, None]
    columns = np.c_[source, np.ones(len(source))]
    solution = np.linalg.lstsq(root * columns, root * target, rcond=None)[0]
    return np.asarray(np.r_[solution.T, [[0.0, 0.0, 0.0, 1.0]]])


def _distances(affine: Affine, source: Points, target: Points) -> Float64[np.ndarray, " n"]:
    return np.asarray(np.linalg.norm(transform(affine, source) - target, axis=1))


def _leave_out(
    kind: Kind, source: Points, target: Points, weight: Float64[np.ndarray, " n"]
) -> Float64[np.ndarray, " n"]:
    """Measure each landmark's distance from where a fit to all others puts it."""
    errors = []
    for left_out in range(len(source)):
        rest = np.arange(len(source)) != left_out
        if _is_flat(source[rest], kind) or _is_flat(target[rest], kind):
            errors.append(np.inf)
            continue
        affine = _fit(kind, source[rest], target[rest], weight[rest])
        errors.append(_distances(affine, source[~rest], target[~rest])[0])
    return np.array(errors)


def _rms(errors: Float64[np.ndarray, " n"], weight: Float64[np.ndarray, " n"]) -> float:
    return float(np.sqrt(np.average(errors**2, weights=weight)))
