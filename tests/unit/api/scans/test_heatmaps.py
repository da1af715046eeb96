"""``POST /v1/heatmaps``: a scan in, heatmaps of its landmarks on its own grid out."""

import gzip
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
from fastapi.testclient import TestClient
from numpy.typing import NDArray

from app.io.schemas import LandmarksAnswer
from app.phantom import make_phantom, scan_bytes
from tests.support.model_folders import make_blob_folder
from tests.support.nifti_files import AFFINE, nifti
from tests.support.onnx_files import as_heatmap, centre_of_mass
from tests.support.services import RAW, running, shared_of, toy_scan, toy_settings
from tests.support.synthetic import make_blob

URL = "/v1/heatmaps"
MODELS = Path(__file__).parents[4] / "models"
MIB = 1 << 20
SHAPE, IJK = (30, 34, 22), (13.3, 18.1, 10.6)
TILE = (80, 72, 80)
GZIP_TIME = slice(4, 8)  # of RFC 1952


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with running(toy_settings(MODELS, default_model="phantom", memory=512 * MIB)) as client:
        yield client


def image_of(client: TestClient, content: bytes, **params: str) -> nib.Nifti1Image:
    response = client.post(URL, content=content, headers=RAW, params=params)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/gzip"
    assert "network;dur=" in response.headers["server-timing"]
    return nib.Nifti1Image.from_bytes(gzip.decompress(response.content))


def peak_of(heatmap: NDArray[np.floating]) -> NDArray[np.int64]:
    return np.array(np.unravel_index(heatmap.argmax(), heatmap.shape))


@pytest.mark.parametrize("seed", [5101, 5102, 5103])
def test_highest_voxel_is_that_of_the_landmark_on_the_grid_of_the_file(
    seed: int, client: TestClient
) -> None:
    """Phantoms lie on oblique and anisotropic grids of their own."""
    content = scan_bytes(make_phantom(seed))
    image = image_of(client, content)
    scan = nib.Nifti1Image.from_bytes(gzip.decompress(content))
    answer = LandmarksAnswer.model_validate_json(
        client.post("/v1/landmarks", content=content).content
    )
    assert image.shape == (*scan.shape, len(answer.landmarks))
    assert image.get_data_dtype() == np.float32
    np.testing.assert_array_equal(image.affine, scan.affine)
    detected = 0
    for index, landmark in enumerate(answer.landmarks):
        heatmap = image.get_fdata()[..., index]
        assert 0 <= heatmap.min() <= heatmap.max() <= 1
        if landmark.status == "detected" and landmark.ijk is not None:
            detected += 1
            assert np.abs(peak_of(heatmap) - landmark.ijk).max() <= 1.0, landmark.name
            assert landmark.mass is not None
            assert heatmap.max() > 0.25 * landmark.mass
    assert detected >= 4


def test_one_landmark_is_a_volume_of_three_axes(client: TestClient) -> None:
    content = scan_bytes(make_phantom(5101))
    everything = image_of(client, content)
    info = client.get("/v1/models/phantom").json()
    for index, landmark in enumerate(info["landmarks"]):
        one = image_of(client, content, landmark=landmark["name"])
        assert one.shape == everything.shape[:3]
        np.testing.assert_array_equal(one.get_fdata(), everything.get_fdata()[..., index])


def test_same_scan_gives_the_same_file_without_its_time(client: TestClient) -> None:
    content = scan_bytes(make_phantom(5102))
    one, two = (client.post(URL, content=content).content for _ in range(2))
    assert gzip.decompress(one) == gzip.decompress(two)
    assert one[GZIP_TIME] == two[GZIP_TIME] == bytes(4)


def test_unknown_landmark_is_refused_before_the_scan_is_read(
    client: TestClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "app.requests")
    response = client.post(URL, content=b"no scan", params={"landmark": "nose"})
    assert response.status_code == 422
    assert "expected a landmark of phantom" in response.json()["detail"]
    (line,) = [vars(line) for line in caplog.records if line.name == "app.requests"]
    assert line["model"] == "phantom"


def test_unknown_parameters_are_refused(client: TestClient) -> None:
    response = client.post(URL, content=b"", params={"format": "json"})
    assert response.status_code == 422


def test_heatmaps_that_would_not_fit_the_memory_are_refused_by_the_header() -> None:
    content = toy_scan((160, 160, 160))
    with running(toy_settings(MODELS, default_model="phantom", memory=100 * MIB)) as client:
        response = client.post(URL, content=content, headers=RAW)
        assert response.status_code == 413
        detail = response.json()["detail"]
        assert "at most 75 MiB of memory, got one that takes" in detail
        assert "3/4 of LANDMARKD_MEMORY" in detail
        assert shared_of(client).engine.memory.used == 0


def test_memory_is_free_again_after_the_answer(client: TestClient) -> None:
    image_of(client, scan_bytes(make_phantom(5103)))
    assert shared_of(client).engine.memory.used == 0


def test_votes_are_charged_until_their_heatmaps_are_written(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = shared_of(client).engine
    compute, charged = engine.compute, list[tuple[int, int]]()

    async def note(work: partial[bytes], **options: Any) -> bytes:
        votes = work.args[0].votes
        charged.append((engine.memory.used, votes.columns.nbytes + votes.landmark.nbytes))
        return await compute(work, **options)

    monkeypatch.setattr(engine, "compute", note)
    content = scan_bytes(make_phantom(5101))
    answer = client.post(URL, content=content, headers=RAW)
    ((held, votes),) = charged
    assert held > votes + len(gzip.decompress(answer.content))
    assert engine.memory.used == 0


def test_deadline_holds_for_heatmaps_too(client: TestClient) -> None:
    params = {"timeout_s": "0.001"}
    response = client.post(URL, content=scan_bytes(make_phantom(5101)), params=params)
    assert response.status_code == 504


def test_service_with_keys_wants_one() -> None:
    with running(toy_settings(MODELS, default_model="phantom", api_keys=["0" * 64])) as client:
        assert client.post(URL, content=b"").status_code == 401


@pytest.mark.parametrize("stride", [1, 2])
def test_heatmaps_of_a_network_are_given_back(tmp_path: Path, stride: int) -> None:
    """From an oblique grid to the model's and back: smoothed a little, in the same place."""
    pytest.importorskip("onnxruntime")
    network = {"output": "heatmaps", "activation": "none", "output_stride": stride}
    voting = {"threshold": 0.1, "radius_mm": 8.6}
    make_blob_folder(tmp_path, as_heatmap(stride), network=network, voting=voting)
    blob = make_blob(SHAPE, IJK, 4.0, AFFINE)
    with running(toy_settings(tmp_path)) as client:
        heatmap = image_of(client, nifti(blob), landmark="1").get_fdata()
    assert np.abs(peak_of(heatmap) - IJK).max() <= 1.0
    assert heatmap.max() == pytest.approx(blob.max(), abs=0.1)
    high = blob > 0.2
    assert np.abs(heatmap - blob)[high].max() < 0.1
    assert heatmap[blob < 0.02].max() < 0.01


def test_coordinates_are_shown_as_blobs(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    make_blob_folder(
        tmp_path,
        centre_of_mass(TILE),
        network={"output": "coordinates"},
        input={"tile_shape": list(TILE)},
        voting={"radius_mm": None},
    )
    with running(toy_settings(tmp_path)) as client:
        heatmap = image_of(client, nifti(make_blob(SHAPE, IJK, 4.0, AFFINE))).get_fdata()[..., 0]
    assert np.abs(peak_of(heatmap) - IJK).max() <= 1.0
    assert heatmap.max() > 0.7
