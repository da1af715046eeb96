"""Grid -> tile plan: where the tiles of a scan lie, and what each of their voxels counts.

Votes are additive, so overlapping tiles need no blended volume: a tile's vote is weighed by the
tile's importance at the voxel it comes from, and at every voxel the importances of all tiles that
cover it sum to one. Importance is a product of one profile per axis, so a plan holds a few lines of
numbers, however large the grid.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor
from torch.nn import functional

from app.compute import Voxels
from app.errors import TooLarge
from app.geometry import Origins
from app.model import WHOLE, InputSpec

Profiles: TypeAlias = tuple[
    Float[Tensor, "place_i u"], Float[Tensor, "place_j v"], Float[Tensor, "place_k w"]
]
"""Per axis, importance by place of a tile along that axis and field voxel in it; on a device."""

PROFILE_SIGMA: Final = 0.25
"""Width of the importance profile in tile lengths: a border counts exp(-2) of the middle."""


@dataclass(frozen=True, slots=True)
class TilePlan:
    """The tiles of one grid.

    Attributes:
        grid_shape: Shape of the grid in voxels.
        tile_shape: Shape of every tile in voxels; tiles that reach over the grid's end are padded.
        stride: Grid voxels per field voxel; divides every origin.
        origins: Grid index of the first voxel of every tile.
        profiles: Per axis, importance by place of the tile along that axis and field voxel in it.
        places: Place of every tile along each axis: row of ``profiles``.
    """

    grid_shape: tuple[int, int, int]
    tile_shape: tuple[int, int, int]
    stride: int
    origins: Origins
    profiles: tuple[Float64[np.ndarray, "_ _"], ...]
    places: Origins

    def __len__(self) -> int:
        """Count the tiles."""
        return len(self.origins)


def plan_tiles(grid_shape: Sequence[int], spec: InputSpec, stride: int) -> TilePlan:
    """Lay tiles over a grid.

    Args:
        grid_shape: Shape of the grid in voxels.
        spec: The model's tile shape and overlap, or that it sees grids whole.
        stride: Grid voxels per voxel of the network's output.

    Returns:
        The plan.

    Raises:
        TooLarge: The model sees grids whole, and this one is larger than it takes.
    """
    shape = tile_shape_of(grid_shape, spec, stride)
    starts = [
        _starts(size, edge, spec.tile_overlap, stride)
        for size, edge in zip(grid_shape, shape, strict=True)
    ]
    profiles = tuple(
        _profiles(start, edge, stride) for start, edge in zip(starts, shape, strict=True)
    )
    places = np.stack(
        np.meshgrid(*[np.arange(len(start)) for start in starts], indexing="ij"), axis=-1
    ).reshape(-1, 3)
    origins = np.stack([starts[axis][places[:, axis]] for axis in range(3)], axis=1)
    i, j, k = grid_shape
    return TilePlan((i, j, k), shape, stride, origins, profiles, places)


def tile_shape_of(grid_shape: Sequence[int], spec: InputSpec, stride: int) -> tuple[int, int, int]:
    """Say which shape of tile a grid needs; a model that sees grids whole pads to its divisor."""
    if spec.tile_shape != WHOLE:
        return spec.tile_shape
    step = int(np.lcm(spec.divisor, stride))
    i, j, k = (step * -(-size // step) for size in grid_shape)
    if i * j * k > spec.max_voxels:
        raise TooLarge(
            f"expected a scan of at most {spec.max_voxels} voxels at the model's spacing of "
            f"{' x '.join(f'{s:g}' for s in spec.spacing_mm)} mm, got {i} x {j} x {k}"
        )
    return i, j, k


def cut(voxels: Voxels, plan: TilePlan, index: int) -> Float[Tensor, "1 tile_i tile_j tile_k"]:
    """Cut one tile out of a grid, padded with zeros past the grid's end."""
    i, j, k = plan.origins[index]
    a, b, c = plan.tile_shape
    tile = voxels[i : i + a, j : j + b, k : k + c]
    missing = [edge - size for edge, size in zip(plan.tile_shape, tile.shape, strict=True)]
    padding = [0, missing[2], 0, missing[1], 0, missing[0]]
    return functional.pad(tile, padding)[None] if any(missing) else tile[None]


def load_profiles(plan: TilePlan, device: torch.device) -> Profiles:
    """Bring a plan's profiles of importance to a device, once for all its tiles."""
    i, j, k = (torch.from_numpy(profile).float().to(device) for profile in plan.profiles)
    return i, j, k


def weigh(
    plan: TilePlan, index: int, profiles: Profiles
) -> tuple[Float[Tensor, " i"], Float[Tensor, " j"], Float[Tensor, " k"]]:
    """Give a tile's importance along each axis; a field voxel's is the product of its three."""
    i, j, k = (
        profile[int(place)] for profile, place in zip(profiles, plan.places[index], strict=True)
    )
    return i, j, k


def _starts(size: int, edge: int, overlap: float, stride: int) -> Int[np.ndarray, " tiles"]:
    """Spread the fewest tiles that overlap enough over an axis, on multiples of the stride."""
    if size <= edge:
        return np.zeros(1, dtype=np.int64)
    step = max(stride, int(edge * (1 - overlap)) // stride * stride)
    last = -(-(size - edge) // stride) * stride
    count = -(-last // step) + 1
    return np.asarray(np.round(np.linspace(0, last // stride, count)).astype(np.int64) * stride)


def _profiles(
    starts: Int[np.ndarray, " tiles"], edge: int, stride: int
) -> Float64[np.ndarray, "place u"]:
    """Make each tile's importance along an axis: its Gaussian over the sum of all there."""
    size = edge // stride
    inside = (np.arange(size) + 0.5) / size - 0.5
    shape = np.exp(-0.5 * (inside / PROFILE_SIGMA) ** 2)
    total = np.zeros(int(starts[-1]) // stride + size)
    for start in starts // stride:
        total[start : start + size] += shape
    return np.stack([shape / total[start : start + size] for start in starts // stride])
