"""Recipe + specimens -> a network that is trained, in a model folder that serves all along.

A training can be interrupted at any step and goes on there. Whatever is random depends on the seed
and the step alone, so where it was interrupted makes no difference.
"""

import signal
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final

import numpy as np
import torch
from rich.console import Console
from torch import nn

from app.geometry import Points
from app.training.data.specimens import Specimen
from app.training.evaluate.outcomes import Outcome, validate
from app.training.files import EXPORT_EVERY
from app.training.fit.augment import Sample, pose
from app.training.fit.checkpoint import Record, Stateful, begin, resume, save
from app.training.fit.export import attach_refine, write_model_folder
from app.training.fit.losses import make_targets, vote_loss
from app.training.fit.progress import Diary
from app.training.fit.truncation import cut_sample, draw_normal, trim
from app.training.recipe import Recipe

OFFSET_WEIGHT: Final = 15.0
"""Scores are learned soon and offsets slowly, and these decide the last tenths of a millimetre. At
2, scores rule the gradients: offsets stay at 0.24 radii and errors on training scans at 0.8 mm."""


@dataclass(frozen=True, slots=True)
class Data:
    """What a run learns from, and what it is judged by.

    Attributes:
        names: Of the landmarks.
        mean: Their mean shape; None for a network that sees parts of scans, in which landmarks may
            be anywhere.
        train: What is learned from.
        held_out: Name, scan and landmark file of what it is judged by.
    """

    names: tuple[str, ...]
    mean: Points | None
    train: tuple[Specimen, ...]
    held_out: tuple[tuple[str, Path, Path], ...]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a training happens.

    Attributes:
        folder: The model folder.
        device: What computes. Training is in fp32 on a CPU, where bf16 gave non-finite gradients,
            and in bf16 on CUDA.
        console: What to report to.
    """

    folder: Path
    device: torch.device
    console: Console


def train(network: nn.Module, data: Data, record: Record, place: Place) -> bool:
    """Train, writing a servable folder at every validation; goes on from a checkpoint.

    Args:
        network: What to train.
        data: Specimens to learn from and scans to be judged by.
        record: All choices, which must be those of the checkpoint, if there is one.
        place: Where.

    Returns:
        Whether it is trained; False if somebody interrupted it.

    Raises:
        StartupError: The checkpoint is that of another training.
    """
    begin(place.folder, record)
    recipe = record.recipe
    network = network.to(place.device, memory_format=torch.channels_last_3d)  # type: ignore[call-overload]
    optimiser = torch.optim.AdamW(network.parameters(), lr=recipe.rate, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, recipe.rate, recipe.steps, pct_start=0.15
    )
    parts: dict[str, Stateful] = {"network": network, "optimiser": optimiser, "schedule": schedule}
    first = resume(place.folder, parts)
    if first == recipe.steps:
        place.console.print(f"all {first} steps are done; {place.folder} is trained")
    elif first:
        place.console.print(f"going on from step {first} of {recipe.steps}")
    diary = Diary(place.folder, place.console, recipe.steps, first)
    with stoppable() as stop, diary.progress:
        for step, samples in batches(recipe, data.train, first):
            diary.note(step + 1, one_step(network, samples, recipe, place.device))
            take_step(network, optimiser, schedule)
            if (step + 1) % EXPORT_EVERY == 0 or step + 1 == recipe.steps:
                save(place.folder, parts, step + 1)
                diary.judge(step + 1, report(network, recipe, data, place))
            elif stop.is_set():
                save(place.folder, parts, step + 1)
            if stop.is_set() and step + 1 < recipe.steps:
                diary.interrupted(step + 1)
                return False
    return True


@contextmanager
def stoppable() -> Iterator[threading.Event]:
    """Let an interrupt (Ctrl-C, or a polite kill) wait for a step to end; a second one does not.

    Yields:
        Set once somebody wants to stop.
    """
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop  # Only the main thread is told of signals.
        return
    signals = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in signals]

    def restore() -> None:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        stop.set()
        restore()

    for number in signals:
        signal.signal(number, on_signal)
    try:
        yield stop
    finally:
        restore()


def batches(
    recipe: Recipe, specimens: Sequence[Specimen], first: int
) -> Iterator[tuple[int, list[Sample]]]:
    """Draw a run's batches, a few ahead in threads; each depends on seed and step alone."""

    def draw(step: int) -> list[Sample]:
        rng = np.random.default_rng([recipe.seed, step])
        shapes = recipe.image_shapes()
        shape = shapes[int(rng.integers(len(shapes)))]
        samples = [
            pose(
                specimens[int(rng.integers(len(specimens)))],
                shape,
                recipe.spacing_mm,
                recipe.augmentation,
                rng,
            )
            for _ in range(recipe.batch)
        ]
        return cut_batch(samples, recipe, rng) if rng.random() < recipe.cuts else samples

    threads = 2
    with ThreadPoolExecutor(threads) as pool:
        ahead: deque[Future[list[Sample]]] = deque()
        for step in range(first, recipe.steps):
            while len(ahead) < threads and step + len(ahead) < recipe.steps:
                ahead.append(pool.submit(draw, step + len(ahead)))
            yield step, ahead.popleft().result()


def cut_batch(samples: Sequence[Sample], recipe: Recipe, rng: np.random.Generator) -> list[Sample]:
    """Cut all samples of a batch one way, as scans that end amid the landmarks.

    A network that sees scans whole then gets an image without what is cut away, as in service.
    """
    whole = recipe.sees == "whole"
    normal = draw_normal(whole, rng)
    cut = [cut_sample(sample, normal, rng) for sample in samples]
    return trim(cut, recipe.divisor) if whole else cut


def one_step(
    network: nn.Module, samples: Sequence[Sample], recipe: Recipe, device: torch.device
) -> tuple[float, float]:
    """Run a batch forward and back; returns its score loss and offset loss."""
    targets = make_targets(
        samples,
        recipe.spacing_mm,
        recipe.stride,
        recipe.radius_mm,
        missing_is_absent=recipe.missing == "absent",
    )
    images = torch.stack([sample.image for sample in samples]).to(device)
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        field = network(images.contiguous(memory_format=torch.channels_last_3d))
    score, offset = vote_loss(
        field.float(), targets.to(device), recipe.radius_mm / recipe.spacing_mm
    )
    torch.autograd.backward([score + OFFSET_WEIGHT * offset])
    return score.item(), offset.item()


def take_step(
    network: nn.Module,
    optimiser: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
) -> None:
    """Move the weights along the gradients that the batch has left."""
    nn.utils.clip_grad_norm_(network.parameters(), 1.0)
    optimiser.step()
    schedule.step()
    optimiser.zero_grad(set_to_none=True)


def report(network: nn.Module, recipe: Recipe, data: Data, place: Place) -> tuple[Outcome, ...]:
    """Write the model folder, and measure its errors on the scans held out, if there are any."""
    network.eval()
    folder = place.folder
    write_model_folder(folder, network, recipe, data.names, data.mean)
    if recipe.sees == "posed":
        folder = attach_refine(folder)
    network.train()
    if not data.held_out:
        return ()
    return validate(folder, data.held_out, place.device, recipe.missing)
