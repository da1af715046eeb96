"""volumes -> landmarks of each: tiles of one shape share forward passes."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Final

from app.inference.detector import Detector
from app.inference.forward import collect, launch
from app.inference.scan_state import ScanState
from app.io.volume import Volume
from app.voting.landmarks import Landmark

TILES: Final = 16
"""In one forward pass, at most."""

Landmarks = tuple[Landmark, ...]


def find_together(
    detector: Detector, volumes: Sequence[Volume], most: int = TILES
) -> list[Landmarks]:
    """Find the landmarks of all; the second look of one shares passes with others, too."""
    scans = [detector.passes(volume) for volume in volumes]
    found = [next(passes) for passes in scans]
    while cases := [case for case in found if isinstance(case, ScanState)]:
        lanes: dict[object, list[tuple[ScanState, int]]] = defaultdict(list)
        for case in cases:
            lanes[case.lane] += [(case, n) for n in range(case.tiles)]
        for tiles in lanes.values():
            for first in range(0, len(tiles), most):
                collect(launch(tiles[first : first + most]))
        found = [
            next(passes) if isinstance(each, ScanState) else each
            for passes, each in zip(scans, found, strict=True)
        ]
    return [each.landmarks for each in found if not isinstance(each, ScanState)]
