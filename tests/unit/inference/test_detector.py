"""The detector: what it keeps of a scan while its tiles are run."""

from pathlib import Path

import torch

from app.inference.detector import Detector
from app.inference.forward import collect, launch
from app.inference.scan_state import MERGED_TILES
from app.voting.votes import concat_votes
from tests.support.device_loops import load_toy, scan


def test_votes_of_many_tiles_are_kept_in_few_pieces_and_in_their_order(tmp_path: Path) -> None:
    detector = Detector(load_toy(tmp_path))
    state, same = (detector.prepare(scan(1, (60, 66, 140))) for _ in range(2))
    tiles = range(2 * MERGED_TILES + 3)
    assert len(state.plan) >= len(tiles)
    alone = []
    for index in tiles:
        collect(launch([(state, index)]))
        same.votes, same.unmerged = [], 0
        collect(launch([(same, index)]))
        alone += same.votes
    assert len(state.votes) == 2 + 3
    kept, expected = concat_votes(state.votes), concat_votes(alone)
    assert len(kept) > 0
    assert torch.equal(kept.source, expected.source)
    assert torch.equal(kept.weight, expected.weight)
