"""What is kept of a scan between two forward passes."""

from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from app.compute.transfer import ReadyEvent
from app.inference.detector import Detector
from app.inference.forward import collect, launch
from tests.support.device_loops import load_toy, scan


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
    state.merged_votes()
    expected = {id(held) for votes in state.votes for held in (votes.landmark, votes.columns)}
    assert {id(values) for values in recorded.read} == expected
