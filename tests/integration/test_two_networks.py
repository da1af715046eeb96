"""Scans through two networks, against a plain reference of it all in float64.

Random models see random subjects of every kind: what is answered of landmarks that are merged, of
doubts, 95 % regions and measurements is that of the reference. A scan of which a change by rounding
would decide anything otherwise says nothing: such ones are told by letting the reference's networks
answer a little otherwise, and left out.
"""

import re
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Final, TypeAlias, get_args

import numpy as np
import pytest
from fastapi.testclient import TestClient

from tests.support.oracle import Array
from tests.support.random_models import disturb
from tests.support.random_scans import RandomScan
from tests.support.random_subjects import (
    SubjectKind,
    SubjectModel,
    make_subject_model,
    make_subject_scan,
)
from tests.support.reference_doubts import Doubts
from tests.support.reference_two_networks import ReferenceAnswer, Stage, answer_of
from tests.support.services import RAW, running, toy_settings

pytest.importorskip("onnxruntime")

KINDS = get_args(SubjectKind)

Said: TypeAlias = str | float | Sequence[float] | Array | None

MOSTLY: Final = 0.5
"""Least share of the numbers of an answer that rounding does not decide."""

CLOSE: Final = 1e-2
"""By what share of it, or of 1 mm, a number may be off."""

LOOSE: Final = 0.05
"""Likewise of what depends on where a fit of the shape expects landmarks: the service takes few
steps towards the best one."""

FROM_SHAPE: Final = ("expected_ras_mm", "region95_mm", "interval95")

STEP: Final = 1 / 65535
"""Of voxel values in the pose of a subject, of the window that becomes 0 to 1."""

NUMBERS: Final = (
    "confidence", "mass", "coherence", "spread_mm", "disagreement_mm", "region95_mm", "ijk",
    "ras_mm", "expected_ras_mm",
)  # fmt: skip

WARNINGS: Final = {
    "surroundings": "neither what lies ",
    "unclear": r"whole scan ([\d]+) of ([\d]+) that it should show",
    "rival": r"another arrangement of them, ([\d.e+-]+) mm away, has (\d+) %",
    "upside_down": r"upside down, the scan has (\d+) % as many",
    "extent": r"the scan is ([\d.]+) mm thick",
    "stretch": r"the subject is ([\d.]+) times as large",
    "twist": r"the subject is turned by (\d+) degrees",
    "scatter": r"Votes scatter ([\d.]+) times",
    "none": "No landmark is detected",
}
"""What warnings say, by the name of the doubt, and the numbers in it."""


WHOLE: Final = ("doubt upside_down", "doubt rival", "doubt twist")
"""Doubts with numbers that are rounded to whole ones."""


CASES: Final[tuple[tuple[int, SubjectKind], ...]] = (
    (0, "whole"), (0, "upside down"), (0, "two"), (0, "stretched"), (0, "padded"),
    (1, "cut"), (1, "turned"), (1, "noise"), (3, "thin"), (3, "blurred"),
    (4, "half"), (7, "blurred"),
)  # fmt: skip
"""Models, by the seed that each is made of, and what each sees."""

TURNING: Final = (4, 7)
"""Models that see a scan in other orientations while it shows nothing: the half one is answered
from the second, and the blurred one from its own, as none shows more."""


@dataclass(frozen=True, slots=True)
class Case:
    """A scan, and what the service says of it alone and among all others."""

    seed: int
    model: SubjectModel
    scan: RandomScan
    alone: dict[str, Any]
    together: dict[str, Any]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> list[Case]:
    """Have a service answer each scan alone, and then all at once."""
    root = tmp_path_factory.mktemp("models")
    seeds = dict.fromkeys(seed for seed, _ in CASES)
    models = {
        seed: make_subject_model(
            root, f"m{seed}", np.random.default_rng(seed), turns=seed in TURNING
        )
        for seed in seeds
    }
    scans = [
        make_subject_scan(models[seed], kind, np.random.default_rng((seed, KINDS.index(kind))))
        for seed, kind in CASES
    ]
    names = [f"m{seed}" for seed, _ in CASES]
    with running(toy_settings(root)) as client:
        alone = [find(client, *one) for one in zip(names, scans, strict=True)]
        with ThreadPoolExecutor(len(CASES)) as threads:
            together = list(threads.map(partial(find, client), names, scans))
    rows = zip(CASES, scans, alone, together, strict=True)
    return [Case(seed, models[seed], scan, one, other) for (seed, _), scan, one, other in rows]


def test_scan_is_answered_among_those_of_other_models_bit_for_bit_as_alone(
    cases: list[Case],
) -> None:
    assert [one.together for one in cases] == [one.alone for one in cases]


@pytest.mark.parametrize("index", range(len(CASES)), ids=[f"{kind} {seed}" for seed, kind in CASES])
def test_answer_of_two_networks_is_that_of_the_reference(cases: list[Case], index: int) -> None:
    one = cases[index]
    wrong, settled = compare(one.model, one.scan, one.alone, one.seed)
    assert wrong == []
    assert settled >= MOSTLY * len(one.alone["landmarks"]) * len(NUMBERS)


def test_random_subjects_are_of_all_kinds(cases: list[Case]) -> None:
    doubts = {name for one in cases for name in doubts_of(one.alone["warnings"])}
    assert doubts >= {"scatter", "twist", "rival", "unclear"}
    marks = [mark for one in cases for mark in one.alone["landmarks"]]
    counts = Counter(mark["status"] for mark in marks)
    assert counts["detected"] >= len(marks) / 4
    assert counts["low_confidence"] >= len(marks) / 4
    assert sum(mark["region95_mm"] is not None for mark in marks) >= len(marks) / 8
    measured = [one for case in cases for one in case.alone["measurements"]]
    assert any(one["interval95"] is not None for one in measured)


def doubts_of(warnings: Sequence[str]) -> Doubts:
    """Find the doubts, with their numbers, in the warnings of an answer."""
    text = "\n".join(warnings)
    found = ((name, re.search(pattern, text)) for name, pattern in WARNINGS.items())
    return {name: tuple(float(one) for one in match.groups()) for name, match in found if match}


def find(client: TestClient, name: str, scan: RandomScan) -> dict[str, Any]:
    """Have a service answer a scan."""
    response = client.post(
        "/v1/landmarks", params={"model": name}, content=scan.content, headers=RAW
    )
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return {key: answer[key] for key in answer.keys() - {"request_id", "timing_ms"}}


def compare(
    model: SubjectModel, scan: RandomScan, found: dict[str, Any], seed: int
) -> tuple[list[str], int]:
    """List in what an answer is not that of the reference; tells how much of it was compared."""
    given = (scan.voxels, scan.affine)
    expected = _listed(answer_of(*given, model.first, model.second), model)
    settled = expected.keys() | {f"doubt {name}" for name in WARNINGS}
    for way in (1, -1):
        stages = (_disturbed(one, seed, way) for one in (model.first, model.second))
        nearly = _listed(answer_of(*given, *stages), model)
        settled -= {line.split(":")[0] for line in _differences(expected, nearly)}
    doubts = doubts_of(found["warnings"])
    marks = {one["name"]: one for one in found["landmarks"]}
    own = {f"{name} {key}": one[key] for name, one in marks.items() for key in (*NUMBERS, "status")}
    own |= {
        f"{one['name']} {key}": one[key]
        for one in found["measurements"]
        for key in ("value", "interval95")
    }
    own |= {f"doubt {name}": numbers for name, numbers in doubts.items()}
    wrong = _differences(expected, own)
    return [line for line in wrong if line.split(":")[0] in settled], len(settled & expected.keys())


def _disturbed(stage: Stage, seed: int, way: int) -> Stage:
    """Let networks answer a little otherwise, to scans whose voxels are rounded to whole steps."""
    (network,) = (disturb(one, seed, way) for one in stage.networks)
    rng = np.random.default_rng(seed)

    def answer(tile: Array) -> Array:
        return network(tile + way * STEP * rng.standard_normal(tile.shape))

    return replace(stage, networks=[answer])


def _listed(answer: ReferenceAnswer, model: SubjectModel) -> dict[str, Any]:
    """List all that an answer says, by names."""
    specs = model.first.manifest
    listed: dict[str, Any] = {f"doubt {name}": one for name, one in answer.doubts.items()}
    for spec, landmark in zip(specs.landmarks, answer.landmarks, strict=True):
        own = asdict(landmark)
        listed |= {f"{spec.name} {key}": own[key] for key in (*NUMBERS, "status")}
    for measurement, one in zip(specs.measurements, answer.measurements, strict=True):
        listed[f"{measurement.name} value"] = one.value
        listed[f"{measurement.name} interval95"] = one.interval95
    return listed


def _differences(expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
    return [
        f"{key}: expected {expected.get(key)}, got {found.get(key)}"
        for key in sorted(expected.keys() | found.keys())
        if (key in expected) != (key in found) or not _is_close(key, expected[key], found[key])
    ]


def _is_close(key: str, expected: Said, found: Said) -> bool:
    if expected is None or found is None:
        return expected is found
    if isinstance(expected, str) or isinstance(found, str):
        return expected == found
    limit = LOOSE if key.rsplit(maxsplit=1)[-1] in FROM_SHAPE or key.startswith("doubt") else CLOSE
    # Warnings tell whole numbers and few digits of others.
    rounding = 0.51 if key in WHOLE else 0.0
    off = np.abs(np.subtract(expected, found))
    return bool((off <= limit * np.maximum(1, np.abs(expected)) + rounding).all())
