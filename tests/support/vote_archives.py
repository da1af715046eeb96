"""Synthetic outputs of a network in every layout, and the files that hold them."""

import io
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save
from torch import Tensor

from app.model.outputs import Field

SHAPE = (5, 7, 6)
LANDMARKS = 3
SAMPLE = (4, 6, 6)
"""Part of ``SHAPE`` that counts."""
OBLIQUE = np.array(
    [
        [0.72, -0.48, 0.36, -31.0],
        [0.60, 0.96, 0.12, 12.5],
        [-0.48, 0.18, 1.10, 40.25],
        [0.0, 0.0, 0.0, 1.0],
    ]
)
"""An affine in mm whose axes lie askew and differ in length."""

Arrays = Mapping[str, NDArray[np.generic]]


@dataclass(frozen=True)
class Output:
    """A network's output in one layout: channels first, axes before landmarks.

    Attributes:
        scores: Probabilities or scores, (channels i j k), float32.
        offsets: (3 landmarks i j k), float32.
        activation: What turns scores into probabilities.
    """

    scores: NDArray[np.float32]
    offsets: NDArray[np.float32]
    activation: str

    @property
    def background(self) -> bool:
        """Whether channel 0 of the scores is the background."""
        return len(self.scores) > LANDMARKS

    def rounded(self, dtype: torch.dtype) -> "Output":
        """Round all numbers to what a type holds."""
        scores, offsets = (
            torch.from_numpy(array).to(dtype).float().numpy()
            for array in (self.scores, self.offsets)
        )
        return Output(scores, offsets, self.activation)


def make_output(activation: str, seed: int = 0) -> Output:
    """Make noise of which about half passes 0.3; some offsets are NaN and some huge."""
    random = np.random.default_rng(seed)
    background = activation != "sigmoid"
    scores = 2 * random.standard_normal((LANDMARKS + background, *SHAPE))
    if activation == "none":
        scores = random.random(scores.shape)
    offsets = 2 * random.standard_normal((3, LANDMARKS, *SHAPE))
    odd = random.random(offsets.shape)
    offsets[odd < 0.02] = np.nan
    offsets[odd > 0.98] = 6e4
    return Output(scores.astype(np.float32), offsets.astype(np.float32), activation)


def laid_out(output: Output, channels: str, order: str) -> dict[str, NDArray[np.float32]]:
    """Lay an output out as networks do."""
    offsets = output.offsets if order == "axis" else output.offsets.swapaxes(0, 1)
    arrays = {
        "probs" if output.activation == "none" else "scores": output.scores,
        "offsets": offsets.reshape(-1, *SHAPE),
    }
    if channels == "last":
        arrays = {name: np.moveaxis(array, 0, -1) for name, array in arrays.items()}
    return {name: np.ascontiguousarray(array) for name, array in arrays.items()}


def p1_rows(
    output: Output, threshold: float, sample_shape: tuple[int, ...] = SHAPE
) -> NDArray[np.float32]:
    """List votes as P1 defines, voxel by voxel and landmark by landmark, in float32."""
    scores = output.scores.astype(np.float64)
    if output.activation == "softmax":
        scores = np.exp(scores - scores.max(axis=0))
        scores /= scores.sum(axis=0)
    if output.activation == "sigmoid":
        scores = 1 / (1 + np.exp(-scores))
    probabilities = scores[int(output.background) :].astype(np.float32)
    rows = []
    for voxel in np.ndindex(*SHAPE):
        for landmark in range(LANDMARKS):
            probability = probabilities[landmark][voxel]
            offset = output.offsets[(slice(None), landmark, *voxel)]
            position = np.array(voxel, dtype=np.float32) + offset
            inside = ((position >= 0) & (position < np.array(sample_shape))).all()
            if probability >= np.float32(threshold) and inside:
                rows.append([landmark, probability, *position])
    return np.array(rows, dtype=np.float32)


def spheres(
    centres: NDArray[np.float64], shape: tuple[int, int, int], radius: float
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Let the voxels around each centre vote for it: (i j k 1 + C) and (i j k 3C), axis-major."""
    voxels = np.stack(np.meshgrid(*map(np.arange, shape), indexing="ij"), axis=-1)
    offsets = centres - voxels[..., None, :]
    near = np.linalg.norm(offsets, axis=-1) <= radius
    probs = np.concatenate([1 - 0.9 * near.any(-1, keepdims=True), 0.9 * near], axis=-1)
    by_axis = offsets.swapaxes(-1, -2).reshape(*shape, -1)
    return probs.astype(np.float32), by_axis.astype(np.float32)


def npz(arrays: Arrays, *, compressed: bool = True) -> bytes:
    """Write an npz file."""
    file = io.BytesIO()
    write = np.savez_compressed if compressed else np.savez
    write(file, **arrays)  # type: ignore[arg-type]
    return file.getvalue()


def safetensors(arrays: Arrays, dtype: torch.dtype = torch.float32) -> bytes:
    """Write a safetensors file, its floats as one type, with metadata as many programs add."""
    tensors: dict[str, Tensor] = {}
    for name, array in arrays.items():
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        tensors[name] = tensor.to(dtype) if tensor.is_floating_point() else tensor
    content: bytes = save(tensors, metadata={"format": "pt"})
    return content


def same_field(one: Field, other: Output) -> bool:
    """Compare a field with an output."""
    return (
        np.array_equal(one.scores.float().numpy(), other.scores)
        and np.array_equal(one.offsets.float().numpy(), other.offsets, equal_nan=True)
        and (one.activation, one.background) == (other.activation, other.background)
    )
