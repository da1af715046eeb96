"""A MONAI bundle -> a model folder, without running anything of the bundle."""

import inspect
import re
import shutil
import tomllib
from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import Any, Final

from torch import Tensor

from app.errors import BadParameter, ModelRefused
from app.exchange.bundles import CONFIG, METADATA, NETWORKS, check_literals, read_target
from app.exchange.folders import (
    choose_weights,
    load_data,
    read_json,
    refuse_unreadable,
    save_weights,
    write_folder,
)
from app.exchange.transforms import (
    is_shape,
    read_divisor,
    read_inferer,
    read_preprocessing,
    read_transforms,
)
from app.model import WHOLE, find_architecture

Json = dict[str, Any]

NEEDED: Final = {
    "input.orientation": "RAS",
    "input.spacing_mm": "[1.0, 1.0, 1.0]",
    "input.tile_shape": "[96, 96, 96]",
    "input.intensity": '{method = "zscore"}',
    "voting.radius_mm": "7.2",
}
"""Keys without a default, with an example of each."""

UNSAID: Final = {
    "input.tile_overlap": "0.25", "input.tile_sigma": "0.125", "input.divisor": "16",
}  # fmt: skip
"""Keys that are needed where the bundle says them in no literal."""

THRESHOLDS: Final = {"heatmaps": 0.2, "votes": 0.3, "coordinates": 0.5}
LABEL_THRESHOLD: Final = 0.5
"""Of a channel that was trained to mark a landmark's voxels against a background."""

SETTABLE: Final = re.compile(r"version|description|license|(input|network|voting)\.[a-z0-9_]+")
MAX_TEXT: Final = 500


def import_monai(
    bundle: Path,
    output: Path,
    *,
    landmarks: Sequence[str] = (),
    given: Sequence[str] = (),
    ignored: Sequence[str] = (),
    allow_torchscript: bool = False,
) -> Path:
    """Write a model folder of a bundle.

    Args:
        bundle: Its folder.
        output: Folder to write; its name becomes the model's.
        landmarks: Names, in the order of the channels; empty: those in ``channel_def``.
        given: Keys of ``model.toml`` as ``KEY=VALUE``, which count more than what the bundle says.
        ignored: Names of transforms that may be left out.
        allow_torchscript: Whether the network may be TorchScript.

    Raises:
        BadParameter: An option does not fit, one is needed, or the output exists.
        ModelRefused: The bundle cannot be served; the reason is named.
    """
    try:
        metadata = read_json(bundle / METADATA)
        config = read_json(bundle / CONFIG) if (bundle / CONFIG).is_file() else {}
        options = {"network.output": "heatmaps", **dict(map(_read_option, given))}
        keys = _complete(metadata, config, options)
        names = list(landmarks) or _read_landmarks(metadata, keys)
        _check(metadata, config, keys, names, ignored)
        network, file = _choose_network(bundle, config)
    except (KeyError, TypeError, AttributeError) as error:
        raise ModelRefused(
            f"{bundle.name}: expected the metadata of a MONAI bundle, with "
            f"network_data_format.inputs.image and outputs.pred, got {error!r:.200}"
        ) from error
    except (ModelRefused, BadParameter) as refusal:
        raise type(refusal)(f"{bundle.name}: {refusal}") from refusal
    return write_folder(
        output,
        _manifest(keys, network, len(names)),
        names,
        _origin(metadata),
        lambda target: _write_network(bundle.name, network, file, target),
        allow_torchscript=allow_torchscript,
    )


def _read_option(option: str) -> tuple[str, Any]:
    """Read ``KEY=VALUE``, whose value is TOML, or text without quotes."""
    key, equals, value = (part.strip() for part in option.partition("="))
    if not (equals and SETTABLE.fullmatch(key)):
        raise BadParameter(
            f"--set: expected KEY=VALUE with a key of model.toml, got {option!r:.100}"
        )
    try:
        read = tomllib.loads(f"value = {value}")["value"]
    except (ValueError, RecursionError):  # Such as of a number of 5,000 digits.
        return key, value
    return key, read if "." in key or isinstance(read, str) else value  # version=2.0 is a text.


def _read_keys(metadata: Json, config: Json) -> Json:
    """Collect the keys of ``model.toml`` that the bundle says."""
    keys = read_preprocessing(config)[0] | read_inferer(config)
    for name, length in (("version", 32), ("description", MAX_TEXT)):
        if isinstance(metadata.get(name), str):
            keys[name] = " ".join(metadata[name].split())[:length]
    return keys


def _complete(metadata: Json, config: Json, options: Json) -> Json:
    """Add to options what the bundle says, and what neither says."""
    keys, output = _read_keys(metadata, config), options["network.output"]
    edges = metadata["network_data_format"]["inputs"]["image"].get("spatial_shape")
    # A network that answers coordinates mostly takes a single shape.
    asked = (None, WHOLE) if output == "coordinates" else (None,)
    if is_shape(edges) and keys.get("input.tile_shape") in asked:
        keys["input.tile_shape"] = edges
    keys |= options
    if keys.get("input.tile_shape") == WHOLE:
        keys.setdefault("input.divisor", read_divisor(edges))
    if output == "heatmaps":
        applied = [
            activation
            for kind, given in read_transforms(config, "postprocessing")
            for activation in ("sigmoid", "softmax")
            if kind == "Activationsd" and given.get(activation) is True
        ]
        keys.setdefault("network.activation", applied[0] if len(applied) == 1 else "none")
    else:
        keys.pop("input.tile_layout", None)
    if output == "votes":
        keys.setdefault("network.activation", "sigmoid")
    labels = keys.get("network.activation") == "softmax"
    threshold = LABEL_THRESHOLD if labels else THRESHOLDS.get(str(output), LABEL_THRESHOLD)
    return {"voting.threshold": threshold, **keys}


def _read_landmarks(metadata: Json, keys: Json) -> list[str]:
    """Read the names of the channels in their order; with a softmax the first is background."""
    named = metadata["network_data_format"]["outputs"]["pred"].get("channel_def") or {}
    if set(named) != set(map(str, range(len(named)))):
        raise ModelRefused(f"channel_def: expected channels 0, 1, ..., got {sorted(named)!s:.200}")
    names = [str(named[str(channel)]) for channel in range(len(named))]
    return names[1:] if keys.get("network.activation") == "softmax" else names


def _check(
    metadata: Json, config: Json, keys: Json, names: list[str], ignored: Sequence[str]
) -> None:
    """Refuse what a model folder cannot express, and say all that is missing at once."""
    channels = metadata["network_data_format"]["inputs"]["image"].get("num_channels")
    if channels != 1:
        raise ModelRefused(f"expected a network for scans of one channel, got {channels!r:.80}")
    needed = {key: example for key, example in NEEDED.items() if keys.get(key) is None}
    needed |= {key: example for key, example in UNSAID.items() if keys.get(key, 0) is None}
    if keys["network.output"] == "coordinates":
        needed.pop("voting.radius_mm", None)
    reasons = [f"--set '{key}={example}'" for key, example in needed.items()]
    reasons += [] if names else ["--landmark NAME for each channel"]
    unread = [name for name in read_preprocessing(config)[1] if name not in ignored]
    reasons += [f"--ignore {quote(name)}, a transform that is left out" for name in unread]
    if reasons:
        yaml = "" if config else f"; {CONFIG} is not there, and YAML is not read"
        raise BadParameter(
            f"expected what the bundle does not say in literals{yaml}; give {'; '.join(reasons)}"
        )


def _choose_network(folder: Path, config: Json) -> tuple[Json, Path]:
    """Choose a network: ONNX, or weights of an architecture that is known, or TorchScript.

    Returns:
        The section ``network``, as far as it says which, and the bundle's file.
    """
    onnx, weights, script = (folder / name for name in NETWORKS)
    if onnx.is_file():
        return {"program": "network.onnx"}, onnx
    if weights.is_file():
        try:
            return _read_architecture(config), weights
        except ModelRefused as refusal:
            if not script.is_file():
                raise ModelRefused(f"network_def: {refusal}") from refusal
    if script.is_file():
        return {"program": "network.ts"}, script
    raise ModelRefused(f"expected one of {', '.join(NETWORKS)}")


def _read_architecture(config: Json) -> Json:
    """Read the class of the network, which must be allow-listed, and its arguments."""
    module, name, arguments = read_target(config.get("network_def"))
    architecture = f"{module or 'monai.networks.nets'}:{name}"
    found = inspect.signature(find_architecture("bundle", architecture)).parameters
    # TOML has no null.
    none = [
        key for key in arguments if key in found and found[key].default is arguments[key] is None
    ]
    arguments = {key: value for key, value in arguments.items() if key not in none}
    check_literals(arguments)
    return {
        "architecture": architecture,
        "weights": "weights.safetensors",
        "arguments": arguments,
    }


def _read_weights(file: Path) -> dict[str, Tensor]:
    """Read a state, which may be a part of a checkpoint."""
    with refuse_unreadable(file.name, "a network's state"):
        state = load_data(file)
        inner = [state[key] for key in ("model", "state_dict") if isinstance(state.get(key), dict)]
        return choose_weights(file, inner[0] if inner else state)


def _write_network(name: str, network: Json, file: Path, target: Path) -> None:
    """Write the file of the network into a model folder."""
    if "program" in network:
        shutil.copyfile(file, target / network["program"])
        return
    weights, arguments = _read_weights(file), network["arguments"]
    save_weights(target / network["weights"], name, network["architecture"], arguments, weights)


def _manifest(keys: Json, network: Json, landmarks: int) -> Json:
    """Write what the manifest says of this bundle."""
    document: Json = {
        "version": "1.0.0",
        "description": f"{landmarks} landmarks of a MONAI bundle",
        "license": "unknown",
        "input": {},
        "network": {**network},
        "voting": {},
    }
    for key, value in keys.items():
        section, _, own = key.partition(".")
        (document[section] if own else document)[own or section] = value
    return document


def _origin(metadata: Json) -> str:
    """Say where the model comes from."""
    said = [metadata.get(key) for key in ("name", "version", "authors", "copyright")]
    texts = [" ".join(text.split())[:MAX_TEXT] for text in said if isinstance(text, str)]
    return f"a MONAI bundle: {', '.join(texts)}."
