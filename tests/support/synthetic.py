"""Synthetic fields, votes and shapes with known answers, for the tests of voting."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from scipy.spatial.transform import Rotation
from torch import Tensor

from app.geometry import Affine
from app.model import Shape
from app.model.manifest import Manifest
from app.model.outputs import Field
from app.preprocessing.grid import Grid
from app.voting.landmarks import Landmark, locate
from app.voting.readout import GridFrame, make_readout
from app.voting.reference import Placement, filter_columns
from app.voting.votes import WHOLE_GRID, Votes

Activation = Literal["none", "sigmoid", "softmax"]
ACTIVATIONS: tuple[Activation, ...] = ("none", "sigmoid", "softmax")

SCAN_SHAPE = (40, 36, 44)
"""Shape of the made-up scan that ``find`` searches; its indices are mm."""
SCAN_RADIUS = 6.0
"""Its voxels vote within this distance of a landmark."""


SHAPE_LANDMARKS = 45
"""Landmarks of the shape that ``make_shape`` makes."""


def random_field(
    shape: Sequence[int], landmarks: int, activation: Activation = "softmax", seed: int = 0
) -> Field:
    """Make a field of noise: about a fifth of voxels and landmarks pass a threshold of 0.3."""
    random = torch.Generator().manual_seed(seed)
    channels = landmarks + (activation == "softmax")
    scores = 2 * torch.randn(channels, *shape, generator=random) - 1
    if activation == "none":
        scores = torch.rand(channels, *shape, generator=random)
    offsets = 4 * torch.randn(3, landmarks, *shape, generator=random)
    return Field(scores, offsets, activation, activation == "softmax")


def filter_votes_by_torch(
    field: Field, threshold: float, placement: Placement = WHOLE_GRID
) -> Votes:
    """Do as ``filter_votes`` by the definition in plain torch."""
    return Votes(*filter_columns(field, threshold, placement))


def ball_votes(
    centre: Sequence[float],
    shape: Sequence[int],
    radius: float,
    *,
    landmark: int = 0,
    noise: float = 1.0,
    seed: int = 0,
) -> Votes:
    """Let all voxels within a radius of a point vote for it with noise and probability 0.8."""
    random = np.random.default_rng(seed)
    voxels = np.stack(np.meshgrid(*[np.arange(n) for n in shape], indexing="ij"), axis=-1)
    source = voxels.reshape(-1, 3)
    source = source[np.linalg.norm(source - np.asarray(centre), axis=1) <= radius]
    position = np.asarray(centre) + noise * random.standard_normal(source.shape)
    return votes_at(position, landmark=landmark, probability=0.8, source=source)


def votes_at(
    position: NDArray[np.float64] | Sequence[Sequence[float]],
    *,
    landmark: int | Sequence[int] = 0,
    probability: float | Sequence[float] = 1.0,
    source: NDArray[np.int64] | None = None,
) -> Votes:
    """Make votes for given positions."""
    positions = torch.as_tensor(np.asarray(position), dtype=torch.float32).reshape(-1, 3)
    weight = torch.as_tensor(probability, dtype=torch.float32).expand(len(positions))
    origin = positions if source is None else torch.as_tensor(source, dtype=torch.float32)
    landmarks = torch.as_tensor(landmark, dtype=torch.int64).expand(len(positions)).clone()
    return Votes(landmarks, torch.cat([origin.T, positions.T, weight[None], weight[None]]))


def shuffled(votes: Votes, seed: int) -> Votes:
    """Put the votes into another order."""
    return votes.select(torch.randperm(len(votes), generator=torch.Generator().manual_seed(seed)))


def pointing_at(votes: Votes, position: NDArray[np.float64]) -> Votes:
    """Let votes point somewhere else."""
    columns = votes.columns.clone()
    columns[3:6] = torch.from_numpy(position.T)
    return Votes(votes.landmark, columns)


def moved(votes: Votes, by: Float[Tensor, " 3"]) -> Votes:
    """Translate votes and the voxels that cast them."""
    still = torch.zeros(2)
    return Votes(votes.landmark, votes.columns + torch.cat([by, by, still])[:, None])


def make_manifest(
    landmarks: int = 1, *, shape: bool = False, stride: int = 1, spacing: float = 1.0
) -> Manifest:
    """Make a manifest whose landmarks vote within 6 voxels, presence threshold 0.25."""
    table: dict[str, object] = {
        "schema": 1,
        "name": "made-up",
        "version": "1.0.0",
        "description": "",
        "license": "none",
        "input": {
            "orientation": "RAS",
            "spacing_mm": [spacing] * 3,
            "tile_shape": [12, 12, 12],
            "intensity": {"method": "none"},
        },
        "network": {
            "program": "network.onnx",
            "sha256": "0" * 64,
            "activation": "sigmoid",
            "output_stride": stride,
        },
        "voting": {"threshold": 0.3, "radius_mm": SCAN_RADIUS * spacing},
        "landmarks": [{"name": str(c), "region95_mm": 0.6} for c in range(landmarks)],
        "selfcheck": {"input": "phantom:7", "tolerance_mm": 0.5},
    }
    if shape:
        table["shape"] = {"mean": "shape.safetensors", "sha256": "0" * 64, "tolerance_mm": 2.0}
    return Manifest.model_validate(table)


def make_grid(
    to_world: Affine | None = None, spacing: float = 1.0, shape: tuple[int, int, int] = SCAN_SHAPE
) -> Grid:
    """Make an empty grid; by default its indices are mm."""
    affine = np.eye(4) if to_world is None else to_world
    return Grid(torch.zeros(shape), np.eye(4), affine, (spacing, spacing, spacing))


def find(
    votes: Votes, *, truth: NDArray[np.float64] | None = None, landmarks: int = 1
) -> tuple[Landmark, ...]:
    """Locate landmarks on the default grid, with a shape if the true constellation is given."""
    manifest = make_manifest(landmarks, shape=truth is not None)
    shape = None if truth is None else Shape(truth, tolerance_mm=2.0)
    return find_on(make_grid(), votes, manifest, shape)


def find_on(
    grid: Grid, votes: Votes, manifest: Manifest, shape: Shape | None = None
) -> tuple[Landmark, ...]:
    """Locate a model's landmarks on a grid."""
    frame = GridFrame(grid.to_volume, grid.to_world)
    return locate(votes, make_readout(grid, manifest), frame, manifest.landmarks, shape)


def thinned(votes: Votes, share: float) -> Votes:
    """Keep a share of the votes."""
    kept = torch.rand(len(votes), generator=torch.Generator().manual_seed(1)) < share
    return votes.select(kept)


def scattered(votes: Votes, share: float, seed: int = 0) -> Votes:
    """Let a share of the votes point anywhere in the grid."""
    random = np.random.default_rng(seed)
    position = votes.position.double().numpy()
    wild = random.random(len(votes)) < share
    position[wild] = random.uniform(0, SCAN_SHAPE, (wild.sum(), 3))
    return pointing_at(votes, position)


def make_shape(seed: int = 0, landmarks: int = SHAPE_LANDMARKS) -> NDArray[np.float64]:
    """Make a shape the size of a mouse skull: some 22 x 12 x 9 mm."""
    return np.random.default_rng(seed).uniform(-0.5, 0.5, (landmarks, 3)) * (22.0, 12.0, 9.0)


def make_subject(
    mean: NDArray[np.float64], seed: int, variation_mm: float = 0.15
) -> NDArray[np.float64]:
    """Turn, scale and shift a shape, and let every landmark of it vary."""
    random = np.random.default_rng(seed)
    varied = mean + variation_mm * random.standard_normal(mean.shape)
    turned = Rotation.random(random_state=seed).apply(varied * random.uniform(0.8, 1.25))
    return np.asarray(turned + random.uniform(-40, 40, 3))


def make_blob(
    shape: Sequence[int], ijk: Sequence[float], sigma_mm: float, affine: Affine
) -> NDArray[np.float32]:
    """Make a scan that shows a Gaussian of height 1, round in mm, and nothing else.

    Args:
        shape: Of the scan.
        ijk: Its centre, in voxels.
        sigma_mm: Its standard deviation.
        affine: Voxel index -> mm.
    """
    away = np.moveaxis(np.indices(shape), 0, -1) - np.asarray(ijk)
    square = ((away @ affine[:3, :3].T) ** 2).sum(axis=-1)
    return np.asarray(np.exp(-0.5 * square / sigma_mm**2), dtype=np.float32)


def gaussian_field(
    centres: NDArray[np.float64],
    shape: Sequence[int],
    sigma: float,
    *,
    noise: float = 0.0,
    stride: int = 1,
    seed: int = 0,
) -> Field:
    """Make heatmaps as a network answers them: a Gaussian of height 1 around each landmark.

    Args:
        centres: Of the landmarks, (landmarks 3), in grid voxels.
        shape: Of the grid, in voxels.
        sigma: Of the Gaussians, in grid voxels.
        noise: Standard deviation of noise on the values.
        stride: Grid voxels per voxel of the heatmaps.
        seed: Of the noise.
    """
    axes = [(np.arange(n // stride) + 0.5) * stride - 0.5 for n in shape]
    away = (np.exp(-0.5 * ((axes[a] - centres[:, a, None]) / sigma) ** 2) for a in range(3))
    heatmaps = np.einsum("ci,cj,ck->cijk", *away)
    heatmaps += noise * np.random.default_rng(seed).standard_normal(heatmaps.shape)
    scores = torch.from_numpy(heatmaps).float()
    offsets = torch.zeros(1).expand(3, *scores.shape)
    return Field(scores, offsets, "none", background=False, peak=1.0)
