"""Arrays of any network -> Field -> Votes: checked, so that an error names the array at fault.

For notebooks and for ``POST /v1/votes``. The layout says which axis and channel is what; arrays are
read in place, through views.
"""

import math
from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeVar, get_args

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from app.errors import BadArrays, BadGeometry, BadParameter, TooLarge
from app.geometry import Affine
from app.io import FLOAT32_MAX, MAX_REACH_MM, check_spacing
from app.model import Field
from app.voting.reference import Placement

Array = np.ndarray | Tensor
Found = TypeVar("Found", bound=Sized)

TYPES: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

ROUNDING: Final = 1e-5
"""How far outside [0, 1] a probability may lie: interpolation and softmax in float32 round."""

Channels = Literal["first", "last"]
Order = Literal["axis", "landmark"]
Activation = Literal["sigmoid", "softmax"]
LAYOUT_WORDS: Final = {
    "channels": get_args(Channels),
    "order": get_args(Order),
    "background": (True, False, None),
    "activation": (*get_args(Activation), None),
}

BLOCK_SIZE: Final = 1 << 23
"""Voxels times landmarks filtered at once: the number of votes is checked after each block."""

MIN_BLOCK_SIZE: Final = 1 << 17
"""Where there may be few votes, as memory is short, a block holds no more than these; but so many,
whose votes take 5 MB: smaller ones take longer."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How arrays of four axes hold scores and offsets; the defaults are those of many networks.

    Attributes:
        channels: Whether the channel axis comes ``first`` or ``last``, beside i, j, k.
        order: Offset channels of landmark c out of C: ``axis``: c, c + C and c + 2C are those
            along i, j and k; ``landmark``: 3c, 3c + 1 and 3c + 2 are.
        background: Whether channel 0 of the scores is the background; None: if there is one
            channel more than landmarks.
        activation: What turns scores into probabilities; None: ``softmax`` if there is a
            background, else ``sigmoid``. Says nothing of probabilities.

    Raises:
        BadParameter: One of them is another word.
    """

    channels: Channels = "last"
    order: Order = "axis"
    background: bool | None = None
    activation: Activation | None = None

    def __post_init__(self) -> None:
        """Refuse other words: they would be taken for one of these, and positions be wrong."""
        for name, words in LAYOUT_WORDS.items():
            if (given := getattr(self, name)) not in words:
                expected = ", ".join(map(repr, words))
                raise BadParameter(f"{name}: expected one of {expected}; got {given!r}")


def make_field(
    *,
    offsets: Array | None,
    probs: Array | None = None,
    scores: Array | None = None,
    layout: Layout | None = None,
) -> Field:
    """View a network's output as a field, without copying it.

    Only shapes and types are checked here; ``check_values`` checks the numbers.

    Args:
        offsets: From each voxel to the landmark, in voxels; four axes, 3C channels.
        probs: Probabilities; four axes, C channels, or C + 1 with the background.
        scores: Scores, instead of probabilities.
        layout: Which axis and channel is what; None: the defaults of ``Layout``.

    Returns:
        The field. Only read-only, byte-swapped and reversed NumPy arrays are copied.

    Raises:
        BadArrays: An array is missing, one too many, or of another type or shape than the layout
            and the other array require; the message names it.
    """
    layout = layout or Layout()
    if (probs is None) == (scores is None):
        got = "none" if probs is None else "both"
        raise BadArrays(f"arrays 'probs' and 'scores': expected one of them, got {got}")
    name, values = ("scores", scores) if probs is None else ("probs", probs)
    vectors = _channels_first("offsets", offsets, layout)
    planes = _channels_first(name, values, layout)
    landmarks, rest = divmod(len(vectors), 3)
    if rest:
        raise BadArrays(f"array 'offsets': expected 3 channels per landmark, got {len(vectors)}")
    if planes.shape[1:] != vectors.shape[1:]:
        raise BadArrays(
            f"array 'offsets': expected the voxels {list(planes.shape[1:])} of {name!r} "
            f"(channels {layout.channels}), got {list(vectors.shape[1:])}"
        )
    background = _has_background(name, len(planes), landmarks, layout)
    if name == "probs":
        activation: Literal["sigmoid", "softmax", "none"] = "none"
    else:
        activation = _activation(background, landmarks, layout)
    if layout.order == "axis":
        by_axis = vectors.unflatten(0, (3, landmarks))
    else:
        by_axis = vectors.unflatten(0, (landmarks, 3)).transpose(0, 1)
    return Field(planes, by_axis, activation, background)


def check_values(field: Field) -> None:
    """Check that scores are finite, or that probabilities are in [0, 1].

    Offsets are not checked: a vote without a finite one is dropped.

    Raises:
        BadArrays: A score is NaN, infinite or beyond float32; a probability is not in [0, 1].
    """
    # In memory order, in which one pass is several times faster.
    strides = field.scores.stride()
    dense = field.scores.permute(sorted(range(4), key=lambda axis: -strides[axis]))
    low, high = (float(bound) for bound in torch.aminmax(dense))
    got = "NaN" if math.isnan(low) else f"{low:g} to {high:g}"
    # Written so that NaN fails.
    if field.activation == "none" and not -ROUNDING <= low <= high <= 1 + ROUNDING:
        raise BadArrays(f"array 'probs': expected probabilities from 0 to 1, got {got}")
    if not -FLOAT32_MAX <= low <= high <= FLOAT32_MAX:
        raise BadArrays(f"array 'scores': expected finite float32 numbers, got {got}")


def check_affine(affine: Array) -> Affine:
    """Check an affine from voxel index to mm, RAS.

    Returns:
        The affine in float64.

    Raises:
        BadArrays: It is not 4 x 4, not finite, not invertible, or not of a scan's size.
    """
    shape = np.shape(affine)
    if shape != (4, 4):  # First: in float64, another may take several times its own memory.
        raise BadArrays(f"array 'affine': expected shape [4, 4], got {list(shape)}")
    given = affine.double().numpy() if isinstance(affine, Tensor) else np.asarray(affine)
    if given.dtype.kind not in "iuf":
        raise BadArrays(f"array 'affine': expected real numbers, got {given.dtype}")
    matrix = given.astype(np.float64)
    peak = np.abs(matrix).max()
    # Written so that NaN fails.
    if not peak <= MAX_REACH_MM:
        raise BadArrays(f"array 'affine': expected numbers up to {MAX_REACH_MM:g} mm, got {peak:g}")
    if matrix[3].tolist() != [0, 0, 0, 1]:
        raise BadArrays(f"array 'affine': expected 0 0 0 1 as last row, got {matrix[3].tolist()}")
    try:
        check_spacing(matrix)
    except BadGeometry as error:
        raise BadArrays(f"array 'affine': {error}") from None
    return matrix


def filter_in_blocks(
    field: Field,
    threshold: float,
    filter_block: Callable[..., Found],
    max_votes: int,
    check_cancelled: Callable[[], None],
) -> list[Found]:
    """Filter a field block by block, and only up to a number of votes.

    Args:
        field: Scores and offsets.
        threshold: Least probability of a vote.
        filter_block: ``filter_votes``, or ``filter_rows`` for some part of the array.
        max_votes: How many votes there may be.
        check_cancelled: Is called between blocks; ends the work by raising.

    Returns:
        What was found in each block; all together is ordered by voxel, then landmark.

    Raises:
        TooLarge: There are more votes.
    """
    parts: list[Found] = []
    for block, placement in _blocks(field, min(BLOCK_SIZE, max(MIN_BLOCK_SIZE, max_votes))):
        check_cancelled()
        parts.append(filter_block(block, threshold, placement=placement))
        if sum(len(part) for part in parts) > max_votes:
            raise TooLarge(
                f"expected at most {max_votes:,} votes at threshold {threshold:g}, got more; "
                "raise the threshold"
            )
    return parts


def _blocks(field: Field, size: int) -> Iterator[tuple[Field, Placement]]:
    """Divide a field into blocks along i, and too large planes along j, in voxel order."""
    _, landmarks, depth, height, width = field.offsets.shape
    rows = max(1, size // (landmarks * width))
    planes, columns = max(1, rows // height), min(rows, height)
    for i in range(0, depth, planes):
        for j in range(0, height, columns):
            box = (..., slice(i, i + planes), slice(j, j + columns), slice(None))
            block = replace(field, scores=field.scores[box], offsets=field.offsets[box])
            yield block, Placement((i, j, 0))


def _channels_first(
    name: str, array: Array | None, layout: Layout
) -> Float[Tensor, "channels i j k"]:
    """View an array with its channels first."""
    if not isinstance(array, np.ndarray | Tensor):
        raise BadArrays(f"array {name!r}: expected an array, got {type(array).__name__}")
    tensor = array if isinstance(array, Tensor) else _tensor_of(name, array)
    if tensor.dtype not in TYPES:
        raise _bad_type(name, str(tensor.dtype).removeprefix("torch."))
    if tensor.ndim != 4 or 0 in tensor.shape:
        axes = "channels, i, j, k" if layout.channels == "first" else "i, j, k, channels"
        raise BadArrays(
            f"array {name!r}: expected four axes ({axes}), none empty, got shape "
            f"{list(tensor.shape)}"
        )
    return tensor if layout.channels == "first" else tensor.permute(3, 0, 1, 2)


def _tensor_of(name: str, array: np.ndarray) -> Tensor:
    """View a NumPy array as a tensor; what torch cannot view is copied."""
    if array.dtype.kind != "f" or array.dtype.itemsize > 8:
        raise _bad_type(name, str(array.dtype))
    strides = [divmod(stride, array.itemsize) for stride in array.strides]
    viewable = all(whole >= 0 and not rest for whole, rest in strides)
    if not (viewable and array.dtype.isnative and array.flags.writeable):
        array = array.astype(array.dtype.newbyteorder("="), order="C")
    return torch.from_numpy(array)


def _bad_type(name: str, got: str) -> BadArrays:
    return BadArrays(
        f"array {name!r}: expected float16, bfloat16, float32 or float64 numbers, got {got}"
    )


def _has_background(name: str, channels: int, landmarks: int, layout: Layout) -> bool:
    """Decide whether channel 0 is the background."""
    expected = {landmarks: False, landmarks + 1: True}
    if layout.background is not None:
        expected = {landmarks + layout.background: layout.background}
    if channels not in expected:
        counts = " or ".join(str(count) for count in expected)
        raise BadArrays(
            f"array {name!r}: expected {counts} channels (channels {layout.channels}), as "
            f"'offsets' has {3 * landmarks}; got {channels}"
        )
    return expected[channels]


def _activation(background: bool, landmarks: int, layout: Layout) -> Activation:
    """Decide what turns scores into probabilities."""
    if layout.activation == "softmax" and not background:
        raise BadArrays(
            f"array 'scores': expected {landmarks + 1} channels, the background and {landmarks} "
            f"landmarks, for a softmax; got {landmarks}"
        )
    return layout.activation or ("softmax" if background else "sigmoid")
