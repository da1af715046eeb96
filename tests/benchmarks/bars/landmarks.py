"""V1, V6 and the cost table: Field -> Landmarks."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Final

import numpy as np
import torch

from tests.benchmarks import agreement, ours
from tests.benchmarks.fields import Scene, make_scene, to_device
from tests.benchmarks.harness import Case, Limit, Rival, Row, Run
from tests.benchmarks.linux import available_bytes
from tests.benchmarks.rivals import plain_torch

TRUTH_TOLERANCE: Final = 1.0
"""Voxels; a mean of hundreds of votes lies within a tenth, the smallest balls' within this."""

PEAK_TOLERANCE: Final = 2.0
"""Voxels; the highest voxel of a cloud of votes with sigma 1 may lie this far from its mean."""

FLOOR: Final = 1.67
"""The kernel's time may be this many times that of copying as many bytes: 60 % of the bandwidth."""

MEMORY_SHARE: Final = 0.8
"""Of the memory that is free, as much may a field take."""

SIZES: Final = (32, 70, 128, 300, 512)
LANDMARKS: Final = (3, 16, 45, 64)
HALF_TYPES: Final = (torch.bfloat16, torch.float16)


def v1_landmarks(run: Run) -> Iterator[Case]:
    """Against plain torch, and against reading the scores once."""
    shapes = [(300, 300, 300), (70, 70, 70), (280, 300, 320)]
    speeds = [10.0, 3.0, 10.0]
    if run.fast:
        shapes, speeds = [(40, 36, 44)], [2.0]
    for shape, speed in zip(shapes, speeds, strict=True):
        scene = make_scene(shape, 3)
        once = Limit(2.0 if min(shape) > 100 else None, "cost")
        yield Case(
            f"Field -> Landmarks, {_text(shape)}, C = 3",
            _find(scene),
            (_plain_torch(scene, speed), _read_once(scene, once)),
        )


def v6_landmarks_on_cuda(run: Run) -> Iterator[Case | Row]:
    """The same on CUDA; the kernel that filters, by itself, against copying as many bytes."""
    whats = ("Field -> Landmarks on CUDA", "filter kernel on CUDA", "Field -> Votes on CUDA")
    missing = "Triton" if find_spec("triton") is None else "CUDA device"
    if missing == "Triton" or not torch.cuda.is_available():
        limits = (Limit(5.0), Limit(FLOOR, "cost"), None)
        for what, limit in zip(whats, limits, strict=True):
            yield Row(what, None, limit=limit, note=f"no {missing} here")
        return
    for size, speed in ((70, None), (300, 5.0)) if not run.fast else ((40, None),):
        shape = (size,) * 3
        scene = to_device(make_scene(shape, 3), torch.device("cuda"))
        size_text = f"{_text(shape)}, C = 3"
        rivals = (_plain_torch(scene, speed), _read_once(scene, Limit(None, "cost")))
        yield Case(f"{whats[0]}, {size_text}", _find(scene), rivals)
        sides: tuple[tuple[Callable[[], object], float | None], ...] = (
            (ours.scan(scene.field, scene.threshold), FLOOR if speed else None),
            (partial(ours.collect, scene.field, scene.threshold), None),
        )
        for what, (side, floor) in zip(whats[1:], sides, strict=True):
            copied = _copy_as_much(scene, Limit(floor, "cost"))
            yield Case(f"{what}, {size_text}", side, (copied,))


def cost(run: Run) -> Iterator[Case | Row]:
    """What landmarks and sizes cost, next to reading the scores once."""
    sizes, counts = ((24, 32), (3,)) if run.fast else (SIZES, LANDMARKS)
    for size, landmarks in itertools.product(sizes, counts):
        yield _cost((size,) * 3, landmarks, torch.float32)
    for dtype in HALF_TYPES:
        yield _cost((sizes[len(sizes) // 2],) * 3, counts[len(counts) // 2], dtype)


def _cost(shape: Sequence[int], landmarks: int, dtype: torch.dtype) -> Case | Row:
    kind = str(dtype).removeprefix("torch.")
    what = f"{_text(shape)}, C = {landmarks}, {kind}"
    needed = (landmarks + 4) * int(np.prod(shape)) * dtype.itemsize
    if needed > MEMORY_SHARE * available_bytes():
        return Row(what, None, note=f"needs {needed / 1e9:.1f} GB")
    scene = make_scene(shape, landmarks, dtype=dtype, shared_offsets=True)
    return Case(what, _find(scene), (_read_once(scene, Limit(None, "cost")),))


def _text(shape: Sequence[int]) -> str:
    return f"{shape[0]}³" if len(set(shape)) == 1 else "x".join(map(str, shape))


def _find(scene: Scene) -> partial[tuple[ours.Landmark, ...]]:
    reading = ours.make_reading(scene.shape, scene.landmarks, scene.radius)
    return partial(ours.find, scene.field, scene.threshold, reading)


def _plain_torch(scene: Scene, speed: float | None) -> Rival:
    return Rival(
        "plain torch",
        partial(plain_torch.find, scene.field, scene.threshold),
        partial(_agree, scene),
        None if speed is None else Limit(speed),
    )


def _read_once(scene: Scene, limit: Limit) -> Rival:
    return Rival("scores.sum()", scene.field.scores.sum, partial(_agree_with_truth, scene), limit)


def _copy_as_much(scene: Scene, limit: Limit) -> Rival:
    """Copy half the scores: that reads and writes as many bytes as reading them all."""
    source = scene.field.scores.flatten()[: scene.field.scores.numel() // 2]
    target = torch.empty_like(source)
    return Rival("copy of as many bytes", partial(target.copy_, source), _anything, limit)


def _anything(_ours: object, _theirs: object) -> None:
    """A copy has no result to agree with; the votes are compared where landmarks are timed."""


def _agree(scene: Scene, found: Sequence[ours.Landmark], plain: plain_torch.Answer) -> None:
    """Compare votes, heatmaps and places; theirs are only known to a voxel."""
    votes = ours.filter_votes(scene.field, scene.threshold)
    agreement.same_rows(ours.list_all(votes), plain.rows, scene.threshold)
    reading = ours.make_reading(scene.shape, scene.landmarks, scene.radius)
    for landmark, heatmap in enumerate(plain.heatmaps):
        agreement.same_sums(ours.add_up(votes, [landmark], reading)[0], heatmap.cpu())
    peaks = plain.peaks.cpu().double().numpy()
    agreement.near(ours.places(found), peaks, PEAK_TOLERANCE)
    _agree_with_truth(scene, found, plain)


def _agree_with_truth(scene: Scene, found: Sequence[ours.Landmark], _theirs: object) -> None:
    agreement.near(ours.places(found), scene.centres, TRUTH_TOLERANCE)
