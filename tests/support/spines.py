"""Lumbar spines, and the same as others would scan them."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final, Literal

import numpy as np
from scipy.ndimage import affine_transform, gaussian_filter
from scipy.spatial.transform import Rotation

from app.geometry import Affine, scaling, transform, translation
from app.io import Volume, read_volume
from app.training.data.specimens import SpecimenFiles

MODEL: Final = Path(__file__).resolve().parents[2] / "models" / "lumbar-mri"
SUBJECTS: Final = tuple(f"subject-{number:02}" for number in (2, 9, 15, 21, 27, 34, 40, 47))
"""Some of them. The lumbar-mri model has learned from all."""

LORDOSIS: Final = "lordosis L1-L5"

BRIGHT: Final = 99.5
"""Percentile that a curve maps from 1."""


def spine_files(data: Path, name: str) -> SpecimenFiles:
    """Return the files of a subject."""
    folder = data / "lumbar-mri"
    landmarks = folder / "landmarks" / f"{name}.mrk.json"
    return SpecimenFiles(name, folder / "scans" / f"{name}.nii.gz", landmarks)


def read_spine(data: Path, name: str) -> Volume:
    """Read a scan."""
    return read_volume(spine_files(data, name).scan.read_bytes())


def _curve(*values: float) -> Callable[[Volume], Volume]:
    """Map voxel values by a piecewise linear curve, as another sequence would; air stays dark."""

    def change(volume: Volume) -> Volume:
        voxels = volume.voxels / np.percentile(volume.voxels, BRIGHT)
        knots = np.linspace(0.0, 1.0, len(values))
        return replace(volume, voxels=np.interp(voxels, knots, values).astype(np.float32))

    return change


def _thick(volume: Volume) -> Volume:
    """Average every four slices from side to side."""
    i, j, k = volume.voxels.shape
    voxels = volume.voxels[:, :, : k // 4 * 4].reshape(i, j, k // 4, 4).mean(axis=3)
    affine = volume.affine @ translation([0.0, 0.0, 1.5]) @ scaling([1.0, 1.0, 4.0])
    return replace(volume, voxels=voxels.astype(np.float32), affine=affine)


def _wider(mode: Literal["constant", "edge", "symmetric"]) -> Callable[[Volume], Volume]:
    """Show 78 mm more on all sides but left and right: nothing, or what ``np.pad`` makes of it."""

    def change(volume: Volume) -> Volume:
        voxels = np.pad(volume.voxels, ((78, 78), (78, 78), (0, 0)), mode=mode)
        affine = volume.affine @ translation([-78.0, -78.0, 0.0])
        return replace(volume, voxels=voxels, affine=affine)

    return change


def _more_above(volume: Volume) -> Volume:
    """Show 144 mm more above, with four more vertebrae: the upper 72 mm twice again."""
    top = volume.voxels[:72]
    voxels = np.concatenate([top, top, volume.voxels])
    return replace(volume, voxels=voxels, affine=volume.affine @ translation([-144.0, 0.0, 0.0]))


def _noisy(volume: Volume) -> Volume:
    noise = np.random.default_rng(0).normal(0.0, 15.0, volume.voxels.shape)
    return replace(volume, voxels=(volume.voxels + noise).clip(0, 255).astype(np.float32))


def _noisier(deviations: float) -> Callable[[Volume], Volume]:
    """Add noise, of so many standard deviations of the scan's values, to every voxel of 1 mm."""

    def change(volume: Volume) -> Volume:
        voxels = volume.voxels.astype(np.float32)
        noise = np.random.default_rng(0).standard_normal(voxels.shape, np.float32)
        return replace(volume, voxels=voxels + deviations * voxels.std() * noise)

    return change


def _smoothed(width_mm: float) -> Callable[[Volume], Volume]:
    """Smooth by a Gaussian of this full width at half maximum; voxels have 1 mm."""

    def change(volume: Volume) -> Volume:
        voxels = volume.voxels.astype(np.float32)
        return replace(volume, voxels=gaussian_filter(voxels, width_mm / 2.355))

    return change


def _without_the_top(volume: Volume) -> Volume:
    """Cut away the upper quarter; the first axis points down."""
    rows = volume.voxels.shape[0] // 4
    affine = volume.affine @ translation([float(rows), 0.0, 0.0])
    return replace(volume, voxels=volume.voxels[rows:], affine=affine)


def _without_the_bottom(volume: Volume) -> Volume:
    """Cut away the lower fifth, and mostly the sacrum with it."""
    return replace(volume, voxels=volume.voxels[: -(volume.voxels.shape[0] // 5)])


def _middle(volume: Volume) -> Volume:
    """Leave the middle two fifths: a few vertebrae, with neither the sacrum nor the last ribs."""
    rows = volume.voxels.shape[0]
    first, last = round(0.3 * rows), round(0.7 * rows)
    affine = volume.affine @ translation([float(first), 0.0, 0.0])
    return replace(volume, voxels=volume.voxels[first:last], affine=affine)


def _middle_of_a_blank_scan(volume: Volume) -> Volume:
    """Set all but the middle two fifths to zero, as a mask does."""
    voxels, rows = np.zeros_like(volume.voxels), volume.voxels.shape[0]
    shown = slice(round(0.3 * rows), round(0.7 * rows))
    voxels[shown] = volume.voxels[shown]
    return replace(volume, voxels=voxels)


def _turned(volume: Volume) -> tuple[Volume, Affine]:
    """Scan the patient with slices 44 degrees oblique: the affine says so."""
    turn = np.eye(4)
    turn[:3, :3] = Rotation.from_euler("x", 44, degrees=True).as_matrix()
    shape = (305, 305, 137)  # It ends 30 to 40 mm beyond the scan.
    middle = transform(volume.affine, (np.array(volume.voxels.shape) - 1) / 2)
    affine = translation(middle) @ turn @ translation(-middle) @ volume.affine
    affine = affine @ translation((np.array(volume.voxels.shape) - shape) / 2)
    index = np.linalg.inv(volume.affine) @ affine
    voxels = affine_transform(
        volume.voxels.astype(np.float32), index[:3, :3], index[:3, 3], shape, order=1
    )
    return replace(volume, voxels=voxels, affine=affine), np.eye(4)


def _with_wrong_signs(*signs: float) -> Callable[[Volume], tuple[Volume, Affine]]:
    """Have an affine with wrong signs of x, y and z, as of LPS that is taken for RAS."""

    def change(volume: Volume) -> tuple[Volume, Affine]:
        wrong = scaling(signs)
        return replace(volume, affine=wrong @ volume.affine), wrong

    return change


def _in_a_wrong_size(*sizes: float) -> Callable[[Volume], tuple[Volume, Affine]]:
    """Have an affine that says a wrong size of voxels along x, y and z."""
    return _with_wrong_signs(*sizes)


def _twisted(volume: Volume) -> tuple[Volume, Affine]:
    """Turn the patient by 40 degrees about the long axis, within the same field, blank around."""
    middle = transform(volume.affine, (np.array(volume.voxels.shape) - 1) / 2)
    turn = np.eye(4)
    turn[:3, :3] = Rotation.from_euler("z", 40, degrees=True).as_matrix()
    motion = translation(middle) @ turn @ translation(-middle)
    index = np.linalg.inv(volume.affine) @ np.linalg.inv(motion) @ volume.affine
    voxels = volume.voxels.astype(np.float32)
    turned = affine_transform(voxels, index[:3, :3], index[:3, 3], voxels.shape, order=1)
    return replace(volume, voxels=turned), motion


def _slab(volume: Volume) -> tuple[Volume, Affine]:
    """Leave 20 mm beside the middle: networks take the middle of these for that of the spine."""
    first = volume.voxels.shape[2] // 2 + 4
    affine = volume.affine @ translation([0.0, 0.0, float(first)])
    return replace(volume, voxels=volume.voxels[:, :, first : first + 20], affine=affine), np.eye(4)


UNLIKE_ALL: Final[Mapping[str, Callable[[Volume], tuple[Volume, Affine]]]] = {
    "1.6 times as large": _in_a_wrong_size(1.6, 1.6, 1.6),
    "1.6 times as large in the plane": _in_a_wrong_size(1.0, 1.6, 1.6),
    "1.5 times as long": _in_a_wrong_size(1.0, 1.0, 1.5),
    "turned about the long axis": _twisted,
    "a slab of its side": _slab,
}
"""Spines of a size or in a pose that no patient has, or in too thin a scan, and the map of their
true landmarks, mm of the scan as it was -> mm, RAS."""

MISLAID: Final[Mapping[str, Callable[[Volume], tuple[Volume, Affine]]]] = {
    "far from the axes of the scan": _turned,
    "front to back": _with_wrong_signs(1.0, -1.0, 1.0),
    "upside down": _with_wrong_signs(1.0, 1.0, -1.0),
    "in RAS called LPS": _with_wrong_signs(-1.0, -1.0, 1.0),
}
"""Spines that do not lie as a network of upright scans takes them to, and the map of their true
landmarks, mm of the scan as it was -> mm, RAS."""

CONTRASTS: Final[Mapping[str, Callable[[Volume], Volume]]] = {
    "inverted": _curve(0.0, 0.9, 0.7, 0.5, 0.3, 0.1),
    "bright marrow": _curve(0.0, 0.4, 0.8, 0.5, 0.45, 0.6),
    "like T1": _curve(0.0, 0.5, 0.58, 0.3, 0.2, 0.15),
}
"""The same subjects in other contrasts."""

FIELDS: Final[Mapping[str, Callable[[Volume], Volume]]] = {
    "slices of 4 mm": _thick,
    "a larger field": _wider("constant"),
    "a larger field, mirrored": _wider("symmetric"),
    "a larger field, drawn out": _wider("edge"),
    "more vertebrae above": _more_above,
    "noise": _noisy,
    "without the upper quarter": _without_the_top,
    "without the lower fifth": _without_the_bottom,
}
"""The same subjects as others would scan them."""

WORSE: Final[Mapping[str, Callable[[Volume], Volume]]] = {
    "noise of 1 standard deviation": _noisier(1.0),
    "noise of 2 standard deviations": _noisier(2.0),
    "noise of 4 standard deviations": _noisier(4.0),
    "smoothed by 4 mm": _smoothed(4.0),
    "smoothed by 8 mm": _smoothed(8.0),
    "smoothed by 16 mm": _smoothed(16.0),
}
"""The same subjects in scans that are worse."""

AMBIGUOUS: Final[Mapping[str, Callable[[Volume], Volume]]] = {
    "the middle alone": _middle,
    "the middle alone, the rest blank": _middle_of_a_blank_scan,
}
"""The same subjects, with nothing in the scan that tells one level from the next."""
