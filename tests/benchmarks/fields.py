"""Made-up Fields of any size, with the landmarks that are in them.

``make_scene``: a ball of voxels around every landmark says "here" with a probability of 0.6 to 0.95
and points at it with noise of one voxel; everything else is background, and noisy.
``make_known_case``: the arrays of the known case P1, channels last, with random content.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from jaxtyping import Float, Float32, Float64
from torch import Tensor

from app.model.outputs import Field

NOISE: Final = 1 << 20
"""Background noise repeats after this many voxels: drawing a billion numbers would take longer than
all that is measured."""

LANDMARK_LOGIT: Final = -5.0
"""Mean logit of a landmark against the background, away from it; sigma is 1.1."""

BALL_LOGITS: Final = (0.4, 2.9)
"""The same within the ball: probabilities of 0.6 to 0.95."""

THRESHOLD: Final = 0.5
WILD_VOXELS: Final = 4.0
"""Sigma of the offsets of voxels that know nothing."""


@dataclass(frozen=True, slots=True)
class Scene:
    """A field and what is in it.

    Attributes:
        field: What a network might have said: softmax scores, background first.
        centres: The landmarks, in voxels.
        radius: Of the ball around each, in voxels.
        threshold: Least probability of a vote.
    """

    field: Field
    centres: Float64[np.ndarray, "landmarks 3"]
    radius: float
    threshold: float = THRESHOLD

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of the field in voxels."""
        i, j, k = self.field.scores.shape[1:]
        return i, j, k

    @property
    def landmarks(self) -> int:
        """How many landmarks there are."""
        return len(self.centres)


@dataclass(frozen=True, slots=True)
class KnownCase:
    """The arrays of P1.

    Attributes:
        probs: Probabilities, background first.
        offsets: In voxels, axis-major: of landmark c the channels c, c + C and c + 2 C.
        threshold: Least probability of a vote.
        sample_shape: Part of the array in which votes must lie.
    """

    probs: Float32[np.ndarray, "i j k channels"]
    offsets: Float32[np.ndarray, "i j k vectors"]
    threshold: float
    sample_shape: tuple[int, int, int]

    @property
    def landmarks(self) -> int:
        """How many landmarks there are."""
        return int(self.probs.shape[-1]) - 1

    def field(self) -> Field:
        """View the same memory as a Field; nothing is copied."""
        offsets = torch.from_numpy(self.offsets).unflatten(-1, (3, self.landmarks))
        scores = torch.from_numpy(self.probs).permute(3, 0, 1, 2)
        return Field(scores, offsets.permute(3, 4, 0, 1, 2), "none", background=True)


def make_scene(
    shape: Sequence[int],
    landmarks: int,
    *,
    radius: float = 12.0,
    dtype: torch.dtype = torch.float32,
    shared_offsets: bool = False,
) -> Scene:
    """Make a field with landmarks whose balls do not touch.

    Args:
        shape: Of the field in voxels.
        landmarks: How many.
        radius: Of the balls in voxels; smaller where they would touch.
        dtype: Of scores and offsets.
        shared_offsets: Let all landmarks view one offset volume, which is right because the balls
            are apart, and needs a fraction of the memory.

    Returns:
        The scene, on the CPU.
    """
    random = torch.Generator().manual_seed(landmarks)
    centres, radius = _place(shape, landmarks, radius)
    scores = torch.empty(landmarks + 1, *shape, dtype=dtype)
    _fill(scores[0], 0.0, 0.5, random)
    for channel in scores[1:]:
        _fill(channel, LANDMARK_LOGIT, 1.0, random)
    volumes = 1 if shared_offsets else landmarks
    offsets = torch.empty(3, volumes, *shape, dtype=dtype)
    for channel in offsets.flatten(0, 1):
        _fill(channel, 0.0, WILD_VOXELS, random)
    for c, centre in enumerate(centres):
        box, apart = _ball(shape, centre, radius)
        inside = apart.square().sum(0) <= radius**2
        low, high = BALL_LOGITS
        logits = low + (high - low) * torch.rand(inside.shape, generator=random)
        logits = scores[0][box].float() + logits
        scores[1 + c][box] = torch.where(inside, logits, scores[1 + c][box].float()).to(dtype)
        noisy = apart + torch.randn(apart.shape, generator=random)
        ours = offsets[:, c % volumes][(slice(None), *box)]
        ours.copy_(torch.where(inside, noisy, ours.float()))
    field = Field(scores, offsets.expand(3, landmarks, *shape), "softmax", background=True)
    return Scene(field, centres, radius)


def make_known_case(
    shape: Sequence[int], landmarks: int, sample_shape: Sequence[int], threshold: float
) -> KnownCase:
    """Make P1's arrays with uniform probabilities and offsets of sigma 4."""
    random = torch.Generator().manual_seed(1)
    probs = torch.rand(*shape, landmarks + 1, generator=random)
    offsets = torch.randn(*shape, 3 * landmarks, generator=random).mul_(WILD_VOXELS)
    i, j, k = sample_shape
    return KnownCase(probs.numpy(), offsets.numpy(), threshold, (i, j, k))


def known_case_of(scene: Scene) -> KnownCase:
    """Turn a scene into P1's arrays: probabilities, channels last."""
    probs = torch.softmax(scene.field.scores, dim=0).permute(1, 2, 3, 0).contiguous()
    offsets = scene.field.offsets.flatten(0, 1).permute(1, 2, 3, 0).contiguous()
    return KnownCase(probs.numpy(), offsets.numpy(), scene.threshold, scene.shape)


def to_device(scene: Scene, device: torch.device) -> Scene:
    """Copy a scene's field to a device."""
    field = scene.field
    there = Field(field.scores.to(device), field.offsets.to(device), "softmax", background=True)
    return Scene(there, scene.centres, scene.radius, scene.threshold)


def _place(
    shape: Sequence[int], landmarks: int, radius: float
) -> tuple[Float64[np.ndarray, "landmarks 3"], float]:
    """Spread landmarks over a lattice, each somewhere in its own cell."""
    random = np.random.default_rng(landmarks)
    edge = math.ceil(round(landmarks ** (1 / 3), 6))
    pitch = np.array(shape) / edge
    radius = min(radius, float(pitch.min()) / 2 - 1)
    cells = np.array(list(itertools.product(range(edge), repeat=3)))
    cells = cells[random.permutation(len(cells))[:landmarks]]
    play = pitch / 2 - radius - 0.5
    return (cells + 0.5) * pitch - 0.5 + play * random.uniform(-1, 1, (landmarks, 3)), radius


def _fill(volume: Tensor, mean: float, sigma: float, random: torch.Generator) -> None:
    """Fill a volume with noise that repeats."""
    block = (mean + sigma * torch.randn(NOISE, generator=random)).to(volume.dtype)
    flat = volume.view(-1)
    for start in range(0, len(flat), NOISE):
        piece = flat[start : start + NOISE]
        piece.copy_(block[: len(piece)])


def _ball(
    shape: Sequence[int], centre: Float64[np.ndarray, " 3"], radius: float
) -> tuple[tuple[slice, ...], Float[Tensor, "3 i j k"]]:
    """Find the box around a ball, and the way from each of its voxels to the centre."""
    first = np.maximum(np.ceil(centre - radius), 0).astype(int)
    last = np.minimum(np.floor(centre + radius) + 1, shape).astype(int)
    lines = [
        torch.arange(int(a), int(b), dtype=torch.float32) for a, b in zip(first, last, strict=True)
    ]
    voxels = torch.stack(torch.meshgrid(*lines, indexing="ij"))
    middle = torch.from_numpy(centre).float().view(3, 1, 1, 1)
    return tuple(slice(int(a), int(b)) for a, b in zip(first, last, strict=True)), middle - voxels
