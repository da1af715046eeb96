"""The detector: what it keeps of a scan while its tiles are run."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from app.compute.transfer import READY, ReadyEvent
from app.geometry import distance_inside, translation
from app.inference import scan_state
from app.inference.detector import MAX_EXTRA_VIEWS, Detector, Located
from app.inference.forward import collect, launch
from app.inference.load import load_checked
from app.inference.scan_heatmaps import VoteMap, keep_votes
from app.inference.scan_state import MERGED_TILES, ScanState
from app.io.volume import Volume
from app.phantom import make_phantom
from app.preprocessing.grid import Grid
from app.preprocessing.posed_grid import reorient_grid
from app.voting.constellation import Rival
from app.voting.landmarks import Landmark, positions_of
from app.voting.votes import Votes, concat_votes
from tests.support.device_loops import load_toy, scan

MODELS = Path(__file__).resolve().parents[3] / "models"
PHANTOM = MODELS / "phantom"
SKULLS = MODELS / "mouse-skull"


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


@pytest.mark.gpu
def test_landmarks_on_cuda_are_those_of_the_host() -> None:
    on_host, on_cuda = (
        Detector(load_checked(PHANTOM, torch.device(device))) for device in ("cpu", "cuda")
    )
    for seed in range(4):
        volume = make_phantom(seed).volume
        expected = on_host.detect(volume).landmarks
        found = on_cuda.detect(volume).landmarks
        assert [one.status for one in found] == [one.status for one in expected]
        np.testing.assert_allclose(positions_of(found), positions_of(expected), atol=0.05)


def test_tiles_that_cannot_be_merged_for_want_of_memory_wait_and_count_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    detector = Detector(load_toy(tmp_path))
    state = detector.prepare(scan(1, (60, 66, 140)))

    def run_out(votes: list[Votes]) -> Votes:
        raise torch.OutOfMemoryError(f"no memory for {len(votes)} tiles")

    with monkeypatch.context() as patch:
        patch.setattr(scan_state, "concat_votes", run_out)
        for index in range(MERGED_TILES + 1):
            collect(launch([(state, index)]))
    assert len(state.votes) == MERGED_TILES + 1
    collect(launch([(state, MERGED_TILES + 1)]))
    assert (len(state.votes), state.unmerged) == (1 + 2, 2)


def test_votes_are_ready_only_once_they_are_merged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CUDA another stream reads them, which waits for nothing else."""
    state = Detector(load_toy(tmp_path)).prepare(scan(1, (60, 66, 140)))
    pieces = []

    def note(_device: torch.device) -> ReadyEvent:
        pieces.append(len(state.votes))
        return READY

    monkeypatch.setattr("app.inference.forward.record_event", note)
    for index in range(MERGED_TILES):
        collect(launch([(state, index)]))
    assert pieces == [*range(1, MERGED_TILES), 1]


class Noted(ReadyEvent):
    """Notes for which values a stream waits."""

    def __init__(self, waited: list[Tensor]) -> None:
        object.__setattr__(self, "waited", waited)

    def wait(self, values: Tensor) -> None:
        vars(self)["waited"].append(values)


def test_grids_are_kept_for_the_stream_on_which_the_next_pass_is_prepared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may turn one for that pass, which lets go of the last before that is done."""
    waited: list[Tensor] = []
    monkeypatch.setattr("app.inference.forward.record_event", lambda _device: Noted(waited))
    monkeypatch.setattr("app.inference.detector.has_enough_votes", lambda _: True)
    seen: list[Grid] = []

    def turn(own: Grid, view: int) -> Grid:
        for grid in (seen[-1], own):
            assert any(values is grid.voxels for values in waited)
        waited.clear()
        return reorient_grid(own, view)

    monkeypatch.setattr("app.inference.detector.reorient_grid", turn)
    detector = Detector(load_checked(SKULLS, torch.device("cpu")))
    noise = np.random.default_rng(0).normal(size=(24, 28, 32)).astype(np.float32)
    for outcome in detector.passes(Volume(noise, np.diag([0.4, 0.4, 0.4, 1.0]))):
        if isinstance(outcome, ScanState):
            seen.append(outcome.grid)
            collect(launch([(outcome, 0)]))
    assert len(seen) == 1 + MAX_EXTRA_VIEWS


@pytest.mark.parametrize("keeps_votes", [False, True])
def test_votes_are_copied_for_heatmaps_alone(
    keeps_votes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no landmark was detected, those of the first pass were, for whatever was asked."""
    kept: list[ScanState] = []

    def keep(state: ScanState) -> VoteMap:
        kept.append(state)
        return keep_votes(state)

    monkeypatch.setattr("app.inference.detector.keep_votes", keep)
    model = load_checked(SKULLS, torch.device("cpu"))
    noise = np.random.default_rng(0).normal(size=(24, 28, 32)).astype(np.float32)
    volume = Volume(noise, np.diag([0.4, 0.4, 0.4, 1.0]))
    for outcome in Detector(model, keeps_votes=keeps_votes).passes(volume):
        if isinstance(outcome, ScanState):
            collect(launch([(outcome, 0)]))
    assert isinstance(outcome, Located)
    assert (outcome.votes is not None) is keeps_votes
    assert len(kept) == keeps_votes


def test_what_other_orientations_show_is_not_said_of_an_answer_in_the_scans_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a slab of a skull, all landmarks were doubted for a rival that only the last one had."""
    monkeypatch.setattr("app.inference.detector.has_enough_votes", lambda _: True)
    detector = Detector(load_checked(SKULLS, torch.device("cpu")))
    shape = detector.model.shape
    assert shape is not None
    views: list[ScanState] = []

    def locate_in_the_last_view(state: ScanState) -> tuple[Landmark, ...]:
        none = locate(state)
        if state.model is not detector.model:
            return none
        views.append(state)
        points = shape.mean[: len(none) if len(views) == 1 + MAX_EXTRA_VIEWS else 1]
        rival = Rival(0.9, 5.0) if len(points) > 1 else None
        seen = [
            replace(one, status="low_confidence", ras_mm=at, ijk=at, confidence=0.4, rival=rival)
            for one, at in zip(none, points, strict=False)
        ]
        return (*seen, *none[len(seen) :])

    locate = ScanState.locate
    monkeypatch.setattr(ScanState, "locate", locate_in_the_last_view)
    blank = Volume(np.zeros((24, 28, 32), np.float32), np.diag([0.4, 0.4, 0.4, 1.0]))
    located, _ = detector.locate(blank)
    assert located.last.model is detector.model.refine
    assert sum(one.ras_mm is not None for one in located.landmarks) == 1
    (remark,) = located.remarks
    assert remark.startswith("No landmark is detected.")


def test_a_scan_ends_where_its_padding_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of half a skull that was padded far, what lies in the padding was no more out of the field.

    So too few of the landmarks that it should show agreed, and those near to its end had regions.
    """
    detector = Detector(load_checked(SKULLS, torch.device("cpu")))
    assert detector.model.shape is not None
    points = detector.model.shape.mean - detector.model.shape.mean.min(axis=0)
    passes: list[ScanState] = []

    def locate_all(state: ScanState) -> tuple[Landmark, ...]:
        passes.append(state)
        return tuple(
            replace(one, status="detected", ras_mm=at, ijk=at, confidence=0.9, region95_mm=1.0)
            for one, at in zip(locate(state), points, strict=True)
        )

    locate = ScanState.locate
    monkeypatch.setattr(ScanState, "locate", locate_all)
    shape = (16, 28, 18)
    noise = np.random.default_rng(0).uniform(1.0, 2.0, shape).astype(np.float32)
    padded = Volume(np.pad(noise, 20), translation((-20.0, -20.0, -20.0)))
    located, _ = detector.locate(padded)
    assert len(passes) == 2
    assert passes[1].grid.scan is not None
    assert passes[1].grid.scan.shape == shape
    margin_mm = passes[1].model.manifest.voting.region_margin_mm
    near = distance_inside(points, np.eye(4), shape) < margin_mm
    assert [one.region95_mm is None for one in located.landmarks] == near.tolist()
    assert 0 < near.sum() < len(near)
