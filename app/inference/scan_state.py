"""Grid -> ScanState: one pass of a network over a scan, and the votes of its tiles so far."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from app.compute import READY, ReadyEvent, is_out_of_memory
from app.model import LoadedModel
from app.preprocessing import Grid, Profiles, TilePlan, load_profiles
from app.voting import (
    DenseMean,
    GridFrame,
    Landmark,
    SparseMean,
    Votes,
    WeightedTile,
    concat_votes,
    locate,
    make_readout,
    mean_of,
)

MERGED_TILES: Final = 16


@dataclass(eq=False, slots=True)
class ScanState:
    """One pass of a network over a scan, and the votes of the tiles that have run.

    Attributes:
        model: Whose network runs: the model itself, or its second-stage model.
        grid: The scan in the axes and spacing of the network.
        plan: Tiles of the grid.
        grid_ready: When the grid is on the device; another CUDA stream uploads it.
        votes_ready: When the votes are on the device; another CUDA stream reads them.
        profiles: Weights of the tiles' voxels, on the device.
        prepare_s: Time of preparing, in all passes so far; likewise those that follow.
        network_s: Forward passes; a shared one counts in full for each of its scans.
        vote_s: Collecting votes.
        locate_s: Locating landmarks.
        votes: Of the tiles that have run.
        unmerged: How many of the last entries of ``votes`` hold a single tile.
        tiles: How many the plan has.
        lane: What tiles must have in common to share a batch: the network and their shape.
        mean: Of its tiles, where they are averaged; None: their votes add up as they are, or all
            are merged.
    """

    model: LoadedModel
    grid: Grid
    plan: TilePlan
    grid_ready: ReadyEvent = READY
    votes_ready: ReadyEvent = READY
    prepare_s: float = 0.0
    network_s: float = 0.0
    vote_s: float = 0.0
    locate_s: float = 0.0
    votes: list[Votes] = field(default_factory=list)
    unmerged: int = 0
    profiles: Profiles = field(init=False)
    tiles: int = field(init=False)
    lane: tuple[str, tuple[int, int, int]] = field(init=False)
    mean: SparseMean | DenseMean | None = field(init=False)

    def __post_init__(self) -> None:
        """Bring what all tiles need to the grid's device."""
        self.tiles = len(self.plan)
        self.lane = self.model.digest, self.plan.tile_shape
        self.mean = mean_of(self.model.manifest, self.plan.grid_shape, self.tiles)
        self.profiles = load_profiles(self.plan, self.grid.voxels.device)

    @property
    def threshold(self) -> float:
        """Least probability of a vote of a tile."""
        if isinstance(self.mean, SparseMean):
            return self.mean.lower_threshold
        return self.model.manifest.voting.threshold

    def wait_for_grid(self) -> None:
        """Make the current CUDA stream wait for the upload; the host does not wait."""
        for values in (self.grid.voxels, *self.profiles):
            self.grid_ready.wait(values)
        self.grid_ready = READY

    @contextmanager
    def locating(self) -> Iterator[None]:
        """Count the time of what is read from the votes, once all tiles have run.

        The grid is kept until the current CUDA stream, which may turn it, is done with it.
        """
        self.votes_ready.wait(self.grid.voxels)
        start = time.perf_counter()
        yield
        self.locate_s += time.perf_counter() - start

    def merge_votes(self) -> Votes:
        """Put the votes of all tiles together, on the current CUDA stream, and keep them alone.

        No tile may be run after it. Called again, it returns the same votes.
        """
        for part in self.votes:
            for values in (part.landmark, part.columns):
                self.votes_ready.wait(values)
        if self.mean is None:
            votes = concat_votes(self.votes)
        elif isinstance(self.mean, SparseMean):
            votes = self.mean.finish(self.mean.merge(self.votes))
        else:
            if self.mean.sums is not None:
                self.votes_ready.wait(self.mean.sums)
            votes = self.mean.votes()
        self.votes, self.mean = [votes], None
        return votes

    def locate(self) -> tuple[Landmark, ...]:
        """Locate the landmarks of the network's model, once all tiles have run."""
        manifest, shape = self.model.manifest, self.model.shape
        frame = GridFrame(self.grid.to_volume, self.grid.to_world)
        readout = make_readout(self.grid, manifest)
        return locate(self.merge_votes(), readout, frame, manifest.landmarks, shape)

    def add(self, part: Votes | WeightedTile) -> None:
        """Store what is kept of a tile, which cannot fail."""
        if isinstance(part, WeightedTile):
            part.add()
        else:
            self.votes.append(part)
            self.unmerged += 1

    def merge_tiles(self) -> None:
        """Merge the last tiles, ``MERGED_TILES`` at a time.

        Small arrays that stay, between large ones that come and go with each batch, fragment the
        memory. Where there is too little to merge them now, they wait for more. Which are merged
        together changes the last bits of a mean: it must not depend on how many share a batch.
        """
        merge = self.mean.merge if isinstance(self.mean, SparseMean) else concat_votes
        while self.unmerged >= MERGED_TILES:
            first = len(self.votes) - self.unmerged
            part = slice(first, first + MERGED_TILES)
            try:
                merged = merge(self.votes[part])
            except Exception as error:
                if is_out_of_memory(error):
                    return
                raise
            self.votes[part] = [merged]
            self.unmerged -= MERGED_TILES
