"""A network's output for one tile -> Field: scores, and where they point, per voxel and landmark.

Each kind of ``network.output`` is one class here, and nothing behind it knows the difference but
the read-out (``app.voting.readout``):

============  ===================================================  =================================
votes         scores and offsets                                   both, viewed
heatmaps      one channel per landmark                             every voxel votes for itself
coordinates   positions, perhaps with log-variances and presences  a few votes for each landmark
============  ===================================================  =================================

Each also knows what its answer for a mirror image says of the tile itself (``unmirror``), and the
mean of several answers, which members and mirror images give. Axes are those of a tile, 0 to 2.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeAlias

import torch
from jaxtyping import Float, Float32
from torch import Tensor

from app.model.cpu import Head
from app.model.manifest import Manifest

MAX_SIGMA: Final = 1e6
"""In voxels: a larger standard deviation says no more than this one."""


TINY: Final = 1e-30
"""A weight that is none."""


@dataclass(frozen=True, slots=True)
class OffsetLayer:
    """The last layer of a network, which computes offsets of the voxels that vote alone.

    Attributes:
        features: What it reads, any float type, any strides.
        weight: Of each feature in an offset.
        bias: Of each offset.
    """

    features: Float[Tensor, "features i j k"]
    weight: Float32[Tensor, "3 landmarks features"]
    bias: Float32[Tensor, "3 landmarks"]


@dataclass(frozen=True, slots=True)
class Field:
    """Output of a network for one tile, or one array: scores and offsets per voxel and landmark.

    Attributes:
        scores: Scores or probabilities, any float type, any strides, (channels i j k). With
            ``softmax`` there is one channel more than landmarks: channel 0 is the background.
        offsets: From a field voxel's centre to the landmark, along grid axes i, j, k; any strides
            (landmark-major networks are read through a view).
        activation: What turns scores into probabilities; ``none``: they are probabilities already.
        background: Whether channel 0 of ``scores`` is the background.
        offset_scale: Grid voxels per unit of ``offsets``, along each axis.
        peak: Value that stands for a probability of 1, where scores are the values of heatmaps,
            which may exceed it a little; None: scores are what ``activation`` says.
        layer: What is still to compute the offsets, which then have a shape and no values; None:
            they are there.
    """

    scores: Float[Tensor, "channels i j k"]
    offsets: Float[Tensor, "3 landmarks i j k"]
    activation: Literal["sigmoid", "softmax", "none"]
    background: bool
    offset_scale: tuple[float, float, float] = (1.0, 1.0, 1.0)
    peak: float | None = None
    layer: OffsetLayer | None = None

    def __post_init__(self) -> None:
        """Refuse a softmax that leaves nothing for voxels which vote for no landmark."""
        if self.activation == "softmax" and not self.background:
            raise ValueError("expected a background channel with softmax, got none")


def _exchange(values: Tensor, dim: int, axes: Sequence[int], manifest: Manifest) -> Tensor:
    """Give each landmark what its partner has, if left and right are exchanged.

    Args:
        values: Any values of the landmarks.
        dim: Its axis of landmarks; what comes before the last of them is no landmark's.
        axes: Along which a tile was mirrored.
        manifest: Says which axis is from left to right, and who is whose partner.
    """
    if manifest.left_right not in axes:
        return values
    partners = manifest.partners
    first = values.shape[dim] - len(partners)  # After the background, if there is one.
    order = [*range(first), *(first + partner for partner in partners)]
    return values.index_select(dim, torch.tensor(order, device=values.device))


def _flip(values: Float[Tensor, "*n i j k"], axes: Sequence[int]) -> Float[Tensor, "*n i j k"]:
    """Mirror the last three axes."""
    return values.flip([axis - 3 for axis in axes])


def _mean(values: Iterable[Tensor]) -> Tensor:
    """Average tensors, of which only one is in memory besides the sum, in float32."""
    total, count = torch.zeros(()), 0
    for one in values:
        total, count = total.to(one.device) + one.float(), count + 1
    return total / count


def _count_scores(manifest: Manifest, what: str) -> str:
    """Say how many channels are scores, and that one is not a landmark's if so."""
    first = ", the background's first," if manifest.network.activation == "softmax" else ""
    return f"{manifest.channels[0]} {what}{first}"


def _dense_shape(manifest: Manifest, edges: Sequence[int]) -> list[int]:
    """Return the shape of an output with a number for each channel and voxel of its own."""
    stride = manifest.network.output_stride
    return [sum(manifest.channels), *(edge // stride for edge in edges)]


class VotesOutput:
    """Scores and offsets; nothing is copied."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest, self._channels = manifest, manifest.channels
        self._softmax = manifest.network.activation == "softmax"
        self._offset_scale = (1.0, 1.0, 1.0)
        if manifest.network.offset_unit == "mm":
            x, y, z = manifest.input.spacing_mm
            self._offset_scale = (1 / x, 1 / y, 1 / z)

    def shape(self, edges: Sequence[int]) -> list[int]:
        """Return the shape of the output for a tile of these edges."""
        return _dense_shape(self._manifest, edges)

    def describe(self, edges: Sequence[int]) -> str:
        """Say what the output should hold."""
        scores, offsets = _count_scores(self._manifest, "scores"), self._channels[1]
        stride = self._manifest.network.output_stride
        return (
            f"{scores} and {offsets} offsets for tiles of {list(edges)} at output_stride {stride}"
        )

    def field(self, output: Tensor, _edges: Sequence[int]) -> Field:
        """View one tile's output as scores and offsets; it has the tile's axes."""
        scores, offsets = self._parts(output[None])
        return self._field(scores[0], offsets[0])

    def deferred_field(
        self,
        scores: Float[Tensor, "scores i j k"],
        features: Float[Tensor, "features i j k"],
        head: Head,
    ) -> Field:
        """Make a field of one tile's scores, and of the layer that is to compute its offsets."""
        weight, bias = head.weight.flatten(1), head.bias
        if bias is None:
            bias = weight.new_zeros(len(weight))
        # Laid out as an output of which each voxel holds one feature's weights, and one the biases.
        table = torch.cat([weight, bias[:, None]], dim=1).detach().float()
        _, numbers = self._parts(table[None, :, :, None, None])
        numbers = numbers[0, ..., 0, 0]
        layer = OffsetLayer(features, numbers[..., :-1].contiguous(), numbers[..., -1].contiguous())
        offsets = scores.new_full((1,), torch.nan).expand(*layer.bias.shape, *scores.shape[1:])
        return replace(self._field(scores, offsets), layer=layer)

    def _field(self, scores: Tensor, offsets: Tensor) -> Field:
        return Field(
            scores=scores,
            offsets=offsets,
            activation="softmax" if self._softmax else "sigmoid",
            background=self._softmax,
            offset_scale=self._offset_scale,
        )

    def unmirror(self, output: Tensor, axes: Sequence[int], _edges: Sequence[int]) -> Tensor:
        """Turn the answer for tiles mirrored along some axes into one for the tiles themselves."""
        scores, offsets = (_flip(part, axes) for part in self._parts(output))
        signs = offsets.new_tensor([-1.0 if axis in axes else 1.0 for axis in range(3)])
        offsets = _exchange(offsets, 2, axes, self._manifest) * signs[:, None, None, None, None]
        return self._join(_exchange(scores, 1, axes, self._manifest), offsets)

    def mean(self, outputs: Iterable[Tensor]) -> Tensor:
        """Average scores; and offsets, each by the probability that its voxel votes."""
        total = _mean(self._weigh(output.float()) for output in outputs)
        sizes = [self._channels[0], self._channels[1] // 3, self._channels[1]]
        scores, weights, moments = total.split(sizes, dim=1)
        return self._join(scores, moments.unflatten(1, (3, -1)) / weights[:, None])

    def _weigh(self, output: Tensor) -> Float[Tensor, "n weighted i j k"]:
        """List scores, the weights of offsets, and weighted offsets, as channels."""
        scores, offsets = self._parts(output)
        weights = scores.softmax(1)[:, 1:] if self._softmax else scores.sigmoid()
        weights = weights + TINY  # So that voxels at which nobody votes have offsets, too.
        return torch.cat([scores, weights, (weights[:, None] * offsets).flatten(1, 2)], dim=1)

    def _parts(
        self, output: Float[Tensor, "n channels i j k"]
    ) -> tuple[Float[Tensor, "n scores i j k"], Float[Tensor, "n 3 landmarks i j k"]]:
        """View a batch of outputs as scores and offsets."""
        scores, offsets = output[:, : self._channels[0]], output[:, self._channels[0] :]
        shape = output.shape[2:]
        if self._manifest.network.offset_order == "axis":
            return scores, offsets.view(len(output), 3, -1, *shape)
        return scores, offsets.view(len(output), -1, 3, *shape).transpose(1, 2)

    def _join(self, scores: Tensor, offsets: Tensor) -> Float[Tensor, "n channels i j k"]:
        """Put the parts of a batch together again."""
        if self._manifest.network.offset_order == "landmark":
            offsets = offsets.transpose(1, 2)
        return torch.cat([scores, offsets.flatten(1, 2)], dim=1)


class HeatmapsOutput:
    """One channel per landmark: offsets are zeros, all of them one number in memory."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest

    def shape(self, edges: Sequence[int]) -> list[int]:
        """Return the shape of the output for a tile of these edges."""
        return _dense_shape(self._manifest, edges)

    def describe(self, edges: Sequence[int]) -> str:
        """Say what the output should hold."""
        heatmaps = _count_scores(self._manifest, "heatmaps")
        stride = self._manifest.network.output_stride
        return f"{heatmaps} for tiles of {list(edges)} at output_stride {stride}"

    def field(self, output: Tensor, _edges: Sequence[int]) -> Field:
        """View one tile's heatmaps, of its axes, as scores of voxels that vote for themselves."""
        network, landmarks = self._manifest.network, len(self._manifest.landmarks)
        offsets = output.new_zeros(1).expand(3, landmarks, *output.shape[1:])
        if network.activation in ("sigmoid", "softmax"):
            is_softmax = network.activation == "softmax"
            return Field(output, offsets, network.activation, background=is_softmax)
        if network.activation == "spatial_softmax":
            # In float32: a sum over so many voxels has no bits left in less.
            output = output.flatten(1).softmax(1, dtype=torch.float32).view_as(output)
        return Field(output, offsets, "none", background=False, peak=network.heatmap_peak or 1.0)

    def unmirror(self, output: Tensor, axes: Sequence[int], _edges: Sequence[int]) -> Tensor:
        """Turn the answer for tiles mirrored along some axes into one for the tiles themselves."""
        return _exchange(_flip(output, axes), 1, axes, self._manifest)

    def mean(self, outputs: Iterable[Tensor]) -> Tensor:
        """Average heatmaps as the network answers them, before their activation."""
        return _mean(outputs)


class CoordinatesOutput:
    """Positions: a vote each, or the sigma points of a normal distribution about each.

    Six points at the square root of 3 standard deviations along each axis, both ways, have the mean
    and the covariance of the distribution, so that votes tell both.
    """

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._extras = manifest.network.coordinate_extras

    def shape(self, _edges: Sequence[int]) -> list[int]:
        """Return the shape of the output, which is the same for all tiles."""
        return [len(self._manifest.landmarks), 3 + len(self._extras)]

    def describe(self, _edges: Sequence[int]) -> str:
        """Say what the output should hold."""
        columns = ", ".join(("i", "j", "k", *self._extras))
        return f"{columns} of {len(self._manifest.landmarks)} landmarks"

    def field(self, output: Tensor, edges: Sequence[int]) -> Field:
        """Make a field of as many voxels, along i, as each landmark has votes."""
        values = output.float()
        scale, first = self._voxels_per_unit(edges)
        position = values[:, :3] * values.new_tensor(scale) + first
        points = position[:, None]
        if "log_variance" in self._extras:
            sigma = (0.5 * self._extra(values, "log_variance")).exp()[:, None]
            away = math.sqrt(3.0) * sigma * values.new_tensor(scale)
            # As an infinite one would leave no vote.
            away = away.clamp(max=MAX_SIGMA).diag_embed()
            points = torch.cat([points + away, points - away], dim=1)
        # A field voxel's own centre is that of the grid voxel of the same index.
        own = torch.zeros_like(points)
        own[..., 0] = torch.arange(points.shape[1], device=points.device)
        presence = torch.ones_like(values[:, 0])
        if "presence" in self._extras:
            presence = self._extra(values, "presence")
        is_sigmoid = self._manifest.network.activation == "sigmoid"
        return Field(
            scores=presence[:, None, None, None].expand(-1, points.shape[1], 1, 1),
            offsets=(points - own).permute(2, 0, 1)[..., None, None],
            activation="sigmoid" if is_sigmoid else "none",
            background=False,
            peak=None if is_sigmoid else 1.0,
        )

    def unmirror(self, output: Tensor, axes: Sequence[int], edges: Sequence[int]) -> Tensor:
        """Turn the answer for tiles mirrored along some axes into one for the tiles themselves."""
        output = _exchange(output, 1, axes, self._manifest).clone()
        scale, first = self._voxels_per_unit(edges)
        for axis in axes:
            # Both ends of the tile together, less the position.
            ends = (edges[axis] - 1 - 2 * first) / scale[axis]
            output[..., axis] = ends - output[..., axis]
        return output

    def mean(self, outputs: Iterable[Tensor]) -> Tensor:
        """Average positions and presences; variances are those of all together."""
        answers = torch.stack([output.float() for output in outputs])
        mean = answers.mean(0)
        if "log_variance" in self._extras:
            column = 3 + self._extras.index("log_variance")
            apart = (answers[..., :3] - mean[..., :3]).square().mean(dim=(0, -1))
            mean[..., column] = (answers[..., column].exp().mean(0) + apart).log()
        return mean

    def _extra(
        self, values: Float[Tensor, "landmarks columns"], name: Literal["log_variance", "presence"]
    ) -> Float[Tensor, " landmarks"]:
        """Read one of the columns after the positions."""
        return values[:, 3 + self._extras.index(name)]

    def _voxels_per_unit(self, edges: Sequence[int]) -> tuple[list[float], float]:
        """Return the voxels per unit of a coordinate, and the index that is coordinate 0."""
        unit = self._manifest.network.coordinate_unit
        if unit == "fraction":  # Of the tile: 0 and 1 are the faces of its outermost voxels.
            return [float(edge) for edge in edges], -0.5
        if unit == "mm":
            return [1 / mm for mm in self._manifest.input.spacing_mm], 0.0
        return [1.0, 1.0, 1.0], 0.0


Output: TypeAlias = VotesOutput | HeatmapsOutput | CoordinatesOutput

OUTPUTS: Final[dict[str, type[Output]]] = {
    "votes": VotesOutput,
    "heatmaps": HeatmapsOutput,
    "coordinates": CoordinatesOutput,
}


def make_output(manifest: Manifest) -> Output:
    """Choose how to read the output of a manifest's network."""
    return OUTPUTS[manifest.network.output](manifest)
