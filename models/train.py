"""Train a landmark network: folders of scans and landmark files in, a servable model folder out.

    python -m models.train SCANS LANDMARKS -o models/NAME

The README's chapter on training says how to prepare the data; ``--help`` lists every option.
"""

import argparse
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors.torch import load_model
from torch import nn

from app.constellation import mean_shape
from app.device import choose_device
from app.frames import Points
from models.augment import Augmentation, Sample, pose
from models.export import attach_refine, write_model_folder
from models.recipe import LEAST_LEVELS, NORM_GROUPS, Recipe, build_network, suggest_spacing
from models.specimens import Specimen, landmark_names, load_specimen, pair_files, read_points
from models.symmetry import with_mirror_images
from models.targets import make_targets, vote_loss
from models.validate import summary, validate

OFFSET_WEIGHT: Final = 15.0
"""Scores are learned soon and offsets slowly, and these decide the last tenths of a millimetre. At
2, scores rule the gradients: offsets stay at 0.24 radii and errors on training scans at 0.8 mm."""

RADIUS_VOXELS: Final = 5.0
"""Default voting radius in voxels of the grid."""

VALIDATE_EVERY: Final = 500
REPORT_EVERY: Final = 50


class Stateful(Protocol):
    """What a checkpoint can hold."""

    def state_dict(self) -> dict[str, Any]:
        """Give the state."""

    def load_state_dict(self, state: Any, /) -> object:  # noqa: ANN401 - as in torch
        """Take the state back."""


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


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    options = make_parser().parse_args(arguments)
    console = Console()
    pairs = pair_files(options.scans, options.landmarks)
    held = set(options.validate)
    unknown = held - {pair[0] for pair in pairs}
    if unknown:
        raise SystemExit(f"expected scans to validate on, found none named {sorted(unknown)}")
    names = landmark_names(pairs)
    trained = [pair for pair in pairs if pair[0] not in held]
    recipe = make_recipe(options, [read_points(pair, names) for pair in trained])
    console.print(recipe)
    specimens = tuple(
        load_specimen(pair, names, recipe.spacing_mm, recipe.intensity) for pair in trained
    )
    mean = mean_shape([specimen.points for specimen in specimens])
    if options.mirror:
        specimens = with_mirror_images(specimens, mean)
    shape = mean if recipe.sees == "whole" else None
    data = Data(tuple(names), shape, specimens, tuple(pair for pair in pairs if pair[0] in held))
    torch.manual_seed(recipe.seed)
    network = build_network(recipe, len(names))
    if options.start is not None:
        load_model(network, options.start / "weights.safetensors")
    train(network, recipe, data, options.output, (choose_device(options.device), console))


def make_parser() -> argparse.ArgumentParser:
    """Describe the options."""
    parser = argparse.ArgumentParser(prog="python -m models.train", description=__doc__)
    add = parser.add_argument
    add("scans", type=Path, help="folder of .nii and .nii.gz files")
    add("landmarks", type=Path, help="folder of .mrk.json, .fcsv or .csv files of the same names")
    add("-o", "--output", type=Path, required=True, help="model folder to write")
    add("--validate", nargs="*", default=[], metavar="NAME", help="scans to hold out")
    add("--spacing", type=float, help="grid spacing in mm; default: from the landmarks' extent")
    add("--radius", type=float, help="voting radius in mm; default: 5 voxels")
    add("--tile", type=int, metavar="N", help="slide over scans in tiles of N³ voxels")
    add("--filters", type=int, nargs="+", default=[24, 48, 96, 128], help="channels per level")
    add("--stride", type=int, choices=(1, 2), default=2, help="grid voxels per output voxel")
    add("--steps", type=int, default=4500)
    add("--batch", type=int, default=2, help="images per step")
    add("--rate", type=float, default=2e-3, help="peak learning rate")
    add("--seed", type=int, default=1)
    add("--rotation", type=float, default=180.0, help="largest random rotation in degrees")
    add("--missing", choices=("unknown", "absent"), default="unknown",
        help="what a landmark without a position is")  # fmt: skip
    add("--mirror", action="store_true", help="learn from mirror images, too")
    add("--start", type=Path, metavar="MODEL", help="model folder whose weights to start from")
    add("--device", default="auto", help="auto, cpu or cuda:N")
    return parser


def make_recipe(options: argparse.Namespace, point_sets: Sequence[np.ndarray]) -> Recipe:
    """Fill in what the options leave open from the data."""
    filters = options.filters
    if len(filters) < LEAST_LEVELS or any(width % NORM_GROUPS for width in filters):
        raise SystemExit(
            f"--filters: expected at least {LEAST_LEVELS} multiples of {NORM_GROUPS}, got {filters}"
        )
    spacing = options.spacing or suggest_spacing(point_sets)
    tile = options.tile or 64
    return Recipe(
        spacing_mm=spacing,
        radius_mm=options.radius or RADIUS_VOXELS * spacing,
        tile_shape=(tile, tile, tile),
        sees="whole" if options.tile is None else "tiles",
        stride=options.stride,
        filters=tuple(filters),
        steps=options.steps,
        batch=options.batch,
        rate=options.rate,
        seed=options.seed,
        missing=options.missing,
        augmentation=Augmentation(
            rotation_deg=options.rotation,
            place="anywhere" if options.tile else "middle",
        ),
    )


def train(
    network: nn.Module,
    recipe: Recipe,
    data: Data,
    folder: Path,
    where: tuple[torch.device, Console],
) -> None:
    """Train, writing a servable folder at every validation; resumes from its checkpoint.

    Args:
        network: What to train.
        recipe: The choices.
        data: Specimens to learn from and scans to be judged by.
        folder: The model folder.
        where: The device, and the console to report to. Training is in fp32 on a CPU, where bf16
            gave non-finite gradients, and in bf16 on CUDA.
    """
    device, console = where
    network = network.to(device, memory_format=torch.channels_last_3d)  # type: ignore[call-overload]
    optimiser = torch.optim.AdamW(network.parameters(), lr=recipe.rate, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, recipe.rate, recipe.steps, pct_start=0.15
    )
    checkpoint = folder / "checkpoint.pt"
    parts: dict[str, Stateful] = {"network": network, "optimiser": optimiser, "schedule": schedule}
    first = resume(checkpoint, parts)
    folder.mkdir(parents=True, exist_ok=True)
    losses: deque[tuple[float, float]] = deque(maxlen=REPORT_EVERY)
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=recipe.steps, completed=first)
        for step, samples in batches(recipe, data.train, first):
            losses.append(one_step(network, samples, recipe, device))
            take_step(network, optimiser, schedule)
            if (step + 1) % REPORT_EVERY == 0:
                score, offset = np.mean(losses, axis=0)
                losses_now = f"score {score:.3f} offset {offset:.3f}"
                progress.update(task, description=losses_now)
                if not console.is_terminal:
                    console.print(f"step {step + 1} of {recipe.steps}: {losses_now}")
            progress.update(task, completed=step + 1)
            if (step + 1) % VALIDATE_EVERY == 0 or step + 1 == recipe.steps:
                save(checkpoint, parts, step + 1)
                console.print(f"step {step + 1}: {report(network, recipe, data, folder, device)}")


def batches(
    recipe: Recipe, specimens: Sequence[Specimen], first: int
) -> Iterator[tuple[int, list[Sample]]]:
    """Draw a run's batches, a few ahead in threads; each depends on seed and step alone."""

    def draw(step: int) -> list[Sample]:
        rng = np.random.default_rng([recipe.seed, step])
        shapes = recipe.image_shapes()
        shape = shapes[int(rng.integers(len(shapes)))]
        return [
            pose(
                specimens[int(rng.integers(len(specimens)))],
                shape,
                recipe.spacing_mm,
                recipe.augmentation,
                rng,
            )
            for _ in range(recipe.batch)
        ]

    threads = 2
    with ThreadPoolExecutor(threads) as pool:
        ahead: deque[Future[list[Sample]]] = deque()
        for step in range(first, recipe.steps):
            while len(ahead) < threads and step + len(ahead) < recipe.steps:
                ahead.append(pool.submit(draw, step + len(ahead)))
            yield step, ahead.popleft().result()


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


def report(
    network: nn.Module, recipe: Recipe, data: Data, folder: Path, device: torch.device
) -> str:
    """Write the model folder and say how it does on the scans held out."""
    network.eval()
    write_model_folder(folder, network, recipe, data.names, data.mean)
    if recipe.sees == "posed":
        folder = attach_refine(folder)
    network.train()
    if not data.held_out:
        return "saved (no scans held out, so no error)"
    return summary(validate(folder, data.held_out, device))


def save(path: Path, parts: Mapping[str, Stateful], step: int) -> None:
    """Write a checkpoint; the old one stays until the new one is whole."""
    partial = path.with_suffix(".partial")
    torch.save({name: part.state_dict() for name, part in parts.items()} | {"step": step}, partial)
    partial.replace(path)


def resume(path: Path, parts: Mapping[str, Stateful]) -> int:
    """Load a checkpoint if there is one; returns the step to go on with."""
    if not path.exists():
        return 0
    state = torch.load(path, weights_only=True)
    for name, part in parts.items():
        part.load_state_dict(state[name])
    return int(state["step"])


if __name__ == "__main__":
    main()
