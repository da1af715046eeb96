"""Scan -> landmarks, in NumPy float64: a plain reference of the whole path, for tests.

``reference_grid`` prepares the scan, ``reference_votes`` has the networks vote, ``reference_modes``
reads their votes; here modes become landmarks, of a mean shape as ``reference_shape`` says. It is
written from the documentation, for models without a second network, and shares nothing with the
package but the manifest: no fixed point, no blocks, no batches. Networks are functions of float64.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from app.model.manifest import Manifest
from tests.support.oracle import Array
from tests.support.reference_grid import ReferenceGrid, reference_grid
from tests.support.reference_modes import (
    Extent,
    Mode,
    ReferenceReadout,
    find_modes,
    is_inside,
    votes_for,
)
from tests.support.reference_shape import ShapeOpinion, choose_by_shape
from tests.support.reference_votes import (
    Coordinates,
    Network,
    coordinates_of,
    votes_of,
)


@dataclass(frozen=True, slots=True)
class ReferenceLandmark:
    """What should be answered of a landmark; see ``app.voting.landmarks.Landmark``."""

    status: str
    ijk: Array | None
    ras_mm: Array | None
    mass: float
    coherence: float
    confidence: float
    spread_mm: float | None
    disagreement_mm: float | None
    expected_ras_mm: Array | None = None
    from_shape_mm: float | None = None
    region95_mm: float | None = None


@dataclass(frozen=True, slots=True)
class ScanFrame:
    """The grid that modes lie in.

    Attributes:
        shape: In voxels.
        spacing_mm: Edges of a voxel, (3,).
        to_volume: Grid voxel index -> index of the scan.
        to_world: Grid voxel index -> mm, RAS.
        extent: Where the scan lies, if the grid reaches past it.
    """

    shape: tuple[int, ...]
    spacing_mm: Array
    to_volume: Array
    to_world: Array
    extent: Extent | None = None


def find_landmarks(
    voxels: Array, affine: Array, manifest: Manifest, networks: Sequence[Network]
) -> list[ReferenceLandmark]:
    """Find the landmarks of a scan.

    Args:
        voxels: (i j k).
        affine: Voxel index -> mm, RAS.
        manifest: Of the model.
        networks: Its members.

    Returns:
        One for each landmark of the manifest.
    """
    grid = reference_grid(voxels, affine, manifest.input)
    if manifest.network.output == "coordinates":
        modes = _modes_of_coordinates(grid, manifest, networks)
    else:
        readout = _readout(grid, manifest)
        votes = votes_of(grid.voxels, manifest, networks)
        indices = range(len(manifest.landmarks))
        modes = [find_modes(votes_for(votes, one, readout), readout) for one in indices]
    scan = ScanFrame(
        grid.voxels.shape, np.array(manifest.input.spacing_mm), grid.to_volume, grid.to_world
    )
    thresholds = [landmark.presence_threshold for landmark in manifest.landmarks]
    return [describe(own, least, scan) for own, least in zip(modes, thresholds, strict=True)]


def _readout(grid: ReferenceGrid, manifest: Manifest) -> ReferenceReadout:
    is_heatmap = manifest.network.output == "heatmaps"
    spacing, voting = np.array(manifest.input.spacing_mm), manifest.voting
    is_round_in_voxels = voting.round_in == "voxels"
    return ReferenceReadout(
        shape=grid.voxels.shape,
        metric_mm=np.full(3, np.cbrt(spacing.prod())) if is_round_in_voxels else spacing,
        spacing_mm=spacing,
        radius_mm=voting.radius_mm,
        reach_mm=voting.radius_mm * (1.25 if is_heatmap else 0.6),
        stride=manifest.network.output_stride,
        threshold=voting.threshold if is_heatmap else None,
    )


def _modes_of_coordinates(
    grid: ReferenceGrid, manifest: Manifest, networks: Sequence[Network]
) -> list[list[Mode]]:
    """Make one mode of each coordinate of which something is known."""
    found: Coordinates = coordinates_of(grid.voxels, manifest, networks)
    spacing = np.array(manifest.input.spacing_mm)
    diagonal_mm = float(np.linalg.norm(np.array(grid.voxels.shape) * spacing))
    modes: list[list[Mode]] = []
    for index, (position, presence) in enumerate(zip(found.position, found.presence, strict=True)):
        spread = (
            None if found.sigma is None else float(np.linalg.norm(found.sigma[index] * spacing))
        )
        is_known = spread is None or spread <= diagonal_mm
        is_there = presence >= manifest.voting.threshold and np.isfinite(position).all()
        mode = Mode(position, presence, presence, 1.0, spread, None)
        modes.append([mode] if is_known and is_there else [])
    return modes


def describe(
    modes: Sequence[Mode], least_mass: float, scan: ScanFrame, opinion: ShapeOpinion | None = None
) -> ReferenceLandmark:
    """Apply the rules of presence to the mode that the shape chooses, else to the heaviest."""
    if not modes:
        expected_mm = None if opinion is None else opinion.expected_mm
        return ReferenceLandmark("not_found", None, None, 0.0, 0.0, 0.0, None, None, expected_mm)
    agrees = opinion is not None and opinion.chosen is not None
    mode = modes[opinion.chosen or 0] if opinion is not None else modes[0]
    is_there = mode.mass >= least_mass
    is_sure = is_there and mode.coherence >= 0.5
    confidence = min(1 / (1 + (least_mass / mode.mass) ** 2), 1.0 if agrees else mode.coherence)
    is_elsewhere = False
    if opinion is not None:
        is_sure = is_there and agrees and opinion.plausible
        confidence /= (1 if agrees else 2) * (1 if opinion.plausible else 2)
        is_elsewhere = opinion.expected_mm is not None and not agrees
    if mode.mass < least_mass / 4:
        status = "not_found"
    elif not is_inside(mode.position, scan.shape, scan.extent):
        status = "out_of_field" if is_sure else "not_found"
    elif is_elsewhere and not is_there:
        status = "not_found"
    else:
        status = "detected" if is_sure else "low_confidence"
    known = (mode.mass, mode.coherence, confidence)
    expected_mm = None if opinion is None else opinion.expected_mm
    absent = ReferenceLandmark(status, None, None, *known, None, None, expected_mm)
    if status not in ("detected", "low_confidence"):
        return absent
    point, apart = np.append(mode.position, 1.0), None
    if mode.source is not None:
        apart = float(np.linalg.norm((mode.position - mode.source) * scan.spacing_mm))
    ijk, ras_mm = (to[:3] @ point for to in (scan.to_volume, scan.to_world))
    found = replace(absent, ijk=ijk, ras_mm=ras_mm, spread_mm=mode.spread_mm, disagreement_mm=apart)
    off = None if expected_mm is None else float(np.linalg.norm(ras_mm - expected_mm))
    return replace(found, from_shape_mm=off, expected_ras_mm=None if agrees else expected_mm)


def ask_shape(
    modes: Sequence[Sequence[Mode]],
    least: Sequence[float],
    scan: ScanFrame,
    mean: Array,
    tolerance_mm: float,
) -> list[ShapeOpinion]:
    """Ask a mean shape which modes agree, and whether enough do."""
    to_world = scan.to_world
    places = [
        np.array([to_world[:3] @ np.append(one.position, 1.0) for one in own]).reshape(-1, 3)
        for own in modes
    ]
    strengths = [
        np.array([min(one.mass / mass, 1.0) for one in own])
        for own, mass in zip(modes, least, strict=True)
    ]
    from_world = np.linalg.inv(to_world)

    def shows(point_mm: Array) -> bool:
        index = (from_world @ np.append(point_mm, 1.0))[:3]
        return is_inside(index, scan.shape, scan.extent)

    opinions = choose_by_shape(places, strengths, mean, tolerance_mm, shows)
    known = due = found = 0
    for own, mass, one in zip(modes, least, opinions, strict=True):
        if one.expected_mm is None:
            continue
        known, due = known + 1, due + shows(one.expected_mm)
        if one.chosen is not None:
            mode = own[one.chosen]
            is_there = is_inside(mode.position, scan.shape, scan.extent)
            found += is_there and mode.mass >= mass / 4
    is_plausible = found >= max(due / 2, min(5, known / 5))
    return [replace(one, plausible=is_plausible) for one in opinions]
