"""What transforms of MONAI say of a network's input is read where it is plain."""

from typing import Any

import pytest
import torch
from monai.bundle.config_parser import ConfigParser

from app.exchange.transforms import read_preprocessing
from app.model import IntensitySpec
from app.preprocessing.intensity import normalise_

UNIT = {"b_min": 0, "b_max": 1}
INTENSITIES: list[dict[str, Any]] = [
    {"_target_": "ScaleIntensityRanged", "a_min": -2, "a_max": 5.5, "clip": True, **UNIT},
    {"_target_": "ScaleIntensityRanged", "a_min": -2, "a_max": 5.5, **UNIT},
    {"_target_": "ScaleIntensityRangeD", "a_min": -2, "a_max": 5, "b_min": -1, "b_max": 1},
    {
        "_target_": "ScaleIntensityRangePercentilesDict",
        "lower": 3,
        "upper": 97,
        "clip": True,
        **UNIT,
    },
    {"_target_": "ScaleIntensityd"},
    {"_target_": "NormalizeIntensityd", "channel_wise": True},
    {"_target_": "NormalizeIntensityd", "nonzero": True},
    {"_target_": "NormalizeIntensityd", "subtrahend": 2.5, "divisor": 4},
]


@pytest.mark.parametrize("step", INTENSITIES, ids=str)
def test_intensities_are_those_that_monai_computes(step: dict[str, Any]) -> None:
    config = {"preprocessing": {"transforms": [step | {"keys": "image"}]}}
    known, unread = read_preprocessing(config)
    values = torch.randn(5, 7, 6, generator=torch.manual_seed(3)) * 4
    values[1:3] = 0
    transform = ConfigParser({"step": step | {"keys": "image"}}).get_parsed_content("step")
    expected = transform({"image": values[None].clone()})["image"][0]
    rule = IntensitySpec.model_validate(known["input.intensity"])
    assert unread == []
    assert torch.allclose(normalise_(values.clone(), rule), torch.as_tensor(expected), atol=1e-5)


@pytest.mark.parametrize(
    ("steps", "missing"),
    [
        ([{"_target_": "Orientationd", "axcodes": "@axes"}], "input.orientation"),
        ([{"_target_": "Orientationd", "as_closest_canonical": True}], "input.orientation"),
        ([{"_target_": "Spacingd", "pixdim": "$[1, 1, 1]"}], "input.spacing_mm"),
        ([{"_target_": "Spacingd", "pixdim": [1.0, 1.0, 2.0]}], "input.spacing_mm"),
        ([{"_target_": "Spacingd", "pixdim": [10**400] * 3}], "input.spacing_mm"),
        ([{"_target_": "Spacingd", "pixdim": [1, 1, 1], "diagonal": True}], "input.spacing_mm"),
        ([{"_target_": "ScaleIntensityd"}, {"_target_": "NormalizeIntensityd"}], "input.intensity"),
        ([{"_target_": "ScaleIntensityRanged", "a_min": "$1", "a_max": 3}], "input.intensity"),
        ([{"_target_": "NormalizeIntensityd", "divisor": "@std"}], "input.intensity"),
        ([{"_target_": "NormalizeIntensityd", "keys": "label"}], "input.intensity"),
    ],
)
def test_what_is_not_plain_is_not_guessed(steps: list[dict[str, Any]], missing: str) -> None:
    steps = [{"keys": "image"} | step for step in steps]
    known, unread = read_preprocessing({"preprocessing": {"transforms": steps}})
    assert missing not in known
    assert unread == []
