"""times of a tile + self-check -> the precision that a network computes in.

Lower precisions are faster on some devices, no faster on others, and too rough for some networks.
So the choice is measured when a model is loaded, where the device has a fast lower precision at
all: the fastest that gains something stays, if the network passes its self-check in it and answers
there as in float32. Elsewhere nothing is measured, and a start costs nothing.
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from app.compute import fast_precisions, wait_for
from app.errors import ModelRefused
from app.model.manifest import Manifest
from app.model.network import Field, Network
from app.model.selfcheck import TINY, make_noise, run_noise

logger = logging.getLogger("landmarkd.precision")

Precision: TypeAlias = Literal["auto", "float32", "bfloat16", "float16"]

FLOAT32: Final = "float32"
DTYPES: Final[Mapping[str, torch.dtype]] = {
    FLOAT32: torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

GAIN: Final = 1.05
"""A lower precision must be this much faster than float32; less is not worth its rounding."""

WARM_UPS: Final = 2
"""Runs before those that are timed: the first choose kernels and fill caches."""

REPEATS: Final = 5
"""Runs that are timed, whose median counts."""


@dataclass(frozen=True, slots=True)
class PrecisionTiming:
    """What a tile takes in one precision.

    Attributes:
        precision: Such as ``bfloat16``.
        seconds: For one tile alone, the median of a few.
        chosen: Whether the network computes in it.
    """

    precision: str
    seconds: float
    chosen: bool


def choose_precision(seconds: Mapping[str, float], sound: Callable[[str], bool]) -> str:
    """Choose the fastest precision that gains something and is sound.

    Args:
        seconds: What a tile takes, by precision; float32 is among them.
        sound: Tells whether the network may answer in a precision; asked from the fastest on, and
            only of those that gain something.

    Returns:
        The precision; float32 if no other is worth it.
    """
    limit = seconds[FLOAT32] / GAIN
    faster = [name for name in seconds if name != FLOAT32 and seconds[name] <= limit]
    return next((name for name in sorted(faster, key=seconds.__getitem__) if sound(name)), FLOAT32)


def settle_precision(
    manifest: Manifest,
    network: Network,
    wanted: Precision,
    verify: Callable[[Network], None],
) -> tuple[Network, tuple[PrecisionTiming, ...]]:
    """Have a network compute in the precision that is wanted, or in the one that proves best.

    Args:
        manifest: Of the network.
        network: In float32.
        wanted: A precision, or ``auto``.
        verify: Runs the self-check; raises ModelRefused.

    Returns:
        The network, checked, in its precision; and what was measured, if anything was.

    Raises:
        ModelRefused: It fails its self-check in float32, or in the precision that is wanted.
    """
    if wanted not in ("auto", FLOAT32):
        return _insist(manifest, network.computing_in(DTYPES[wanted]), wanted, verify), ()
    verify(network)
    candidates = fast_precisions(network.device) if wanted == "auto" else ()
    if not candidates:
        return network, ()
    return compare_precisions(manifest, network, candidates, verify)


def compare_precisions(
    manifest: Manifest,
    network: Network,
    candidates: tuple[str, ...],
    verify: Callable[[Network], None],
) -> tuple[Network, tuple[PrecisionTiming, ...]]:
    """Time a network in several precisions, and have it compute in the best that is sound.

    Args:
        manifest: Of the network.
        network: In float32, checked.
        candidates: Lower precisions.
        verify: Runs the self-check; raises ModelRefused.

    Returns:
        The network in its precision, and what was measured.
    """
    tile = make_noise(manifest, 0)[None]
    seconds = {FLOAT32: time_tile(network, tile)}

    def passes(name: str, test: Callable[[Network], None]) -> bool:
        try:
            test(network.computing_in(DTYPES[name]))
        except (ModelRefused, torch.OutOfMemoryError) as error:
            said = {"model": manifest.name, "precision": name, "reason": str(error)}
            logger.info("precision refused", extra=said)
            return False
        return True

    def measure(lower: Network) -> None:
        # Says it as a refusal if this precision is not to be had.
        run_noise(manifest.name, manifest, lower)
        seconds[lower.precision] = time_tile(lower, tile)

    def prove(lower: Network) -> None:
        check_agreement(manifest, network, lower)
        verify(lower)

    for name in candidates:
        passes(name, measure)
    chosen = choose_precision(seconds, lambda name: passes(name, prove))
    said = {"model": manifest.name, "device": str(network.device), "precision": chosen}
    logger.info("precision chosen", extra=said | {"seconds": seconds})
    timings = (PrecisionTiming(name, took, name == chosen) for name, took in seconds.items())
    return network.computing_in(DTYPES[chosen]), tuple(timings)


def time_tile(network: Network, tile: Tensor) -> float:
    """Say how many seconds a network needs for one tile, (1 1 i j k), alone on its device."""
    tile = tile.to(network.device)
    times = []
    for _ in range(WARM_UPS + REPEATS):
        wait_for(network.device)
        start = time.perf_counter()
        network.predict(tile)
        wait_for(network.device)
        times.append(time.perf_counter() - start)
    return float(np.median(times[WARM_UPS:]))


def check_agreement(manifest: Manifest, exact: Network, lower: Network) -> None:
    """Compare the whole answers of a network in two precisions to its self-check's noise.

    Args:
        manifest: Says how far apart they may be: ``selfcheck.tolerance``, by which stored samples
            are compared too.
        exact: In float32.
        lower: In a lower precision.

    Raises:
        ModelRefused: They differ by more.
    """
    one, other = (run_noise(manifest.name, manifest, network) for network in (exact, lower))
    for kind in ("scores", "offsets"):
        distance = _distance(one, other, kind)
        # Written so that a NaN is a failure too.
        if not distance <= manifest.selfcheck.tolerance:
            raise ModelRefused(
                f"{manifest.name}: precision: expected {kind} within "
                f"{manifest.selfcheck.tolerance:g} of those in float32, got {distance:.3g}"
            )


def _distance(exact: Field, lower: Field, kind: str) -> float:
    """Give the norm of the difference over the norm of what is exact."""
    expected, got = getattr(exact, kind), getattr(lower, kind).float()
    norm = float(torch.linalg.vector_norm(expected))
    return float(torch.linalg.vector_norm(got - expected)) / max(norm, TINY)


def _insist(
    manifest: Manifest, network: Network, wanted: Precision, verify: Callable[[Network], None]
) -> Network:
    """Check a network in the one precision that is wanted."""
    try:
        verify(network)
    except ModelRefused as refusal:
        raise ModelRefused(
            f"{manifest.name}: precision: expected a network that passes its self-check in "
            f"{wanted}, which was asked for; got: {refusal}"
        ) from refusal
    said = {"model": manifest.name, "device": str(network.device), "precision": wanted}
    logger.info("precision set", extra=said)
    return network
