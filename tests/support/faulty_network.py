"""A network for real service processes that misbehaves where a scan tells it to.

A voxel above 1000 is a command to the tile it is in; everything else has its landmarks at its
brightest voxels. Commands are uploaded like any scan: nothing of the service is patched.
"""

import math
import os
import signal
import sys
from pathlib import Path
from types import ModuleType
from typing import Final

import nibabel as nib
import numpy as np
import torch
from torch import Tensor, nn

from tests.support.model_folders import make_model_folder

MODULE: Final = "monai.networks.nets.faulty"
"""An allow-listed name, so that a manifest may say it; exists only where ``install`` was called."""

RAISE: Final = 1000.0
NAN: Final = 2000.0
TOO_MANY: Final = 3000.0
"""Batches of more than FITS tiles do not fit the memory."""
TOO_LARGE: Final = 4000.0
"""Not even one tile fits."""
DIE: Final = 5000.0
"""Ends the device's thread."""
BREAK: Final = 6000.0
"""Does not fit, and from now on nothing does, the self-check's noise included."""
BREAK_AND_DIE: Final = 7000.0
"""Ends the device's thread, and every thread that tries again."""
HOLD: Final = 8000.0
"""Waits until a test opens the gate: a named pipe, so nobody polls."""
KILL: Final = 9000.0
"""Kills the process."""

FITS: Final = 2
IMPOSSIBLE_BYTES: Final = 1 << 50


class FaultyNetwork(nn.Module):
    """Finds the brightest voxels, and obeys the commands in its tiles."""

    gate = Path()
    hold_loading = False

    def __init__(self, landmarks: int) -> None:
        """Make it; wait for the gate first, if the loading of the first network shall be held.

        Args:
            landmarks: How many it has.
        """
        super().__init__()
        if FaultyNetwork.hold_loading:
            FaultyNetwork.hold_loading = False
            self.gate.read_bytes()
        self.landmarks = landmarks
        self.level = nn.Parameter(torch.tensor(200.0))
        self.broken = False
        self.deadly = False

    def forward(self, tiles: Tensor) -> Tensor:
        """Answer, or misbehave."""
        commands = {1000.0 * math.floor(float(tile.max()) / 1000) for tile in tiles}
        if HOLD in commands:
            # Opening a pipe waits for somebody who opens its other end.
            self.gate.read_bytes()
        if KILL in commands:
            os.kill(os.getpid(), signal.SIGKILL)
        self.deadly |= BREAK_AND_DIE in commands
        if self.deadly or DIE in commands:
            sys.exit("device thread told to end")
        self.broken |= BREAK in commands
        too_many = TOO_MANY in commands and len(tiles) > FITS
        if self.broken or too_many or TOO_LARGE in commands:
            torch.empty(IMPOSSIBLE_BYTES, dtype=torch.uint8)
        if RAISE in commands:
            raise RuntimeError("told to raise")
        # Bright voxels are likely, and every voxel votes for itself.
        scores = ((tiles - self.level) / 20).expand(-1, self.landmarks, -1, -1, -1)
        output = torch.cat([scores, torch.zeros_like(scores).repeat(1, 3, 1, 1, 1)], dim=1)
        for place, tile in enumerate(tiles):
            if NAN <= float(tile.max()) < NAN + 1000:
                output[place] = math.nan
        return output


def install(gate: Path = Path(), *, hold_loading: bool = False) -> None:
    """Make the network known to this process under its allow-listed name.

    Args:
        gate: A named pipe that whoever is held waits for.
        hold_loading: Whether the first network that is loaded waits for the gate.
    """
    FaultyNetwork.gate = gate
    FaultyNetwork.hold_loading = hold_loading
    module = ModuleType(MODULE)
    FaultyNetwork.__module__ = MODULE
    vars(module)["FaultyNetwork"] = FaultyNetwork
    sys.modules[MODULE] = module


def faulty_models(folder: Path) -> Path:
    """Make a models folder with one model that misbehaves on command."""
    install()
    models = folder / "models"
    models.mkdir()
    make_model_folder(
        models,
        "faulty",
        input={"intensity": {"method": "none"}},
        network={
            "architecture": f"{MODULE}:FaultyNetwork",
            "arguments": {"landmarks": 3},
        },
        voting={"threshold": 0.4},
    )
    return models


def command_scan(
    command: float = 0.0, seed: int = 1, shape: tuple[int, int, int] = (40, 30, 50)
) -> bytes:
    """Make a scan on the faulty model's own grid, with a command in its first tile.

    Of the default shape it has eight tiles; as large as a tile, one.
    """
    rng = np.random.default_rng(seed)
    voxels = rng.normal(100.0, 20.0, shape)
    place = rng.uniform(0.3, 0.7, 3) * shape
    apart = [(np.arange(size) - middle) / 1.5 for size, middle in zip(shape, place, strict=True)]
    i, j, k = np.meshgrid(*apart, indexing="ij")
    voxels = (voxels + 300.0 * np.exp(-(i**2 + j**2 + k**2) / 2)).astype(np.float32)
    if command:
        voxels[0, 0, 0] = command + 500.0
    image = nib.Nifti1Image(voxels, np.diag([1.0, 1.5, 2.0, 1.0]))
    image.header.set_xyzt_units("mm")
    content: bytes = image.to_bytes()
    return content
