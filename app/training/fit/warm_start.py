"""model to start from -> its weights in a new network, each landmark's channels where they belong.

Landmarks go by their names: a model may have them in another order, lack some or have others.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn

from app.errors import BadParameter, ModelRefused
from app.model import Manifest, load_module, read_manifest
from app.training.data.issues import listed
from app.training.recipe import head_of

NAMED: Final = 8
"""Landmarks that a message names; of the others it gives the number."""


def take_over(network: nn.Module, names: Sequence[str], start: Path) -> str:
    """Give a new network the weights of a model.

    Args:
        network: As ``build_network`` makes it; is changed.
        names: Its landmarks, in the order of its channels.
        start: Folder of the model to start from.

    Returns:
        Which landmarks are taken over and which are not; empty if both have the same.

    Raises:
        BadParameter: There is no such model, its network is another, or it has other landmarks.
    """
    try:
        manifest = read_manifest(start)
        theirs = load_module(start, manifest)
    except ModelRefused as error:
        raise BadParameter(f"--start: expected weights that fit, got: {error}") from None
    if type(theirs) is not type(network):
        wanted, got = type(network).__name__, type(theirs).__name__
        raise BadParameter(f"--start: expected weights that fit, of a {wanted}, got a {got}")
    known = [landmark.name for landmark in manifest.landmarks]
    both = [name for name in names if name in known]
    if not both:
        raise BadParameter(
            f"--start: expected a model of the same landmarks, or of some of "
            f"{listed(names, NAMED)}; got one of {listed(known, NAMED)}"
        )
    places = [names.index(name) for name in both], [known.index(name) for name in both]
    _arrange(network, theirs, manifest, places)
    try:
        network.load_state_dict(theirs.state_dict())
    except RuntimeError as error:
        raise BadParameter(f"--start: expected weights that fit, got: {error}") from None
    new = [name for name in names if name not in known]
    gone = [name for name in known if name not in names]
    told = [
        f"{what} {listed(some, NAMED)}"
        for what, some in (("takes over", both), ("learns anew", new), ("leaves out", gone))
        if some
    ]
    return f"--start {start}: {'; '.join(told)}" if new or gone else ""


def _arrange(
    network: nn.Module, theirs: nn.Module, manifest: Manifest, places: tuple[list[int], list[int]]
) -> None:
    """Bring the last layer of a model into the order of a new network's.

    Rows of landmarks that only the new network has are its own, fresh ones.
    """
    mine, head = head_of(network), head_of(theirs)
    expected = sum(manifest.channels)
    got = "none" if head is None else f"one of {head.out_channels} channels"
    if mine is None or head is None or head.out_channels != expected:
        raise BadParameter(
            f"--start: expected a network that ends in a convolution of {expected} channels, as "
            f"{len(manifest.landmarks)} landmarks have, got {got}"
        )
    for name in ("weight", "bias"):
        new, old = getattr(mine, name), getattr(head, name)
        if new is None or old is None:
            continue  # Where only one has a bias, the weights do not fit, which is told later.
        rows = new.detach().clone().unflatten(0, (4, -1))
        old = by_landmark(old.detach(), manifest)
        if rows.shape[2:] == old.shape[2:]:
            rows[:, places[0]] = old[:, places[1]]
        setattr(head, name, nn.Parameter(rows.flatten(0, 1)))


def by_landmark(rows: Tensor, manifest: Manifest) -> Tensor:
    """Read a model's output channels as those of a network that is trained here.

    These are scores for a sigmoid and offsets in voxels, by axis. All it takes is linear, so it
    does for the last layer's weights what it does for the output.

    Args:
        rows: Channels first; whatever follows is kept.
        manifest: What they mean.

    Returns:
        Scores and offsets along i, j, k of each landmark, (4, landmarks, ...).
    """
    scores, offsets = rows.split(manifest.channels)
    if manifest.network.activation == "softmax":
        # Sigmoid of the difference is the softmax between a landmark and the background.
        scores = scores[1:] - scores[:1]
    if manifest.network.offset_order == "axis":
        offsets = offsets.unflatten(0, (3, -1))
    else:
        offsets = offsets.unflatten(0, (-1, 3)).transpose(0, 1)
    if manifest.network.offset_unit == "mm":
        spacing = torch.tensor(manifest.input.spacing_mm, dtype=rows.dtype)
        offsets = offsets / spacing.view(3, *[1] * rows.ndim)
    return torch.cat([scores[None], offsets])
