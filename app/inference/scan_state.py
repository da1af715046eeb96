"""Volume + Grid -> Case: one scan on the device, between two forward passes."""

from dataclasses import dataclass, field
from typing import Final

from app.compute import READY, ReadyEvent
from app.inference.pose import Pose
from app.io import Volume
from app.model import LoadedModel
from app.preprocessing import Grid, Profiles, TilePlan, load_profiles
from app.voting import Landmark, Votes, concat_votes

JOINED_TILES: Final = 16


@dataclass(eq=False, slots=True)
class Case:
    """One scan on the device; grows by the votes of each tile that was run.

    Attributes:
        volume: The scan.
        model: Whose network looks at it: the model's first, or its second.
        grid: The scan as the network sees it.
        plan: Tiles of the grid.
        found: Landmarks of the first look, if this is a further one.
        pose: In which the second network looks; None if this is the first look.
        looks: How many looks of the second network there are with this one.
        turn: How many times the first network has looked from another side.
        spare: What was found before it did, which is told if it never finds more.
        arrival: When the grid is on the device; made on another stream than networks run on.
        counted: When the votes that are kept are; likewise of who reads them.
        begun: Whether any of its tiles has been given to the device.
        profiles: Those of the plan, on the device.
        prepare_s: Time that preparing took, of all looks, as are those that follow.
        network_s: Forward passes; one that is shared counts for all its cases.
        vote_s: Collecting votes.
        locate_s: Reading landmarks off them.
        votes: Those of the tiles that have been run.
        loose: How many tiles' votes, the last ones, stand alone in the list.
    """

    volume: Volume
    model: LoadedModel
    grid: Grid
    plan: TilePlan
    found: tuple[Landmark, ...] = ()
    pose: Pose | None = None
    looks: int = 0
    turn: int = 0
    spare: tuple[Landmark, ...] = ()
    arrival: ReadyEvent = READY
    counted: ReadyEvent = READY
    begun: bool = False
    prepare_s: float = 0.0
    network_s: float = 0.0
    vote_s: float = 0.0
    locate_s: float = 0.0
    votes: list[Votes] = field(default_factory=list)
    loose: int = 0
    profiles: Profiles = field(init=False)

    def __post_init__(self) -> None:
        """Bring what all tiles need to where the grid is."""
        self.profiles = load_profiles(self.plan, self.grid.voxels.device)

    def arrive(self) -> None:
        """Have the current stream wait until the scan is on the device; the host does not."""
        for values in (self.grid.voxels, *self.profiles):
            self.arrival.wait(values)
        self.arrival = READY

    def gather(self) -> Votes:
        """Join the votes of all tiles, on the current stream."""
        for votes in self.votes:
            for column in (votes.landmark, votes.position, votes.probability, votes.weight):
                self.counted.wait(column)
        return concat_votes(self.votes)

    def keep(self, votes: Votes) -> None:
        """Keep the votes of a tile that was run.

        Small arrays that stay, between large ones that come and go with each batch, keep their
        memory from being used again; so those of the last tiles are joined now and then.
        """
        self.votes.append(votes)
        self.loose += 1
        if self.loose == JOINED_TILES:
            self.votes[-JOINED_TILES:] = [concat_votes(self.votes[-JOINED_TILES:])]
            self.loose = 0
