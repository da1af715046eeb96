"""Model folder + held-out scans -> the radius that 95 % of errors stay within, in ``model.toml``.

    python -m models.calibrate models/NAME SCANS LANDMARKS --validate scan_7 scan_12

Use scans that no weight was trained on. The radius is that of split-conformal prediction (Vovk,
Gammerman, Shafer: Algorithmic Learning in a Random World, 2005): of n errors, the k-th smallest
with k = ceil(0.95 (n + 1)). Errors of all landmarks count together, as a few scans say too little
about each; it holds on average over landmarks, for scans like these.
"""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import tomlkit
from rich.console import Console

from app.device import choose_device
from app.manifest import read_manifest
from models.export import attach_refine
from models.specimens import pair_files
from models.validate import Errors, validate

COVERAGE: Final = 0.95


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m models.calibrate", description=__doc__)
    parser.add_argument("model", type=Path, help="model folder")
    parser.add_argument("scans", type=Path)
    parser.add_argument("landmarks", type=Path)
    parser.add_argument("--validate", nargs="+", required=True, metavar="NAME")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda:N")
    options = parser.parse_args(arguments)
    pairs = pair_files(options.scans, options.landmarks)
    unknown = set(options.validate) - {pair[0] for pair in pairs}
    if unknown:
        raise SystemExit(f"expected scans that are there, found none named {sorted(unknown)}")
    held = [pair for pair in pairs if pair[0] in options.validate]
    errors = validate(options.model, held, choose_device(options.device))
    console = Console()
    console.print(errors.summary())
    radius = conformal_radius(sure_errors(errors))
    if radius is None:
        raise SystemExit("expected at least 19 detected landmarks, found fewer")
    write_radius(options.model, radius)
    console.print(f"95 % within {radius:.3f} mm; of each scan, by the others: {left_out(errors)}")


def sure_errors(errors: Errors, scans: Sequence[int] | None = None) -> np.ndarray:
    """List the errors of detected landmarks, in mm, of all or of some scans."""
    rows = slice(None) if scans is None else list(scans)
    counted = errors.detected[rows] & np.isfinite(errors.mm[rows])
    return np.asarray(errors.mm[rows][counted])


def conformal_radius(errors: np.ndarray) -> float | None:
    """Find the radius that a further error stays within with a chance of 95 %; None if too few."""
    rank = math.ceil(COVERAGE * (len(errors) + 1))
    return float(np.sort(errors)[rank - 1]) if rank <= len(errors) else None


def left_out(errors: Errors) -> str:
    """Say which share of each scan's errors the radius of the other scans covers."""
    shares = []
    for row in range(len(errors.names)):
        others = [other for other in range(len(errors.names)) if other != row]
        radius = conformal_radius(sure_errors(errors, others))
        mine = sure_errors(errors, [row])
        if radius is not None and len(mine):
            shares.append(f"{100 * (mine <= radius).mean():.0f} %")
    return ", ".join(shares) or "too few scans"


def write_radius(folder: Path, radius_mm: float) -> None:
    """Write a radius to every landmark of a folder, or of the second model within it."""
    refine = read_manifest(folder).refine
    inner = folder if refine is None else folder / refine.folder
    path = inner / "model.toml"
    document = tomlkit.parse(path.read_text(encoding="utf-8"))
    for landmark in document["landmarks"]:
        landmark["region95_mm"] = round(radius_mm, 3)
    path.write_text(tomlkit.dumps(document), encoding="utf-8")
    if refine is not None:
        attach_refine(inner)


if __name__ == "__main__":
    main()
