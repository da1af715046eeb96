"""Trained network -> the model folder that the service loads."""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import tomlkit
import torch
from torch import nn

from app.geometry import Points
from app.model import (
    editing,
    hash_file,
    parse_manifest,
    place_surroundings,
    read_document,
    write_selfcheck,
    write_tensors,
)
from app.training.evaluate.model_card import OF_BOTH, OF_FIRST, drop_sections
from app.training.fit.network import ARCHITECTURE, network_arguments
from app.training.recipe import Recipe
from app.training.versions import drop_measured

TOLERANCE_RADII: Final = 0.6
"""Largest distance of a mode from where the constellation expects it, in voting radii."""

POSED_TOLERANCE_RADII: Final = 1.2
"""The same for a second network: its image shows few look-alikes, and subjects differ by more than
0.6 of its small radius. Landmarks of unusual ones would be doubted though they are right."""

MODES: Final = 4
"""Candidates per landmark; look-alikes come in twos and threes."""

TUNABLE: Final = ("threshold", "modes", "tolerance_mm")
"""Keys of ``[voting]`` and ``[shape]`` that people tune, for the voting radius that there is."""

USAGE: Final = ("mirror",)
"""Keys of ``[network]`` that say how it is run, not how to read its output."""

NO_HASH: Final = "0" * 64
"""Stands in a manifest that is only checked for those of files that are not there yet."""


def write_model_folder(
    folder: Path,
    network: nn.Module,
    recipe: Recipe,
    names: Sequence[str],
    mean: Points | None,
) -> None:
    """Write a model folder, or update an existing one.

    Whatever people have written into ``model.toml`` (description, licence, comments, and, while the
    voting radius stays, thresholds and tolerance) is kept. What was measured of other weights is
    not, nor the sections on it in the model card.

    Args:
        folder: The folder; its name becomes the model's name.
        network: The trained network; its weights are stored in half precision.
        recipe: What it was trained with.
        names: Landmark names in channel order.
        mean: Mean shape of the landmarks in mm, NaN where unknown; None: the model has none.
    """
    folder.mkdir(parents=True, exist_ok=True)
    plain = copy.deepcopy(network).half().cpu()
    write_tensors(folder / "weights.safetensors", plain.state_dict())
    if mean is not None:
        write_tensors(folder / "shape.safetensors", {"mean": torch.from_numpy(mean)})
    with editing(folder, new=_new(folder.name)) as document:
        _update(document, _hashes_in(folder), recipe, names)
    drop_sections(folder, *OF_FIRST)
    write_selfcheck(folder)


def check_exportable(
    folder: Path, recipe: Recipe, names: Sequence[str], mean: Points | None
) -> None:
    """Check that what a training would write keeps the contract, before any time is spent on it.

    Raises:
        ModelRefused: ``write_model_folder`` would refuse it, with the same text.
    """
    document = read_document(folder) if (folder / "model.toml").exists() else _new(folder.name)
    hashes = _hashes_in(folder) | {"weights": NO_HASH}
    _update(document, hashes if mean is None else hashes | {"shape": NO_HASH}, recipe, names)
    manifest = parse_manifest(folder.name, tomlkit.dumps(document))
    if mean is not None:
        place_surroundings(mean, manifest)


def attach_refine(folder: Path) -> Path:
    """Enter a folder as the second network in the ``model.toml`` of the folder around it.

    Returns:
        The folder around it.
    """
    section = {"folder": folder.name, "sha256": hash_file(folder / "model.toml")}
    with editing(folder.parent) as document:
        document.setdefault("refine", tomlkit.table()).update(section)
        drop_measured(document)
    drop_sections(folder.parent, *OF_BOTH)
    return folder.parent


def _hashes_in(folder: Path) -> dict[str, str]:
    """Hash the weights of a folder, and its mean shape if it has one."""
    files = {name: folder / f"{name}.safetensors" for name in ("weights", "shape")}
    return {name: hash_file(path) for name, path in files.items() if path.exists()}


def _new(name: str) -> tomlkit.TOMLDocument:
    document = tomlkit.document()
    document.update(
        {"schema": 1, "name": name, "version": "1.0.0", "description": "", "license": ""}
    )
    return document


def _update(
    document: tomlkit.TOMLDocument,
    hashes: Mapping[str, str],
    recipe: Recipe,
    names: Sequence[str],
) -> None:
    """Set the keys that training decides, and drop what was measured with other weights."""
    drop_measured(document)
    sections: dict[str, dict[str, object]] = {
        "input": {
            "orientation": "RAS",
            "spacing_mm": [recipe.spacing_mm] * 3,
            "tile_shape": "whole" if recipe.sees == "whole" else list(recipe.tile_shape),
            "divisor": recipe.divisor,
            "upright": recipe.sees == "whole" and recipe.is_upright,
            "intensity": recipe.intensity.model_dump(exclude_unset=True),
        },
        "network": {
            "architecture": ARCHITECTURE,
            "arguments": network_arguments(recipe, len(names)),
            "weights": "weights.safetensors",
            "sha256": hashes["weights"],
            "activation": "sigmoid",
            "output_stride": recipe.stride,
        },
        "voting": {
            "threshold": recipe.threshold,
            "radius_mm": recipe.radius_mm,
        },
    }
    if "shape" in hashes:
        radii = POSED_TOLERANCE_RADII if recipe.sees == "posed" else TOLERANCE_RADII
        sections["shape"] = {
            "mean": "shape.safetensors",
            "sha256": hashes["shape"],
            "modes": MODES,
            "tolerance_mm": radii * recipe.radius_mm,
        }
    tuned = TUNABLE if document.get("voting", {}).get("radius_mm") == recipe.radius_mm else ()
    for name, keys in sections.items():
        table = document.setdefault(name, tomlkit.table())
        table.update({key: keys[key] for key in keys if key not in tuned or key not in table})
    network = document["network"]
    for key in {*network}.difference(sections["network"], USAGE):
        del network[key]  # Of the output of another network, such as offsets in mm.
    _list_landmarks(document, names)
    document.setdefault(
        "selfcheck", tomlkit.item({"input": "noise:7", "expected": "selfcheck.safetensors"})
    )


def _list_landmarks(document: tomlkit.TOMLDocument, names: Sequence[str]) -> None:
    """List landmarks in channel order, with what the manifest says of them."""
    existing = {item["name"]: item for item in document.get("landmarks", [])}
    if [*existing] == [*names]:  # Else comments would go.
        return
    landmarks = tomlkit.aot()
    for name in names:
        table = tomlkit.table()
        table.update(existing.get(name, {"name": name}))
        landmarks.append(table)
    document["landmarks"] = landmarks
