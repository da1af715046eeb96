"""plans.json and dataset.json of nnU-Net -> Plan: what one of its networks expects and answers.

nnU-Net reads a scan as SimpleITK does, so the axes of its arrays are k, j, i of the file, then
permutes them (``transpose_forward``). It does not look where they point to in the patient. Spacing,
patch and kernels follow the permuted axes. A model folder of ours says where the axes of the
network's input point to, which is all that is needed: no weight has to be permuted.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from app.errors import BadParameter, ModelRefused

UNETS: Final = "dynamic_network_architectures.architectures.unet"

REORIENTS: Final = ("NibabelIOWithReorient", "SimpleITKIOWithReorient")
"""The readers of scans that bring them to RAS first."""

RESAMPLING: Final = {
    "resampling_fn_data": "resample_data_or_seg_to_shape",
    "resampling_fn_data_kwargs": {
        "is_seg": False, "order": 3, "order_z": 0, "force_separate_z": None,
    },
}  # fmt: skip
"""How nnU-Net resamples scans unless it is told otherwise: what ``tile_layout`` does."""

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Plan:
    """What a configuration of nnU-Net expects.

    Attributes:
        architecture: Its network, as ``module:Class``.
        arguments: Of its constructor, without those that depend on the data.
        orientation: Where the axes of the network's input point to.
        spacing_mm: Along these axes.
        resampling: What brought scans to this spacing, if it is not what a model folder does.
        patch: Voxels along these axes.
        intensity: The section ``[input.intensity]``.
        landmarks: Names, in the order of the channels.
        dataset: Name of the dataset.
        licence: Of the dataset.
    """

    architecture: str
    arguments: dict[str, Any]
    orientation: str
    spacing_mm: tuple[float, ...]
    resampling: str
    patch: tuple[int, ...]
    intensity: dict[str, Any]
    landmarks: tuple[str, ...]
    dataset: str
    licence: str


def read_plan(plans: Json, dataset: Json, configuration: str, orientation: str | None) -> Plan:
    """Read what a configuration says.

    Args:
        plans: The content of ``plans.json``.
        dataset: The content of ``dataset.json``.
        configuration: Its name, such as ``3d_fullres``.
        orientation: Where the axes i, j, k of the training scans' files point to; None: they were
            reoriented as they were read.

    Raises:
        ModelRefused: The network is none for scans of one channel, or the files lack something.
        BadParameter: The orientation is needed, or not one.
    """
    try:
        chosen = _configuration(plans, configuration)
        _check(dataset, chosen, configuration)
        architecture, arguments = _architecture(chosen)
        return Plan(
            architecture=architecture,
            arguments={key: value for key, value in arguments.items() if value is not None},
            orientation=_orientation(plans, orientation),
            spacing_mm=_spacing(chosen["spacing"]),
            resampling=_resampling(chosen),
            patch=tuple(int(edge) for edge in chosen["patch_size"]),
            intensity=_intensity(plans, chosen),
            landmarks=_landmarks(dataset["labels"]),
            dataset=str(plans.get("dataset_name", "")),
            licence=str(dataset.get("licence", dataset.get("license", "unknown"))),
        )
    except (
        LookupError,
        TypeError,
        AttributeError,
        RecursionError,
        ValueError,
        OverflowError,
    ) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ModelRefused(
            f"expected plans.json and dataset.json of nnU-Net, version 2, got {reason:.200}"
        ) from error


def _configuration(plans: Json, name: str) -> dict[str, Any]:
    """Look a configuration up, with all that it inherits."""
    own = plans["configurations"][name]
    parent = own.get("inherits_from")
    return {**(_configuration(plans, parent) if parent else {}), **own}


def _check(dataset: Json, chosen: Json, name: str) -> None:
    """Refuse what a model folder cannot express."""
    channels = dataset.get("channel_names", dataset.get("modality"))
    if channels is None or len(channels) != 1:
        raise ModelRefused(f"expected a network for scans of one channel, got {channels}")
    if len(chosen["patch_size"]) != 3:
        raise ModelRefused(f"expected a network in 3D, got configuration {name!r}")
    if chosen.get("previous_stage"):
        raise ModelRefused(f"expected a network that needs no other, got configuration {name!r}")


def _architecture(chosen: Json) -> tuple[str, Mapping[str, Any]]:
    """Read the network's class and arguments, also from plans before nnU-Net 2.4."""
    if "architecture" in chosen:
        given = chosen["architecture"]
        module, _, name = given["network_class_name"].rpartition(".")
        # Some plans name a module of the package's first versions.
        module = UNETS if module.endswith(".residual_unet") else module
        return f"{module}:{name}", given["arch_kwargs"]
    name, blocks = chosen["UNet_class_name"], chosen["n_conv_per_stage_encoder"]
    features, most = chosen["UNet_base_num_features"], chosen["unet_max_num_features"]
    residual = name == "ResidualEncoderUNet"
    return f"{UNETS}:{name}", {
        "n_stages": len(blocks),
        "features_per_stage": [min(features * 2**stage, most) for stage in range(len(blocks))],
        "conv_op": "torch.nn.Conv3d",
        "kernel_sizes": chosen["conv_kernel_sizes"],
        "strides": chosen["pool_op_kernel_sizes"],
        "n_blocks_per_stage" if residual else "n_conv_per_stage": blocks,
        "n_conv_per_stage_decoder": chosen["n_conv_per_stage_decoder"],
        "conv_bias": True,
        "norm_op": "torch.nn.InstanceNorm3d",
        "norm_op_kwargs": {"eps": 1e-5, "affine": True},
        "nonlin": "torch.nn.LeakyReLU",
        "nonlin_kwargs": {"inplace": True},
    }


def _orientation(plans: Json, given: str | None) -> str:
    """Say where the axes of the network's input point to."""
    reader = plans.get("image_reader_writer")
    reoriented = reader in REORIENTS
    of_file = "RAS" if reoriented else given
    if of_file is None:
        raise BadParameter(
            "--orientation: expected where the axes i, j, k of the training scans' files point to, "
            "such as RAS or LPS, as nnU-Net does not look; nibabel.aff2axcodes says it of a file"
        )
    if reoriented and given not in (None, "RAS"):
        raise BadParameter(f"--orientation: expected RAS, as {reader} read them, got {given}")
    if len(of_file) != 3:
        raise BadParameter(f"--orientation: expected three letters such as RAS, got {of_file}")
    return "".join(of_file[::-1][axis] for axis in plans["transpose_forward"])


def _spacing(given: Sequence[Any]) -> tuple[float, ...]:
    """Read the spacing in mm, whose cube root tells how far heatmaps reach."""
    spacing_mm = tuple(float(mm) for mm in given)
    if not all(0 < mm < math.inf for mm in spacing_mm):
        raise ModelRefused(f"expected a spacing above 0 mm, got {given!s:.80}")
    return spacing_mm


def _resampling(chosen: Json) -> str:
    """Name the function that resampled scans, if another or with other arguments than planned."""
    same = all(chosen.get(key, known) == known for key, known in RESAMPLING.items())
    return "" if same else str(chosen.get("resampling_fn_data"))


def _intensity(plans: Json, chosen: Json) -> dict[str, Any]:
    """Translate the normalisation."""
    scheme, masked = chosen["normalization_schemes"][0], chosen["use_mask_for_norm"][0]
    if scheme == "ZScoreNormalization":
        return {"method": "zscore", "region": "filled" if masked else "all"}
    if scheme == "CTNormalization":
        key = "foreground_intensity_properties_per_channel"
        found = plans.get(key, plans.get("foreground_intensity_properties_by_modality"))["0"]
        return {
            "method": "clip",
            "lower": float(found["percentile_00_5"]),
            "upper": float(found["percentile_99_5"]),
            "mean": float(found["mean"]),
            "deviation": max(float(found["std"]), 1e-8),
        }
    others: dict[str, dict[str, Any]] = {
        "NoNormalization": {"method": "none"},
        "RescaleTo01Normalization": {"method": "percentile", "lower": 0.0, "upper": 100.0},
        "RGBTo01Normalization": {"method": "window", "lower": 0.0, "upper": 255.0},
    }
    if scheme not in others:
        known = ", ".join(["ZScoreNormalization", "CTNormalization", *others])
        raise ModelRefused(f"expected a normalisation of {known}, got {scheme!r:.80}")
    return others[scheme]


def _landmarks(labels: Mapping[str, Any]) -> tuple[str, ...]:
    """List the names of landmarks in the order of their labels, which count from 1."""
    named = {number: name for name, number in labels.items() if name != "ignore"}
    if sorted(named) != list(range(len(named))) or len(named) < 2:
        raise ModelRefused(
            f"expected labels 0 for the background and 1, 2, ... for landmarks, got {labels!s:.200}"
        )
    return tuple(str(named[number]) for number in range(1, len(named)))
