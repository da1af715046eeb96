"""Volume -> Detection: the device half composed, for one model on one device.

A **case** is one scan on the device: its grid, its tile plan and the votes so far. Tiles of many
cases may share a forward pass; each case gets only its own votes, so neighbours cannot touch each
other.
All methods run on the one thread that owns the device.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from app.constellation import Shape
from app.device import describe_shortage, is_shortage
from app.errors import DoesNotFit
from app.frames import Affine, Points, axis_codes, spacing_of
from app.grid import Grid, make_grid
from app.landmarks import Landmark, locate
from app.phantom import make_phantom
from app.readout import GridFrame, readout_of
from app.refine import Refiner
from app.registry import LoadedModel, load_model
from app.selfcheck import check
from app.tiles import TilePlan, cut, importance, plan_tiles
from app.volume import Volume
from app.votes import Votes, concat_votes, filter_votes


@dataclass(frozen=True, slots=True)
class VolumeInfo:
    """What an answer says about the scan it is for.

    Attributes:
        shape: Of the uploaded array, voxels.
        spacing_mm: Along its axes.
        orientation: The RAS direction that each of its axes comes nearest to, such as ``LPS``.
        affine: Its voxel index -> mm, RAS.
        digest: SHA-256 of the uncompressed file, hex.
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


@dataclass(eq=False, slots=True)
class Case:
    """One scan on the device; grows by the votes of each tile that was run."""

    volume: Volume
    grid: Grid
    plan: TilePlan
    prepare_s: float
    network_s: float = 0.0
    vote_s: float = 0.0
    votes: list[Votes] = field(default_factory=list)


class Detector:
    """One model on one device."""

    def __init__(self, model: LoadedModel) -> None:
        """Args: the loaded model."""
        self.model = model
        spec = model.manifest.shape
        self._shape = None
        if model.shape is not None and spec is not None:
            self._shape = Shape(model.shape, spec.tolerance_mm, spec.modes)
        self._refiner = None
        if model.refine is not None:
            off = spec.tolerance_mm if spec is not None else model.manifest.voting.radius_mm
            self._refiner = Refiner(model.refine, off)

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
            if not is_shortage(error):
                raise
            device = self.model.network.device
            raise DoesNotFit(
                "expected a scan whose grid fits the device, got shape "
                f"{volume.voxels.shape}: {describe_shortage(error, device)}"
            ) from error
        plan = plan_tiles(grid.voxels.shape, spec, self.model.manifest.network.output_stride)
        return Case(volume, grid, plan, prepare_s=time.perf_counter() - start)

    def lane(self, case: Case) -> tuple[str, tuple[int, int, int]]:
        """Say what tiles of cases must have in common to be run together, the model first."""
        return self.model.digest, case.plan.tile_shape

    def run(self, tiles: Sequence[tuple[Case, int]]) -> None:
        """Run some tiles of some cases in one forward pass and keep their votes.

        Args:
            tiles: Case and tile index; all of one tile shape.

        Raises:
            NetworkFailed: The network raised, or gave scores that are not numbers.
            DoesNotFit: The batch needs more memory than the device has.
        """
        start = time.perf_counter()
        fields = self.model.network.predict_tiles(
            [cut(case.grid.voxels, case.plan, index) for case, index in tiles]
        )
        forward = time.perf_counter() - start
        threshold = self.model.manifest.voting.threshold
        cast: list[tuple[Case, Votes, float]] = []
        for (case, index), scores in zip(tiles, fields, strict=True):
            start = time.perf_counter()
            i, j, k = case.plan.origins[index]
            votes = filter_votes(
                scores,
                threshold,
                stride=case.plan.stride,
                origin=(int(i), int(j), int(k)),
                importance=importance(case.plan, index, self.model.network.device),
            )
            cast.append((case, votes, time.perf_counter() - start))
        # Only now, so that a batch which fails can be run again without doubling a vote.
        for case, votes, seconds in cast:
            case.votes.append(votes)
            case.vote_s += seconds
        for case in dict.fromkeys(case for case, _ in tiles):
            case.network_s += forward

    def locate(self, case: Case) -> tuple[Landmark, ...]:
        """Read the landmarks off a case whose tiles have all been run."""
        manifest = self.model.manifest
        found = locate(
            concat_votes(case.votes),
            readout_of(case.grid, manifest),
            GridFrame(case.grid.to_volume, case.grid.to_world),
            manifest.landmarks,
            self._shape,
        )
        if self._refiner is None:
            return found
        start = time.perf_counter()
        refined = self._refiner.refine(case.volume, found, case.grid.window or (0.0, 1.0))
        case.network_s += time.perf_counter() - start
        return refined

    def finish(self, case: Case) -> "tuple[Landmark, ...] | Case":
        """Say what comes after all tiles of a case: its landmarks, or tiles of a second look.

        Args:
            case: Its tiles have all been run.

        Returns:
            The landmarks; or a case with the times of this one, whose tiles are run next.
        """
        return self.locate(case)

    def detect(self, volume: Volume, *, batch_size: int = 1, decode_s: float = 0.0) -> Detection:
        """Find the landmarks of one scan, alone on the device.

        Args:
            volume: The scan.
            batch_size: Tiles per forward pass.
            decode_s: How long decoding took; passed through to the answer.

        Returns:
            The landmarks and what belongs to them.

        Raises:
            LandmarkdError: As ``prepare`` and ``run``.
        """
        case = self.prepare(volume)
        for first in range(0, len(case.plan), batch_size):
            last = min(first + batch_size, len(case.plan))
            self.run([(case, index) for index in range(first, last)])
        start, network_s = time.perf_counter(), case.network_s
        landmarks = self.locate(case)
        locate_s = time.perf_counter() - start - (case.network_s - network_s)
        times = stage_times(case, locate_s=locate_s, decode_s=decode_s)
        return Detection(describe(volume), landmarks, volume.warnings, len(case.plan), times)


def load_checked(folder: Path, device: torch.device) -> LoadedModel:
    """Load a model folder; it must pass its self-check, by noise or by a whole phantom.

    Args:
        folder: The model folder.
        device: Where the network shall run.

    Returns:
        The model.

    Raises:
        ModelRefused: The folder breaks the contract; the key and the reason are named.
    """
    return load_model(folder, device, _detect_phantom)


def check_again(folder: Path, model: LoadedModel) -> None:
    """Run a loaded model's self-check again, after its device was in trouble.

    Args:
        folder: The model's folder.
        model: The model as it serves.

    Raises:
        ModelRefused: It does not answer what it answered when its folder was made.
    """
    check(folder, model.manifest, model.network, lambda seed: _detect_phantom(model, seed))


def _detect_phantom(model: LoadedModel, seed: int) -> tuple[Points, Points]:
    """Find a phantom's landmarks; gives the points found and the true ones in mm, RAS."""
    phantom = make_phantom(seed)
    truth = dict(zip(phantom.names, phantom.points, strict=True))
    missing = np.full(3, np.nan)
    landmarks = Detector(model).detect(phantom.volume).landmarks
    found = [missing if mark.ras_mm is None else mark.ras_mm for mark in landmarks]
    return np.stack(found), np.stack([truth.get(mark.name, missing) for mark in landmarks])


def stage_times(
    case: Case, *, locate_s: float, decode_s: float = 0.0, queue_s: float = 0.0
) -> StageTimes:
    """Put the times of a case together, in ms."""
    return StageTimes(
        decode=1e3 * decode_s,
        prepare=1e3 * case.prepare_s,
        queue=1e3 * queue_s,
        network=1e3 * case.network_s,
        vote=1e3 * case.vote_s,
        locate=1e3 * locate_s,
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
