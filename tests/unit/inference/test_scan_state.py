"""What is kept of a scan between two forward passes."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor

from app.compute.transfer import ReadyEvent
from app.inference.detector import Detector
from app.inference.forward import collect, launch
from app.inference.load import load_checked
from app.inference.scan_state import ScanState
from tests.support.device_loops import load_toy, scan
from tests.support.model_folders import make_model_folder


@dataclass(frozen=True, slots=True)
class RecordedEvent(ReadyEvent):
    """A moment that records which tensors are read after it."""

    read: list[Tensor] = field(default_factory=list)

    def wait(self, values: Tensor) -> None:
        self.read.append(values)


def test_all_memory_of_the_votes_is_kept_until_another_stream_has_read_it(tmp_path: Path) -> None:
    """Each may have memory of its own, which CUDA would give to others too early."""
    state = Detector(load_toy(tmp_path)).prepare(scan(1))
    collect(launch([(state, 0), (state, 1)]))
    state.votes_ready = recorded = RecordedEvent()
    held = [values for votes in state.votes for values in (votes.landmark, votes.columns)]
    expected = {id(values) for values in held}
    state.merge_votes()
    assert {id(values) for values in recorded.read} == expected


@pytest.mark.parametrize(("activation", "channels"), [("softmax", 4), ("sigmoid", 3)])
def test_votes_of_a_mean_are_merged_once_and_outlive_it(
    tmp_path: Path, activation: str, channels: int
) -> None:
    network = {"spatial_dims": 3, "in_channels": 1, "channels": [4, 8], "strides": [2]}
    folder = make_model_folder(
        tmp_path,
        input={"tile_shape": [16, 16, 16], "divisor": 2},
        network={
            "output": "heatmaps",
            "activation": activation,
            "arguments": network | {"out_channels": channels},
        },
    )
    detector = Detector(load_checked(folder, torch.device("cpu")))
    passes = detector.passes(scan(1, (60, 66, 70)))
    state = next(passes)
    assert isinstance(state, ScanState)
    for index in range(len(state.plan)):
        collect(launch([(state, index)]))
    assert state.mean is not None
    next(passes)
    assert state.mean is None
    votes = state.merge_votes()
    assert len(votes) > 0
    assert torch.equal(votes.probability, votes.weight)
