"""The detector: what it keeps of a scan while its tiles are run."""

from pathlib import Path

import torch

from app.inference.detector import Detector
from app.inference.forward import launch, settle
from app.inference.scan_state import JOINED_TILES
from app.voting.votes import concat_votes
from tests.support.device_loops import load_toy, scan


def test_votes_of_many_tiles_are_kept_in_few_pieces_and_in_their_order(tmp_path: Path) -> None:
    detector = Detector(load_toy(tmp_path))
    case, same = (detector.prepare(scan(1, (60, 66, 140))) for _ in range(2))
    tiles = range(2 * JOINED_TILES + 3)
    assert len(case.plan) >= len(tiles)
    alone = []
    for index in tiles:
        settle(launch([(case, index)]))
        same.votes, same.loose = [], 0
        settle(launch([(same, index)]))
        alone += same.votes
    assert len(case.votes) == 2 + 3
    kept, expected = concat_votes(case.votes), concat_votes(alone)
    assert len(kept) > 0
    assert torch.equal(kept.source, expected.source)
    assert torch.equal(kept.weight, expected.weight)
