"""Tiles -> one forward pass -> the votes of each tile.

Launching a pass and collecting its votes are separate, so that an asynchronous device can be given
the next pass before the host waits for the votes of this one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from app.compute import Stopwatch, record_event
from app.inference.scan_state import ScanState
from app.model import Field
from app.preprocessing import extract_tile, tile_weights, within_grid
from app.voting import DenseMean, Placement, Votes, WeightedTile, launch_filter


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """A forward pass that was launched on a device.

    Attributes:
        states: The scan of each tile.
        parts: For each tile, a function that waits for what is kept of it and returns that.
        stopwatch: Of its stages: the network, then the reading of each tile's votes.
    """

    states: tuple[ScanState, ...]
    parts: tuple[Callable[[], Votes | WeightedTile], ...]
    stopwatch: Stopwatch


def launch(
    tiles: Sequence[tuple[ScanState, int]], give_way: Callable[[], None] | None = None
) -> ForwardPass:
    """Launch one forward pass over tiles of one or more scans.

    Args:
        tiles: Scan and tile index; all of one lane.
        give_way: Called during a pass on a CPU, as for ``Network.predict``; its time is left out.

    Returns:
        The pass to ``collect``; on CUDA it is still running.

    Raises:
        NetworkFailed: The network raised, or gave scores that are not numbers.
        InsufficientMemory: The batch needs more memory than the device has.
    """
    model = tiles[0][0].model
    device = model.network.device
    stopwatch = Stopwatch(device)
    for state in dict.fromkeys(state for state, _ in tiles):
        state.wait_for_grid()

    def pause() -> None:
        if give_way is not None:
            with stopwatch.paused():
                give_way()

    images = [extract_tile(state.grid.voxels, state.plan, index) for state, index in tiles]
    fields = model.network.predict_tiles(images, pause)
    stopwatch.end_stage()
    parts = []
    for (state, index), field in zip(tiles, fields, strict=True):
        parts.append(_launch_part(state, index, field))
        stopwatch.end_stage()
    return ForwardPass(tuple(state for state, _ in tiles), tuple(parts), stopwatch)


def _launch_part(state: ScanState, index: int, field: Field) -> Callable[[], Votes | WeightedTile]:
    """Launch the reading of a tile's field."""
    i, j, k = (int(start) for start in state.plan.origins[index])
    network, stride = state.model.manifest.network, state.plan.stride
    if network.votes_each is not None:
        return launch_filter(field, state.threshold, Placement((i, j, k)))
    weights = tile_weights(state.plan, index, state.profiles)
    if network.output == "heatmaps":  # Padding is no place for a landmark.
        spans = within_grid(state.plan, index)
        field = replace(field, scores=field.scores[:, *spans], offsets=field.offsets[..., *spans])
        i, j, k = (
            first + stride * span.start for first, span in zip((i, j, k), spans, strict=True)
        )
        a, b, c = (along[span] for along, span in zip(weights, spans, strict=True))
        weights = a, b, c
    placement = Placement((i, j, k), stride, weights if state.tiles > 1 else None)
    if isinstance(state.mean, DenseMean):
        tile = state.mean.weigh(field, placement)
        return lambda: tile
    return launch_filter(field, state.threshold, placement)


def collect(forward_pass: ForwardPass) -> float:
    """Wait for the votes of a pass and store them in the states of its scans.

    Returns:
        How long the device took, in seconds.

    Raises:
        NetworkFailed, InsufficientMemory: As ``launch``; then no vote was stored, and the tiles
            may be run again.
    """
    states = forward_pass.states
    collected = [wait() for wait in forward_pass.parts]
    network_s, *votes_s = forward_pass.stopwatch.seconds()
    for state, part, vote_s in zip(states, collected, votes_s, strict=True):
        state.add(part)
        state.vote_s += vote_s
    for state in dict.fromkeys(states):
        state.network_s += network_s
        state.merge_tiles()
    votes_ready = record_event(states[0].model.network.device)  # Merged votes, too.
    for state in states:
        state.votes_ready = votes_ready
    return network_s + sum(votes_s)
