"""Landmarks of a mean shape among look-alikes, against a reference that tries all triples."""

from collections import Counter
from dataclasses import asdict
from typing import get_args

import numpy as np
import pytest
from scipy.spatial.transform import Rotation

from app.io.schemas import Status
from app.model import LandmarkSpec, Shape
from app.voting import GridFrame, Layout, Readout, filter_votes, locate, make_field
from tests.support.oracle import Array, collect
from tests.support.reference import ReferenceLandmark, ScanFrame, ask_shape, describe
from tests.support.reference_modes import ReferenceReadout, find_modes, votes_for
from tests.support.reference_votes import ReferenceVotes

SEEDS = range(40)
RADIUS_MM, TOLERANCE_MM = 3.0, 1.5
NUMBERS = ("mass", "coherence", "confidence", "spread_mm", "disagreement_mm", "ijk", "ras_mm")
OF_THE_FIT = ("expected_ras_mm", "from_shape_mm")
"""Where the reference fits another triple best, they differ by up to a fifth of the tolerance."""


def make_subject(seed: int) -> tuple[ScanFrame, Array, Array, Array, list[float]]:
    """Make a subject in any pose, with look-alikes of its landmarks, and some of these missing.

    Returns:
        Its scan; the mean shape; probabilities (landmarks i j k); offsets (3 landmarks i j k); and
        thresholds.
    """
    rng = np.random.default_rng(seed)
    landmarks, shape = int(rng.integers(4, 8)), tuple(rng.integers(14, 22, 3).tolist())
    spacing, affine = rng.choice([0.8, 1.0, 1.3], 3), np.eye(4)
    turns = Rotation.from_rotvec(rng.normal(0, 2, (2, 3))).as_matrix()
    affine[:3, :3], affine[:3, 3] = turns[0] * spacing, rng.uniform(-50, 50, 3)
    mean = rng.normal(0, 5, (landmarks, 3))
    middle = affine[:3] @ np.append(np.array(shape) / 2 + rng.normal(0, 2.5, 3), 1.0)
    truth = rng.uniform(0.85, 1.15) * mean @ turns[1].T + middle
    truth += rng.normal(0, 0.25, truth.shape)
    gone = rng.random(landmarks) < rng.choice([0.0, 0.15, 0.5])
    voxels = np.moveaxis(np.indices(shape), 0, -1)
    probabilities, offsets = np.zeros((landmarks, *shape)), np.zeros((3, landmarks, *shape))
    to_voxels = np.linalg.inv(affine)
    for landmark in range(landmarks):
        places = [] if gone[landmark] else [truth[landmark]]
        places += list(truth[rng.integers(0, landmarks, rng.integers(0, 3))])
        for place in places:
            away = to_voxels[:3] @ np.append(place, 1.0) - voxels
            near = np.linalg.norm(away * spacing, axis=-1) <= RADIUS_MM
            probabilities[landmark, near] = rng.uniform(0.1, 1)
            offsets[:, landmark, near] = away[near].T
    thresholds = rng.choice([0.1, 0.25, 0.4], landmarks).tolist()
    return ScanFrame(shape, spacing, np.eye(4), affine), mean, probabilities, offsets, thresholds


def expected_of(seed: int) -> list[ReferenceLandmark]:
    scan, mean, probabilities, offsets, thresholds = make_subject(seed)
    votes = collect(probabilities, offsets, 0.05)
    weighted = ReferenceVotes(
        votes.landmark, votes.source, votes.position, votes.probability, votes.probability
    )
    reach = 0.6 * RADIUS_MM
    readout = ReferenceReadout(
        scan.shape, scan.spacing_mm, scan.spacing_mm, RADIUS_MM, reach, 1, None
    )
    modes = [find_modes(votes_for(weighted, one, readout), readout) for one in range(len(mean))]
    opinions = ask_shape(modes, thresholds, scan, mean, TOLERANCE_MM)
    rows = zip(modes, thresholds, opinions, strict=True)
    return [describe(own, least, scan, opinion) for own, least, opinion in rows]


def test_modes_statuses_and_confidences_are_those_of_the_reference() -> None:
    counts = Counter[str]()
    for seed in SEEDS:
        scan, mean, probabilities, offsets, thresholds = make_subject(seed)
        arrays = {"probs": probabilities, "offsets": offsets.reshape(-1, *scan.shape)}
        given = {name: array.astype(np.float32) for name, array in arrays.items()}
        field = make_field(**given, layout=Layout(channels="first"))
        x, y, z = scan.spacing_mm.tolist()
        i, j, k = scan.shape
        specs = [
            LandmarkSpec(name=str(number), presence_threshold=least)
            for number, least in enumerate(thresholds)
        ]
        found = locate(
            filter_votes(field, 0.05),
            Readout(len(mean), (i, j, k), (x, y, z), RADIUS_MM),
            GridFrame(scan.to_volume, scan.to_world),
            specs,
            Shape(mean, TOLERANCE_MM),
        )
        for landmark, expected in zip(found, expected_of(seed), strict=True):
            counts[expected.status] += 1
            assert landmark.status == expected.status, seed
            for name in (*NUMBERS, *OF_THE_FIT):
                number, own = getattr(landmark, name), asdict(expected)[name]
                assert (number is None) == (own is None), (seed, name)
                if own is not None:
                    near = 0.3 if name in OF_THE_FIT else 2e-3
                    assert number == pytest.approx(own, rel=1e-3, abs=near), (seed, name)
    assert set(counts) == set(get_args(Status))
