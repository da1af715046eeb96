"""V5: the most memory a scan takes, in a process of its own."""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import load_file, save_file

from app.model.files import hash_file
from app.model.manifest import parse_manifest
from app.model.selfcheck import write_selfcheck
from tests.benchmarks.harness import Limit, Row, Run
from tests.benchmarks.surroundings import ROOT
from tests.support.model_folders import build_network, make_model_folder, manifest_table

VOTE_SHARE: Final = 3e-4
"""Share of voxels and landmarks that vote: that of balls of 12 voxels in 300³."""

THRESHOLD: Final = 0.5
FILTERS: Final = [8, 16, 32]


def v5_memory(run: Run) -> Iterator[Row]:
    """Peak memory above the weights, against the dense output of the whole volume."""
    shape, landmarks, tile = ((300, 300, 300), 45, 96) if not run.fast else ((40, 36, 44), 3, 32)
    with tempfile.TemporaryDirectory() as root:
        folder = make_quiet_model(Path(root), landmarks, tile)
        words = ["-m", "tests.benchmarks.memory_probe", str(folder), *map(str, shape)]
        done = subprocess.run(
            [sys.executable, *words], cwd=ROOT, check=True, capture_output=True, text=True
        )
    peak, tiles, votes = (int(word) for word in done.stdout.split())
    dense = 4 * landmarks * shape[0] * shape[1] * shape[2] * 4
    yield Row(
        f"peak memory above weights, {'x'.join(map(str, shape))}, C = {landmarks}",
        peak / 1e9,
        "GB",
        "dense output",
        dense / 1e9,
        Limit(1.5, "figure"),
        f"{tiles} tiles of {tile}³, {votes} votes",
    )


def make_quiet_model(root: Path, landmarks: int, tile: int) -> Path:
    """Make a model folder whose random network votes about as often as a trained one.

    Args:
        root: Where to make it.
        landmarks: How many it has.
        tile: Edge of its tiles in voxels.

    Returns:
        The folder, with true hashes and a self-check.
    """
    arguments = {
        "spatial_dims": 3,
        "in_channels": 1,
        "out_channels": 4 * landmarks,
        "kernel_size": [3, 3, 3],
        "strides": [1, 2, 2],
        "upsample_kernel_size": [2, 2],
        "filters": FILTERS,
        "norm_name": ["INSTANCE", {"affine": True}],
    }
    sections: dict[str, dict[str, object]] = {
        "input": {"spacing_mm": [1.0] * 3, "tile_shape": [tile] * 3, "divisor": 4},
        "network": {"architecture": "monai.networks.nets:DynUNet", "arguments": arguments},
        "voting": {"threshold": THRESHOLD, "radius_mm": 12.0},
    }
    folder = make_model_folder(root, "quiet", landmarks, checked=False, **sections)
    weights = folder / "weights.safetensors"
    state = load_file(weights)
    bias = state["output_block.conv.conv.bias"]
    table = manifest_table("quiet", landmarks)
    table["network"].update(sections["network"])
    with torch.inference_mode():
        tiles = torch.rand(1, 1, 64, 64, 64, generator=torch.Generator().manual_seed(0))
        scores = build_network(table)(tiles)[0, :landmarks].flatten(1)
    count = max(1, round(VOTE_SHARE * scores.shape[1]))
    bias[:landmarks] -= scores.topk(count, dim=1).values[:, -1]
    save_file(state, weights)
    name = folder / "model.toml"
    old = parse_manifest(folder.name, name.read_text(encoding="utf-8")).network.sha256
    text = name.read_text(encoding="utf-8").replace(old, hash_file(weights))
    name.write_text(text, encoding="utf-8")
    write_selfcheck(folder)
    return folder
