"""What a scan will take, from its header alone: tiles and memory.

The bytes per voxel were measured on a CPU and rounded up: a volume is held as it is stored, and
besides it what two of its axes are resampled to, or its smoothed copy in two bytes; a grid is held
in float32, with the votes of its voxels; and a network that sees grids whole has 130 to 240 bytes
of activations per voxel at once, and what it answers, which grows with the number of landmarks. So
does the mean of tiles before a softmax.
"""

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Final

from app.errors import BadGeometry, TooLarge
from app.geometry import spacing_of
from app.io import ONLY, Content, Header, Selection, VolumeLimits, check_header
from app.model import WHOLE, LoadedModel
from app.preprocessing import count_tiles, grid_shape
from app.voting import DenseMean, mean_of

FILTER_BYTES: Final = 5
"""Per voxel of a scan, besides its values: the scan filtered along two axes, in float32, rounded
up."""

UPLOAD_BYTES: Final = 8
"""Instead of FILTER_BYTES where a scan is filtered on another device, or as nnU-Net does it: its
copy in float32, half resampled."""

GRID_BYTES: Final = 16
"""Per voxel of a grid: its value, a part of its neighbours' while resampled, and votes."""

WHOLE_BYTES: Final = 256
"""Per voxel of a grid that the network sees whole: activations."""

SUMS: Final = 3
"""Outputs in memory, besides that of a single pass, while those of several passes are averaged."""

SOFTMAX: Final = 2
"""Outputs in memory, besides that of a pass, for a softmax over the scan."""

BASE_BYTES: Final = 16 << 20
"""Of any scan: what a batch of tiles takes, its votes, its answer."""


VALUE_BYTES: Final = 4
"""Of a voxel of a heatmap, float32."""

GRID_COPIES: Final = 3
"""Heatmaps on the model's grid that are in memory at once, while one is smoothed."""

SLAB_VOXELS: Final = 1 << 20
"""Voxels of a file of heatmaps that are resampled at once."""

SLAB_BYTES: Final = 24
"""Per voxel of a slab: its coordinates, its value, and the value in the file's order."""

MAX_UPSAMPLING: Final = 512
"""Voxels of a grid per voxel of its scan: eight along each axis. More would show nothing more."""

SMALL_GRID: Final = 1_000_000
"""Voxels of a grid that is not worth a refusal."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a scan will take.

    Attributes:
        lane: Of its first pass; see ``ScanState``.
        tiles: Of its first pass.
        memory: Bytes that it holds between its decoding and its answer, heatmaps included.
    """

    lane: Hashable
    tiles: int
    memory: int


def forecast(
    head: Content,
    limits: VolumeLimits,
    model: LoadedModel,
    selection: Selection = ONLY,
    heatmaps: int = 0,
    check_cancelled: Callable[[], None] = lambda: None,
) -> Forecast:
    """Read the header of a file, and say what its scan will take; nothing is allocated.

    Args:
        head: The file's first ``HEAD_BYTES``, or all of it; all of it where ``is_dicom``.
        limits: Of the scan.
        model: The model to use.
        selection: Which scan of a file that holds several.
        heatmaps: How many are made of its votes.
        check_cancelled: As for ``read_volume``.

    Raises:
        RequestError: As ``read_volume``, where the header tells enough.
        TooLarge: The grid is larger than the model allows, or than one tile if it takes no more.
        BadGeometry: The voxels of the scan are far too coarse for the model.
    """
    header = check_header(head, limits, selection, check_cancelled)
    spec, stride = model.manifest.input, model.manifest.network.output_stride
    shape = grid_shape(header.shape, header.affine, spec)
    voxels, grid = math.prod(header.shape), math.prod(shape)
    if grid > max(SMALL_GRID, MAX_UPSAMPLING * voxels):
        raise BadGeometry(
            f"expected voxels at most 8 times as wide as the model's "
            f"{' x '.join(f'{mm:g}' for mm in spec.spacing_mm)} mm, got voxels of "
            f"{' x '.join(f'{mm:.3g}' for mm in spacing_of(header.affine))} mm. Is it the right "
            "model, and the spacing in the file right?"
        )
    tile_shape, tiles = count_tiles(shape, spec, stride)
    check_tiles(model, tiles)
    per_grid_voxel = GRID_BYTES
    if spec.tile_shape == WHOLE:
        per_grid_voxel += WHOLE_BYTES + _output_bytes(model)
    elif isinstance(mean_of(model.manifest, shape, tiles), DenseMean):
        per_grid_voxel += -(-VALUE_BYTES * (1 + sum(model.manifest.channels)) // stride**3)
    memory = BASE_BYTES + voxels * _voxel_bytes(header, model) + grid * per_grid_voxel
    if heatmaps:
        memory += _heatmap_bytes(header.shape, grid, heatmaps)
    return Forecast((model.digest, tile_shape), tiles, memory)


def _voxel_bytes(header: Header, model: LoadedModel) -> int:
    """Return what a voxel of a scan takes while it is decoded, and then becomes a grid."""
    values = header.value_dtype
    # Floats that are not finite are found by their sizes, and a mask.
    masking = values.itemsize + 1 if values.kind == "f" else 0
    is_copied = header.is_scaled or values.itemsize != header.dtype.itemsize
    decoding = values.itemsize + masking + (header.dtype.itemsize if is_copied else 0)
    in_slabs = model.network.device.type == "cpu" and model.manifest.input.tile_layout != "nnunet"
    return max(decoding, values.itemsize + (FILTER_BYTES if in_slabs else UPLOAD_BYTES))


def _heatmap_bytes(shape: tuple[int, ...], grid: int, count: int) -> int:
    """Say what a file of heatmaps takes at most, as if nothing of it could be packed."""
    slab = SLAB_BYTES * max(SLAB_VOXELS, shape[0] * shape[1])  # A slab is one plane at least.
    return grid * GRID_COPIES * VALUE_BYTES + slab + count * math.prod(shape) * VALUE_BYTES


def _output_bytes(model: LoadedModel) -> int:
    """Return how much a network answers for a voxel that it sees, in all copies at once."""
    network = model.manifest.network
    if network.votes_each is not None:  # Of coordinates, the same for any scan.
        return 0
    copies = 1 + (SUMS if model.network.passes > 1 else 0)
    copies += SOFTMAX if network.activation == "spatial_softmax" else 0
    return copies * VALUE_BYTES * sum(model.manifest.channels) // network.output_stride**3


def check_tiles(model: LoadedModel, tiles: int) -> None:
    """Refuse scans of several tiles where each would answer all landmarks of its own.

    Raises:
        TooLarge: The network answers coordinates, and sees the scan in parts.
    """
    if tiles > 1 and model.manifest.network.output == "coordinates":
        spec = model.manifest.input
        raise TooLarge(
            f"expected a scan that fits one tile of {list(spec.tile_shape)} voxels at the model's "
            f"spacing of {' x '.join(f'{mm:g}' for mm in spec.spacing_mm)} mm, as its network "
            f"answers coordinates, got one of {tiles} tiles"
        )
