"""Field -> rows, dense heatmaps and argmax, in torch as one writes it: array operations only."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from app.model.outputs import Field


@dataclass(frozen=True, slots=True)
class Answer:
    """Everything on the way.

    Attributes:
        rows: Landmark, probability and position of every vote.
        heatmaps: Summed probability per voxel.
        peaks: Voxel of each heatmap's maximum.
    """

    rows: Float[Tensor, "votes 5"]
    heatmaps: Float[Tensor, "landmarks i j k"]
    peaks: Int64[Tensor, "landmarks 3"]


def find(field: Field, threshold: float) -> Answer:
    """Find landmarks in a field with softmax scores, background first."""
    probabilities = torch.softmax(field.scores, dim=0)[1:]
    landmarks, *shape = probabilities.shape
    landmark, i, j, k = torch.nonzero(probabilities >= threshold, as_tuple=True)
    probability = probabilities[landmark, i, j, k].float()
    offset = field.offsets[:, landmark, i, j, k].float()
    position = torch.stack([i, j, k]) + offset
    nearest = torch.floor(position + 0.5).long()
    size = torch.tensor(shape, device=nearest.device)[:, None]
    inside = ((nearest >= 0) & (nearest < size)).all(dim=0)
    a, b, c = nearest[:, inside]
    index = ((landmark[inside] * shape[0] + a) * shape[1] + b) * shape[2] + c
    heatmaps = torch.zeros(probabilities.numel(), device=index.device)
    heatmaps.scatter_add_(0, index, probability[inside])
    heatmaps = heatmaps.view(landmarks, *shape)
    peaks = torch.stack(torch.unravel_index(heatmaps.flatten(1).argmax(dim=1), tuple(shape)), dim=1)
    return Answer(torch.cat([landmark[None], probability[None], position]).T, heatmaps, peaks)
