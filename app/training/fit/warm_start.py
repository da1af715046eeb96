"""Weights of another model for a new network, with each landmark's channels where they belong.

Landmarks are matched by name: the other model may have them in another order, lack some or have
others.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from torch import nn

from app.errors import BadParameter
from app.model import Manifest, find_last_convolution, load_module, read_manifest
from app.training.data.issues import LINE_NAMES, shorten

CHANNELS: Final = {
    "output": "votes", "activation": "sigmoid", "offset_order": "axis", "offset_unit": "voxel",
}  # fmt: skip
"""Keys of ``[network]`` that say what the channels of networks mean which are trained here."""


def load_weights(network: nn.Module, names: Sequence[str], start: Path) -> str:
    """Load the weights of a model into a new network.

    Args:
        network: As ``build_network`` returns it; is changed.
        names: Its landmarks, in the order of its channels.
        start: Folder of the model to start from.

    Returns:
        Which landmarks are taken over and which are not; empty if both have the same.

    Raises:
        BadParameter: Its network or its landmarks do not fit.
        ModelRefused: There is no such model.
    """
    manifest = read_manifest(start)
    other = load_module(start, manifest)
    if type(other) is not type(network):
        expected, got = type(network).__name__, type(other).__name__
        raise BadParameter(f"--start: expected weights that fit, of a {expected}, got a {got}")
    for key, expected in CHANNELS.items():
        if (found := getattr(manifest.network, key)) != expected:
            raise BadParameter(f"--start: expected a network of {key} {expected}, got {found}")
    known = [landmark.name for landmark in manifest.landmarks]
    common = [name for name in names if name in known]
    if not common:
        raise BadParameter(
            f"--start: expected a model of the same landmarks, or of some of "
            f"{shorten(names, LINE_NAMES)}; got one of {shorten(known, LINE_NAMES)}"
        )
    rows = [names.index(name) for name in common], [known.index(name) for name in common]
    _rearrange_head(network, other, manifest, rows)
    try:
        network.load_state_dict(other.state_dict())
    except RuntimeError as error:
        raise BadParameter(f"--start: expected weights that fit, got: {error}") from None
    new = [name for name in names if name not in known]
    unused = [name for name in known if name not in names]
    parts = [
        f"{verb} {shorten(some, LINE_NAMES)}"
        for verb, some in (("takes over", common), ("learns anew", new), ("leaves out", unused))
        if some
    ]
    return f"--start {start}: {'; '.join(parts)}" if new or unused else ""


def _rearrange_head(
    network: nn.Module, other: nn.Module, manifest: Manifest, rows: tuple[list[int], list[int]]
) -> None:
    """Bring the rows of the other network's last layer into the order of the new one's.

    Rows of landmarks that only the new network has are its own, fresh ones.
    """
    head, other_head = find_last_convolution(network), find_last_convolution(other)
    expected = sum(manifest.channels)
    got = "none" if other_head is None else f"one of {other_head.out_channels} channels"
    if head is None or other_head is None or other_head.out_channels != expected:
        raise BadParameter(
            f"--start: expected a network that ends in a convolution of {expected} channels, as "
            f"{len(manifest.landmarks)} landmarks have, got {got}"
        )
    for name in ("weight", "bias"):
        new, old = getattr(head, name), getattr(other_head, name)
        if new is None or old is None:
            continue  # If only one has a bias, load_state_dict will say so.
        arranged = new.detach().clone().unflatten(0, (4, -1))
        old = old.detach().unflatten(0, (4, -1))
        if arranged.shape[2:] == old.shape[2:]:
            arranged[:, rows[0]] = old[:, rows[1]]
        setattr(other_head, name, nn.Parameter(arranged.flatten(0, 1)))
