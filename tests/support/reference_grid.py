"""Voxels -> grid, in NumPy float64: the first part of the reference of the whole path.

Written from the documentation to be read, not to be fast; it shares nothing with the package but
the manifest. A line of voxels is resampled by one dense matrix, all axes one after the other.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import binary_fill_holes, map_coordinates

from app.model.sections import InputSpec, IntensitySpec
from tests.support.oracle import Array

ENDS = {"R": (0, 1), "L": (0, -1), "A": (1, 1), "P": (1, -1), "S": (2, 1), "I": (2, -1)}
"""World axis in RAS to whose end a letter points, and which end that is."""

LEAST_DIFFERENCE = 1e-5
"""Share of voxel values that counts as a difference between them."""

FAR = 6
"""Of a scan that was padded far, what is shown has less than one of so many parts."""

ALIKE = 0.9
"""Next to what is around a scan and may be a part of it, such a share is at least like it."""

THICK = 3.0
"""nnU-Net does not interpolate along an axis whose voxels are more than so many times as long."""

EDGE = 12
"""Voxels by which an end is repeated before a spline is fitted, which then is as if for ever."""


@dataclass(frozen=True, slots=True)
class ReferenceGrid:
    """A scan as a network takes it.

    Attributes:
        voxels: Normalised values, (i j k).
        to_volume: Grid voxel index -> index of the scan.
        to_world: Grid voxel index -> mm, RAS.
        window: Voxel values that became 0 and 1; None if the rule has none.
    """

    voxels: Array
    to_volume: Array
    to_world: Array
    window: tuple[float, float] | None = None


def reference_grid(voxels: Array, affine: Array, spec: InputSpec) -> ReferenceGrid:
    """Bring a scan to a model's axes, spacing and intensities.

    Args:
        voxels: (i j k).
        affine: Voxel index -> mm, RAS.
        spec: Of the model.
    """
    shown, to_shown = trim(voxels) if spec.trim else (voxels, np.eye(4))
    values, to_volume = _orient(shown, affine, spec.orientation)
    to_volume, window = to_shown @ to_volume, None
    spacing = np.linalg.norm((affine @ to_volume)[:3, :3], axis=0)
    target = np.array(spec.spacing_mm)
    if spec.tile_layout == "nnunet":
        values, to_axes = _crop(values)
        to_volume = to_volume @ to_axes
        values = _normalise(values, spec.intensity)
        values, to_axes = _resample_by_splines(values, spacing, target)
    else:
        values, to_axes = _resample(values, target / spacing)
        window = _window(values, spec.intensity)
        values = _normalise(values, spec.intensity)
    to_volume = to_volume @ to_axes
    return ReferenceGrid(values, to_volume, affine @ to_volume, window)


def trim(voxels: Array, most: int = 3) -> tuple[Array, Array]:
    """Take away what a scan was padded with, up to so often; gives the map of indices back, too."""
    padding, box = find_padding(voxels)
    shown = voxels[box]
    if not shown.size:
        return voxels, np.eye(4)
    beside = [np.take(shown, 0, axis) for axis, one in enumerate(box) if one.start > 0]
    ends = zip(box, voxels.shape, strict=True)
    beside += [np.take(shown, -1, axis) for axis, (one, end) in enumerate(ends) if one.stop < end]
    is_far = shown.size < voxels.size / FAR
    is_other = any((face == padding).mean() < ALIKE for face in beside)
    if not (is_far or is_other) or most == 0 or shown.size == voxels.size:
        return voxels, np.eye(4)
    to_voxels = np.eye(4)
    to_voxels[:3, 3] = [one.start for one in box]
    inner, to_shown = trim(shown, most - 1)
    return inner, to_voxels @ to_shown


def find_padding(voxels: Array) -> tuple[float, tuple[slice, ...]]:
    """Find the value of outermost planes, and the box of the voxels that are not blank by it.

    Of planes of several values, those that leave the least box.
    """
    planes = [np.take(voxels, end, axis) for axis in range(3) for end in (0, -1)]
    values = {float(one.flat[0]) for one in planes if (one == one.flat[0]).all()}
    found = [(value, _box(voxels != value)) for value in sorted(values)]
    whole = (float(voxels.flat[0]), tuple(slice(0, size) for size in voxels.shape))
    return min(found, key=lambda one: voxels[one[1]].size, default=whole)


def _box(inside: NDArray[np.bool_]) -> tuple[slice, ...]:
    """Bound what is inside; no box of nothing has any voxels."""
    if not inside.any():
        return (slice(0, 0),) * 3
    where = np.argwhere(inside)
    ends = zip(where.min(axis=0), where.max(axis=0), strict=True)
    return tuple(slice(int(first), int(last) + 1) for first, last in ends)


def _orient(voxels: Array, affine: Array, orientation: str) -> tuple[Array, Array]:
    """Permute and flip axes, without a mirror image, so that they point to where letters say."""
    cosines = affine[:3, :3] / np.linalg.norm(affine[:3, :3], axis=0)

    def turns() -> list[Array]:
        signed = itertools.product(
            itertools.permutations(range(3)), itertools.product((1, -1), repeat=3)
        )
        return [np.eye(3)[:, list(axes)] * signs for axes, signs in signed]

    # Column a of a turn is the world direction, of six, that stands for axis a.
    handed = [turn for turn in turns() if np.linalg.det(turn) * np.linalg.det(cosines) > 0]
    nearest = max(handed, key=lambda turn: float((turn * cosines).sum()))
    to_volume, order, flips = np.zeros((4, 4)), [], []
    to_volume[3, 3] = 1.0
    for new, letter in enumerate(orientation):
        world, end = ENDS[letter]
        old = int(np.flatnonzero(nearest[world])[0])
        flip = nearest[world, old] != end
        to_volume[old, new] = -1.0 if flip else 1.0
        to_volume[old, 3] = voxels.shape[old] - 1 if flip else 0.0
        order.append(old)
        flips += [new] if flip else []
    return np.flip(voxels.transpose(order), tuple(flips)).astype(np.float64), to_volume


def along(values: Array, matrix: Array, axis: int) -> Array:
    """Multiply every line of voxels along an axis by a matrix."""
    return np.moveaxis(np.tensordot(matrix, values, (1, axis)), 0, axis)


def _resample(values: Array, steps: Array) -> tuple[Array, Array]:
    """Interpolate linearly what was smoothed so much as the new voxels are wider.

    Grid and scan share their centre.

    Args:
        values: (i j k).
        steps: New voxels in old ones, by axis.
    """
    to_axes = np.eye(4)
    for axis, step in enumerate(steps):
        old, new = values.shape[axis], max(1, round(values.shape[axis] / step))
        first = (old - 1) / 2 - step * (new - 1) / 2
        places = np.clip(first + step * np.arange(new), 0, old - 1)
        low = np.minimum(np.floor(places).astype(int), max(old - 2, 0))
        smooth = gaussians(old, 0.5 * math.sqrt(max(step * step - 1, 0.0)))
        share = (places - low)[:, None]
        high = np.minimum(low + 1, old - 1)
        values = along(values, (1 - share) * smooth[low] + share * smooth[high], axis)
        to_axes[axis, axis], to_axes[axis, 3] = step, first
    return values, to_axes


def gaussians(size: int, sigma: float) -> Array:
    """Tabulate, in rows, by how much each voxel of a line counts for each smoothed one."""
    if sigma == 0:
        return np.eye(size)
    away = np.abs(np.arange(size)[:, None] - np.arange(size))
    weights = np.exp(-0.5 * (away / sigma) ** 2) * (away <= int(4 * sigma + 1))
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))


def _crop(values: Array) -> tuple[Array, Array]:
    """Cut away what is zero around a scan, as nnU-Net does."""
    to_axes = np.eye(4)
    if not values.any():
        return values, to_axes
    box = _box(values != 0)
    to_axes[:3, 3] = [one.start for one in box]
    return values[box], to_axes


def _resample_by_splines(values: Array, spacing: Array, target: Array) -> tuple[Array, Array]:
    """Resample by cubic splines, as nnU-Net does; the ends of the scan stay where they are."""
    old = np.array(values.shape)
    new = [max(1, round(size)) for size in old * spacing / target]
    steps = old / new
    places = [(np.arange(size) + 0.5) * step - 0.5 for size, step in zip(new, steps, strict=True)]
    thick = _thick_axis(spacing, target)
    if thick is None:
        values = _spline(values, places)
    else:
        others = [place for axis, place in enumerate(places) if axis != thick]
        slices = [_spline(one, others) for one in np.moveaxis(values, thick, 0)]
        nearest = np.floor(places[thick] + 0.5).astype(int)
        values = np.stack([slices[one] for one in nearest], axis=thick)
    to_axes = np.diag([*steps, 1.0])
    to_axes[:3, 3] = steps / 2 - 0.5
    return values, to_axes


def _thick_axis(*spacings: Array) -> int | None:
    """Say along which axis slices are so thick, of the scan or else of the model, if one is."""
    for spacing in spacings:
        if spacing.max() > THICK * spacing.min():
            (thickest,) = np.nonzero(spacing == spacing.max())
            return int(thickest[0]) if len(thickest) == 1 else None
    return None


def _spline(values: Array, places: Sequence[Array]) -> Array:
    """Interpolate at places along each axis; what was between the extremes stays there."""
    if [len(place) for place in places] == list(values.shape):
        return values
    points = np.meshgrid(*[place + EDGE for place in places], indexing="ij")
    new = map_coordinates(np.pad(values, EDGE, mode="edge"), points, order=3, mode="nearest")
    return np.asarray(np.clip(new, values.min(), values.max()))


def _normalise(values: Array, spec: IntensitySpec) -> Array:
    """Apply an intensity rule; voxels that are all alike become zeros, if it has no bounds."""
    if spec.method == "none":
        return values
    if spec.method == "clip":
        return np.asarray((np.clip(values, spec.lower, spec.upper) - spec.mean) / spec.deviation)
    if spec.method == "zscore":
        return _standardise(values, spec.region)
    return stretch(values, _window(values, spec) or (0.0, 1.0))


def _window(values: Array, spec: IntensitySpec) -> tuple[float, float] | None:
    """Find the values that an intensity rule maps to 0 and 1."""
    if spec.method not in ("percentile", "window"):
        return None
    lower, upper = spec.lower, spec.upper
    if spec.method == "percentile":
        lower, upper = np.percentile(values, [lower, upper])
        if _alike(float(values.min()), float(values.max())):
            lower = upper = values.max()
    return lower, upper


def stretch(values: Array, window: tuple[float, float]) -> Array:
    """Map a window of values to 0 and 1, and those beyond it, too."""
    lower, upper = window
    width = max(upper - lower, LEAST_DIFFERENCE * max(abs(lower), abs(upper)), 1e-30)
    return np.asarray(np.clip((values - lower) / width, 0.0, 1.0))


def _standardise(values: Array, region: str) -> Array:
    """Bring a region to mean 0 and standard deviation 1; all else becomes 0."""
    if _alike(float(values.min()), float(values.max())):
        return np.zeros_like(values)
    inside = values != 0 if region != "all" else np.ones(values.shape, bool)
    if region == "filled":
        inside = binary_fill_holes(inside)
    chosen = values[inside] if inside.any() else np.zeros(1)
    least = 0.1 * LEAST_DIFFERENCE * np.abs(values).max()
    return np.where(inside, (values - chosen.mean()) / max(chosen.std(), least), 0.0)


def _alike(least: float, most: float) -> bool:
    return most - least <= max(LEAST_DIFFERENCE * max(abs(least), abs(most)), 1e-30)
