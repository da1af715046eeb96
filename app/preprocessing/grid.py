"""Volume -> Grid: the scan on the device, in the axes, spacing and intensities a network expects.

The array is first brought to the model's axes by permuting and flipping, without resampling, so
that all 48 axis orders of one scan become the same array; then it is resampled along each axis. The
grid and the volume share their centre, and a grid index is the centre of its voxel.

A scan that was padded far, or with what is not its air, is seen without the padding, if the model
says so: what a network makes of voxels depends on how much of the grid is blank, and so do
percentiles.

For nnU-Net, a volume is prepared as nnU-Net does it: cropped to what is not zero, normalised, and
only then resampled, by splines.
"""

from dataclasses import dataclass, replace
from itertools import compress
from typing import Final

import numpy as np
import torch
from jaxtyping import Bool, Float64
from nibabel.orientations import apply_orientation, axcodes2ornt, inv_ornt_aff, ornt_transform

from app.compute import Voxels, upload
from app.geometry import Affine, assign_axes, is_inside, spacing_of, transform, translation
from app.io import Volume
from app.model import InputSpec
from app.preprocessing.intensity import find_window, normalise_
from app.preprocessing.resampling import resample, resampled_size
from app.preprocessing.splines import resample_as_nnunet

MIN_SHOWN: Final = 1 / 6
"""Share of all voxels from which on a network sees the padding around them, too. Of 24 mouse skulls
that no network had seen, all landmarks were detected with a share of 16 to 21 %; with some 10 %,
those of 9 skulls, and with 6 %, none."""

MIN_ALIKE: Final = 0.9
"""Least share of the voxels next to a blank field, on each side, that have its value if it is a
part of the scan, as masked air: of 19 skulls and spines with such a field, 0.98 and more."""

MAX_PADDINGS: Final = 3
"""Around one another, or on opposite sides, each of a value of its own, as several programs add
them. Files may be made to have hundreds, which would take seconds."""


@dataclass(frozen=True, slots=True)
class ScanExtent:
    """Where a scan lies in a grid that reaches past it.

    Attributes:
        from_grid: Grid voxel index -> index of the scan, which ends where its padding begins.
        shape: Shape of the scan.
    """

    from_grid: Affine
    shape: tuple[int, ...]

    def contains(self, points: Float64[np.ndarray, "*n 3"]) -> Bool[np.ndarray, "*n"]:
        """Test which points lie in the scan, up to the faces of its outermost voxels.

        Args:
            points: In grid voxels; NaN lies nowhere.
        """
        return is_inside(transform(self.from_grid, points), self.shape)


@dataclass(frozen=True, slots=True)
class Grid:
    """A scan as a network takes it.

    Attributes:
        voxels: Normalised values on the device, float32, (i j k).
        to_volume: Grid voxel index -> index of the uploaded array.
        to_world: Grid voxel index -> mm, RAS.
        spacing_mm: Spacing of the grid along its own axes.
        window: Voxel values of the scan that became 0 and 1; None if the model's rule has none.
        scan: Where the scan lies, if the grid reaches past it; None: the grid ends where it does.
    """

    voxels: Voxels
    to_volume: Affine
    to_world: Affine
    spacing_mm: tuple[float, float, float]
    window: tuple[float, float] | None = None
    scan: ScanExtent | None = None


def make_grid(volume: Volume, spec: InputSpec, device: torch.device) -> Grid:
    """Bring a volume to a device in a model's axes, spacing and intensities.

    Returns:
        The grid, with its float64 maps back to the uploaded array and to mm.
    """
    voxels, volume_from_axes = orient(volume.voxels, volume.affine, spec.orientation)
    spacing = spacing_of(volume.affine @ volume_from_axes)
    step = np.asarray(spec.spacing_mm) / spacing
    as_nnunet = spec.tile_layout == "nnunet"
    if spec.trim:
        voxels, axes_from_shown = _trim(voxels)
        volume_from_axes = volume_from_axes @ axes_from_shown
    if as_nnunet:
        voxels, axes_from_box = crop(voxels, 0)
        volume_from_axes = volume_from_axes @ axes_from_box
        values = upload(voxels, device, "K" if np.prod(step) > 1 else "C")
    else:
        values, axes_from_grid = resample(voxels, step, device)
    window = find_window(values, spec.intensity)
    values = normalise_(values, spec.intensity, window)
    if as_nnunet:
        values, axes_from_grid = resample_as_nnunet(values, spacing, spec.spacing_mm)
    to_volume = volume_from_axes @ axes_from_grid
    return Grid(
        voxels=values,
        to_volume=to_volume,
        to_world=volume.affine @ to_volume,
        spacing_mm=spec.spacing_mm,
        window=window,
    )


def grid_shape(
    shape: tuple[int, int, int], affine: Affine, spec: InputSpec
) -> tuple[int, int, int]:
    """Compute the shape of a scan's grid from its header: the largest, if it may be cropped."""
    # One zero with strides of 0: an array of any shape that takes no memory.
    view, volume_from_axes = orient(np.broadcast_to(np.zeros(()), shape), affine, spec.orientation)
    step = np.asarray(spec.spacing_mm) / spacing_of(affine @ volume_from_axes)
    i, j, k = (resampled_size(n, s) for n, s in zip(view.shape, step, strict=True))
    return i, j, k


def orient(array: np.ndarray, affine: Affine, orientation: str) -> tuple[np.ndarray, Affine]:
    """View an array in other anatomical axes by permuting and flipping; nothing is copied.

    Args:
        array: Voxel values, (i j k).
        affine: Array index -> mm, RAS.
        orientation: The axes to view it in: one letter of each of LR, PA, IS per axis, naming where
            the axis points.

    Returns:
        The view, and the affine that maps its indices to indices of ``array``.
    """
    turn = ornt_transform(assign_axes(affine), axcodes2ornt(orientation))
    return apply_orientation(array, turn), inv_ornt_aff(turn, array.shape)


def crop(array: np.ndarray, blank: float) -> tuple[np.ndarray, Affine]:
    """View the smallest box of an array that holds all that is not blank; nothing is copied.

    Returns:
        The view, all of an array that is blank; and the affine that maps its indices to those of
        the array.
    """
    box, before = array, []
    for axis in range(3):
        planes = np.moveaxis(box, axis, 0)
        first = _count_blank(planes, blank)
        if first == len(planes):
            return array, np.eye(4)
        before.append(float(first))
        box = np.moveaxis(planes[first : len(planes) - _count_blank(planes[::-1], blank)], 0, axis)
    return box, translation(before)


def find_blank(array: np.ndarray) -> float:
    """Find the value of the blank field around a scan, however its axes are flipped.

    Returns:
        Of the values that fill an outermost plane, the one that ``crop`` leaves least with; that of
        the first voxel, which crops nothing, if there are none.
    """
    values = {float(face[0, 0]) for face in _faces(array) if (face == face[0, 0]).all()}
    values = values or {float(array[0, 0, 0])}
    return min(values, key=lambda value: (crop(array, value)[0].size, value))


def trim(volume: Volume) -> Volume:
    """View a scan without the blank field around it, if that is no part of it; nothing is copied.

    The field, on whichever sides, is no part of a scan that has less than ``MIN_SHOWN`` of all
    voxels, or less than ``MIN_ALIKE`` of those next to it, on any side, are as it is: they are of
    other air, as in CT that was padded with -3000 or with 0, or of a subject that goes on there.
    What is left may have a field, too.
    """
    voxels, volume_from_shown = _trim(volume.voxels)
    return replace(volume, voxels=voxels, affine=volume.affine @ volume_from_shown)


def _trim(array: np.ndarray) -> tuple[np.ndarray, Affine]:
    """View what ``trim`` leaves of voxels, and map its indices to theirs."""
    shown, array_from_shown = array, np.eye(4)
    for _ in range(MAX_PADDINGS):
        blank = find_blank(shown)
        box, shown_from_box = crop(shown, blank)
        is_large = box.size >= MIN_SHOWN * shown.size
        if is_large and _is_part(blank, shown, box, shown_from_box):
            break
        shown, array_from_shown = box, array_from_shown @ shown_from_box
    return shown, array_from_shown


def _is_part(blank: float, array: np.ndarray, box: np.ndarray, array_from_box: Affine) -> bool:
    """Say whether the blank field that ``crop`` takes away may be a part of a scan."""
    first = array_from_box[:3, 3]
    is_cut = np.stack([first > 0, first + box.shape < array.shape], axis=1)
    beside = compress(_faces(box), is_cut.ravel())
    return all((face == blank).mean() >= MIN_ALIKE for face in beside)


def _faces(array: np.ndarray) -> list[np.ndarray]:
    """View the outermost planes of an array."""
    return [np.moveaxis(array, axis, 0)[end] for axis in range(3) for end in (0, -1)]


def _count_blank(planes: np.ndarray, blank: float) -> int:
    """Count the planes that hold one value alone, from the first one on."""
    counts = (count for count, plane in enumerate(planes) if (plane != blank).any())
    return next(counts, len(planes))
