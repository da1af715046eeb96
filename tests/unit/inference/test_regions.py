"""95 % regions: wider in scans that are uncertain, none near the border."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from app.geometry import distance_inside
from app.inference.detector import Detector, Located
from app.inference.load import load_checked
from app.inference.regions import MAX_SCATTER, Uncertainty, combine, growth, settle_regions
from app.io import Status
from app.io.volume import Volume
from app.model import LoadedModel
from app.phantom import make_phantom
from tests.support.synthetic import make_manifest
from tests.unit.inference.test_refinement import landmark

PHANTOM = Path(__file__).resolve().parents[3] / "models" / "phantom"


def load_calibrated(**voting: float) -> LoadedModel:
    """Load the phantom's model with a region of 0.5 mm for each landmark."""
    model = load_checked(PHANTOM, torch.device("cpu"))
    specs = (one.model_copy(update={"region95_mm": 0.5}) for one in model.manifest.landmarks)
    changes = {
        "landmarks": tuple(specs), "voting": model.manifest.voting.model_copy(update=voting)
    }  # fmt: skip
    return replace(model, manifest=model.manifest.model_copy(update=changes))


def locate(model: LoadedModel, volume: Volume) -> Located:
    return Detector(model).locate(volume)[0]


def spread_mm(located: Located) -> float:
    """Compute how far the votes for detected landmarks scatter."""
    spreads = [one.spread_mm or 0.0 for one in located.landmarks if one.status == "detected"]
    return float(np.sqrt(np.mean(np.square(spreads))))


def test_a_landmark_has_a_region_only_as_far_from_the_border_as_regions_were_calibrated() -> None:
    volume = make_phantom(7).volume
    for margin_mm in (0.0, 30.0):
        found = locate(load_calibrated(region_margin_mm=margin_mm), volume).landmarks
        detected = [one for one in found if one.status == "detected"]
        near = [
            distance_inside(np.array(one.ras_mm), volume.affine, volume.voxels.shape) < margin_mm
            for one in detected
        ]
        assert any(near) == (margin_mm > 0)
        assert not all(near)
        assert [one.region95_mm for one in detected] == [None if at else 0.5 for at in near]


def test_regions_grow_with_the_scatter_of_votes_and_much_of_it_is_said() -> None:
    volume = make_phantom(7).volume
    seen = spread_mm(locate(load_calibrated(), volume))
    for usual, factor in ((2 * seen, 1.0), (seen / 1.25, 1.25), (seen / 2, 2.0)):
        located = locate(load_calibrated(region_spread_mm=usual), volume)
        regions = [one.region95_mm for one in located.landmarks if one.status == "detected"]
        assert regions == [pytest.approx(0.5 * factor)] * len(regions)
        said = [line for line in located.remarks if f"scatter {factor:.1f} times" in line]
        assert len(said) == len(located.remarks) == (factor > MAX_SCATTER)
        assert not any("region" in line for line in said)  # Near the border, there may be none.


def test_regions_grow_with_the_distance_from_the_shape_and_with_the_scatter_at_once() -> None:
    manifest = make_manifest(3, shape=True)
    assert manifest.shape is not None
    scales = {
        "shape": manifest.shape.model_copy(update={"region_scale_mm": 2.0}),
        "voting": manifest.voting.model_copy(update={"region_spread_mm": 0.5}),
    }
    off_mm: dict[float, Status] = {3.0: "detected", 4.0: "detected", 90.0: "low_confidence"}
    found = tuple(
        replace(landmark(np.full(3, 4.0), status), from_shape_mm=mm, spread_mm=0.6)
        for mm, status in off_mm.items()
    )
    volume = Volume(np.zeros((9, 10, 11), np.float32), np.eye(4))
    settled, said = settle_regions(found, volume, manifest.model_copy(update=scales))
    factor = np.sqrt(12.5) / 2.0 * 0.6 / 0.5
    assert [one.region95_mm for one in settled[:2]] == [pytest.approx(0.3 * factor)] * 2
    assert said == ()  # Votes alone scatter little more than usual.


def test_growth_is_of_what_is_known_and_never_below_one() -> None:
    assert growth(Uncertainty(3.0, 2.0), Uncertainty(1.5, 0.5)) == 8.0
    assert growth(Uncertainty(3.0, 0.1), Uncertainty(1.5, 0.5)) == 2.0
    assert growth(Uncertainty(3.0, None), Uncertainty(None, 0.5)) == 1.0
    doubtful: tuple[Status, float, float] = ("low_confidence", 90.0, 90.0)
    both = combine([("detected", 3.0, None), doubtful, ("detected", 4.0, 2.0)])
    assert both.from_shape_mm == pytest.approx(np.sqrt(12.5))
    assert both.spread_mm == 2.0
    assert combine([doubtful]) == combine([]) == Uncertainty(None, None)
