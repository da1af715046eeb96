"""Grid -> tiles: where they lie, and how much each of their voxels counts.

Votes are additive, so overlapping tiles need no blended volume: a vote is weighted by its tile's
importance at the voxel it comes from, and at every voxel the importances of all tiles that cover it
sum to one. Importance is a product of one profile per axis, so a plan holds a few short profiles,
however large the grid.

``tile_layout`` says where tiles lie, and where the Gaussian peaks by which each counts:

========  ==========================================  =============================  ===========
even      the fewest that overlap enough, spread      grids are padded at their end  middle
nnunet    the same, over what is not zero             at both ends, as by nnU-Net    a voxel
monai     side by side, the last moved back to fit    at both ends, as by MONAI      middle
========  ==========================================  =============================  ===========

With ``monai`` importances are not divided by their sum, as MONAI bounds them from below before it
does that.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor
from torch.nn import functional

from app.compute import Voxels, upload_numbers
from app.errors import TooLarge
from app.model import WHOLE, InputSpec

Profiles: TypeAlias = tuple[
    Float[Tensor, "tiles_i u"], Float[Tensor, "tiles_j v"], Float[Tensor, "tiles_k w"]
]
"""Importance along each axis, by tile along that axis and field voxel of the tile; on a device."""

Indices: TypeAlias = Int[np.ndarray, "tiles 3"]


@dataclass(frozen=True, slots=True)
class TilePlan:
    """The tiles of one grid.

    Attributes:
        grid_shape: Shape of the grid in voxels.
        tile_shape: Shape of every tile in voxels; tiles that reach over the grid's end are padded.
        stride: Grid voxels per field voxel; divides every origin.
        origins: Grid index of the first voxel of every tile; negative before a padded grid.
        profiles: Importance along each axis, by tile along that axis and field voxel of the tile.
        profile_rows: Row of each axis's ``profiles`` that holds a tile's importance.
    """

    grid_shape: tuple[int, int, int]
    tile_shape: tuple[int, int, int]
    stride: int
    origins: Indices
    profiles: tuple[Float64[np.ndarray, "_ _"], ...]
    profile_rows: Indices

    def __len__(self) -> int:
        return len(self.origins)


def plan_tiles(grid_shape: Sequence[int], spec: InputSpec, stride: int) -> TilePlan:
    """Cover a grid with tiles.

    Args:
        grid_shape: Shape of the grid in voxels.
        spec: The model's tile shape and overlap, or that it takes grids whole.
        stride: Grid voxels per voxel of the network's output.

    Raises:
        TooLarge: The model takes grids whole, and this one is larger than it may be.
    """
    shape = tile_shape(grid_shape, spec, stride)
    starts = [
        _starts(size, edge, spec, stride) for size, edge in zip(grid_shape, shape, strict=True)
    ]
    profiles = tuple(
        _profiles(start // stride, edge // stride, spec)
        for start, edge in zip(starts, shape, strict=True)
    )
    rows = np.stack(
        np.meshgrid(*[np.arange(len(start)) for start in starts], indexing="ij"), axis=-1
    ).reshape(-1, 3)
    origins = np.stack([starts[axis][rows[:, axis]] for axis in range(3)], axis=1)
    i, j, k = grid_shape
    return TilePlan((i, j, k), shape, stride, origins, profiles, rows)


def tile_shape(grid_shape: Sequence[int], spec: InputSpec, stride: int) -> tuple[int, int, int]:
    """Choose the tile shape for a grid; a model that takes grids whole pads to its divisor."""
    if spec.tile_shape != WHOLE:
        return spec.tile_shape
    step = int(np.lcm(spec.divisor, stride))
    i, j, k = (step * -(-size // step) for size in grid_shape)
    if i * j * k > spec.max_voxels:
        spans, padded = (
            " x ".join(f"{size * mm:.0f}" for size, mm in zip(shape, spec.spacing_mm, strict=True))
            for shape in (grid_shape, (i, j, k))
        )
        edge = (spec.max_voxels * math.prod(spec.spacing_mm)) ** (1 / 3)
        raise TooLarge(
            f"expected a scan that spans, padded, about {edge:.0f} mm along each axis at most "
            f"({spec.max_voxels:,} voxels at the model's spacing of "
            f"{' x '.join(f'{s:g}' for s in spec.spacing_mm)} mm), got one of "
            f"{spans} mm, padded to {padded} mm. Is it the right model, and the spacing in the "
            "file right?"
        )
    return i, j, k


def count_tiles(
    grid_shape: Sequence[int], spec: InputSpec, stride: int
) -> tuple[tuple[int, int, int], int]:
    """Return the tile shape for a grid, and how many tiles ``plan_tiles`` would plan."""
    edges = tile_shape(grid_shape, spec, stride)
    axes = zip(grid_shape, edges, strict=True)
    return edges, math.prod(len(_starts(size, edge, spec, stride)) for size, edge in axes)


def extract_tile(
    voxels: Voxels, plan: TilePlan, index: int
) -> Float[Tensor, "1 tile_i tile_j tile_k"]:
    """Extract one tile of a grid, padded with zeros past the grid's ends."""
    spans: list[slice] = []
    padding: list[int] = []
    for first, edge, size in zip(
        plan.origins[index], plan.tile_shape, plan.grid_shape, strict=True
    ):
        low, high = max(int(first), 0), min(int(first) + edge, size)
        spans.append(slice(low, high))
        padding = [low - int(first), int(first) + edge - high, *padding]  # The last axis first.
    tile = voxels[spans[0], spans[1], spans[2]]
    return functional.pad(tile, padding)[None] if any(padding) else tile[None]


def within_grid(plan: TilePlan, index: int) -> tuple[slice, slice, slice]:
    """Say which field voxels of a tile lie in the grid, and not in what it is padded with."""
    stride = plan.stride
    i, j, k = (
        slice(max(-int(first), 0) // stride, min(edge, -(-(size - int(first)) // stride)))
        for first, edge, size in zip(
            plan.origins[index],
            (edge // stride for edge in plan.tile_shape),
            plan.grid_shape,
            strict=True,
        )
    )
    return i, j, k


def load_profiles(plan: TilePlan, device: torch.device) -> Profiles:
    """Copy a plan's importance profiles to a device, once for all its tiles."""
    numbers = np.concatenate([profile.ravel() for profile in plan.profiles]).astype(np.float32)
    parts = upload_numbers(numbers, device).split([profile.size for profile in plan.profiles])
    i, j, k = (part.view(own.shape) for part, own in zip(parts, plan.profiles, strict=True))
    return i, j, k


def tile_weights(
    plan: TilePlan, index: int, profiles: Profiles
) -> tuple[Float[Tensor, " i"], Float[Tensor, " j"], Float[Tensor, " k"]]:
    """Return a tile's importance along each axis; a field voxel's is the product of the three."""
    rows = plan.profile_rows[index]
    i, j, k = (profile[int(row)] for profile, row in zip(profiles, rows, strict=True))
    return i, j, k


def _starts(size: int, edge: int, spec: InputSpec, stride: int) -> Int[np.ndarray, " tiles"]:
    """Put tiles along an axis, at multiples of the stride."""
    if size <= edge:
        before = 0 if spec.tile_layout == "even" else (edge - size) // 2 // stride
        return np.array([-before * stride])
    last, step = -(-(size - edge) // stride), _step(edge, spec, stride)
    count = math.ceil(last * stride / step) + 1
    if spec.tile_layout == "monai":
        starts = np.minimum(np.arange(count) * (step // stride), last)
    else:
        starts = np.round(np.linspace(0, last, count))
    return np.asarray(starts.astype(np.int64) * stride)


def _step(edge: int, spec: InputSpec, stride: int) -> float:
    """Return how far apart the starts of two tiles may be; nnU-Net does not round it."""
    step = edge * (1 - spec.tile_overlap)
    return step if spec.tile_layout == "nnunet" else max(stride, int(step) // stride * stride)


def _profiles(
    starts: Int[np.ndarray, " tiles"], size: int, spec: InputSpec
) -> Float64[np.ndarray, "tiles u"]:
    """Compute each tile's importance along an axis: its Gaussian over the sum of all Gaussians.

    With the layout of MONAI, whose sums are known only once all axes are, it is the Gaussian.

    Args:
        starts: First field voxel of each tile.
        size: Field voxels of a tile.
        spec: Where the Gaussian peaks, and how wide it is.
    """
    centre = size // 2 if spec.tile_layout == "nnunet" else (size - 1) / 2
    gaussian = np.exp(-0.5 * ((np.arange(size) - centre) / (size * spec.tile_sigma)) ** 2)
    if spec.tile_layout == "monai":
        return np.repeat(gaussian[None], len(starts), axis=0)
    starts = starts - starts[0]
    total = np.zeros(int(starts[-1]) + size)
    for start in starts:
        total[start : start + size] += gaussian
    return np.stack([gaussian / total[start : start + size] for start in starts])
