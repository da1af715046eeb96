"""Check that a network still answers what it answered when its folder was made.

Hashes prove that the files are the same; the self-check proves that this machine, this precision
and this torch compute the same from them. Seeded noise goes through the network, and samples of
its Field are compared with those that ``landmarkd check --write`` stored. A model may instead be
checked by landmarks that it must find in a phantom.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import numpy as np
import torch
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from app.errors import ModelRefused, NetworkFailed
from app.geometry import Points
from app.model.files import find_file, read_text, update_hashes, update_precisions
from app.model.loader import load_module
from app.model.manifest import WHOLE, InputSpec, LowerPrecision, Manifest, parse_manifest
from app.model.network import Field, Network

Detect = Callable[[int], tuple[Points, Points]]
"""Makes the phantom of a seed; gives the points found in it and the true ones, RAS mm, (C, 3)."""

WHOLE_EDGES: Final = (40, 48, 56)
"""Voxels along i, j, k, before rounding up to the step, of the noise for models that see all."""

SAMPLES: Final = 2048
"""How many scores, and how many components of offsets, are compared: 48 kB on disk."""

TINY: Final = 1e-12
"""Avoids a division by zero where a network answers nothing but zeros."""


def check(
    folder: Path,
    manifest: Manifest,
    network: Network,
    detect: Detect | None = None,
    batch: int = 1,
) -> None:
    """Run a model's self-check.

    Args:
        folder: The model folder.
        manifest: Its manifest.
        network: Its network, on the device and in the precision to be checked.
        detect: The whole pipeline, for a model that is checked by a phantom.
        batch: Size of the batch in which the noise is run, last, after other noise.

    Raises:
        ModelRefused: The answer differs by more than the tolerance, or there is none.
    """
    kind, seed = manifest.selfcheck.input.split(":")
    if kind == "noise":
        expected = _load_samples(folder, manifest)
        _check_noise(
            folder.name, manifest, expected, run_noise(folder.name, manifest, network, batch)
        )
        return
    # Noise shows here, not at the first request, whether the output has the right shape.
    run_noise(folder.name, manifest, network, batch)
    if detect is None:
        raise ModelRefused(
            f"{folder.name}: selfcheck.input: expected a detector to run phantoms with"
        )
    check_points(manifest, *detect(int(seed)))


def check_points(manifest: Manifest, found: Points, truth: Points) -> None:
    """Compare landmarks found in a phantom with its own.

    Args:
        manifest: Says the names and the tolerance.
        found: Where the model found each landmark, RAS mm, (C, 3); NaN where it found none.
        truth: Where it is; NaN where it is absent.

    Raises:
        ModelRefused: A landmark is missing, invented, or further off than the tolerance.
    """
    tolerance = manifest.selfcheck.tolerance_mm or 0.0
    distance = np.linalg.norm(found - truth, axis=1)
    present, answered = (np.isfinite(points).all(axis=1) for points in (truth, found))
    for index, landmark in enumerate(manifest.landmarks):
        key = f"{manifest.name}: selfcheck.input: landmark {landmark.name!r}"
        if present[index] != answered[index]:
            wanted, got = ("present", "absent") if present[index] else ("absent", "present")
            raise ModelRefused(f"{key}: expected {wanted}, got {got}")
        if present[index] and not distance[index] <= tolerance:
            raise ModelRefused(
                f"{key}: expected within {tolerance:g} mm, got {distance[index]:.3g} mm"
            )


def noise_shape(spec: InputSpec, step: int) -> tuple[int, int, int]:
    """Say which shape of noise a model is checked with.

    Args:
        spec: Its tile shape.
        step: What the edges of a whole scan must be multiples of.

    Returns:
        The tile shape; for models that see scans whole, WHOLE_EDGES rounded up to the step.
    """
    if spec.tile_shape != WHOLE:
        return spec.tile_shape
    i, j, k = (step * -(-edge // step) for edge in WHOLE_EDGES)
    return i, j, k


def make_noise(manifest: Manifest, seed: int) -> Float[Tensor, "1 i j k"]:
    """Make a tile of seeded noise with about the intensities that the model knows.

    Uniform in [0, 1), as percentile and window rules give; of mean 0 and variance 1 for zscore.
    """
    shape = noise_shape(manifest.input, manifest.tile_step)
    values = np.random.Generator(np.random.PCG64(seed)).random((1, *shape))
    if manifest.input.intensity.method == "zscore":
        values = (values - 0.5) * np.sqrt(12.0)
    return torch.from_numpy(values).float()


def run_noise(name: str, manifest: Manifest, network: Network, batch: int = 1) -> Field:
    """Run the network on its self-check's noise, last in a batch of other noise.

    Raises:
        ModelRefused: The network raises, or answers in another shape than promised.
    """
    seed = int(manifest.selfcheck.input.split(":")[1])
    tiles = torch.stack([make_noise(manifest, seed + batch - 1 - index) for index in range(batch)])
    try:
        return network.predict(tiles)[-1]
    except torch.OutOfMemoryError:
        raise
    except NetworkFailed as error:
        raise ModelRefused(f"{name}: network: {error}") from error
    except Exception as error:
        # Anything at all may come out of a network; only torch's first line is for users.
        reason = str(error).strip().partition("\n")[0]
        raise ModelRefused(
            f"{name}: network: expected an answer to a tile of {list(tiles.shape[2:])}, "
            f"got {type(error).__name__}: {reason:.200}"
        ) from error


def write_selfcheck(
    folder: Path, device: torch.device | None = None, *, allow_torchscript: bool = False
) -> Manifest:
    """Write a model folder's hashes and its self-check file.

    Nothing is written unless the folder then keeps the contract. In ``model.toml`` only the values
    of ``sha256`` change, or one line is added for each that is missing.

    Args:
        folder: The model folder.
        device: Where to run the network; the CPU if not given.
        allow_torchscript: Whether its program may be TorchScript.

    Returns:
        The manifest as it is now.

    Raises:
        ModelRefused: The folder breaks the contract in some other way.
    """
    text = update_hashes(folder, read_text(folder, "model.toml"))
    manifest = parse_manifest(folder.name, text)
    module = load_module(folder, manifest, allow_torchscript=allow_torchscript)
    network = Network(manifest, module, device or torch.device("cpu"))
    field = run_noise(folder.name, manifest, network)
    if manifest.selfcheck.expected is not None:
        _replace(
            folder / manifest.selfcheck.expected, lambda path: save_file(_make_samples(field), path)
        )
    _replace(folder / "model.toml", lambda path: path.write_text(text, encoding="utf-8"))
    return manifest


def write_precisions(folder: Path, shifts_mm: Mapping[LowerPrecision, float]) -> None:
    """Write into a ``model.toml`` in which precisions its model was verified.

    Args:
        folder: The model folder.
        shifts_mm: Largest shift of a landmark in mm, by precision.
    """
    text = update_precisions(read_text(folder, "model.toml"), shifts_mm)
    parse_manifest(folder.name, text)
    _replace(folder / "model.toml", lambda path: path.write_text(text, encoding="utf-8"))


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file atomically: no reader sees half of it."""
    temporary = path.with_name(f".{path.name}.new")
    try:
        write(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _sample(field: Field, indices: dict[str, Tensor]) -> dict[str, Tensor]:
    """Read a Field at flat indices of its scores and offsets; offsets in voxels."""
    at = {
        kind: torch.unravel_index(indices[f"{kind}_index"].to(values.device), values.shape)
        for kind, values in (("scores", field.scores), ("offsets", field.offsets))
    }
    scale = torch.tensor(field.offset_scale, device=field.offsets.device)[at["offsets"][0]]
    return {
        "scores": field.scores[at["scores"]].float().cpu(),
        "offsets": (field.offsets[at["offsets"]].float() * scale).cpu(),
    }


def _make_samples(field: Field) -> dict[str, Tensor]:
    """Sample a Field at random indices, for the file."""
    random = np.random.Generator(np.random.PCG64(0))
    indices = {
        f"{kind}_index": torch.from_numpy(random.integers(0, values.numel(), SAMPLES))
        for kind, values in (("scores", field.scores), ("offsets", field.offsets))
    }
    shape = torch.tensor(field.scores.shape)
    return {"field_shape": shape, **indices, **_sample(field, indices)}


def _load_samples(folder: Path, manifest: Manifest) -> dict[str, Tensor]:
    """Load the samples that are expected."""
    path = find_file(folder, "selfcheck.expected", manifest.selfcheck.expected or "")
    key = f"{folder.name}: selfcheck.expected"
    try:
        stored = load_file(path)
    except SafetensorError as error:
        raise ModelRefused(f"{key}: not safetensors: {error}") from None
    wanted = {"field_shape", "scores_index", "offsets_index", "scores", "offsets"}
    if stored.keys() != wanted:
        raise ModelRefused(f"{key}: expected {sorted(wanted)}, got {sorted(stored)}")
    for kind in ("scores", "offsets"):
        for name, dtype in ((kind, torch.float32), (f"{kind}_index", torch.int64)):
            if stored[name].shape != (SAMPLES,) or stored[name].dtype != dtype:
                raise ModelRefused(
                    f"{key}: expected {name} of {SAMPLES} {dtype}, got "
                    f"{list(stored[name].shape)} {stored[name].dtype}"
                )
    return stored


def _check_noise(name: str, manifest: Manifest, expected: dict[str, Tensor], field: Field) -> None:
    """Compare samples: the norm of their difference over the norm of what is expected."""
    key = f"{name}: selfcheck"
    if list(field.scores.shape) != expected["field_shape"].tolist():
        raise ModelRefused(
            f"{key}: expected scores of shape {expected['field_shape'].tolist()}, got "
            f"{list(field.scores.shape)}; write the self-check again with landmarkd check --write"
        )
    for kind, values in (("scores", field.scores), ("offsets", field.offsets)):
        indices = expected[f"{kind}_index"]
        if int(indices.min()) < 0 or int(indices.max()) >= values.numel():
            raise ModelRefused(
                f"{key}.expected: expected {kind}_index inside {values.numel()} {kind}"
            )
    got = _sample(field, expected)
    tolerance = manifest.selfcheck.tolerance
    for kind in ("scores", "offsets"):
        norm = float(torch.linalg.vector_norm(expected[kind]))
        distance = float(torch.linalg.vector_norm(got[kind] - expected[kind])) / max(norm, TINY)
        # Written so that a NaN on either side is a failure too.
        if not distance <= tolerance:
            raise ModelRefused(
                f"{key}: expected {kind} within {tolerance:g} of those stored (norm of the "
                f"difference over norm), got {distance:.3g}"
            )
