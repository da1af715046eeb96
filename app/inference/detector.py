"""Volume -> Detection: everything that happens to one scan on one device.

``Detector.passes`` is the whole way, from pass to pass:

1. The first-stage network sees the scan as it lies; its landmarks show the pose of the subject.
2. Where a row of look-alikes would fit upside down as well, it sees the scan so, to compare.
3. The second-stage network sees the scan in that pose (see ``app.inference.refinement``), and once
   more as long as its own landmarks show a better one.
4. Until a landmark is detected, all this is tried in other orientations; if it is in none, what was
   found in the scan's own is answered. Its votes are then those of the first-stage network, if that
   detects none either: what it finds and the second one does not keeps its position.

Whoever runs the passes, for one scan or for many, runs all tiles of each before the next. Tiles of
several scans may share a forward pass (see ``app.inference.forward``); each ``ScanState`` gets the
votes of its own tiles only. Networks run on the one thread that owns the device; what ``passes``
does between two passes may run on any, on one at a time.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from app.compute import OnDevice, call_here, describe_out_of_memory, is_out_of_memory
from app.errors import InsufficientMemory
from app.geometry import Affine
from app.inference.doubts import check_plausibility, compare_upside_down
from app.inference.forecast import check_tiles
from app.inference.forward import collect, launch
from app.inference.refinement import (
    Refiner,
    any_detected,
    has_enough_votes,
    merge_stages,
)
from app.inference.regions import settle_regions
from app.inference.scan_heatmaps import VoteMap, keep_votes
from app.inference.scan_state import ScanState
from app.io import Volume
from app.model import WHOLE, LoadedModel
from app.preprocessing import (
    Grid,
    TilePlan,
    make_grid,
    plan_tiles,
    reorient_grid,
    trim,
    turn_upside_down,
)
from app.voting import Landmark

MAX_REFINE_PASSES: Final = 3
"""Passes of the second-stage network; one of eighteen half skulls needed the third."""

MAX_EXTRA_VIEWS: Final = 5
"""Orientations the first-stage network sees a scan in, besides its own, while no landmark is
detected. Each costs a first pass and is another chance for a partial subject; a whole one needs
none."""

MAX_VIEW_VOXELS: Final = 1 << 19
"""Largest grid that is tried in other orientations. A pass at this size takes about a second of one
core. A mouse's head has a third of it, a brain of real size twenty times as many."""


@dataclass(frozen=True, slots=True)
class VolumeInfo:
    """Description of the scan that a detection is for.

    Attributes:
        shape: Of the uploaded array, voxels.
        affine: Its voxel index -> mm, RAS.
        digest: BLAKE3 of the uncompressed file, hex.
    """

    shape: tuple[int, ...]
    affine: Affine
    digest: str


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Time a scan spent in each stage, in ms; a shared pass counts in full for every scan."""

    decode: float = 0.0
    prepare: float = 0.0
    queue: float = 0.0
    network: float = 0.0
    vote: float = 0.0
    locate: float = 0.0

    @property
    def busy_ms(self) -> float:
        """Time that it was worked on, once it was decoded."""
        return self.prepare + self.network + self.vote + self.locate


@dataclass(frozen=True, slots=True)
class Detection:
    """The landmarks of one scan.

    Attributes:
        volume: The scan it is for.
        landmarks: One for every landmark of the model, in the manifest's order.
        warnings: Remarks on the scan.
        tiles: How many tiles were run.
        timing: Time spent in each stage.
        votes: Of the pass that the answer is of, if they were asked for.
    """

    volume: VolumeInfo
    landmarks: tuple[Landmark, ...]
    warnings: tuple[str, ...]
    tiles: int
    timing: StageTimes
    votes: VoteMap | None = None


@dataclass(frozen=True, slots=True)
class Located:
    """What all passes over a scan have found.

    Attributes:
        landmarks: The answer, in the order of the manifest.
        remarks: What it says besides the scan's own warnings.
        last: The last pass, with its votes, and with the times of all.
        stages: Landmarks of the first network alone, in its last pass that showed a pose, and of
            the second alone, in its last pass; None if the first has shown no pose.
        votes: Of the pass that the answer is of, if they were asked for.
    """

    landmarks: tuple[Landmark, ...]
    remarks: tuple[str, ...]
    last: ScanState
    stages: tuple[tuple[Landmark, ...], tuple[Landmark, ...]] | None
    votes: VoteMap | None = None


class Detector:
    """One model on one device.

    Args:
        model: The model.
        keeps_votes: Whether ``passes`` tells the votes, too: they may be many, and on a GPU.
    """

    def __init__(self, model: LoadedModel, *, keeps_votes: bool = False) -> None:
        self.model = model
        self._keep = keep_votes if keeps_votes else _keep_none
        manifest = model.manifest
        self._refiner = None
        if model.refine is not None:
            shape, radius_mm = manifest.shape, manifest.voting.radius_mm
            self._refiner = Refiner(model.refine, shape.tolerance_mm if shape else radius_mm)

    def prepare(self, volume: Volume) -> ScanState:
        """Bring a scan to the device and plan its tiles.

        Raises:
            TooLarge: The network sees scans whole, or in one tile, and this one is larger.
            InsufficientMemory: The grid needs more memory than the device has.
        """
        start = time.perf_counter()
        spec = self.model.manifest.input
        device = self.model.network.device
        try:
            grid = make_grid(volume, spec, device)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise InsufficientMemory(
                "expected a scan whose grid fits the device, got shape "
                f"{volume.voxels.shape}: {describe_out_of_memory(error, device)}"
            ) from error
        plan = _plan_of(self.model, grid)
        return ScanState(self.model, grid, plan, prepare_s=time.perf_counter() - start)

    def passes(self, volume: Volume) -> "Iterator[ScanState | Located]":
        """Prepare one pass over a scan after the other, and at last tell what they have found.

        Yields:
            Passes, all of whose tiles must have run before the next item is asked for; the last
            item is what they have found.

        Raises:
            TooLarge, InsufficientMemory: As ``prepare``.
        """
        refiner, shown = self._refiner, self._shown(volume)
        state = self.prepare(volume)
        own_grid = state.grid if self._may_turn(state.grid) else None
        doubts: tuple[str, ...] = ()
        own: tuple[tuple[Landmark, ...], tuple[Landmark, ...], VoteMap | None] | None = None
        stages = votes = None
        for view in range(1 + MAX_EXTRA_VIEWS):
            yield state
            with state.locating():
                first = landmarks = state.locate()
                pose = None if refiner is None else refiner.find_pose(first)
            if refiner is None:
                break
            seen = None if own or any_detected(first) else self._keep(state)
            if pose is not None and self._may_be_upside_down(first):
                state = self._turn_upside_down(state)
                yield state
                with state.locating():
                    doubts = compare_upside_down(first, state.locate())
            for _ in range(MAX_REFINE_PASSES):
                if pose is None:
                    break
                resample = partial(refiner.resample, volume, pose, state.grid.window, shown)
                state = _next_pass(state, refiner.model, resample)
                yield state
                with state.locating():
                    refined = state.locate()
                    stages = first, refined
                    landmarks = merge_stages(first, refined, refiner.tolerance_mm)
                    pose = refiner.improve_pose(refined, pose)
            if any_detected(landmarks):
                votes = None
                break
            landmarks, first, votes = own = own or (landmarks, first, seen or self._keep(state))
            if own_grid is None or view == MAX_EXTRA_VIEWS or not has_enough_votes(landmarks):
                break
            state = self._reorient(state, own_grid, view)
        landmarks, remarks = check_plausibility(landmarks, first, shown, doubts, self.model)
        landmarks, scatter = settle_regions(landmarks, shown, state.model.manifest)
        yield Located(landmarks, (*remarks, *scatter), state, stages, votes or self._keep(state))

    def _shown(self, volume: Volume) -> Volume:
        """View what the model is to see of a scan, which ends there."""
        return trim(volume) if self.model.manifest.input.trim else volume

    def _may_turn(self, grid: Grid) -> bool:
        """Say whether the first-stage network may see a scan in other orientations."""
        spec = self.model.manifest.input
        # Axes can be permuted only if all are alike; with tiles there would be too many of them.
        is_isotropic, sees_whole = len(set(spec.spacing_mm)) == 1, spec.tile_shape == WHOLE
        may_turn = sees_whole and is_isotropic and not spec.upright
        return may_turn and grid.voxels.numel() <= MAX_VIEW_VOXELS

    def _may_be_upside_down(self, first: tuple[Landmark, ...]) -> bool:
        """Say whether it is worth a pass to see if the scan is upside down.

        A row of look-alikes is one upside down, too, but then hardly ever all of it is detected.
        """
        shape, spec = self.model.manifest.shape, self.model.manifest.input
        if shape is None or not (shape.surroundings and spec.upright):
            return False
        return any(landmark.status != "detected" for landmark in first)

    def _reorient(self, state: ScanState, own_grid: Grid, view: int) -> ScanState:
        state.votes_ready.wait(own_grid.voxels)
        return _next_pass(state, self.model, partial(reorient_grid, own_grid, view))

    def _turn_upside_down(self, state: ScanState) -> ScanState:
        orientation = self.model.manifest.input.orientation
        return _next_pass(state, self.model, partial(turn_upside_down, state.grid, orientation))

    def detect(self, volume: Volume, *, on_device: OnDevice = call_here) -> Detection:
        """Find the landmarks of one scan by itself, tile by tile.

        The service does this for self-checks only: tiles of its scans share batches.

        Args:
            volume: The scan.
            on_device: Calls every stage on the thread that owns the device.

        Returns:
            The landmarks, with what the answer says besides.

        Raises:
            LandmarkdError: As ``locate``.
        """
        located, tiles = self.locate(volume, on_device=on_device)
        return conclude(volume, located, tiles)

    def locate(self, volume: Volume, *, on_device: OnDevice = call_here) -> tuple[Located, int]:
        """Run all passes over one scan by itself, as ``detect``.

        Returns:
            What they have found, and how many tiles were run.

        Raises:
            LandmarkdError: As ``passes`` and ``app.inference.forward.launch``.
        """

        def run(state: ScanState, tile: int) -> None:
            collect(launch([(state, tile)]))

        passes, tiles = self.passes(volume), 0
        while isinstance(outcome := on_device(partial(next, passes)), ScanState):
            tiles += outcome.tiles
            for tile in range(outcome.tiles):
                on_device(partial(run, outcome, tile))
        return outcome, tiles


def _keep_none(_: ScanState) -> None:
    """Keep no votes, as no heatmaps are made of them."""


def _plan_of(model: LoadedModel, grid: Grid) -> TilePlan:
    manifest = model.manifest
    plan = plan_tiles(grid.voxels.shape, manifest.input, manifest.network.output_stride)
    check_tiles(model, len(plan))
    return plan


def _next_pass(state: ScanState, model: LoadedModel, make_grid: Callable[[], Grid]) -> ScanState:
    """Prepare another pass over a scan, whose times go on from those of the last one."""
    start = time.perf_counter()
    grid = make_grid()
    return replace(
        state,
        model=model,
        grid=grid,
        plan=_plan_of(model, grid),
        votes=[],
        unmerged=0,
        prepare_s=state.prepare_s + time.perf_counter() - start,
    )


def conclude(volume: Volume, located: Located, tiles: int, *, queue_s: float = 0.0) -> Detection:
    """Put together what is known about a scan once its landmarks are located."""
    state = located.last
    times = StageTimes(
        prepare=1e3 * state.prepare_s,
        queue=1e3 * queue_s,
        network=1e3 * state.network_s,
        vote=1e3 * state.vote_s,
        locate=1e3 * state.locate_s,
    )
    info = VolumeInfo(volume.voxels.shape, volume.affine, volume.digest)
    warnings = (*volume.warnings, *located.remarks)
    return Detection(info, located.landmarks, warnings, tiles, times, located.votes)
