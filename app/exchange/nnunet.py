"""A results folder of nnU-Net or nnLandmark -> a model folder.

Checkpoints are read without running code of theirs: tensors, numbers and text, and nothing else.
Networks are built from an allow-list, and their weights are stored as safetensors.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
from torch import Tensor

from app.errors import BadParameter, ModelRefused
from app.exchange.folders import (
    choose_weights,
    load_data,
    read_json,
    refuse_unreadable,
    save_weights,
    write_folder,
)
from app.exchange.plans import Plan, read_plan

CHECKPOINTS: Final = ("checkpoint_final.pth", "checkpoint_best.pth")

ALL_FOLDS: Final = "fold_all"
"""The folder of a network that was trained on all scans."""

SCALAR: Final[Any] = np.float64(0).__reduce__()[0]
"""What makes a NumPy scalar of a dtype and bytes."""

Named: TypeAlias = Callable[..., Any] | tuple[Callable[..., Any], str]
"""What a checkpoint may call; with the name that it has there, if that is another one."""

NUMBERS: Final[list[Named]] = [np.dtype, *{type(np.dtype(code)) for code in "?bBhHiIlLqQefd"}]
"""Types of NumPy's numbers, which nnU-Net's logs are made of."""

SCALARS: Final[list[Named]] = [
    (SCALAR, f"{module}.multiarray.scalar") for module in ("numpy.core", "numpy._core")
]
"""The same function, under the names that old and new versions of NumPy write."""

THRESHOLD: Final = 0.2
"""Of a heatmap's peak: what weaker voxels say is left out."""

TILES: Final = {"tile_overlap": 0.5, "tile_sigma": 0.125, "tile_layout": "nnunet"}
"""nnU-Net's tiles overlap by half, and count by a Gaussian of an eighth of their edges; the layout
also says that scans are prepared as there."""

BALL_RADIUS: Final = 15
"""Of nnLandmark's targets, which fall evenly to 0 one voxel outside of it."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What is needed of a checkpoint.

    Attributes:
        fold: Name of its folder.
        weights: The network's state.
        configuration: Name of the configuration in the plans.
        mirror: Axes of its input along which nnU-Net mirrors in inference, too.
        trainer: Name of nnU-Net's class that trained it.
    """

    fold: str
    weights: Mapping[str, Tensor]
    configuration: str
    mirror: tuple[int, ...]
    trainer: str

    @property
    def file(self) -> str:
        """Name of its weights in a model folder."""
        return f"{self.fold}.safetensors"


@dataclass(frozen=True, slots=True)
class Training:
    """What is needed of a training.

    Attributes:
        plan: What its networks expect.
        checkpoints: One for each fold.
        channels: How many channels its networks answer.
    """

    plan: Plan
    checkpoints: tuple[Checkpoint, ...]
    channels: int

    @property
    def answers_labels(self) -> bool:
        """Whether there is a channel for the background, too."""
        return self.channels > len(self.plan.landmarks)

    @property
    def arguments(self) -> dict[str, Any]:
        """Of the constructor of its networks."""
        return self.plan.arguments | {"input_channels": 1, "num_classes": self.channels}


def import_nnunet(
    results: Path,
    output: Path,
    *,
    orientation: str | None = None,
    folds: Sequence[str] = (),
    radius: float | None = None,
    version: str = "1.0.0",
) -> Path:
    """Write a model folder of a training.

    Args:
        results: The folder with ``plans.json``, ``dataset.json`` and ``fold_0`` and so on.
        output: Folder to write; its name becomes the model's.
        orientation: See ``app.exchange.plans.read_plan``.
        folds: Which folds to take, such as ``0`` or ``all``; empty: all that are there.
        radius: Of the ball around a landmark that the network was trained to mark, in voxels; None:
            nnLandmark's.
        version: Of the model.

    Raises:
        BadParameter: An option does not fit, or the output exists.
        ModelRefused: The training cannot be served; the reason is named.
    """
    training = _read_training(results, orientation, folds)
    plan = training.plan

    def fill(folder: Path) -> None:
        for each in training.checkpoints:
            save_weights(
                folder / each.file,
                results.name,
                plan.architecture,
                training.arguments,
                each.weights,
            )

    document = _manifest(version, training, radius)
    return write_folder(output, document, plan.landmarks, _origin(training), fill)


def _read_training(results: Path, orientation: str | None, folds: Sequence[str]) -> Training:
    """Read all that is needed of a training."""
    checkpoints = [_read_checkpoint(path) for path in _find_checkpoints(results, folds)]
    first = checkpoints[0]
    if len({(each.configuration, each.mirror) for each in checkpoints}) > 1:
        raise ModelRefused(f"{results.name}: expected folds of one training, got several")
    plans, dataset = (read_json(results / name) for name in ("plans.json", "dataset.json"))
    try:
        plan = read_plan(plans, dataset, first.configuration, orientation)
    except ModelRefused as refusal:
        raise ModelRefused(f"{results.name}: {refusal}") from refusal
    return Training(plan, tuple(checkpoints), _count_channels(results.name, first, plan))


def _find_checkpoints(results: Path, folds: Sequence[str]) -> list[Path]:
    """Find the checkpoint of each fold; all folds but the one of all scans, if there are any."""
    names = [f"fold_{fold}" for fold in folds]
    if not names:
        there = sorted(path.name for path in results.glob("fold_*"))
        names = [name for name in there if name != ALL_FOLDS] or there
    found = []
    for name in names:
        paths = [results / name / file for file in CHECKPOINTS]
        path = next((path for path in paths if path.is_file()), None)
        if path is None:
            raise ModelRefused(f"{results.name}: {name}: expected {' or '.join(CHECKPOINTS)}")
        found.append(path)
    if not found:
        raise ModelRefused(
            f"{results}: expected the folder of a training, with fold_0, fold_1, ..., such as "
            "DATASET/nnLandmark__nnUNetPlans__3d_fullres, found no fold"
        )
    return found


def _read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint; its file can make nothing but tensors, numbers and text."""
    where = f"{path.parent.name}/{path.name}"
    with refuse_unreadable(where, "a checkpoint of nnU-Net, version 2,"):
        state = load_data(path, [*NUMBERS, *SCALARS])
        mirror = state.get("inference_allowed_mirroring_axes") or ()
        return Checkpoint(
            fold=path.parent.name,
            weights=choose_weights(path, state["network_weights"]),
            configuration=str(state["init_args"]["configuration"]),
            mirror=tuple(int(axis) for axis in mirror),
            trainer=str(state["trainer_name"]),
        )


def _count_channels(name: str, checkpoint: Checkpoint, plan: Plan) -> int:
    """Say how many channels a network answers: one for each landmark, perhaps a background."""
    heads = [key for key in checkpoint.weights if "seg_layers" in key and key.endswith("weight")]
    channels = {len(checkpoint.weights[head]) for head in heads}
    landmarks = len(plan.landmarks)
    if channels not in ({landmarks}, {landmarks + 1}):
        raise ModelRefused(
            f"{name}: expected a network of {landmarks} heatmaps, or {landmarks + 1} with a "
            f"background, as dataset.json has {landmarks} landmarks; got {sorted(channels)}"
        )
    return channels.pop()


def _voting(training: Training, radius: float | None) -> dict[str, Any]:
    """Say at what distance from a landmark the answer falls to the threshold."""
    voxel_mm = float(np.prod(training.plan.spacing_mm)) ** (1 / 3)
    if not training.answers_labels:
        reach = (1 - THRESHOLD) * ((BALL_RADIUS if radius is None else radius) + 1)
        return {
            "threshold": THRESHOLD,
            "radius_mm": round(reach * voxel_mm, 4),
            "round_in": "voxels",
        }
    if radius is None:
        raise BadParameter(
            "--radius: expected the radius in voxels of what each label of the training marks, as "
            "the network answers labels, not heatmaps"
        )
    return {"threshold": 0.5, "radius_mm": round(radius * voxel_mm, 4), "round_in": "voxels"}


def _manifest(version: str, training: Training, radius: float | None) -> dict[str, Any]:
    """Write what the manifest says of this training."""
    plan, checkpoints = training.plan, training.checkpoints
    files = [each.file for each in checkpoints]
    return {
        "version": version,
        "description": f"{len(plan.landmarks)} landmarks of {plan.dataset}",
        "license": plan.licence,
        "input": {
            "orientation": plan.orientation,
            "spacing_mm": list(plan.spacing_mm),
            "tile_shape": list(plan.patch),
            **TILES,
            "intensity": plan.intensity,
        },
        "network": {
            "output": "heatmaps",
            "architecture": plan.architecture,
            "weights": files[0],
            "members": files[1:],
            "mirror": ["ijk"[axis] for axis in checkpoints[0].mirror],
            "activation": "softmax" if training.answers_labels else "sigmoid",
            "arguments": training.arguments,
        },
        "voting": _voting(training, radius),
    }


def _origin(training: Training) -> str:
    """Say where the model comes from."""
    plan, first = training.plan, training.checkpoints[0]
    folds = ", ".join(each.fold for each in training.checkpoints)
    remark = (
        f"\n\nScans of another spacing are resampled by nnU-Net's cubic splines; those of the "
        f"training were by `{plan.resampling:.80}`, with arguments of its own."
    )
    return (
        f"a training of nnU-Net: dataset `{plan.dataset}`, configuration `{first.configuration}`, "
        f"trainer `{first.trainer}`, {folds}.{remark if plan.resampling else ''}"
    )
