"""Compiles the kernel of voting for CUDA, without a device.

Run as a process of its own, without ``TRITON_INTERPRET``:
``python -m tests.support.compile_kernels 80`` for compute capability 8.0. Prints the PTX.
"""

import os
import sys
from collections.abc import Callable
from dataclasses import replace

import torch
from triton import JITFunction
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from app.voting.cuda import votes as cuda_votes
from app.voting.cuda.votes_kernels import append_votes
from app.voting.reference import Placement
from tests.support.synthetic import random_field

SHAPE = (4, 6, 8)


class Device:
    """The part of a driver that Triton needs to compile."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0


class Compiled:
    """Replaces a kernel, and compiles it where it would be launched."""

    def __init__(self, kernel: JITFunction) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*given: object, **options: object) -> None:
            code = self._kernel.warmup(*given, grid=grid, **options)
            sys.stdout.write(code.asm["ptx"])

        return launch


def main(capability: int) -> None:
    """Compile the kernel for a compute capability, 80 for 8.0."""
    driver.set_active(Device(capability))
    vars(cuda_votes)["append_votes"] = Compiled(append_votes)
    field = random_field(SHAPE, 3)
    channels_last = field.scores.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2)
    profiles = (torch.ones(4), torch.ones(6), torch.ones(8))
    for scores, importance in ((field.scores, None), (channels_last.bfloat16(), profiles)):
        shown = replace(field, scores=scores)
        order = cuda_votes.plan_memory_order(shown)
        for stride in (2, 1):  # Triton makes a constant of a 1.
            placement = Placement((4, 8, 2), stride, importance)
            geometry = cuda_votes.plan_geometry(shown, order.axes, placement)
            cuda_votes.append(shown, 0.5, order, geometry, 1000)


if __name__ == "__main__":
    if "TRITON_INTERPRET" in os.environ:
        raise SystemExit("expected no TRITON_INTERPRET, got one: kernels would not be compiled")
    main(int(sys.argv[1]))
