"""Writes generated scans and landmark files, to train and measure the phantom model on.

    python -m app.training.tools.make_phantoms OUT --count 40 --seed 1000

writes ``OUT/scans/phantom-1000.nii.gz`` with ``OUT/landmarks/phantom-1000.mrk.json``, and so on.
"""

import argparse
from pathlib import Path

from app.io import markups_json
from app.phantom import make_phantom, scan_bytes


def make_phantoms(folder: Path, count: int, seed: int) -> None:
    """Write phantoms of consecutive seeds into the folders ``scans`` and ``landmarks``."""
    scans, landmarks = folder / "scans", folder / "landmarks"
    scans.mkdir(parents=True, exist_ok=True)
    landmarks.mkdir(exist_ok=True)
    for number in range(seed, seed + count):
        phantom = make_phantom(number)
        (scans / f"phantom-{number}.nii.gz").write_bytes(scan_bytes(phantom))
        truth = landmarks / f"phantom-{number}.mrk.json"
        truth.write_text(markups_json(phantom.names, phantom.points), encoding="utf-8")


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description="Write phantoms: scans and landmark files.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1000, help="of the first phantom")
    args = parser.parse_args()
    make_phantoms(args.folder, args.count, args.seed)


if __name__ == "__main__":
    main()
