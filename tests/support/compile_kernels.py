"""field -> machine code: compiles the kernels of the voting stages for CUDA, without a device.

Run as a process of its own, without ``TRITON_INTERPRET``:
``python -m tests.support.compile_kernels 80`` for compute capability 8.0. Prints the PTX.
"""

import os
import sys
from dataclasses import replace
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from app.voting.cuda import modes as modes_triton
from app.voting.cuda import votes as votes_triton
from app.voting.peaks import choose_cells
from app.voting.readout import Readout
from app.voting.votes import filter_votes_by_torch
from tests.support.synthetic import random_field

SHAPE = (4, 6, 8)


class Device:
    """What Triton asks of a driver before it compiles."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0


class Compiled:
    """Stands where a kernel stands, and compiles it where it would be launched."""

    def __init__(self, kernel: Any) -> None:  # noqa: ANN401 - a kernel has no type
        self._kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:  # noqa: ANN401
        def launch(*given: object, **options: object) -> None:
            code = self._kernel.warmup(*given, grid=grid, **options)
            sys.stdout.write(code.asm["ptx"])

        return launch


def main(capability: int) -> None:
    """Compile all kernels for a compute capability, 80 for 8.0."""
    driver.set_active(Device(capability))
    for module, name in (
        (votes_triton, "append_votes"),
        (votes_triton, "order_votes"),
        (modes_triton, "add_to_cells"),
        (modes_triton, "add_to_modes"),
    ):
        setattr(module, name, Compiled(getattr(module, name)))
    field = random_field(SHAPE, 3)
    apart = field.scores.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2)
    profiles = (torch.ones(4), torch.ones(6), torch.ones(8))
    for scores, importance in ((field.scores, None), (apart.bfloat16(), profiles)):
        shown = replace(field, scores=scores)
        walk = votes_triton.plan_memory_order(shown)
        places = votes_triton.plan_geometry(shown, walk.axes, 2, (4, 8, 2), importance)
        room = votes_triton.append(shown, 0.5, walk, places, 1000)
    votes_triton.sort_chunks(room, 10, 3)
    votes = filter_votes_by_torch(field, 0.3)
    readout = Readout(3, SHAPE, (0.5, 0.75, 1.25), 2.0)
    modes_triton.ModeFinder(votes, readout, 4, choose_cells(readout)).find()


if __name__ == "__main__":
    if "TRITON_INTERPRET" in os.environ:
        raise SystemExit("expected no TRITON_INTERPRET, got one: kernels would not be compiled")
    main(int(sys.argv[1]))
