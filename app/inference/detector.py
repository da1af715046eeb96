"""Volume -> Detection: everything that happens to one scan on one device.

::

    prepare ─► all tiles through the network ─► finish ─► landmarks
                          ▲                       │
                          └───── another pass ────┘

Another pass is one of the second-stage network (see ``app.inference.refinement``), or of the first
in another orientation, or upside down. Tiles of several scans may share a forward pass (see
``app.inference.forward``); each ``ScanState`` gets the votes of its own tiles only. Networks run on
the one thread that owns the device; ``prepare`` and ``finish`` may run on any.
"""

import time
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from app.compute import OnDevice, call_here, describe_out_of_memory, is_out_of_memory
from app.errors import InsufficientMemory
from app.geometry import Affine, distance_inside
from app.inference.doubts import check_plausibility, compare_upside_down
from app.inference.forecast import check_tiles
from app.inference.forward import collect, launch
from app.inference.refinement import (
    MAX_EXTRA_VIEWS,
    MAX_REFINE_PASSES,
    MAX_VIEW_VOXELS,
    Refiner,
    any_detected,
    has_enough_votes,
    merge_stages,
)
from app.inference.scan_heatmaps import VoteMap
from app.inference.scan_state import ScanState
from app.io import Volume
from app.model import WHOLE, LoadedModel
from app.preprocessing import (
    Grid,
    Pose,
    TilePlan,
    make_grid,
    make_posed_grid,
    plan_tiles,
    reorient_grid,
    turn_upside_down,
)
from app.voting import Landmark, positions_of


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
        votes: Of the last pass, if they were asked for.
    """

    volume: VolumeInfo
    landmarks: tuple[Landmark, ...]
    warnings: tuple[str, ...]
    tiles: int
    timing: StageTimes
    votes: VoteMap | None = None


class Detector:
    """One model on one device."""

    def __init__(self, model: LoadedModel) -> None:
        """Use a loaded model."""
        self.model = model
        manifest = model.manifest
        self._refiner = None
        if model.refine is not None:
            shape, radius_mm = manifest.shape, manifest.voting.radius_mm
            self._refiner = Refiner(model.refine, shape.tolerance_mm if shape else radius_mm)
        # Axes can be permuted only if all are alike; with tiles there would be too many of them.
        is_isotropic = len(set(manifest.input.spacing_mm)) == 1
        sees_whole = manifest.input.tile_shape == WHOLE
        self._turns = sees_whole and is_isotropic and not manifest.input.upright

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
        own = grid if self._turns and grid.voxels.numel() <= MAX_VIEW_VOXELS else None
        prepare_s = time.perf_counter() - start
        return ScanState(volume, self.model, grid, plan, own_grid=own, prepare_s=prepare_s)

    def finish(self, state: ScanState) -> "tuple[Landmark, ...] | ScanState":
        """Locate the landmarks once all tiles have run, or prepare another pass.

        Args:
            state: Its tiles have all run.

        Returns:
            The landmarks; or the state of another pass, with the times so far, to be run next.
        """
        state.share_grids()
        outcome = self._locate_or_continue(state)
        if isinstance(outcome, ScanState):
            return outcome
        landmarks, state.remarks = check_plausibility(
            outcome, state.coarse or outcome, state.volume, state.doubts, self.model
        )
        margin_mm = state.model.manifest.voting.region_margin_mm
        return _withhold_regions(landmarks, state.volume, margin_mm)

    def _locate_or_continue(self, state: ScanState) -> "tuple[Landmark, ...] | ScanState":
        start = time.perf_counter()
        if state.pose is None or self._refiner is None:
            landmarks = coarse = self._locate_first(state)
            pose = None if self._refiner is None else self._refiner.find_pose(coarse)
        else:
            coarse, pose = state.coarse, None
            refined = state.locate()
            landmarks = merge_stages(coarse, refined, self._refiner.tolerance_mm)
            if state.refine_passes < MAX_REFINE_PASSES:
                pose = self._refiner.improve_pose(refined, state.pose)
        state.locate_s += time.perf_counter() - start
        if self._refiner is None:
            return landmarks
        if pose is not None:
            if self._may_be_upside_down(state, coarse):
                return self._look_upside_down(state, coarse)
            return self._refine(state, self._refiner, coarse, pose)
        if any_detected(landmarks):
            return landmarks
        return self._try_next_view(state, state.fallback or landmarks)

    def _locate_first(self, state: ScanState) -> tuple[Landmark, ...]:
        """Locate the landmarks of the first-stage network as the scan lies."""
        landmarks = state.locate()
        if not state.upside_down:
            return landmarks
        state.doubts = compare_upside_down(state.coarse, landmarks)
        return state.coarse

    def _may_be_upside_down(self, state: ScanState, coarse: tuple[Landmark, ...]) -> bool:
        """Say whether it is worth a pass to see if the scan is upside down.

        A row of look-alikes is one upside down, too, but then hardly ever all of it is detected.
        """
        shape, spec = self.model.manifest.shape, self.model.manifest.input
        if shape is None or not (shape.surroundings and spec.upright):
            return False
        is_first = state.pose is None and not state.upside_down
        return is_first and any(one.status != "detected" for one in coarse)

    def _look_upside_down(self, state: ScanState, coarse: tuple[Landmark, ...]) -> ScanState:
        """Prepare a pass of the first-stage network over the scan upside down."""
        start = time.perf_counter()
        grid = turn_upside_down(state.grid, self.model.manifest.input.orientation)
        return _next_pass(state, self.model, grid, start, coarse=coarse, upside_down=True)

    def _try_next_view(
        self, state: ScanState, fallback: tuple[Landmark, ...]
    ) -> "tuple[Landmark, ...] | ScanState":
        """Prepare a pass of the first-stage network in the next orientation, if that is worth it.

        Returns:
            The state of that pass; else the landmarks found in the scan's own orientation.
        """
        if state.own_grid is None or state.view >= MAX_EXTRA_VIEWS:
            return fallback
        if not has_enough_votes(fallback):
            return fallback
        start = time.perf_counter()
        return _next_pass(
            state,
            self.model,
            reorient_grid(state.own_grid, state.view),
            start,
            coarse=(),
            pose=None,
            refine_passes=0,
            view=state.view + 1,
            fallback=fallback,
        )

    def _refine(
        self, state: ScanState, refiner: Refiner, coarse: tuple[Landmark, ...], pose: Pose
    ) -> ScanState:
        """Prepare a pass of the second-stage network."""
        start = time.perf_counter()
        model, window = refiner.model, state.grid.window or (0.0, 1.0)
        spec, device = model.manifest.input, model.network.device
        trim = self.model.manifest.input.trim
        grid = make_posed_grid(state.volume, pose, spec, window, device, without_padding=trim)
        passes = state.refine_passes + 1
        seen = {"coarse": coarse, "pose": pose, "upside_down": False}
        return _next_pass(state, model, grid, start, refine_passes=passes, **seen)

    def detect(self, volume: Volume, *, on_device: OnDevice = call_here) -> Detection:
        """Find the landmarks of one scan by itself, tile by tile.

        The service does this for self-checks only: tiles of its scans share batches.

        Args:
            volume: The scan.
            on_device: Calls every stage on the thread that owns the device.

        Returns:
            The landmarks, with what the answer says besides.

        Raises:
            LandmarkdError: As ``prepare`` and ``app.inference.forward.launch``.
        """

        def run(state: ScanState, tile: int) -> None:
            collect(launch([(state, tile)]))

        outcome: tuple[Landmark, ...] | ScanState = on_device(partial(self.prepare, volume))
        tiles = 0
        while isinstance(outcome, ScanState):
            state = outcome
            tiles += state.tiles
            for tile in range(state.tiles):
                on_device(partial(run, state, tile))
            outcome = on_device(partial(self.finish, state))
        return conclude(state, outcome, tiles)


def _withhold_regions(
    landmarks: tuple[Landmark, ...], volume: Volume, margin_mm: float
) -> tuple[Landmark, ...]:
    """Withhold the 95 % regions of what is nearer to the border than they were calibrated on."""
    inside_mm = distance_inside(positions_of(landmarks), volume.affine, volume.voxels.shape)
    return tuple(
        replace(one, region95_mm=None) if mm < margin_mm else one
        for one, mm in zip(landmarks, inside_mm, strict=True)
    )


def _plan_of(model: LoadedModel, grid: Grid) -> TilePlan:
    manifest = model.manifest
    plan = plan_tiles(grid.voxels.shape, manifest.input, manifest.network.output_stride)
    check_tiles(model, len(plan))
    return plan


def _next_pass(
    state: ScanState, model: LoadedModel, grid: Grid, start: float, **changes: Any
) -> ScanState:
    """Prepare another pass over a scan, since a time by ``time.perf_counter()``."""
    return replace(
        state,
        model=model,
        grid=grid,
        plan=_plan_of(model, grid),
        votes=[],
        unmerged=0,
        prepare_s=state.prepare_s + time.perf_counter() - start,
        **changes,
    )


def conclude(
    state: ScanState, landmarks: tuple[Landmark, ...], tiles: int, *, queue_s: float = 0.0
) -> Detection:
    """Put together what is known about a scan once its landmarks are located."""
    times = StageTimes(
        prepare=1e3 * state.prepare_s,
        queue=1e3 * queue_s,
        network=1e3 * state.network_s,
        vote=1e3 * state.vote_s,
        locate=1e3 * state.locate_s,
    )
    warnings = (*state.volume.warnings, *state.remarks)
    volume = VolumeInfo(state.volume.voxels.shape, state.volume.affine, state.volume.digest)
    return Detection(volume, landmarks, warnings, tiles, times)
