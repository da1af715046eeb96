"""The whole path from a file to landmarks, against a plain reference of it in float64.

Random models of every kind find landmarks in random scans of every kind. A landmark that a change
by rounding would decide otherwise, as where two modes are equally heavy, says nothing: such ones
are told by letting the reference's networks answer a little otherwise, and left out.
"""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias, get_args

import numpy as np
import pytest

from app.io.schemas import Status
from tests.support.oracle import Array
from tests.support.random_models import ModelKind, RandomModel, disturb, make_random_model
from tests.support.random_scans import LEAST_SCALE, RandomScan, ScanKind, make_random_scan
from tests.support.reference import ReferenceLandmark, find_landmarks
from tests.support.services import RAW, running, toy_settings

pytest.importorskip("onnxruntime")

KINDS = (
    ModelKind("votes", "sigmoid"),
    ModelKind("votes", "softmax"),
    ModelKind("votes", "sigmoid", whole=True),
    ModelKind("votes", "softmax", members=2),
    ModelKind("votes", "sigmoid", architecture=True),
    ModelKind("votes", "softmax", architecture=True, members=2),
    ModelKind("heatmaps", "none"),
    ModelKind("heatmaps", "sigmoid"),
    ModelKind("heatmaps", "softmax", layout="monai"),
    ModelKind("heatmaps", "none", layout="monai", members=2),
    ModelKind("heatmaps", "sigmoid", layout="nnunet"),
    ModelKind("heatmaps", "softmax", layout="nnunet", members=2),
    ModelKind("heatmaps", "none", whole=True),
    ModelKind("heatmaps", "spatial_softmax", whole=True),
    ModelKind("coordinates", None),
    ModelKind("coordinates", "none"),
    ModelKind("coordinates", "sigmoid", members=2),
)
"""The model of each is made of its place here, as a seed."""

SCANS = get_args(ScanKind)

IN_COMPANY = 24
"""Scans at once, so that tiles of several share a batch."""

CLOSE_VOXELS = 5e-3
"""How far positions may be off, in voxels of the model: networks, votes and weights are in float32.
Of heatmaps, whose logarithms are fitted, they are further off than of votes."""

CLOSE = 1e-3
"""By what share of it, or of 1, any other number may be off, likewise."""

Number: TypeAlias = float | Array | list[float]

NUMBERS = ("mass", "coherence", "confidence", "spread_mm", "disagreement_mm")

MOSTLY = 0.3
"""Least share of the landmarks of a model that say something; in blank scans, all is a tie."""


@dataclass(frozen=True, slots=True)
class Answered:
    """A scan, and what the service says of it alone and among all others."""

    kind: ScanKind
    scan: RandomScan
    alone: dict[str, Any]
    together: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Case:
    """A model, and the scans that it has seen."""

    model: RandomModel
    scans: list[Answered]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> list[Case]:
    """Have a service find the landmarks of each scan alone, and then of all at once."""
    root = tmp_path_factory.mktemp("models")
    models, sent = [], []
    for seed, kind in enumerate(KINDS):
        rng, name = np.random.default_rng(seed), f"m{seed}"
        models.append(make_random_model(root, name, kind, rng))
        spacing = models[-1].manifest.input.spacing_mm
        sent += [(name, one, make_random_scan(one, spacing, rng)) for one in SCANS]
    with running(toy_settings(root)) as client:

        def find(what: tuple[str, ScanKind, RandomScan]) -> dict[str, Any]:
            name, _, scan = what
            query = {"model": name, "candidates": "true"}
            url = "/v1/landmarks"
            response = client.post(url, params=query, content=scan.content, headers=RAW)
            assert response.status_code == 200, response.text
            answer: dict[str, Any] = response.json()
            return {key: answer[key] for key in answer.keys() - {"request_id", "timing_ms"}}

        alone = [find(one) for one in sent]
        with ThreadPoolExecutor(IN_COMPANY) as threads:
            together = list(threads.map(find, sent))
    answers = zip(sent, alone, together, strict=True)
    rows = [Answered(kind, scan, *found) for (_, kind, scan), *found in answers]
    count = len(SCANS)
    return [Case(model, rows[n * count : (n + 1) * count]) for n, model in enumerate(models)]


def test_scan_is_answered_among_all_others_bit_for_bit_as_alone(cases: list[Case]) -> None:
    differ = [
        (case.model.manifest.name, one.kind)
        for case in cases
        for one in case.scans
        if one.together != one.alone
    ]
    assert differ == []


@pytest.mark.parametrize("seed", range(len(KINDS)), ids=[kind.title for kind in KINDS])
def test_landmarks_are_those_of_the_reference(cases: list[Case], seed: int) -> None:
    model = cases[seed].model
    spacing, count = model.manifest.input.spacing_mm, len(model.manifest.landmarks)
    # Two ways and not at random: of two equal modes, one of both ways chooses the other.
    ways = [[disturb(network, seed, way) for network in model.networks] for way in (1, -1)]
    settled, wrong = 0, []
    for one in cases[seed].scans:
        given = (one.scan.voxels, one.scan.affine, model.manifest)
        expected = find_landmarks(*given, model.networks)
        nearly = [find_landmarks(*given, networks) for networks in ways]
        found = one.alone["landmarks"]
        for own, *others, landmark in zip(expected, *nearly, found, strict=True):
            if any(differences(own, asdict(other), spacing) for other in others):
                continue
            settled += 1
            wrong += [(one.kind, text) for text in differences(own, landmark, spacing)]
    assert wrong == []
    assert settled >= MOSTLY * count * len(SCANS)


def test_random_scans_have_landmarks_of_all_kinds(cases: list[Case]) -> None:
    answers = [
        landmark for case in cases for one in case.scans for landmark in one.alone["landmarks"]
    ]
    counts = Counter(landmark["status"] for landmark in answers)
    assert set(counts) == set(get_args(Status))
    assert counts["detected"] >= len(answers) / 4


def differences(
    expected: ReferenceLandmark, found: dict[str, Any], spacing_mm: tuple[float, ...]
) -> list[str]:
    """List in what a landmark differs by more than float32 accounts for."""
    own = asdict(expected)
    limits = {name: CLOSE * max(1.0, own[name] or 0.0) for name in NUMBERS}
    limits["ras_mm"] = CLOSE_VOXELS * max(spacing_mm)
    # Voxels of the scan are at most so many times smaller than those of the model.
    limits["ijk"] = CLOSE_VOXELS * max(spacing_mm) / min(spacing_mm) / LEAST_SCALE
    wrong = [name for name in limits if not _is_close(own[name], found[name], limits[name])]
    if expected.status != found["status"]:
        wrong.append("status")
    return [f"{name}: expected {own[name]}, got {found[name]}" for name in wrong]


def _is_close(expected: Number | None, found: Number | None, limit: float) -> bool:
    if expected is None or found is None:
        return expected is None and found is None
    return bool(np.abs(np.subtract(expected, found)).max() <= limit)
