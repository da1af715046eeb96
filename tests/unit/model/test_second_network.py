"""A second network, which looks again in the pose that the first one has found."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from app.errors import ModelRefused
from app.inference import load_checked
from app.model import write_selfcheck
from tests.support.model_folders import make_model_folder, manifest_table

load = partial(load_checked, device=torch.device("cpu"))
ARGUMENTS = manifest_table()["network"]["arguments"]
SHAPE = {"mean": "shape.safetensors", "tolerance_mm": 1.0}
WHOLE = {"tile_shape": "whole", "divisor": 2}
PHANTOM = {"input": "phantom:1", "expected": None, "tolerance_mm": 1.0}


@pytest.mark.parametrize(
    ("landmarks", "overrides", "message"),
    [
        # Its left and right lie along no axis that its manifest could know.
        (3, {"shape": SHAPE, "network": {"mirror": ["j"]}}, r"no network\.mirror, got \('j',\)"),
        (2, {"shape": SHAPE}, r"the landmarks \['1', '2', '3'\], got \['1', '2'\]"),
        (3, {}, "a section shape and no section refine"),
        (3, {"shape": SHAPE, "input": WHOLE}, r"input\.tile_shape in voxels"),
        (3, {"shape": SHAPE, "selfcheck": PHANTOM}, r"selfcheck\.input noise, got a phantom"),
    ],
)
def test_second_network_that_cannot_look_again_is_refused(
    tmp_path: Path, landmarks: int, overrides: dict[str, Any], message: str
) -> None:
    folder = make_model_folder(tmp_path, shape=SHAPE)
    text = (folder / "model.toml").read_text()
    (folder / "model.toml").write_text(f'{text}\n[refine]\nfolder = "inner"\n')
    make_model_folder(folder, "inner", landmarks, **overrides)
    write_selfcheck(folder)
    with pytest.raises(ModelRefused, match=f"refine: expected {message}"):
        load(folder)


def test_second_network_may_answer_heatmaps_but_no_coordinates(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path, shape=SHAPE)
    text = (folder / "model.toml").read_text()
    (folder / "model.toml").write_text(f'{text}\n[refine]\nfolder = "inner"\n')
    inner = make_model_folder(
        folder,
        "inner",
        shape=SHAPE,
        network={"output": "heatmaps", "arguments": {**ARGUMENTS, "out_channels": 3}},
    )
    write_selfcheck(folder)
    assert load(folder).refine is not None
    path = inner / "model.toml"
    path.write_text(
        path.read_text()
        .replace('"heatmaps"', '"coordinates"')
        .replace('activation = "sigmoid"\n', "")
        .replace("radius_mm = 2.0\n", "")
    )
    write_selfcheck(folder)
    with pytest.raises(ModelRefused, match=r"refine: expected network\.output votes or heatmaps"):
        load(folder)
