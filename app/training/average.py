"""Two models -> one with the mean of their weights, in a folder that can be served.

Weights may be averaged where one training continued the other: the mean is often better than
either (Wortsman et al.: Model soups, ICML 2022). All else is copied from the first model, except
what was calibrated on its own weights.
"""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, Literal

import numpy as np
import tomlkit
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from app.errors import BadParameter
from app.inference import load_checked
from app.model import Manifest, hash_file, read_manifest, write_selfcheck
from app.training.evaluate.model_card import CARD
from app.training.fit.export import attach_refine

Selection = Literal["all", "first", "second"]

MAY_DIFFER: Final = {"network": {"weights", "sha256"}, "voting": {"smooth_mm"}}
"""Keys of a section that may differ between models whose weights mean the same; ``smooth_mm`` of
older folders has no effect."""


@dataclass(frozen=True, slots=True)
class NetworkFolder:
    """The folder of one network, the first or the second of a model.

    Attributes:
        folder: The folder.
        manifest: Its manifest.
    """

    folder: Path
    manifest: Manifest

    @property
    def weights(self) -> Path:
        """The file of its weights.

        Raises:
            BadParameter: The network is a program, which contains them.
        """
        if self.manifest.network.weights is None:
            raise BadParameter(f"expected weights of an architecture, {self.folder} is a program")
        return self.folder / self.manifest.network.weights

    @property
    def label(self) -> str:
        """Name of the folder for the model card, without the path to it."""
        outer = self.folder.resolve().parent
        inside = (outer / "model.toml").exists()
        return f"{outer.name}/{self.folder.name}" if inside else self.folder.resolve().name

    def second(self) -> "NetworkFolder | None":
        """Return the model's second network; None if it has none."""
        refine = self.manifest.refine
        return None if refine is None else read_network_folder(self.folder / refine.folder)


Pair = tuple[NetworkFolder, NetworkFolder]


def average_models(
    model: Path, other: Path, output: Path, share: float, networks: Selection
) -> None:
    """Write a model whose weights are the average of those of two others.

    Args:
        model: Folder of the first model, from which all else is copied.
        other: Folder of the other one.
        output: Folder to write; its name becomes the model's.
        share: Weight of the first model, in [0, 1].
        networks: Which networks to average; the others are the first model's.

    Raises:
        BadParameter: The models are not compatible, or the output exists.
        ModelRefused: One of the folders is no model, or the average does not pass its self-check.
    """
    if output.exists():
        raise BadParameter(f"-o: expected a folder that is not there yet, {output} is")
    first = read_network_folder(model)
    pairs = pair_networks(first, read_network_folder(other), networks)
    output.parent.mkdir(parents=True, exist_ok=True)
    # Written next to its final path and then renamed, so that nobody serves half of it.
    with TemporaryDirectory(prefix=".", dir=output.parent) as temporary:
        folder = Path(temporary) / output.name
        copy_model(first, folder)
        for mine, theirs in pairs:
            weights = folder / mine.weights.relative_to(model)
            weights.unlink()
            average_files(mine.weights, theirs.weights, weights, share)
        update_manifest(folder, first)
        (folder / CARD).write_text(card_text(output.name, pairs, share), encoding="utf-8")
        load_checked(folder, torch.device("cpu"))
        folder.rename(output)


def read_network_folder(folder: Path) -> NetworkFolder:
    """Read a model folder."""
    return NetworkFolder(folder, read_manifest(folder))


def pair_networks(first: NetworkFolder, other: NetworkFolder, networks: Selection) -> list[Pair]:
    """Pair the networks to average, and check that they are compatible.

    Raises:
        BadParameter: They are not, or a model lacks one of them.
    """
    pairs = [(first, other)] if networks != "second" else []
    if networks != "first":
        inner, theirs = first.second(), other.second()
        if inner is not None and theirs is not None:
            check_same_pose(inner, theirs)
            pairs.append((inner, theirs))
        elif networks == "second" or inner is not theirs:
            lacking = first if inner is None else other
            raise BadParameter(
                f"expected both models to have a second network, {lacking.folder} has none; "
                "--networks first averages the first ones alone"
            )
    for mine, theirs in pairs:
        check_compatible(mine, theirs)
    return pairs


def check_compatible(first: NetworkFolder, other: NetworkFolder) -> None:
    """Check that the weights of two networks mean the same.

    Raises:
        BadParameter: They do not; the first key that differs is named.
    """
    tables = [one.manifest.model_dump(mode="json") for one in (first, other)]
    for section in ("input", "network", "voting"):
        for key, value in tables[0][section].items():
            got = tables[1][section][key]
            if got != value and key not in MAY_DIFFER.get(section, ()):
                raise BadParameter(
                    f"expected models alike in {section}.{key}: {first.folder} has {value}, "
                    f"{other.folder} {got}"
                )
    mine, theirs = ([landmark["name"] for landmark in table["landmarks"]] for table in tables)
    if mine != theirs:
        raise BadParameter(
            f"expected the same landmarks in the same order: {first.folder} has "
            f"{', '.join(mine)}; {other.folder} {', '.join(theirs)}"
        )


def check_same_pose(first: NetworkFolder, other: NetworkFolder) -> None:
    """Check that two second networks see their subject in one pose, that of their mean shape.

    Raises:
        BadParameter: The mean shapes are further apart than a voxel of the grid.
    """
    if first.manifest.shape is None or other.manifest.shape is None:
        return
    mine, theirs = (
        load_file(one.folder / shape.mean)["mean"].double().numpy()
        for one, shape in ((first, first.manifest.shape), (other, other.manifest.shape))
    )
    spacing = min(first.manifest.input.spacing_mm)
    distance = float("inf")
    if mine.shape == theirs.shape:
        distance = float(np.nanmax(np.linalg.norm(mine - theirs, axis=1), initial=0.0))
    if distance > spacing:
        raise BadParameter(
            f"expected second networks that see their subject in one pose: the mean shapes of "
            f"{first.folder} and {other.folder} are {distance:.3g} mm apart, more than a voxel of "
            f"{spacing:g} mm"
        )


def average_files(first: Path, other: Path, output: Path, share: float) -> None:
    """Average two files of tensors; see ``average_tensors``.

    Raises:
        BadParameter: They do not hold the same tensors, or are no safetensors.
    """
    try:
        mine, theirs = load_file(first), load_file(other)
        with safe_open(first, framework="pt") as file:
            metadata = file.metadata()
    except (OSError, SafetensorError) as error:
        raise BadParameter(f"expected weights as safetensors, got: {error}") from None
    save_file(average_tensors(mine, theirs, share), output, metadata)
    output.chmod(0o644)


def average_tensors(
    first: Mapping[str, Tensor], other: Mapping[str, Tensor], share: float
) -> dict[str, Tensor]:
    """Average tensors, in float64; integers, such as counts of batches, are copied from the first.

    Args:
        first: Tensors by name.
        other: Tensors of the same names, shapes and types.
        share: Weight of the first ones.

    Returns:
        Their average, of the same types.

    Raises:
        BadParameter: Names, shapes or types differ.
    """
    unmatched = sorted(first.keys() ^ other.keys())
    if unmatched:
        raise BadParameter(f"expected the same tensors in both, only one has {unmatched[0]}")
    averaged = {}
    for name, mine in first.items():
        theirs = other[name]
        if (mine.shape, mine.dtype) != (theirs.shape, theirs.dtype):
            raise BadParameter(
                f"expected {name} of one shape and type, got {list(mine.shape)} {mine.dtype} and "
                f"{list(theirs.shape)} {theirs.dtype}"
            )
        averaged[name] = mine
        if mine.is_floating_point():
            mean = share * mine.double() + (1 - share) * theirs.double()
            averaged[name] = mean.to(mine.dtype)
    return averaged


def copy_model(model: NetworkFolder, folder: Path) -> None:
    """Copy the files that a model's manifest names, and those of its second network."""
    folder.mkdir()
    manifest = model.manifest
    names: list[str | None] = [
        "model.toml",
        manifest.network.weights or manifest.network.program,
        None if manifest.shape is None else manifest.shape.mean,
        manifest.selfcheck.expected,
    ]
    for name in filter(None, names):
        shutil.copyfile(model.folder / name, folder / name)
    inner = model.second()
    if inner is not None:
        copy_model(inner, folder / inner.folder.name)


def update_manifest(folder: Path, model: NetworkFolder) -> None:
    """Write a copied model's name, hashes and self-checks, and remove its 95 % regions."""
    inner = model.second()
    if inner is not None:
        update_manifest(folder / inner.folder.name, inner)
    path = folder / "model.toml"
    document: Any = tomlkit.parse(path.read_text(encoding="utf-8"))
    document["name"] = folder.name
    for landmark in document["landmarks"]:
        landmark.pop("region95_mm", None)
    path.write_text(tomlkit.dumps(document), encoding="utf-8")
    if inner is not None:
        attach_refine(folder / inner.folder.name)
    write_selfcheck(folder)


def card_text(name: str, pairs: list[Pair], share: float) -> str:
    """Describe in the model card what was averaged."""
    lines = [f"# {name}", "", "Weights averaged by `landmarkd average`:", ""]
    for mine, theirs in pairs:
        parts = (
            f"{part:g} of {one.label} (SHA-256 {hash_file(one.weights)[:12]})"
            for one, part in ((mine, share), (theirs, 1 - share))
        )
        lines.append(f"- {' and '.join(parts)}")
    return "\n".join([*lines, ""])
