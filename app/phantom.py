"""Phantoms: generated scans whose landmarks are known exactly.

A phantom is a textured, noisy box in a random oblique pose with up to six bright or dark structures
in it. Every structure differs from the others in shape, under any rotation and in a neighbourhood
of a few centimetres, and its centre is the landmark. Structures are continuous functions of mm,
evaluated at voxel centres, so no rounding moves a landmark.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from blake3 import blake3
from jaxtyping import Float64

from app.durable import write_file
from app.errors import BadParameter
from app.geometry import Affine, Points, spacing_of, transform, translation
from app.io import Volume, markups_json, write_gzip, write_nifti

Point = Float64[np.ndarray, " 3"]
Distance = Callable[[Float64[np.ndarray, "i j k 3"]], Float64[np.ndarray, "i j k"]]

ABSENT_CHANCE: Final = 0.15
"""Chance that a structure is left out."""

AXIS_VOXELS: Final = (60, 110)
SPACING_MM: Final = (0.8, 2.0)
EXTENT_MM: Final = (88.0, 140.0)
"""Bounds of every axis: all six structures fit into the smallest box, whatever the voxel counts."""

MIN_DISTANCE_MM: Final = 25.0
MIN_MARGIN_MM: Final = 13.0
"""Least distances of a structure's centre from another's and from the faces of the scan."""

REACH_MM: Final = 14.0
"""Beyond this distance from its centre, no structure changes a voxel by as much as the noise."""

EDGE_MM: Final = 0.7
"""Width of every surface: a logistic step, 10 to 90 % within 4.4 of these, over two voxels."""

BACKGROUND: Final = 0.3
BRIGHT: Final = (0.85, 1.0)
DARK: Final = (0.0, 0.05)
"""Values before scale and offset. The texture varies by about 0.1 around the background."""

TEXTURE: Final = ((26.0, 0.07), (13.0, 0.035))
"""Distance between knots in mm and standard deviation at the knots, per octave."""

NOISE: Final = (0.01, 0.04)
"""Bounds of the standard deviation of the white noise."""


@dataclass(frozen=True, slots=True)
class Phantom:
    """A generated scan and its landmarks.

    Attributes:
        volume: The scan, int16.
        names: Names of the landmarks, always all of them, in one order.
        points: The landmarks in mm, RAS; NaN where the structure is absent.
    """

    volume: Volume
    names: tuple[str, ...]
    points: Points


def make_phantom(seed: int) -> Phantom:
    """Generate a phantom; the same seed gives the same phantom."""
    rng = np.random.default_rng(seed)
    shape, affine = _draw_pose(rng)
    index = _draw_centres(shape, spacing_of(affine), rng)
    points = transform(affine, index)
    points[rng.random(len(points)) < ABSENT_CHANCE] = np.nan
    values = BACKGROUND + _texture(shape, spacing_of(affine), rng)
    for point, (name, structure) in zip(points, STRUCTURES.items(), strict=True):
        rotation, size = _draw_rotation(rng), rng.uniform(0.95, 1.05)
        bright, dark = rng.uniform(*BRIGHT), rng.uniform(*DARK)
        if np.isfinite(point).all():
            # Shrinking the frame enlarges the structure.
            local = np.diag([*[1 / size] * 3, 1.0]) @ rotation @ translation(-point) @ affine
            _draw(values, local, structure, dark if name == "void" else bright)
    values += rng.uniform(*NOISE) * rng.standard_normal(shape)
    scale, offset = float(np.exp(rng.uniform(np.log(150), np.log(6000)))), rng.uniform(-1000, 1000)
    voxels = np.round(values * scale + offset).astype(np.int16)
    digest = blake3(write_nifti(voxels, affine)).hexdigest()
    return Phantom(Volume(voxels, affine, digest), tuple(STRUCTURES), points)


def scan_bytes(phantom: Phantom) -> bytes:
    """Encode the scan of a phantom as a gzipped NIfTI-1 file; equal phantoms give equal bytes."""
    return write_gzip([write_nifti(phantom.volume.voxels, phantom.volume.affine)])


def write_phantom(phantom: Phantom, path: Path) -> Path:
    """Write the scan of a phantom, and its landmarks beside it.

    Returns:
        The path of the landmark file: the scan's, ending in ``.mrk.json`` instead.

    Raises:
        BadParameter: The path has another ending.
    """
    if not path.name.endswith(".nii.gz"):
        raise BadParameter(f"expected a name ending in .nii.gz, got {path.name}")
    truth = path.with_name(path.name.removesuffix(".nii.gz") + ".mrk.json")
    write_file(path, scan_bytes(phantom))
    write_file(truth, markups_json(phantom.names, phantom.points).encode())
    return truth


def write_phantoms(folder: Path, count: int, seed: int) -> None:
    """Write phantoms of consecutive seeds into the folders ``scans`` and ``landmarks``."""
    scans, landmarks = folder / "scans", folder / "landmarks"
    for made in (scans, landmarks):
        made.mkdir(parents=True, exist_ok=True)
    for number in range(seed, seed + count):
        truth = write_phantom(make_phantom(number), scans / f"phantom-{number}.nii.gz")
        truth.replace(landmarks / truth.name)


def _draw_pose(rng: np.random.Generator) -> tuple[tuple[int, int, int], Affine]:
    """Draw a shape that is never cubic and any rotated, mirrored, shifted frame for it."""
    i, j, k = rng.choice(np.arange(AXIS_VOXELS[0], AXIS_VOXELS[1] + 1), 3, replace=False).tolist()
    count = np.array([i, j, k])
    low = np.maximum(SPACING_MM[0], EXTENT_MM[0] / count)
    high = np.minimum(SPACING_MM[1], EXTENT_MM[1] / count)
    spacing = rng.uniform(low, high)
    spacing[0] *= rng.choice([-1.0, 1.0])
    centre = translation(-(count - 1) / 2)
    shift = translation(rng.uniform(-80, 80, 3))
    affine = shift @ _draw_rotation(rng) @ np.diag([*spacing, 1.0]) @ centre
    # NIfTI-1 keeps the affine in float32: what is written must be what the landmarks refer to.
    return (i, j, k), affine.astype(np.float32).astype(np.float64)


def _draw_rotation(rng: np.random.Generator) -> Affine:
    """Draw a rotation, uniformly, from a unit quaternion."""
    w, x, y, z = (q := rng.standard_normal(4)) / np.sqrt((q**2).sum())
    rotation = np.eye(4)
    rotation[:3, :3] = [
        [1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w)],
        [2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w)],
        [2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y)],
    ]
    return rotation


def _draw_centres(
    shape: tuple[int, int, int], spacing_mm: Point, rng: np.random.Generator
) -> Points:
    """Draw a voxel index for every structure, far enough from the others and from every face."""
    low = MIN_MARGIN_MM / spacing_mm - 0.5
    high = np.array(shape) - 1 - low
    centres: list[Point] = []
    misses = 0
    while len(centres) < len(STRUCTURES):
        centre = rng.uniform(low, high)
        if all(
            np.linalg.norm((centre - other) * spacing_mm) >= MIN_DISTANCE_MM for other in centres
        ):
            centres.append(centre)
        elif (misses := misses + 1) > 200:
            # The first ones may have left no space: start over.
            centres, misses = [], 0
    return np.stack(centres)


def _texture(
    shape: tuple[int, int, int], spacing_mm: Point, rng: np.random.Generator
) -> Float64[np.ndarray, "i j k"]:
    """Draw a smooth random field: cubic B-splines through random knots, a few octaves."""
    total = np.zeros(shape)
    for knot_mm, amplitude in TEXTURE:
        bases = [_spline_basis(n, knot_mm / mm) for n, mm in zip(shape, spacing_mm, strict=True)]
        field = amplitude * rng.standard_normal([basis.shape[1] for basis in bases])
        for basis in bases:
            # Contracts the first axis and appends the new one: after three, all are in order.
            field = np.tensordot(field, basis, axes=([0], [1]))
        total += field
    return total


def _spline_basis(size: int, step: float) -> Float64[np.ndarray, "voxel knot"]:
    """Evaluate cubic B-splines, ``step`` voxels apart, at every voxel of a line."""
    knots = np.arange(-1, int(np.ceil((size - 1) / step)) + 2)
    distance = np.abs(np.arange(size)[:, None] / step - knots)
    near = 2 / 3 - distance**2 + distance**3 / 2
    far = np.clip(2 - distance, 0, None) ** 3 / 6
    return np.asarray(np.where(distance < 1, near, far))


def _draw(
    values: Float64[np.ndarray, "i j k"], local: Affine, structure: Distance, level: float
) -> None:
    """Blend a structure into the voxels near it; ``local`` maps voxel indices to its own mm."""
    index = np.linalg.inv(local)
    centre, reach = index[:3, 3], REACH_MM * np.linalg.norm(index[:3, :3], axis=1)
    start = np.maximum(np.floor(centre - reach), 0).astype(int)
    stop = np.minimum(np.ceil(centre + reach) + 1, values.shape).astype(int)
    box = tuple(slice(a, b) for a, b in zip(start, stop, strict=True))
    axes = [np.arange(a, b, dtype=np.float64) for a, b in zip(start, stop, strict=True)]
    points = transform(local, np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1))
    inside = 1 / (1 + np.exp(structure(points) / EDGE_MM))
    values[box] += inside * (level - values[box])


def _length(points: Float64[np.ndarray, "*n axes"]) -> Float64[np.ndarray, " *n"]:
    return np.asarray(np.sqrt((points**2).sum(axis=-1)))


def _ball(points: Float64[np.ndarray, "i j k 3"]) -> Float64[np.ndarray, "i j k"]:
    return _length(points) - 6.0


def _shell(points: Float64[np.ndarray, "i j k 3"]) -> Float64[np.ndarray, "i j k"]:
    return np.abs(_length(points) - 8.0) - 1.8


def _target(points: Float64[np.ndarray, "i j k 3"]) -> Float64[np.ndarray, "i j k"]:
    distance = _length(points)
    return np.asarray(np.minimum(distance - 3.0, np.abs(distance - 9.0) - 1.6))


def _dumbbell(points: Float64[np.ndarray, "i j k 3"]) -> Float64[np.ndarray, "i j k"]:
    arm = np.array([6.5, 0.0, 0.0])
    return np.asarray(np.minimum(_length(points - arm), _length(points + arm)) - 4.0)


def _ring(points: Float64[np.ndarray, "i j k 3"]) -> Float64[np.ndarray, "i j k"]:
    from_circle = np.stack([_length(points[..., :2]) - 7.0, points[..., 2]], axis=-1)
    return _length(from_circle) - 2.2


STRUCTURES: Final[dict[str, Distance]] = {
    "ball": _ball,
    "void": _ball,
    "shell": _shell,
    "target": _target,
    "dumbbell": _dumbbell,
    "ring": _ring,
}
"""Signed distance to the surface in mm, in the structure's own frame, by landmark name."""
