"""The device that was asked for, or an error."""

import pytest
import torch

from app.device import choose_device
from app.errors import StartupError


def test_auto_is_cuda_exactly_when_there_is_one() -> None:
    assert choose_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_cpu_is_always_there() -> None:
    assert choose_device("cpu") == torch.device("cpu")


def test_absent_device_is_an_error_not_a_fall_back() -> None:
    with pytest.raises(StartupError, match="expected a CUDA device cuda:99"):
        choose_device("cuda:99")


@pytest.mark.parametrize("name", ["gpu", "", "mps", "cuda:x"])
def test_other_names_are_refused_with_what_is_known(name: str) -> None:
    with pytest.raises(StartupError, match="auto, cpu, cuda or cuda:N"):
        choose_device(name)
