"""Tiles -> a forward pass and the votes of each: what a device is given, and what came of it.

The two are apart, so that a device which works by itself is given the next tiles before anybody
waits for the votes of these.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from app.compute import Stopwatch, record_event
from app.inference.scan_state import Case
from app.preprocessing import extract_tile, tile_weights
from app.voting import Votes, begin_votes


@dataclass(frozen=True, slots=True)
class Pass:
    """A forward pass over some tiles that a device was given.

    Attributes:
        cases: Of the tiles, one for each tile.
        votes: Likewise; each waits for the votes of its tile.
        forward: The time of the network.
        voting: That of each tile's votes.
        whole: That of everything.
    """

    cases: tuple[Case, ...]
    votes: tuple[Callable[[], Votes], ...]
    forward: Stopwatch
    voting: tuple[Stopwatch, ...]
    whole: Stopwatch


def launch(tiles: Sequence[tuple[Case, int]]) -> Pass:
    """Give the device some tiles of some cases, for one forward pass.

    Args:
        tiles: Case and tile index; all of one lane.

    Returns:
        What to settle; an accelerator is still at work on it.

    Raises:
        NetworkFailed: The network raised, or gave scores that are not numbers.
        DoesNotFit: The batch needs more memory than the device has.
    """
    model = tiles[0][0].model
    device = model.network.device
    whole, forward = Stopwatch(device), Stopwatch(device)
    for case in dict.fromkeys(case for case, _ in tiles):
        case.arrive()
    fields = model.network.predict_tiles(
        [extract_tile(case.grid.voxels, case.plan, index) for case, index in tiles]
    )
    forward.stop()
    votes, watches = [], []
    for (case, index), field in zip(tiles, fields, strict=True):
        watches.append(Stopwatch(device))
        i, j, k = case.plan.origins[index]
        begun = begin_votes(
            field,
            model.manifest.voting.threshold,
            stride=case.plan.stride,
            origin=(int(i), int(j), int(k)),
            importance=tile_weights(case.plan, index, case.profiles),
        )
        votes.append(begun)
        watches[-1].stop()
    whole.stop()
    cases = tuple(case for case, _ in tiles)
    return Pass(cases, tuple(votes), forward, tuple(watches), whole)


def settle(passed: Pass) -> float:
    """Wait for the votes of a pass and keep them.

    Returns:
        How long the device took, in seconds.

    Raises:
        NetworkFailed, DoesNotFit: As ``launch``; then no vote was kept, and the tiles may be run
            again.
    """
    votes = [wait() for wait in passed.votes]
    for case, theirs, voting in zip(passed.cases, votes, passed.voting, strict=True):
        case.keep(theirs)
        case.vote_s += voting.seconds()
    counted = record_event(passed.cases[0].model.network.device)
    for case in dict.fromkeys(passed.cases):
        case.network_s += passed.forward.seconds()
        case.counted = counted
    return passed.whole.seconds()
