"""nnU-Net itself, where it is installed: its files are imported, and its answers are ours.

The package ``nnunetv2`` is no dependency of the project; without it, this is skipped.
"""

import json
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest
import torch
from torch import Tensor

from app.exchange.nnunet import import_nnunet
from app.model.manifest import read_manifest
from tests.support.nnunet_results import (
    BALL_RADIUS,
    ORIENTATION,
    SPACING,
    build,
    detect,
    make_case,
    make_dataset,
    make_plans,
    read_out,
    respace,
    scan_of,
    to_file,
    trained,
    write_results,
)

pytestmark = [
    pytest.mark.skipif(find_spec("nnunetv2") is None, reason="nnunetv2 is not installed"),
    pytest.mark.filterwarnings("ignore"),  # Those of its imports are none of ours.
]

CPU = torch.device("cpu")
LARGE = (40, 50, 30)
SMALL = (24, 50, 21)
"""Smaller than a patch along an axis."""

FINER = (0.7, 0.4, 0.5)
COARSER = (3.1, 1.1, 2.2)
THICK = (7.1, 1.3, 0.9)
"""Spacings of scans in mm along the network's axes; slices so thick are not interpolated."""

EXACT = 1e-4
SPARSE = 0.01
ROUNDED = 0.02
"""Voxels: against sums of nnU-Net in float32, of labels and of heatmaps, of which weak voxels are
dropped; and against its own in half precision, which decide differently about voxels at the
threshold."""

REGIONS = {
    "labels": {"background": 0, "bright": [1, 2], "dark": [2]},
    "regions_class_order": [1, 2],
}
"""For regions nnU-Net answers as nnLandmark does for landmarks: by sigmoids, without background."""


def leave(values: np.ndarray) -> np.ndarray:
    """Change nothing."""
    return values


def pad(values: np.ndarray) -> np.ndarray:
    """Put a scan into an empty one."""
    return np.pad(values, [(9, 2), (0, 31), (17, 5)])


def strip(values: np.ndarray) -> np.ndarray:
    """Leave a rounded part of a scan in an empty one, with a hole in it."""
    middle = np.array(values.shape) / 2
    voxels = np.stack(np.meshgrid(*map(np.arange, values.shape), indexing="ij"), axis=-1)
    inside = (((voxels + 0.5 - middle) / middle) ** 2).sum(-1) <= 1.9
    inside &= np.abs(voxels - middle).max(-1) > 0.5
    return pad(values * inside)


Case = tuple[Callable[[np.ndarray], np.ndarray], tuple[int, ...], tuple[float, ...]]
"""What is done to the voxels of scans, their shape in the network's voxels, and their spacing."""

CASES = pytest.mark.parametrize(
    "case",
    [
        *product([leave, pad, strip], [LARGE, SMALL], [SPACING]),
        (leave, LARGE, FINER),
        (leave, LARGE, COARSER),
        (strip, LARGE, THICK),
    ],
)

Placement = Callable[[np.ndarray], np.ndarray]


class Predictor(Protocol):
    """What is used of nnU-Net's own inference."""

    plans_manager: Any
    configuration_manager: Any
    dataset_json: Any
    initialize_from_trained_model_folder: Callable[..., None]
    manual_initialization: Callable[..., None]
    predict_logits_from_preprocessed_data: Callable[[Tensor], Tensor]


def plans_of_nnunet(*, masked: bool) -> dict[str, Any]:
    """Make plans that tell nnU-Net how to prepare a scan and to train, too.

    Args:
        masked: Whether voxels that are zero in the margins do not count in the normalisation.
    """
    plans = make_plans()
    plans["configurations"]["3d_lowres"] |= {
        "preprocessor_name": "DefaultPreprocessor",
        "batch_size": 2,
        "batch_dice": False,
        "use_mask_for_norm": [masked],
        **{
            f"resampling_fn_{kind}{suffix}": value
            for kind in ("seg", "probabilities")
            for suffix, value in (("", "resample_data_or_seg_to_shape"), ("_kwargs", {}))
        },
    }
    return plans


def train_with_nnunet(root: Path, monkeypatch: pytest.MonkeyPatch, *, masked: bool) -> Path:
    """Let a trainer of nnU-Net write the results of a network of its own."""
    nnunet_trainer = import_module("nnunetv2.training.nnUNetTrainer.nnUNetTrainer").nnUNetTrainer
    monkeypatch.setenv("nnUNet_results", str(root))
    plans, dataset = plans_of_nnunet(masked=masked), make_dataset()
    given = plans | {"continue_training": False}
    trainer = nnunet_trainer(given, "3d_fullres", 0, dataset, device=CPU)
    trainer.network = trainer.build_network_architecture(
        trainer.plans_manager, trainer.configuration_manager, 1, 3, enable_deep_supervision=True
    )
    trainer.network.load_state_dict(trained(0, labels=True).state_dict())
    trainer.optimizer, _ = trainer.configure_optimizers()
    results = Path(trainer.output_folder_base)
    (results / "plans.json").write_text(json.dumps(plans))
    (results / "dataset.json").write_text(json.dumps(dataset))
    trainer.save_checkpoint(f"{trainer.output_folder}/checkpoint_final.pth")
    return results


def make_predictor(*, mirror: bool) -> Predictor:
    """Make nnU-Net's own inference."""
    module = import_module("nnunetv2.inference.predict_from_raw_data")
    made: Predictor = module.nnUNetPredictor(use_mirroring=mirror, device=CPU, allow_tqdm=False)
    return made


def predict(predictor: Predictor, scan: Path) -> tuple[Tensor, Placement]:
    """Predict the logits of a scan in the axes of the network; and map their voxels to the file."""
    preprocessor = predictor.configuration_manager.preprocessor_class(verbose=False)
    data, _, properties = preprocessor.run_case(
        [str(scan)],
        None,
        predictor.plans_manager,
        predictor.configuration_manager,
        predictor.dataset_json,
    )
    logits = predictor.predict_logits_from_preprocessed_data(torch.from_numpy(data)).float()
    first = [float(low) for low, _ in properties["bbox_used_for_cropping"]]
    old = properties["shape_after_cropping_and_before_resampling"]
    step = to_file(np.divide([old], logits.shape[1:]))
    return logits, lambda points: step * (points + 0.5) - 0.5 + to_file(np.array([first]))


def compare(
    folder: Path,
    predictor: Predictor,
    case: Case,
    monkeypatch: pytest.MonkeyPatch,
    exact: float,
) -> None:
    """Find landmarks where nnU-Net's own heatmaps have them."""
    change, shape, spacing = case
    scan = folder.parent / "scan.nii"
    network_voxels = to_file(np.divide([spacing], SPACING))
    for seed in (78, 81, 82):
        values = change(respace(make_case(shape, seed=seed, margin=4)[0], spacing))
        scan.write_bytes(scan_of(values, spacing))
        found, tiles = detect(folder, values, spacing)
        assert tiles > 1
        for sums, bound in ((torch.half, ROUNDED), (torch.float32, exact)):
            monkeypatch.setattr(torch, "half", sums)
            logits, to_scan = predict(predictor, scan)
            expected = to_scan(read_out(logits, read_manifest(folder)))
            off = np.abs((found - expected) * network_voxels).max()
            assert off <= bound, (seed, sums)


@CASES
def test_labels_are_found_where_nnunet_has_them(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    case: Case,
) -> None:
    results = train_with_nnunet(tmp_path, monkeypatch, masked=case[0] is strip)
    predictor = make_predictor(mirror=False)
    predictor.initialize_from_trained_model_folder(str(results), (0,))
    folder = import_nnunet(
        results, tmp_path / "blobs", orientation=ORIENTATION, radius=float(BALL_RADIUS)
    )
    compare(folder, predictor, case, monkeypatch, EXACT)


@CASES
def test_heatmaps_of_folds_and_mirror_images_are_averaged_as_in_nnunet(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    case: Case,
) -> None:
    networks, mirror = [trained(0), trained(1)], (0, 2)
    results = tmp_path / "Dataset900_Blobs"
    results.mkdir()
    written = plans_of_nnunet(masked=case[0] is strip)
    write_results(results, networks, written, mirror=mirror)
    manager = import_module("nnunetv2.utilities.plans_handling.plans_handler").PlansManager
    plans, states = manager(written), [network.state_dict() for network in networks]
    predictor = make_predictor(mirror=True)
    predictor.manual_initialization(
        build(), plans, plans.get_configuration("3d_fullres"), states,
        make_dataset() | REGIONS, "nnLandmark", mirror,
    )  # fmt: skip
    folder = import_nnunet(
        results, tmp_path / "blobs", orientation=ORIENTATION, radius=float(BALL_RADIUS)
    )
    compare(folder, predictor, case, monkeypatch, SPARSE)
