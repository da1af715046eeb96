"""Volume -> Detection: the device half composed, for one model on one device.

Tiles of many cases may share a forward pass (see ``app.inference.forward``); each case gets only
its own votes, so neighbours cannot touch each other. Networks run on the one thread that owns the
device; ``prepare`` and ``finish`` may run beside it.
"""

import math
import time
from dataclasses import dataclass, replace

from app.compute import describe_out_of_memory, is_out_of_memory
from app.errors import DoesNotFit
from app.geometry import Affine, axis_codes, spacing_of
from app.inference.forward import launch, settle
from app.inference.pose import Pose, turn_grid
from app.inference.refinement import (
    MOST_LOOKS,
    MOST_TURNED,
    MOST_TURNS,
    SecondLook,
    is_believed,
    is_worth_a_turn,
)
from app.inference.scan_state import Case
from app.io import Volume
from app.model import WHOLE, LoadedModel
from app.preprocessing import grid_shape, make_grid, plan_tiles
from app.voting import GridFrame, Landmark, Shape, locate, readout_of


@dataclass(frozen=True, slots=True)
class VolumeInfo:
    """What an answer says about the scan it is for.

    Attributes:
        shape: Of the uploaded array, voxels.
        spacing_mm: Along its axes.
        orientation: The RAS direction that each of its axes comes nearest to, such as ``LPS``.
        affine: Its voxel index -> mm, RAS.
        digest: BLAKE3 of the uncompressed file, hex.
    """

    shape: tuple[int, ...]
    spacing_mm: tuple[float, ...]
    orientation: str
    affine: Affine
    digest: str


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Time a scan spent in each stage, in ms; a shared forward pass counts for all its cases."""

    decode: float = 0.0
    prepare: float = 0.0
    queue: float = 0.0
    network: float = 0.0
    vote: float = 0.0
    locate: float = 0.0


@dataclass(frozen=True, slots=True)
class Detection:
    """The answer for one scan.

    Attributes:
        volume: The scan it is for.
        landmarks: One for every landmark of the model, in the manifest's order.
        warnings: What a careful reader should know.
        tiles: How many tiles were run.
        timing: Where the time went.
    """

    volume: VolumeInfo
    landmarks: tuple[Landmark, ...]
    warnings: tuple[str, ...]
    tiles: int
    timing: StageTimes


class Detector:
    """One model on one device."""

    def __init__(self, model: LoadedModel) -> None:
        """Args: the loaded model."""
        self.model = model
        spec = model.manifest.shape
        self._shape = None
        if model.shape is not None and spec is not None:
            self._shape = Shape(model.shape, spec.tolerance_mm, spec.modes)
        self._second = None
        # Its axes may only change places where they are alike, and tiles would be many more.
        look = model.manifest.input
        alike = look.tile_shape == WHOLE and len(set(look.spacing_mm)) == 1
        self._turns = MOST_TURNS if alike else 0
        if model.refine is not None:
            off = spec.tolerance_mm if spec is not None else model.manifest.voting.radius_mm
            self._second = SecondLook(model.refine, off)

    def prepare(self, volume: Volume) -> Case:
        """Bring a scan to the device and plan its tiles.

        Raises:
            TooLarge: The model sees grids whole, and this one is larger than it takes.
            DoesNotFit: The grid needs more memory than the device has.
        """
        start = time.perf_counter()
        spec = self.model.manifest.input
        try:
            grid = make_grid(volume, spec, self.model.network.device)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            device = self.model.network.device
            raise DoesNotFit(
                "expected a scan whose grid fits the device, got shape "
                f"{volume.voxels.shape}: {describe_out_of_memory(error, device)}"
            ) from error
        plan = plan_tiles(grid.voxels.shape, spec, self.model.manifest.network.output_stride)
        return Case(volume, self.model, grid, plan, prepare_s=time.perf_counter() - start)

    def lane(self, case: Case) -> tuple[str, tuple[int, int, int]]:
        """Say what tiles of cases must have in common to be run together, the model first."""
        return case.model.digest, case.plan.tile_shape

    def finish(self, case: Case) -> "tuple[Landmark, ...] | Case":
        """Say what comes after all tiles of a case: its landmarks, or tiles of a further look.

        Args:
            case: Its tiles have all been run.

        Returns:
            The landmarks; or a case with the times of this one, whose tiles are run next.
        """
        start = time.perf_counter()
        votes = case.gather()
        if case.pose is None or self._second is None:
            spec = self.model.manifest
            frame = GridFrame(case.grid.to_volume, case.grid.to_world)
            readout = readout_of(case.grid, spec)
            landmarks = found = locate(votes, readout, frame, spec.landmarks, self._shape)
            pose = None if self._second is None else self._second.find_pose(found)
        else:
            found = case.found
            refined = self._second.locate_alone(votes, case.grid)
            landmarks = self._second.merge(found, refined)
            pose = self._second.better_pose(refined, case.pose) if case.looks < MOST_LOOKS else None
        case.locate_s += time.perf_counter() - start
        if self._second is None:
            return landmarks
        if pose is not None:
            return self._look_again(case, self._second, found, pose)
        if is_believed(landmarks):
            return landmarks
        spare = case.spare or landmarks
        more = case.turn < self._turns and self._is_small(case.volume) and is_worth_a_turn(spare)
        return self._turn(case, spare) if more else spare

    def _is_small(self, volume: Volume) -> bool:
        """Say whether further looks at all of a scan take no longer than people wait."""
        shape = grid_shape(volume.voxels.shape, volume.affine, self.model.manifest.input)
        return math.prod(shape) <= MOST_TURNED

    def _turn(self, case: Case, spare: tuple[Landmark, ...]) -> Case:
        """Plan the tiles of a first look at the scan from another side."""
        start = time.perf_counter()
        spec = self.model.manifest
        grid = turn_grid(make_grid(case.volume, spec.input, self.model.network.device), case.turn)
        return replace(
            case,
            model=self.model,
            grid=grid,
            plan=plan_tiles(grid.voxels.shape, spec.input, spec.network.output_stride),
            found=(),
            pose=None,
            looks=0,
            turn=case.turn + 1,
            spare=spare,
            prepare_s=case.prepare_s + time.perf_counter() - start,
            begun=False,
            votes=[],
            loose=0,
        )

    def _look_again(
        self, case: Case, second: SecondLook, found: tuple[Landmark, ...], pose: Pose
    ) -> Case:
        """Plan the tiles of a further look, in a pose."""
        start = time.perf_counter()
        grid = second.prepare(case.volume, pose, case.grid.window or (0.0, 1.0))
        manifest = second.model.manifest
        return replace(
            case,
            model=second.model,
            grid=grid,
            plan=plan_tiles(grid.voxels.shape, manifest.input, manifest.network.output_stride),
            found=found,
            pose=pose,
            looks=case.looks + 1,
            prepare_s=case.prepare_s + time.perf_counter() - start,
            begun=False,
            votes=[],
            loose=0,
        )

    def detect(self, volume: Volume, *, batch_size: int = 1, decode_s: float = 0.0) -> Detection:
        """Find the landmarks of one scan, alone on the device.

        Args:
            volume: The scan.
            batch_size: Tiles per forward pass.
            decode_s: How long decoding took; passed through to the answer.

        Returns:
            The landmarks and what belongs to them.

        Raises:
            LandmarkdError: As ``prepare`` and ``app.inference.forward.launch``.
        """
        found: tuple[Landmark, ...] | Case = self.prepare(volume)
        tiles = 0
        while isinstance(found, Case):
            case = found
            tiles += len(case.plan)
            for first in range(0, len(case.plan), batch_size):
                last = min(first + batch_size, len(case.plan))
                settle(launch([(case, index) for index in range(first, last)]))
            found = self.finish(case)
        times = stage_times(case, decode_s=decode_s)
        return Detection(describe(volume), found, volume.warnings, tiles, times)


def stage_times(case: Case, *, decode_s: float = 0.0, queue_s: float = 0.0) -> StageTimes:
    """Put the times of a case together, in ms."""
    return StageTimes(
        decode=1e3 * decode_s,
        prepare=1e3 * case.prepare_s,
        queue=1e3 * queue_s,
        network=1e3 * case.network_s,
        vote=1e3 * case.vote_s,
        locate=1e3 * case.locate_s,
    )


def describe(volume: Volume) -> VolumeInfo:
    """Say what an answer repeats of its scan."""
    return VolumeInfo(
        shape=tuple(volume.voxels.shape),
        spacing_mm=tuple(float(mm) for mm in spacing_of(volume.affine)),
        orientation=axis_codes(volume.affine),
        affine=volume.affine,
        digest=volume.digest,
    )
