"""Check that a network still answers what it answered when its folder was made.

Hashes prove that the files are the same; the self-check proves that this machine, this precision
and this torch compute the same from them. Seeded noise goes through the network, and samples of
its Field are compared with those that ``landmarkd check --write`` stored. A model may instead be
checked by landmarks that it must find in a phantom.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np
import tomlkit
import torch
from jaxtyping import Float
from torch import Tensor

from app.errors import ModelRefused, NetworkFailed
from app.geometry import Points
from app.model.editing import editing, update_hashes
from app.model.files import read_tensors, write_tensors
from app.model.loader import load_module
from app.model.manifest import Manifest, parse_manifest
from app.model.network import Network
from app.model.outputs import Field
from app.model.sections import WHOLE, LowerPrecision

Samples = Mapping[str, Tensor]
"""Samples of a Field, where they were taken, and its shape; see ``_make_samples``."""

WHOLE_EDGES: Final = (40, 48, 56)
"""Voxels along i, j, k, before rounding up to the step, of the noise for models that see all."""

KINDS: Final = ("scores", "offsets")

STORED: Final = {"field_shape", *KINDS, *(f"{kind}_index" for kind in KINDS)}
"""Names of the tensors in the file of a self-check."""

SAMPLES: Final = 2048
"""How many scores, and how many components of offsets, are compared: 48 kB on disk."""

TINY: Final = 1e-12
"""Avoids a division by zero where a network answers nothing but zeros."""


def check_noise(manifest: Manifest, network: Network, expected: Samples | None) -> Field:
    """Run a network on its self-check's noise; to be called on the thread of its device.

    Args:
        manifest: Of the network.
        network: On the device and in the precision to be checked.
        expected: What to compare the answer with; None: any answer of the right shape will do.

    Raises:
        ModelRefused: The answer differs by more than the tolerance or has another shape than
            promised, or the network raises.
    """
    (field,) = _predict(manifest, network, make_noise(manifest)[None])
    if expected is not None:
        _compare(manifest, expected, field)
    return field


def _predict(
    manifest: Manifest, network: Network, tiles: Float[Tensor, "n 1 i j k"]
) -> list[Field]:
    """Run a network, whatever may come out of it.

    Raises:
        ModelRefused: It raises, or answers in another shape than promised.
    """
    try:
        return network.predict(tiles)
    except torch.OutOfMemoryError:
        raise
    except NetworkFailed as error:
        raise ModelRefused(f"{manifest.name}: network: {error}") from error
    except Exception as error:
        # Anything at all may come out of a network; only one of torch's lines is for users.
        first, *others = str(error).strip().split("\n")
        reason = others[-1] if others and "TorchScript interpreter" in first else first
        reason = reason.removeprefix(f"{type(error).__name__}: ")
        raise ModelRefused(
            f"{manifest.name}: network: expected an answer to a tile of {list(tiles.shape[2:])}, "
            f"got {type(error).__name__}: {reason:.200}"
        ) from error


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


def make_noise(manifest: Manifest, *, odd: bool = False) -> Float[Tensor, "1 i j k"]:
    """Make the tile of seeded noise of a self-check, with about the intensities the model knows.

    Uniform in [0, 1), as percentile and window rules give; of mean 0 and variance 1 for zscore
    and clip.
    Models that see scans whole get WHOLE_EDGES, rounded up to multiples of their step; if ``odd``,
    to odd ones, as scans may have.
    """
    tile, step = manifest.input.tile_shape, manifest.tile_step
    shape = [step * -(-edge // step) for edge in (WHOLE_EDGES if tile == WHOLE else tile)]
    if odd and tile == WHOLE:
        shape = [step * (edge // step | 1) for edge in shape]
    random = np.random.Generator(np.random.PCG64(manifest.selfcheck.seed))
    values = random.random((1, *shape))
    if manifest.input.intensity.method in ("zscore", "clip"):
        values = (values - 0.5) * np.sqrt(12.0)
    return torch.from_numpy(values).float()


def write_selfcheck(folder: Path, *, allow_torchscript: bool = False) -> Manifest:
    """Write a model folder's hashes and its self-check file.

    Nothing is written unless the folder then keeps the contract. In ``model.toml`` only the values
    of ``sha256`` change, or one line is added for each that is missing.

    Raises:
        ModelRefused: The folder breaks the contract in some other way.
    """
    with editing(folder) as document:
        update_hashes(folder, document)
        manifest = parse_manifest(folder.name, tomlkit.dumps(document))
        module = load_module(folder, manifest, allow_torchscript=allow_torchscript)
        network = Network(manifest, module, torch.device("cpu"))
        field = check_noise(manifest, network, expected=None)
        _check_edges(manifest, network)
        if manifest.selfcheck.expected is not None:
            samples = _make_samples(manifest, field)
            _check_same(manifest, samples, check_noise(manifest, network, expected=None))
            _check_batch(manifest, network, samples)
            _check_replaceable(folder, manifest.selfcheck.expected)
            write_tensors(folder / manifest.selfcheck.expected, samples)
    return manifest


def _check_replaceable(folder: Path, name: str) -> None:
    """Refuse to write over a file that is no self-check, such as weights that are named twice.

    Raises:
        ModelRefused: There is one.
    """
    if not (folder / name).exists():
        return
    try:
        names = read_tensors(folder, "selfcheck.expected", name).keys()
    except ModelRefused:
        names = {}.keys()
    if names != STORED:
        raise ModelRefused(
            f"{folder.name}: selfcheck.expected: expected the name of a new file, or of one of an "
            f"earlier self-check to write over, got {name!r}, which is another; if it is damaged, "
            "remove it"
        )


def _check_same(manifest: Manifest, samples: Samples, again: Field) -> None:
    """Check that a network answers as it did before, as no answer could be relied on otherwise."""
    try:
        _compare(manifest, samples, again)
    except ModelRefused as error:
        raise ModelRefused(
            f"{manifest.name}: network: expected the same answer to the same noise, got another: "
            "it keeps a state, or draws random numbers, as one that was exported for training does"
        ) from error


def _check_batch(manifest: Manifest, network: Network, samples: Samples) -> None:
    """Check that a network answers a tile alike whatever tile, of another scan, is beside it."""
    noise = make_noise(manifest)
    try:
        _, field = _predict(manifest, network, torch.stack([2 * noise, noise]))
        _compare(manifest, samples, field)
    except ModelRefused as error:
        raise ModelRefused(
            f"{manifest.name}: network: expected the same answer to the same noise beside another "
            "tile in a batch: it was exported for training, as one with batch norm may be, or for "
            f"one tile, which ONNX has to say by an input of batch size 1; got: {error}"
        ) from error


def _check_edges(manifest: Manifest, network: Network) -> None:
    """Check that a network that sees scans whole takes all multiples of its step for their edges.

    The noise does not tell: its edges are multiples of 8, whatever the step.
    """
    if manifest.input.tile_shape != WHOLE:
        return
    try:
        _predict(manifest, network, make_noise(manifest, odd=True)[None])
    except ModelRefused as error:
        raise ModelRefused(
            f"{error}; expected input.divisor to be what the edges of its input must be multiples "
            f"of, got {manifest.input.divisor}"
        ) from error


def write_precisions(folder: Path, shifts_mm: Mapping[LowerPrecision, float]) -> None:
    """Write into a ``model.toml`` how far landmarks shift in verified precisions, in mm at most."""
    with editing(folder) as document:
        # Rounded up: each is an upper bound.
        bounds = {name: math.ceil(1e4 * shift_mm) / 1e4 for name, shift_mm in shifts_mm.items()}
        if bounds:
            document["precision"] = bounds
        else:
            document.pop("precision", None)
        parse_manifest(folder.name, tomlkit.dumps(document))


def _sample(field: Field, indices: Samples) -> dict[str, Tensor]:
    """Read a Field at flat indices of its scores and offsets; offsets in voxels."""
    samples = {}
    for kind in KINDS:
        values: Tensor = getattr(field, kind)
        at = indices[f"{kind}_index"].to(values.device)
        samples[kind] = values.take(at).float()
        if kind == "offsets":
            scale = torch.tensor(field.offset_scale, device=values.device)
            samples[kind] *= scale[at // values[0].numel()]
    return {kind: values.cpu() for kind, values in samples.items()}


def _make_samples(manifest: Manifest, field: Field) -> dict[str, Tensor]:
    """Sample a Field at random indices, for the file.

    Raises:
        ModelRefused: A sample is not a number, so that nothing could be compared with it.
    """
    random = np.random.Generator(np.random.PCG64(0))
    indices = {
        f"{kind}_index": torch.from_numpy(random.integers(0, getattr(field, kind).numel(), SAMPLES))
        for kind in KINDS
    }
    shape = torch.tensor(field.scores.shape)
    samples = _sample(field, indices)
    for kind, values in samples.items():
        if count := int(values.isnan().sum()):
            raise ModelRefused(
                f"{manifest.name}: network: expected numbers in its answer to the noise of the "
                f"selfcheck, got NaN in {count} of {SAMPLES} {kind} sampled"
            )
    return {"field_shape": shape, **indices, **samples}


def load_samples(folder: Path, manifest: Manifest) -> Samples | None:
    """Load the samples that a self-check compares with.

    Returns:
        The samples; None if the model is checked by a phantom.

    Raises:
        ModelRefused: The file is missing, or holds something else.
    """
    if manifest.selfcheck.is_phantom:
        return None
    key = f"{folder.name}: selfcheck.expected"
    stored = read_tensors(folder, "selfcheck.expected", manifest.selfcheck.expected or "")
    if stored.keys() != STORED:
        raise ModelRefused(f"{key}: expected {sorted(STORED)}, got {sorted(stored)}")
    for kind in KINDS:
        for name, dtype in ((kind, torch.float32), (f"{kind}_index", torch.int64)):
            if stored[name].shape != (SAMPLES,) or stored[name].dtype != dtype:
                raise ModelRefused(
                    f"{key}: expected {name} of {SAMPLES} {dtype}, got "
                    f"{list(stored[name].shape)} {stored[name].dtype}"
                )
    return stored


def _compare(manifest: Manifest, expected: Samples, field: Field) -> None:
    """Compare samples: the norm of their difference over the norm of what is expected."""
    key = f"{manifest.name}: selfcheck"
    if list(field.scores.shape) != expected["field_shape"].tolist():
        raise ModelRefused(
            f"{key}: expected scores of shape {expected['field_shape'].tolist()}, got "
            f"{list(field.scores.shape)}; write the self-check again with landmarkd check --write"
        )
    for kind in KINDS:
        indices, count = expected[f"{kind}_index"], getattr(field, kind).numel()
        if int(indices.min()) < 0 or int(indices.max()) >= count:
            raise ModelRefused(f"{key}.expected: expected {kind}_index inside {count} {kind}")
    tolerance = manifest.selfcheck.tolerance
    for kind, got in _sample(field, expected).items():
        # Both infinite, as logarithms of a probability of 0 are: alike, and of no use in a norm.
        alike = got.isinf() & (got == expected[kind])
        norm = float(torch.linalg.vector_norm(expected[kind].masked_fill(alike, 0.0)))
        off = (got - expected[kind]).masked_fill(alike, 0.0)
        distance = float(torch.linalg.vector_norm(off)) / max(norm, TINY)
        # Written so that a NaN on either side is a failure too.
        if not distance <= tolerance:
            raise ModelRefused(
                f"{key}: expected {kind} within {tolerance:g} of those stored (norm of the "
                f"difference over norm), got {distance:.3g}"
            )
