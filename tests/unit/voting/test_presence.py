"""What a scan must show for its landmarks to be believed: its own voxels, and enough of them."""

from dataclasses import replace

import numpy as np
import pytest

from app.geometry import translation
from app.preprocessing.grid import ScanExtent
from app.voting.landmarks import locate
from app.voting.readout import GridFrame, make_readout
from app.voting.votes import concat_votes
from tests.support.synthetic import (
    SCAN_RADIUS,
    SCAN_SHAPE,
    ball_votes,
    find,
    make_grid,
    make_manifest,
    make_shape,
    thinned,
)
from tests.unit.voting.test_landmarks import constellation_votes, make_constellation


def test_nothing_is_detected_where_few_of_the_landmarks_due_in_the_scan_agree() -> None:
    """Four of twelve fit by chance; each keeps its place, and is doubted."""
    truth = make_constellation()
    more = truth[[0, 2, 4, 7]] * 0.6 + truth[[1, 3, 5, 6]] * 0.4
    mean = np.concatenate([truth, more])
    few = find(constellation_votes(truth[:5], [], truth[0]), truth=mean, landmarks=12)
    assert {mark.status for mark in few[:5]} == {"low_confidence"}
    assert all(mark.confidence < 0.5 and mark.ras_mm is not None for mark in few[:5])
    enough = find(constellation_votes(truth, [], truth[0]), truth=mean, landmarks=12)
    assert {mark.status for mark in enough[:8]} == {"detected"}


def test_landmarks_expected_outside_the_scan_are_not_missed() -> None:
    """Half of a subject: eight landmarks are there, and ten more would lie past the border."""
    truth = make_constellation()
    mean = np.concatenate([truth, truth + 45 * np.eye(3)[2], truth[:2] - 45 * np.eye(3)[1]])
    found = find(constellation_votes(truth, [], truth[0]), truth=mean, landmarks=18)
    assert {mark.status for mark in found[:8]} == {"detected"}
    assert {mark.status for mark in found[8:]} == {"not_found"}


@pytest.mark.parametrize(
    ("fifth", "others", "status"),
    [
        ("found", 40, "detected"),
        ("found", 195, "detected"),
        ("absent", 40, "low_confidence"),
        ("absent", 16, "low_confidence"),
        ("absent", 15, "detected"),
        ("of few votes", 40, "low_confidence"),
        ("outside", 40, "low_confidence"),
        ("elsewhere", 40, "low_confidence"),
    ],
)
def test_five_landmarks_must_be_found_or_a_fifth_however_few_are_due_in_the_scan(
    fifth: str, others: int, status: str
) -> None:
    """Of many landmarks, some four fit a pose by chance; these may be all that the scan shows."""
    truth = make_constellation()[[0, 3, 6, 7, 4]]
    if fifth == "outside":
        truth[4] = (31, 18, -1.2)
    mean = np.concatenate([truth, make_shape(1, others) + 150])
    if fifth == "elsewhere":
        truth[4] = (8, 18, 20)
    balls = [
        ball_votes(place, SCAN_SHAPE, 4.5, landmark=index, seed=index)
        for index, place in enumerate(truth.tolist())
    ]
    balls[4] = thinned(balls[4], {"absent": 0.0, "of few votes": 0.02}.get(fifth, 1.0))
    found = find(concat_votes(balls), truth=mean, landmarks=len(mean))
    assert {mark.status for mark in found[:4]} == {status}
    assert all(mark.expected_ras_mm is None for mark in found[:4])


def test_votes_of_voxels_where_there_is_no_scan_are_not_counted() -> None:
    """A grid that reaches past its scan: what is cut is as sure, and what is beyond is outside."""
    whole = ball_votes((20.0, 17, 21), SCAN_SHAPE, SCAN_RADIUS)
    readout = make_readout(make_grid(), make_manifest())
    specs, frame = make_manifest().landmarks, GridFrame(np.eye(4), np.eye(4))
    sure = []
    for first in (0, 18, 23):
        left = (SCAN_SHAPE[0] - first, *SCAN_SHAPE[1:])
        scan = ScanExtent(translation((-first, 0, 0)), left)
        (mark,) = locate(whole, replace(readout, scan=scan), frame, specs)
        sure.append(mark)
    assert [mark.status for mark in sure] == ["detected", "detected", "out_of_field"]
    assert sure[1].mass == pytest.approx(sure[0].mass, rel=0.1)
