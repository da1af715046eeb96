"""V7: the same votes in any order and any tiles give the same bits."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import astuple
from typing import Final

import numpy as np
import torch

from app.model.outputs import Field
from tests.benchmarks import ours
from tests.benchmarks.fields import Scene, make_scene, to_device
from tests.benchmarks.harness import Limit, Row, Run

THRESHOLD: Final = 0.02
"""Low, so that background noise votes, too, and landmarks have several modes."""

TILES: Final = ((70, 62, 80), (32, 32, 32), (7, 62, 33), (70, 5, 80), (1, 62, 80))


def v7_same_bits(run: Run) -> Iterator[Row]:
    """Count the answers that differ in any bit."""
    scene = make_scene((40, 36, 44) if run.fast else (70, 62, 80), 5)
    orders = 5 if run.fast else 100
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    for name in devices:
        there = to_device(scene, torch.device(name))
        reading = ours.make_reading(there.shape, there.landmarks, there.radius)
        votes = ours.filter_votes(there.field, THRESHOLD)
        wanted = bits(ours.find_from_votes(votes, reading))
        shuffled = (ours.find_from_votes(_shuffled(votes, seed), reading) for seed in range(orders))
        wrong = sum(bits(found) != wanted for found in shuffled)
        what = f"answers of {orders} orders of {len(votes)} votes on {name} that differ"
        yield Row(what, wrong, "", limit=Limit(0, "figure"))
        tiled = (ours.find_from_votes(_tiled(there, tile), reading) for tile in TILES)
        wrong = sum(bits(found) != wanted for found in tiled)
        what = f"answers of {len(TILES)} tilings on {name} that differ"
        yield Row(what, wrong, "", limit=Limit(0, "figure"), note="tiles that do not overlap")


def bits(found: Sequence[ours.Landmark]) -> str:
    """Write everything an answer holds, every float to its last bit."""
    return repr([_plain(value) for mark in found for value in astuple(mark)])


def _plain(value: object) -> object:
    if isinstance(value, np.ndarray):
        return [number.hex() for number in value.astype(float).ravel().tolist()]
    if isinstance(value, float):
        return float(value).hex()
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _shuffled(votes: ours.Votes, seed: int) -> ours.Votes:
    random = torch.Generator().manual_seed(seed)
    return votes.select(torch.randperm(len(votes), generator=random).to(votes.landmark.device))


def _tiled(scene: Scene, tile: Sequence[int]) -> ours.Votes:
    """Collect a field's votes tile by tile, the last tile first."""
    a, b, c = (range(0, size, edge) for size, edge in zip(scene.shape, tile, strict=True))
    parts = []
    for origin in reversed(list(itertools.product(a, b, c))):
        box = tuple(slice(o, o + edge) for o, edge in zip(origin, tile, strict=True))
        field = scene.field
        part = Field(
            field.scores[(slice(None), *box)],
            field.offsets[(slice(None), slice(None), *box)],
            field.activation,
            field.background,
        )
        parts.append(ours.filter_votes(part, THRESHOLD, ours.Placement(origin)))
    return ours.join(parts)
