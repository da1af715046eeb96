"""Arrays -> what ``POST /v1/votes`` answers, in NumPy float64, for tests; from docs/votes.md."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tests.support import oracle
from tests.support.oracle import Array
from tests.support.reference import ReferenceLandmark, ScanFrame, describe
from tests.support.reference_modes import ReferenceReadout, find_modes, votes_for
from tests.support.reference_votes import ReferenceVotes

PRESENT = 0.25
"""Least mass of a landmark that is there, where no model says otherwise."""

MOST_VOXELS = 64.0
"""Of a voting radius."""


@dataclass(frozen=True, slots=True)
class ReferenceAnswer:
    """What one file of arrays holds.

    Attributes:
        rows: landmark, probability, i, j, k of each vote, voxel by voxel and landmark by landmark.
        heatmaps: (i j k landmarks).
        landmarks: One of each.
    """

    rows: Array
    heatmaps: Array
    landmarks: list[ReferenceLandmark]


def answer_of(
    arrays: Mapping[str, NDArray[np.floating]], query: Mapping[str, str]
) -> ReferenceAnswer:
    """Read rows, heatmaps and landmarks from arrays, by a query as in a URL."""
    votes, shape = _collect(arrays, query), _sample_shape(arrays, query)
    landmarks = _landmarks(arrays, query)
    affine = np.asarray(arrays.get("affine", np.eye(4)), np.float64)
    spacing = np.linalg.norm(affine[:3, :3], axis=0)
    heatmaps = oracle.heatmaps(
        votes.landmark, votes.position, votes.probability, (landmarks, *shape)
    )
    sigma = float(query.get("smooth_mm", "0"))
    if sigma > 0:
        heatmaps = np.stack([oracle.smooth(one, tuple(sigma / spacing)) for one in heatmaps])
    radius = float(query.get("radius_mm", 10 * np.cbrt(spacing.prod())))
    radius = min(radius, MOST_VOXELS * spacing.min())
    readout = ReferenceReadout(shape, spacing, spacing, radius, 0.6 * radius, 1, None)
    scan = ScanFrame(shape, spacing, np.eye(4), affine)
    cast = ReferenceVotes(
        votes.landmark, votes.source, votes.position, votes.probability, votes.probability
    )
    modes = [find_modes(votes_for(cast, one, readout), readout) for one in range(landmarks)]
    return ReferenceAnswer(
        oracle.rows(votes, shape),
        np.moveaxis(heatmaps, 0, -1),
        [describe(own, PRESENT, scan) for own in modes],
    )


def _channels_first(
    arrays: Mapping[str, NDArray[np.floating]], name: str, query: Mapping[str, str]
) -> Array:
    values = arrays[name].astype(np.float64)
    return values if query.get("channels") == "first" else np.moveaxis(values, -1, 0)


def _landmarks(arrays: Mapping[str, NDArray[np.floating]], query: Mapping[str, str]) -> int:
    return len(_channels_first(arrays, "offsets", query)) // 3


def _sample_shape(
    arrays: Mapping[str, NDArray[np.floating]], query: Mapping[str, str]
) -> tuple[int, ...]:
    all_of_it = ",".join(map(str, _channels_first(arrays, "offsets", query).shape[1:]))
    return tuple(int(edge) for edge in query.get("sample_shape", all_of_it).split(","))


def _collect(
    arrays: Mapping[str, NDArray[np.floating]], query: Mapping[str, str]
) -> oracle.OracleVotes:
    """Filter votes; those of a probability that is not a number are none."""
    offsets, landmarks = _channels_first(arrays, "offsets", query), _landmarks(arrays, query)
    shape = offsets.shape[1:]
    if query.get("order", "axis") == "axis":
        offsets = offsets.reshape(3, landmarks, *shape)
    else:
        offsets = offsets.reshape(landmarks, 3, *shape).swapaxes(0, 1)
    name = "probs" if "probs" in arrays else "scores"
    scores = _channels_first(arrays, name, query)
    background = query.get("background", str(len(scores) > landmarks).lower()) == "true"
    activation = query.get("activation", "softmax" if background else "sigmoid")
    activation = activation if name == "scores" else "none"
    probabilities = oracle.probabilities_of(scores, activation, background=background)
    return oracle.collect(probabilities, offsets, float(query.get("threshold", "0.5")))
