"""The training loop: writes a model folder that can be served at any time from the first export on.

A training can be interrupted at any step and resumed there. Everything random depends on the seed
and the step alone, so that an interruption makes no difference.
"""

import signal
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
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

from app.errors import NetworkFailed
from app.geometry import Points
from app.inference import Detector, load_checked
from app.training.data.specimens import Specimen
from app.training.data.split import Split
from app.training.evaluate.outcomes import Measurement, measure, write_outcomes
from app.training.files import EXPORT_EVERY
from app.training.fit.augment import Sample, draw_sample
from app.training.fit.checkpoint import Stateful, resume, save, start
from app.training.fit.export import attach_refine, write_model_folder
from app.training.fit.losses import make_targets, vote_loss
from app.training.fit.progress import TrainingProgress
from app.training.fit.suggest import Choice
from app.training.fit.truncation import draw_axis, draw_normal, trim, truncate
from app.training.options import Options
from app.training.recipe import Recipe
from app.training.record import Record

OFFSET_WEIGHT: Final = 15.0
"""Scores are learned quickly and offsets slowly, and these decide the last tenths of a millimetre.
At 2, scores dominate the gradients: offsets stay at 0.24 radii, errors on training scans at 0.8 mm.
"""

LARGER_FIELDS: Final = 0.3
"""Share of the steps whose images may be larger, if any are: they take several times as long."""

LOADER_THREADS: Final = 2

MAX_LOST_STEPS: Final = 50
"""Steps without finite gradients, one after the other, from which a training has diverged: a few
are lost in bfloat16, but none will be won back by weights that no longer change."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A training with all choices made.

    Attributes:
        options: What was asked of it.
        split: Training and held-out specimens.
        choices: The reasons for what the options left open.
        mean: Mean shape of the training specimens; None for a network that sees parts of scans, in
            which landmarks may be anywhere.
        record: What the training is started with: landmarks, and every number.
    """

    options: Options
    split: Split
    choices: tuple[Choice, ...]
    mean: Points | None
    record: Record

    @property
    def folder(self) -> Path:
        """The model folder of the network that is trained."""
        return self.options.network_folder


def train(network: nn.Module, plan: Plan, specimens: Sequence[Specimen], console: Console) -> bool:
    """Train a network, from a checkpoint if there is one; export and validate it regularly.

    Args:
        network: With the weights that it starts from, on the device where it is trained.
        plan: Of its training.
        specimens: To train on: those of the plan, and their mirror images if they count, too.
        console: Where to print.

    Returns:
        Whether it is trained; False if it was interrupted, be it in the last step: what would
        follow, such as the next fold, is not to begin.

    Raises:
        StartupError: The checkpoint is that of another training.
        NetworkFailed: The training diverged; the folder is as it was last written.
    """
    start(plan.folder, plan.record)
    recipe, device = plan.record.recipe, next(network.parameters()).device
    optimiser = torch.optim.AdamW(network.parameters(), lr=recipe.rate, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, recipe.rate, recipe.steps, pct_start=0.15
    )
    parts: dict[str, Stateful] = {"network": network, "optimiser": optimiser, "schedule": schedule}
    done = resume_training(network, parts, plan, console)
    progress = TrainingProgress(plan.folder, console, recipe.steps, done)
    lost = 0
    with graceful_interrupt() as stop, progress.bar:
        for step, samples in draw_batches(recipe, specimens, done):
            progress.record_step(step + 1, backward(network, samples, recipe, device))
            lost = 0 if optimiser_step(network, optimiser, schedule) else lost + 1
            if lost == MAX_LOST_STEPS:
                raise NetworkFailed(
                    f"the training diverged: expected finite losses and gradients, got none in the "
                    f"{lost} steps up to {step + 1} of {recipe.steps}; train anew, in another "
                    f"folder, at a smaller --rate than {recipe.rate:g}"
                )
            if is_exported := (step + 1) % EXPORT_EVERY == 0 or step + 1 == recipe.steps:
                save(plan.folder, parts, step + 1, exported=False)
                measured = export(network, plan, step + 1, console)
                progress.record_validation(step + 1, measured)
                save(plan.folder, parts, step + 1, exported=True)
            if stop.is_set():
                if not is_exported:
                    save(plan.folder, parts, step + 1, exported=False)
                progress.record_interruption(step + 1)
                return False
    return True


def resume_training(
    network: nn.Module, parts: Mapping[str, Stateful], plan: Plan, console: Console
) -> int:
    """Load the checkpoint, if there is one, and say so; gives the number of steps that are done."""
    done, exported = resume(plan.folder, parts)
    if done == plan.record.recipe.steps:
        if not exported:
            export(network, plan, done, console)
            save(plan.folder, parts, done, exported=True)
        console.print(f"all {done} steps are done; {plan.folder} is trained")
    elif done:
        console.print(f"resuming at step {done} of {plan.record.recipe.steps}")
    return done


@contextmanager
def graceful_interrupt() -> Iterator[threading.Event]:
    """Let the first SIGINT or SIGTERM only set an event; the second one acts as usual.

    Yields:
        Set by the first signal.
    """
    stop = threading.Event()
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


def draw_batches(
    recipe: Recipe, specimens: Sequence[Specimen], first: int
) -> Iterator[tuple[int, list[Sample]]]:
    """Draw batches, a few ahead in threads; each depends on the seed and the step alone."""

    def draw(step: int) -> list[Sample]:
        rng = np.random.default_rng([recipe.seed, step])
        shape = draw_shape(recipe, rng)
        samples = [
            draw_sample(
                specimens[int(rng.integers(len(specimens)))],
                shape,
                recipe.spacing_mm,
                recipe.augmentation,
                rng,
            )
            for _ in range(recipe.batch)
        ]
        return truncate_batch(samples, recipe, rng) if rng.random() < recipe.cuts else samples

    with ThreadPoolExecutor(LOADER_THREADS) as pool:
        ahead: deque[Future[list[Sample]]] = deque()
        for step in range(first, recipe.steps):
            while len(ahead) < LOADER_THREADS and step + len(ahead) < recipe.steps:
                ahead.append(pool.submit(draw, step + len(ahead)))
            yield step, ahead.popleft().result()


def draw_shape(recipe: Recipe, rng: np.random.Generator) -> tuple[int, int, int]:
    """Draw the shape of a batch's images: one of the usual ones, or at times a larger one."""
    shapes = recipe.image_shapes()
    i, j, k = shapes[int(rng.integers(len(shapes)))]
    field, divisor = recipe.augmentation.field, recipe.divisor
    if field > 1.0 and rng.random() < LARGER_FIELDS:
        edges = rng.uniform(1.0, field, 3) * (i, j, k)
        i, j, k = ((edges / divisor).round().astype(int) * divisor).tolist()
    return i, j, k


def truncate_batch(
    samples: Sequence[Sample], recipe: Recipe, rng: np.random.Generator
) -> list[Sample]:
    """Truncate all samples of a batch along one direction.

    A network that sees scans whole then gets a smaller image, as it does in service.
    """
    whole = recipe.sees == "whole"
    normal = draw_axis(samples, rng) if whole else draw_normal(rng)
    truncated = [truncate(sample, normal, rng) for sample in samples]
    return trim(truncated, recipe.divisor) if whole else truncated


def backward(
    network: nn.Module, samples: Sequence[Sample], recipe: Recipe, device: torch.device
) -> tuple[float, float]:
    """Run a batch forward and backward; returns its score loss and offset loss."""
    targets = make_targets(samples, recipe.spacing_mm, recipe.stride, recipe.radius_mm)
    images = torch.stack([sample.image for sample in samples]).to(device)
    with torch.autocast(device.type, torch.bfloat16, enabled=recipe.precision == "bfloat16"):
        output = network(images.contiguous(memory_format=torch.channels_last_3d))
    score, offset = vote_loss(output, targets.to(device), recipe.radius_mm / recipe.spacing_mm)
    torch.autograd.backward([score + OFFSET_WEIGHT * offset])
    return score.item(), offset.item()


def optimiser_step(
    network: nn.Module,
    optimiser: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
) -> bool:
    """Update the weights with the clipped gradients, and clear these.

    A step whose gradients are not finite, as one in bfloat16 may be, changes no weight.

    Returns:
        Whether the gradients were finite.
    """
    norm = nn.utils.clip_grad_norm_(network.parameters(), 1.0)
    finite = bool(norm.isfinite())
    if finite:
        optimiser.step()
        schedule.step()
    optimiser.zero_grad(set_to_none=True)
    return finite


def export(network: nn.Module, plan: Plan, step: int, console: Console) -> Measurement | None:
    """Write the model folder, and validate it on the held-out scans.

    What comes of these after the last step is kept, in ``outcomes.json``.
    One that the model does not answer, such as one of more voxels than it takes, ends no training.

    Returns:
        What came of these; None if there are none.
    """
    network.eval()
    folder, recipe = plan.folder, plan.record.recipe
    write_model_folder(folder, network, recipe, plan.record.landmarks, plan.mean)
    if recipe.sees == "posed":
        folder = attach_refine(folder)
    network.train()
    held_out = [specimen.files for specimen in plan.split.held_out]
    if not held_out:
        return None
    detector = Detector(load_checked(folder, next(network.parameters()).device))
    measured = measure(detector, held_out, console, recipe.missing)
    if step == recipe.steps:
        write_outcomes(plan.folder, measured)
    return measured
