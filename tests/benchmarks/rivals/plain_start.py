"""The least that a program must do before it can answer: import torch, load, one forward pass.

``python -m tests.benchmarks.rivals.plain_start FOLDER`` ends when it has.
"""

import sys
import tomllib
from pathlib import Path

import torch
from monai.networks.nets.dynunet import DynUNet
from safetensors.torch import load_model


def main() -> None:
    """Load a model folder whose network is a DynUNet, and run one tile."""
    folder = Path(sys.argv[1])
    manifest = tomllib.loads((folder / "model.toml").read_text(encoding="utf-8"))
    network = DynUNet(**manifest["network"]["arguments"]).eval()
    # Not strict: names of layers that share weights come and go, and batch norm counts batches.
    load_model(network, folder / manifest["network"]["weights"], strict=False)
    with torch.inference_mode():
        network(torch.zeros(1, 1, *manifest["input"]["tile_shape"]))


if __name__ == "__main__":
    main()
