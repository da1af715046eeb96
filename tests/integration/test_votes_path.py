"""``POST /v1/votes``, from arrays to its answers, against a plain reference of it in float64.

A landmark that float32 would decide otherwise says nothing, as in ``test_whole_path``.
"""

import gzip
import io
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import nibabel as nib
import numpy as np
import pytest
from fastapi.testclient import TestClient
from numpy.typing import NDArray
from safetensors.numpy import save

from app.io.schemas import Status
from app.model import LandmarkSpec
from app.voting import GridFrame, Layout, Readout, filter_votes, locate, make_field
from tests.integration.test_whole_path import differences
from tests.support.oracle import Array
from tests.support.random_arrays import RandomArrays, make_random_arrays
from tests.support.reference_request import answer_of
from tests.support.services import RAW, Response, running, toy_settings
from tests.support.vote_archives import npz

SEEDS = range(36)

DISTURBANCE = 2e-6
"""Of offsets and scores; of probabilities, which no activation rounds, a twentieth of it."""


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    models: Path = tmp_path_factory.mktemp("votes")
    with running(toy_settings(models)) as client:
        yield client


@pytest.fixture(scope="module")
def asked() -> list[RandomArrays]:
    return [make_random_arrays(np.random.default_rng(seed)) for seed in SEEDS]


def test_rows_heatmaps_and_landmarks_are_those_of_the_reference(
    client: TestClient, asked: list[RandomArrays]
) -> None:
    counts, wrong = Counter[str](), list[Any]()
    for seed, one in zip(SEEDS, asked, strict=True):
        expected = answer_of(one.arrays, one.query)
        ways = [answer_of(_disturbed(one, seed, way), one.query) for way in (1, -1)]
        rows, heatmaps = _rows(client, one), _heatmaps(client, one)
        counts["rows"] += len(rows)
        if all(way.rows.shape == expected.rows.shape for way in ways):
            wrong += [(seed, "rows")] * (not _is_close(rows, expected.rows, 1e-5))
        if all(_is_close(way.heatmaps, expected.heatmaps, 1e-4) for way in ways):
            counts["heatmaps"] += 1
            wrong += [(seed, "heatmaps")] * (not _is_close(heatmaps, expected.heatmaps, 1e-4))
        spacing = _spacing(one)
        found = _post(client, one, "json").json()["landmarks"]
        for number, landmark in enumerate(found):
            own, *others = (answer.landmarks[number] for answer in (expected, *ways))
            if not any(differences(own, asdict(other), spacing) for other in others):
                counts[own.status] += 1
                wrong += [(seed, text) for text in differences(own, landmark, spacing)]
    assert wrong == []
    assert set(get_args(Status)) <= set(counts)
    assert counts["heatmaps"] >= 0.8 * len(asked)
    assert counts["rows"] > 1000


def test_service_and_package_read_the_same_landmarks(
    client: TestClient, asked: list[RandomArrays]
) -> None:
    """To the last bit, in float32: other types take loops that no start of a service compiles."""
    plain = [one for one in asked if _is_single(one)]
    for one in plain:
        landmarks = _post(client, one, "json").json()["landmarks"]
        said = [(mark["status"], mark["mass"], mark["ras_mm"]) for mark in landmarks]
        assert said == _located(one)
    assert len(plain) >= len(asked) / 3


def _is_single(one: RandomArrays) -> bool:
    return all(array.dtype == np.float32 for name, array in one.arrays.items() if name != "affine")


def _located(one: RandomArrays) -> list[tuple[str, float, list[float] | None]]:
    """Read landmarks as docs/votes.md does it in Python."""
    query, arrays = one.query, one.arrays
    has_background = {None: None, "true": True, "false": False}[query.get("background")]
    words: Any = {name: query[name] for name in query.keys() & {"channels", "order", "activation"}}
    given = {name: array for name, array in arrays.items() if name != "affine"}
    field = make_field(**given, layout=Layout(**words, background=has_background))
    landmarks, i, j, k = field.offsets.shape[1:]
    edges = query.get("sample_shape", f"{i},{j},{k}").split(",")
    spacing = _spacing(one)
    radius = query.get("radius_mm", min(10 * np.cbrt(np.prod(spacing)), 64 * min(spacing)))
    x, y, z = (int(edge) for edge in edges)
    readout = Readout(landmarks, (x, y, z), spacing, float(radius))
    frame = GridFrame(np.eye(4), np.asarray(arrays.get("affine", np.eye(4)), np.float64))
    votes = filter_votes(field, float(query.get("threshold", "0.5")))
    specs = [LandmarkSpec(name=str(number)) for number in range(landmarks)]
    found = locate(votes, readout, frame, specs)
    return [
        (mark.status, mark.mass, None if mark.ras_mm is None else mark.ras_mm.tolist())
        for mark in found
    ]


def _post(client: TestClient, one: RandomArrays, form: str) -> Response:
    """Send a file of either kind; safetensors has no memory order but one."""
    is_plain = all(array.flags.c_contiguous for array in one.arrays.values())
    content = save(one.arrays) if is_plain else npz(one.arrays)
    query = one.query | {"format": form}
    response = client.post("/v1/votes", params=query, content=content, headers=RAW)
    assert response.status_code == 200, response.text
    return response


def _rows(client: TestClient, one: RandomArrays) -> NDArray[np.float32]:
    rows: NDArray[np.float32] = np.load(io.BytesIO(_post(client, one, "rows.npy").content))
    return rows


def _heatmaps(client: TestClient, one: RandomArrays) -> Array:
    content = gzip.decompress(_post(client, one, "nii.gz").content)
    return np.asarray(nib.Nifti1Image.from_bytes(content).get_fdata(), np.float64)


def _spacing(one: RandomArrays) -> tuple[float, float, float]:
    affine = np.asarray(one.arrays.get("affine", np.eye(4)), np.float64)
    x, y, z = np.linalg.norm(affine[:3, :3], axis=0).tolist()
    return x, y, z


def _disturbed(one: RandomArrays, seed: int, way: int) -> dict[str, NDArray[np.floating]]:
    """Change all numbers a little; -1 is the opposite way of 1."""
    rng, disturbed = np.random.default_rng(seed), dict[str, NDArray[np.floating]](one.arrays)
    for name in disturbed.keys() - {"affine"}:
        values = disturbed[name].astype(np.float64)
        size = np.nan_to_num(np.abs(values), posinf=0.0)
        size = size / 20 if name == "probs" else np.maximum(size, 1)
        noise = rng.standard_normal(values.shape) + rng.standard_normal() * (name == "offsets")
        disturbed[name] = values + way * DISTURBANCE * size * noise
    return disturbed


def _is_close(found: NDArray[np.floating], expected: Array, most: float) -> bool:
    found = found.reshape(expected.shape) if found.size == expected.size else found
    return found.shape == expected.shape and np.allclose(found, expected, rtol=most, atol=most)
