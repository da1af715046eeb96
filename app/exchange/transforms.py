"""What is done before and around a MONAI network -> which input it expects, if it is literal."""

import math
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeGuard

from app.errors import ModelRefused
from app.exchange.bundles import Json, read_target
from app.model import WHOLE

NEUTRAL: Final = {
    "AddChanneld", "CastToTyped", "DeleteItemsd", "EnsureChannelFirstd", "EnsureTyped", "Identityd",
    "LoadImaged", "SelectItemsd", "ToDeviced", "ToTensord",
}  # fmt: skip
"""Transforms that change no voxel value, and none's place."""

EVEN_SIGMA: Final = 1000.0
"""Width of a Gaussian, in edges of a tile, that counts all voxels alike."""

WIDEST: Final = 1e38
"""Beyond all voxel values: clips nothing."""


def read_transforms(config: Json, section: str) -> list[tuple[str, Json]]:
    """List the transforms of a section of ``inference.json``, such as ``preprocessing``.

    Returns:
        Name, as it ends in d, and arguments of each; of what is none, its beginning.
    """
    composed = config.get(section)
    steps = composed.get("transforms") if isinstance(composed, dict) else None
    listed: list[tuple[str, Json]] = []
    for step in steps if isinstance(steps, list) else []:
        try:
            _, name, given = read_target(step)
            listed.append((re.sub(r"(?<=[a-z])(D|Dict)$", "d", name), given))
        except ModelRefused:
            listed.append((f"{step!s:.40}", {}))
    return listed


def read_preprocessing(config: Json) -> tuple[dict[str, Any], list[str]]:
    """Read which input a network expects from the transforms before it in ``inference.json``.

    Returns:
        Keys of ``model.toml`` that are known, such as ``input.orientation``; and the names of
        transforms that change the input in other ways.
    """
    known: dict[str, Any] = {}
    unread = []
    for kind, given in read_transforms(config, "preprocessing"):
        if kind in NEUTRAL or not _of_image(given.get("keys")):
            continue
        if kind not in READERS:
            unread.append(kind)
            continue
        key, read = READERS[kind]
        value = read(_without(given, "keys", "mode", "padding_mode", "allow_missing_keys"))
        if kind == "Spacingd" and "input.orientation" not in known and len(set(value or ())) > 1:
            value = None  # Along the axes of the file, which are anyone's.
        # What is done twice is done in another way than either says.
        known[key] = None if key in known else value
    return {key: value for key, value in known.items() if value is not None}, unread


def read_inferer(config: Json) -> dict[str, Any]:
    """Read from ``inference.json`` how an inferer slides over scans, or that it does not.

    Returns:
        Keys of ``model.toml``; None for those that it says in no literal, or by axis. Empty if it
        is none that can be read.

    Raises:
        ModelRefused: It does what a model folder cannot express.
    """
    inferer = config.get("inferer")
    if not isinstance(inferer, dict):
        return {}
    _, name, given = read_target(inferer)
    if name == "SimpleInferer":
        return {"input.tile_shape": WHOLE}
    if name != "SlidingWindowInferer":
        raise ModelRefused(f"inferer: expected SlidingWindowInferer or SimpleInferer, got {name}")
    for key, only in {"padding_mode": "constant", "cval": 0, "with_coord": False}.items():
        if (value := given.get(key, only)) != only:
            raise ModelRefused(f"inferer: expected {key} {only!r}, got {value!r:.80}")
    sigmas = {"constant": EVEN_SIGMA, "gaussian": _same_number(given.get("sigma_scale", 0.125))}
    edges = given.get("roi_size")
    edges = [edges] * 3 if type(edges) is int else edges
    return {
        "input.tile_layout": "monai",
        "input.tile_shape": edges if is_shape(edges) else None,
        "input.tile_overlap": _same_number(given.get("overlap", 0.25)),
        "input.tile_sigma": sigmas.get(given.get("mode", "constant")),
    }


def read_divisor(edges: object) -> int | None:
    """Read what edges must be multiples of, such as ``["16*n", "16*n", "8*n"]`` or ``["*"]``."""
    listed = edges if isinstance(edges, list) else [None]
    found = [re.fullmatch(r"(?:(\d{1,3})\s*\*\s*n|\*)", str(edge)) for edge in listed]
    factors = [int(one[1] or 1) for one in found if one]
    return math.lcm(*factors) if len(factors) == len(found) else None


def is_shape(value: object) -> TypeGuard[list[int]]:
    """Say whether a value is the edges of a tile."""
    edges = value if isinstance(value, list) else []
    return len(edges) == 3 and all(type(edge) is int and edge > 0 for edge in edges)


def _same_number(value: object) -> float | None:
    """Read a number, or one that is the same along all axes."""
    listed = value if isinstance(value, list) else [value]
    same = [float(one) for one in listed if is_number(one) and one == listed[0]]
    return same[0] if same and len(same) == len(listed) else None


def _of_image(keys: object) -> bool:
    """Say whether a transform is of the image, or may be."""
    named = keys if isinstance(keys, list) else [keys]
    return any(not isinstance(key, str) or key == "image" or key[:1] in {"@", "$"} for key in named)


def _without(values: Json, *keys: str) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in keys}


def _numbers(given: Json, names: str) -> list[float] | None:
    """Read arguments that are numbers; None if one is none, or there are others besides."""
    values = _without(given, "dtype", "channel_wise")
    listed = [values.pop(name, None) for name in names.split()]
    numeric = all(is_number(one) for one in listed)
    return [float(one) for one in listed] if numeric and not any(values.values()) else None


def is_number(value: object) -> TypeGuard[int | float]:
    """Say whether a value is a number that a float can be, which True is not, nor infinity."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= sys.float_info.max


def _orientation(given: Json) -> str | None:
    codes = given.get("axcodes")
    return codes if isinstance(codes, str) and len(given) == 1 and len(codes) == 3 else None


def _spacing(given: Json) -> list[float] | None:
    edges = given.get("pixdim")
    plain = isinstance(edges, list) and len(edges) == 3 and all(is_number(mm) for mm in edges)
    others = _without(given, "pixdim", "align_corners", "dtype")
    return [float(mm) for mm in edges] if plain and edges and not any(others.values()) else None


def _window(given: Json) -> dict[str, Any] | None:
    numbers = _numbers(_without(given, "clip"), "a_min a_max b_min b_max")
    clipped = given.get("clip", False)
    if numbers is None or not isinstance(clipped, bool):
        return None
    low, high, bottom, top = numbers
    if clipped and (bottom, top) == (0.0, 1.0):
        return {"method": "window", "lower": low, "upper": high}
    if not (low < high and bottom < top):
        return None
    deviation = (high - low) / (top - bottom)
    lower, upper = (low, high) if clipped else (-WIDEST, WIDEST)
    scale = {"mean": low - bottom * deviation, "deviation": deviation}
    return {"method": "clip", "lower": lower, "upper": upper, **scale}


def _percentiles(given: Json) -> dict[str, Any] | None:
    numbers = _numbers(_without(given, "clip"), "lower upper b_min b_max")
    if numbers is None or numbers[2:] != [0.0, 1.0] or given.get("clip") is not True:
        return None
    return {"method": "percentile", "lower": numbers[0], "upper": numbers[1]}


def _extremes(given: Json) -> dict[str, Any] | None:
    if _numbers({"minv": 0.0, "maxv": 1.0, **given}, "minv maxv") != [0.0, 1.0]:
        return None
    return {"method": "percentile", "lower": 0.0, "upper": 100.0}


def _standard(given: Json) -> dict[str, Any] | None:
    if (numbers := _numbers(given, "subtrahend divisor")) is not None and numbers[1] > 0:
        scale = {"mean": numbers[0], "deviation": numbers[1]}
        return {"method": "clip", "lower": -WIDEST, "upper": WIDEST, **scale}
    nonzero = given.get("nonzero", False)
    others = _without(given, "nonzero", "dtype", "channel_wise")
    if not isinstance(nonzero, bool) or any(value is not None for value in others.values()):
        return None
    return {"method": "zscore", "region": "nonzero"} if nonzero else {"method": "zscore"}


READERS: Final[Mapping[str, tuple[str, Callable[[Json], Any]]]] = {
    "Orientationd": ("input.orientation", _orientation),
    "Spacingd": ("input.spacing_mm", _spacing),
    "ScaleIntensityRanged": ("input.intensity", _window),
    "ScaleIntensityRangePercentilesd": ("input.intensity", _percentiles),
    "ScaleIntensityd": ("input.intensity", _extremes),
    "NormalizeIntensityd": ("input.intensity", _standard),
}
"""What each transform says, and how it is read."""
