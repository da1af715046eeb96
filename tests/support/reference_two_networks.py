"""Scan -> landmarks by two networks, in NumPy float64: the reference of the whole path goes on.

The second network sees the scan in the pose that the first one's landmarks show. Doubts, 95 %
regions and measurements of both follow. Written from the documentation, as ``reference`` is.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from app.model.manifest import Manifest
from app.model.sections import InputSpec
from tests.support.oracle import Array
from tests.support.reference import ReferenceLandmark, ScanFrame, ask_shape, describe
from tests.support.reference_doubts import Doubts, ReferenceRival, find_doubts, find_rival
from tests.support.reference_grid import ReferenceGrid, reference_grid, trim
from tests.support.reference_measurements import ReferenceMeasurement, measure
from tests.support.reference_modes import MODES, ReferenceReadout, find_modes, votes_for
from tests.support.reference_pose import (
    ReferencePose,
    ReferenceScan,
    find_pose,
    move,
    posed_grid,
)
from tests.support.reference_shape import LEAST_LANDMARKS, ShapeOpinion
from tests.support.reference_votes import Network, votes_of

MOST_PASSES = 3
"""Of the second network."""

SAME_POSE = 0.4
"""Voting radii, in mm of the subject, by which landmarks of the same pose differ, on average."""

MOST_VOXELS = 1 << 19
"""Of a grid that is seen in other orientations."""

TURNS = ("jki", "IJk", "KiJ", "ikJ", "Kji")
"""These orientations, one after the other, by where axes run in the own one; capitals: against."""

SCATTERED = 1.5
"""Times as far as usual, from which on a warning tells that votes scatter."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A network, its manifest, and the mean shape of its model, (landmarks 3)."""

    manifest: Manifest
    networks: Sequence[Network]
    mean: Array | None


@dataclass(frozen=True, slots=True)
class _Look:
    """What both networks find in one orientation.

    Attributes:
        landmarks: Of both.
        seen: Of the first.
        rival: Of these.
        doubts: That passes have shown.
        last: The last network.
    """

    landmarks: list[ReferenceLandmark]
    seen: list[ReferenceLandmark]
    rival: ReferenceRival | None
    doubts: Doubts
    last: Stage


@dataclass(frozen=True, slots=True)
class ReferenceAnswer:
    """What should be answered of a scan: a doubt has a name, and the numbers that it tells."""

    landmarks: list[ReferenceLandmark]
    doubts: Doubts
    measurements: list[ReferenceMeasurement]


def answer_of(voxels: Array, affine: Array, first: Stage, second: Stage) -> ReferenceAnswer:
    """Find the landmarks of a scan by two networks.

    Args:
        voxels: (i j k).
        affine: Voxel index -> mm, RAS.
        first: Sees the scan as it lies, and in other orientations while it shows nothing.
        second: Sees it in the pose that the first one finds.
    """
    scan = shown = ReferenceScan(voxels, affine)
    if first.manifest.input.trim:
        part, to_part = trim(voxels)
        shown = ReferenceScan(part, affine @ to_part)
    grid = reference_grid(voxels, affine, first.manifest.input)
    own = look = _look(grid, scan, shown, first, second)
    if _may_turn(grid, first.manifest.input) and _has_votes(own.landmarks):
        for turn in TURNS:
            if _is_any_sure(look.landmarks):
                break
            look = _look(_turned(grid, turn), scan, shown, first, second)
    if not _is_any_sure(look.landmarks):
        look = own
    landmarks, doubts = _doubt(look.landmarks, look.seen, shown, first, look.doubts, look.rival)
    landmarks, scatter = _settle(landmarks, shown, look.last.manifest)
    names = [one.name for one in first.manifest.landmarks]
    places = {name: one.ras_mm for name, one in zip(names, landmarks, strict=True)}
    radii = {name: one.region95_mm for name, one in zip(names, landmarks, strict=True)}
    measured = [measure(spec, places, radii) for spec in first.manifest.measurements]
    return ReferenceAnswer(landmarks, doubts | scatter, measured)


def _look(
    grid: ReferenceGrid, scan: ReferenceScan, shown: ReferenceScan, first: Stage, second: Stage
) -> _Look:
    """Have the first network see a grid, and the second one the pose that it shows."""
    spacing = np.linalg.norm(grid.to_world[:3, :3], axis=0)
    frame = ScanFrame(grid.voxels.shape, spacing, grid.to_volume, grid.to_world)
    seen, rival = _locate(grid.voxels, frame, first)
    landmarks, last, doubts = seen, first, Doubts()
    tolerance_mm, shape = first.manifest.voting.radius_mm, first.manifest.shape
    if shape is not None:
        tolerance_mm = shape.tolerance_mm
    assert second.mean is not None
    pose = find_pose(seen, second.mean, tolerance_mm)
    if pose is not None and _may_lie_upside_down(seen, first.manifest):
        doubts |= _upside_down(seen, grid.voxels, frame, first)
    for _ in range(MOST_PASSES):
        if pose is None:
            break
        window = grid.window or (0.0, 1.0)
        posed = posed_grid(scan, shown, pose.to_world, second.manifest.input, window)
        refined, _ = _locate(*posed, second)
        landmarks = [_merge(*both, tolerance_mm) for both in zip(seen, refined, strict=True)]
        pose, last = _improve(refined, pose, second), second
    return _Look(landmarks, seen, rival, doubts, last)


def _may_turn(grid: ReferenceGrid, spec: InputSpec) -> bool:
    is_alike = len(set(spec.spacing_mm)) == 1 and spec.tile_shape == "whole"
    return is_alike and not spec.upright and grid.voxels.size <= MOST_VOXELS


def _has_votes(landmarks: Sequence[ReferenceLandmark]) -> bool:
    return sum(one.mass > 0 for one in landmarks) >= LEAST_LANDMARKS


def _is_any_sure(landmarks: Sequence[ReferenceLandmark]) -> bool:
    return any(one.status == "detected" for one in landmarks)


def _turned(grid: ReferenceGrid, letters: str) -> ReferenceGrid:
    """Turn a grid so that its axes run along i, j, k of the own one, or against: I, J, K."""
    turn, size = np.zeros((4, 4)), grid.voxels.shape
    turn[3, 3] = 1.0
    order = ["ijk".index(letter.lower()) for letter in letters]
    flips = [new for new, letter in enumerate(letters) if letter.isupper()]
    for new, old in enumerate(order):
        turn[old, new] = -1.0 if new in flips else 1.0
        turn[old, 3] = size[old] - 1 if new in flips else 0.0
    voxels = np.flip(grid.voxels.transpose(order), tuple(flips))
    return replace(
        grid, voxels=voxels, to_volume=grid.to_volume @ turn, to_world=grid.to_world @ turn
    )


def _locate(
    voxels: Array, frame: ScanFrame, stage: Stage
) -> tuple[list[ReferenceLandmark], ReferenceRival | None]:
    """Find the landmarks of one network on one grid, and what rivals them."""
    manifest, voting = stage.manifest, stage.manifest.voting
    scale = frame.spacing_mm[0] / manifest.input.spacing_mm[0]
    is_heatmap = manifest.network.output == "heatmaps"
    readout = ReferenceReadout(
        shape=frame.shape,
        metric_mm=frame.spacing_mm,
        spacing_mm=frame.spacing_mm,
        radius_mm=scale * voting.radius_mm,
        reach_mm=scale * voting.radius_mm * (1.25 if is_heatmap else 0.6),
        stride=manifest.network.output_stride,
        threshold=voting.threshold if is_heatmap else None,
        scan=frame.extent,
        modes=MODES if manifest.shape is None else manifest.shape.modes,
    )
    votes = votes_of(voxels, manifest, stage.networks)
    count = len(manifest.landmarks)
    modes = [find_modes(votes_for(votes, one, readout), readout) for one in range(count)]
    least = [one.presence_threshold for one in manifest.landmarks]
    radii = [one.region95_mm for one in manifest.landmarks]
    opinions: Sequence[ShapeOpinion | None] = [None] * count
    rival = None
    if stage.mean is not None and manifest.shape is not None:
        tolerance_mm = manifest.shape.tolerance_mm
        opinions = said = ask_shape(modes, least, frame, stage.mean, tolerance_mm)
        positions = [np.array([one.position for one in own]).reshape(-1, 3) for own in modes]
        masses = [np.array([one.mass for one in own]) for own in modes]
        places = [move(frame.to_world, own) for own in positions]
        # Beside too few modes, false ones are many.
        if all(one.plausible for one in said):
            rival = find_rival(said, places, masses, stage.mean, tolerance_mm)
    found = [
        describe(own, t, frame, one) for own, t, one in zip(modes, least, opinions, strict=True)
    ]
    with_regions = [
        replace(one, region95_mm=radius if one.status == "detected" else None)
        for one, radius in zip(found, radii, strict=True)
    ]
    return with_regions, rival


def _may_lie_upside_down(seen: Sequence[ReferenceLandmark], manifest: Manifest) -> bool:
    shape, is_upright = manifest.shape, manifest.input.upright
    may = shape is not None and bool(shape.surroundings) and is_upright
    return may and any(one.status != "detected" for one in seen)


def _upside_down(
    seen: Sequence[ReferenceLandmark], voxels: Array, frame: ScanFrame, stage: Stage
) -> Doubts:
    """Turn the grid by half a turn about the axis from back to front, and compare the votes."""
    turn = np.eye(4)
    axes = [n for n, letter in enumerate(stage.manifest.input.orientation) if letter not in "PA"]
    for axis in axes:
        turn[axis, axis], turn[axis, 3] = -1.0, voxels.shape[axis] - 1
    to = (frame.to_volume @ turn, frame.to_world @ turn)
    turned = replace(frame, to_volume=to[0], to_world=to[1])
    other, _ = _locate(np.flip(voxels, tuple(axes)), turned, stage)
    masses = [
        sum(
            one.mass for one in own if one.from_shape_mm is not None and one.expected_ras_mm is None
        )
        for own in (seen, other)
    ]
    if masses[1] <= masses[0]:
        return {}
    return {"upside_down": (100 * masses[1] / masses[0],) if masses[0] else ()}


def _merge(
    coarse: ReferenceLandmark, fine: ReferenceLandmark, tolerance_mm: float
) -> ReferenceLandmark:
    """Choose between what both networks say of a landmark."""
    if fine.status == "not_found":
        return coarse if coarse.ras_mm is None else _in_doubt(coarse)
    if fine.status != "low_confidence" or coarse.ras_mm is None or fine.ras_mm is None:
        return fine
    if np.linalg.norm(fine.ras_mm - coarse.ras_mm) <= tolerance_mm:
        return fine
    return _in_doubt(coarse if coarse.confidence > fine.confidence else fine)


def _in_doubt(one: ReferenceLandmark) -> ReferenceLandmark:
    half = one.confidence / 2
    return replace(one, status="low_confidence", confidence=half, region95_mm=None)


def _improve(
    refined: Sequence[ReferenceLandmark], pose: ReferencePose, stage: Stage
) -> ReferencePose | None:
    """Find the pose for one more pass; None if it is the same."""
    assert stage.mean is not None
    assert stage.manifest.shape is not None
    better = find_pose(refined, stage.mean, stage.manifest.shape.tolerance_mm)
    if better is None:
        return None
    moved = move(better.to_world, stage.mean) - move(pose.to_world, stage.mean)
    most = SAME_POSE * pose.scale * stage.manifest.voting.radius_mm
    return better if np.linalg.norm(moved, axis=1).mean() > most else None


def _doubt(
    landmarks: list[ReferenceLandmark],
    seen: Sequence[ReferenceLandmark],
    shown: ReferenceScan,
    first: Stage,
    doubts: Doubts,
    rival: ReferenceRival | None,
) -> tuple[list[ReferenceLandmark], Doubts]:
    """Lower the confidence of all that is doubtful, and say why."""
    is_any = any(one.ras_mm is not None for one in landmarks)
    if not is_any or first.mean is None:
        doubts = {}
    else:
        doubts = doubts | find_doubts(landmarks, seen, shown, first.manifest, first.mean)
        if rival is not None:
            doubts["rival"] = (rival.distance_mm, 100 * rival.share)
    sure = [landmarks, seen]
    if doubts:
        landmarks = [one if one.ras_mm is None else _in_doubt(one) for one in landmarks]
    is_sure = [any(one.status == "detected" for one in own) for own in (*sure, landmarks)]
    # By the second network alone, as in noise, or in doubt: none.
    if not (is_sure[0] if is_sure[1] else is_sure[2]):
        doubts = doubts | {"none": ()}
    return landmarks, doubts


def _settle(
    landmarks: list[ReferenceLandmark], shown: ReferenceScan, manifest: Manifest
) -> tuple[list[ReferenceLandmark], Doubts]:
    """Widen 95 % regions, and take away those near the border of what is shown."""
    sure = [one for one in landmarks if one.status == "detected"]
    usual = manifest.shape.region_scale_mm if manifest.shape is not None else None
    off = _growth([one.from_shape_mm for one in sure], usual)
    scatter = _growth([one.spread_mm for one in sure], manifest.voting.region_spread_mm)
    settled = []
    for one in landmarks:
        radius = one.region95_mm
        if radius is not None and one.ras_mm is not None:
            index = move(np.linalg.inv(shown.affine).astype(np.float64), one.ras_mm)
            thick = 1 / np.linalg.norm(np.linalg.inv(shown.affine[:3, :3]), axis=1)
            inside = np.minimum(index + 0.5, np.array(shown.voxels.shape) - 0.5 - index) * thick
            is_near = inside.min() < manifest.voting.region_margin_mm
            radius = None if is_near else radius * off * scatter
        settled.append(replace(one, region95_mm=radius))
    return settled, {"scatter": (scatter,)} if scatter > SCATTERED else {}


def _growth(lengths: Sequence[float | None], usual: float | None) -> float:
    known = np.array([one for one in lengths if one is not None])
    if usual is None or not len(known):
        return 1.0
    return max(1.0, float(np.sqrt((known**2).mean())) / usual)
