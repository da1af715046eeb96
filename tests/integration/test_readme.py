"""The examples of the README and of docs/, run as they stand there."""

import gzip
import json
import re
import runpy
import shlex
import subprocess
import warnings
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any

import httpx
import nibabel as nib
import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from app.api.dependencies import hash_key
from app.inference.detector import Detector
from app.inference.load import load_checked
from app.io import markups_json, read_landmarks
from app.io.volume import read_volume
from app.model.selfcheck import write_selfcheck
from app.voting.votes import Votes
from tests.support import nnunet_results
from tests.support.answers import place_by_hand
from tests.support.dicom_files import as_dicom, zipped
from tests.support.documents import DOCS, PAGES, README, ROOT, code_blocks, read
from tests.support.monai_bundles import build as build_monai
from tests.support.monai_bundles import write_bundle
from tests.support.nifti_files import nifti
from tests.support.nnunet_results import write_results
from tests.support.required import needs_reports
from tests.support.services import RAW, ServiceProcess
from tests.support.training_data import landmarkd

ADDRESS = "http://127.0.0.1:8000"
LINES = "".join(block for page in PAGES for block in code_blocks(read(page), "sh")).splitlines()
COMMANDS = [
    line
    for line in dict.fromkeys(LINES)
    if line.startswith(("curl ", "landmarkd "))
    and "NAME" not in line
    and " serve" not in line
    # The commands that make and use a model of one's own are run in order, by test_own_landmarks.
    and "my-model" not in line
    and "--check" not in line
]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    kept = tmp_path_factory.mktemp("kept")
    process = ServiceProcess(ROOT / "models", STORE=str(kept / "cases"), JOBS=str(kept / "jobs"))
    yield process
    process.kill()


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run the Python of the page on votes in a new folder; gives its variables and the folder."""
    here = tmp_path_factory.mktemp("notebook")
    return run_python(DOCS / "votes.md", here) | {"folder": here}


def run_python(page: Path, folder: Path, url: str = ADDRESS) -> dict[str, Any]:
    """Run the Python blocks of a page as one program; gives its variables."""
    program = "\n".join(code_blocks(read(page), "python"))
    folder.mkdir(exist_ok=True)
    (folder / "program.py").write_text(program.replace(ADDRESS, url), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return runpy.run_path(str(folder / "program.py"))


@pytest.fixture
def folder(tmp_path: Path, notebook: dict[str, Any]) -> Path:
    """Make the files that the examples take for granted."""
    voxels = np.random.default_rng(1).normal(size=(90, 100, 80)).astype(np.float32)
    scan = nib.Nifti1Image(voxels, np.diag([0.2, 0.2, 0.25, 1.0])).to_bytes()
    (tmp_path / "scan.nii.gz").write_bytes(scan)
    (tmp_path / "scan.nii").write_bytes(scan)
    files = as_dicom((99 * voxels).astype(np.int16), np.diag([0.2, 0.2, 0.25, 1.0]))
    (tmp_path / "series.zip").write_bytes(zipped(files))
    (tmp_path / "series").mkdir()
    (tmp_path / "series" / "0.dcm").write_bytes(files[0])
    (tmp_path / "scans").mkdir()
    (tmp_path / "scans" / "one.nii.gz").write_bytes(scan)
    (tmp_path / "landmarks").mkdir()
    (tmp_path / "landmarks" / "one.csv").write_text("name,x,y,z\n1,9.0,10.0,8.0\n")
    (tmp_path / "found").mkdir()
    shape = np.random.default_rng(2).uniform(-9, 9, (6, 3))
    for name in "abc":
        (tmp_path / "found" / f"{name}.mrk.json").write_text(markups_json(list("123456"), shape))
    (tmp_path / "models").symlink_to(ROOT / "models")
    (tmp_path / "votes.npz").symlink_to(notebook["folder"] / "votes.npz")
    return tmp_path


def test_there_are_commands_to_run() -> None:
    assert len(COMMANDS) >= 12


def run(command: str, service: ServiceProcess, folder: Path) -> None:
    here = command.replace(ADDRESS, service.url).replace("curl ", "curl -sSf ")
    if here.startswith("landmarkd "):
        with chdir(folder):
            landmarkd(*shlex.split(here, comments=True)[1:])
        return
    done = subprocess.run(
        ["bash", "-euc", here],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr


def correct(service: ServiceProcess, folder: Path) -> None:
    """Write the answer to the scan, with a first landmark that a person has placed."""
    url = f"{service.url}/v1/landmarks?model=mouse-skull"
    scan = (folder / "scan.nii.gz").read_bytes()
    answer = httpx.post(url, content=scan, headers=RAW, timeout=60).json()
    place_by_hand(answer, 0, (2, 4, 10))
    (folder / "corrected.json").write_text(json.dumps(answer))


@pytest.mark.parametrize(
    "command",
    [pytest.param(one, marks=needs_reports) if "dcm" in one else one for one in COMMANDS],
)
def test_command_works(command: str, service: ServiceProcess, folder: Path) -> None:
    if "corrected.json" in command:
        correct(service, folder)
    run(command, service, folder)


def test_own_votes_find_the_true_places(notebook: dict[str, Any]) -> None:
    votes, truth = notebook["votes"], notebook["truth"]
    assert isinstance(votes, Votes)
    assert len(notebook["rows"]) == len(votes) == (notebook["probs"][..., 1:] > 0).sum()
    assert notebook["heatmaps"].sum().item() == pytest.approx(0.9 * len(votes), rel=1e-5)
    assert_allclose(notebook["landmark"].ijk, truth[-1], atol=1e-4)


def test_own_votes_say_the_same_in_python_and_over_http(
    service: ServiceProcess, folder: Path, notebook: dict[str, Any]
) -> None:
    for command in COMMANDS:
        if "/v1/votes" in command:
            run(command, service, folder)
    rows = np.loadtxt(folder / "rows.csv", np.float32, delimiter=",", skiprows=1)
    assert np.array_equal(rows, notebook["rows"].numpy())
    heatmaps = gzip.decompress((folder / "heatmaps.nii.gz").read_bytes())
    found = nib.Nifti1Image.from_bytes(heatmaps).get_fdata(dtype=np.float32)
    assert np.array_equal(np.moveaxis(found, -1, 0), notebook["heatmaps"].numpy())
    landmarks = json.loads((folder / "landmarks.json").read_bytes())["landmarks"]
    assert [mark["name"] for mark in landmarks] == [spec.name for spec in notebook["specs"]]
    assert [mark["status"] for mark in landmarks] == ["detected"] * 3
    assert_allclose([mark["ras_mm"] for mark in landmarks], notebook["truth"], atol=1e-4)


def test_networks_of_every_kind_can_be_brought(folder: Path) -> None:
    """Those of the page, whose sections follow the beginning that all manifests share."""
    with warnings.catch_warnings():
        # torch 2.13 exports by what it has itself deprecated.
        warnings.simplefilter("ignore")
        variables = run_python(DOCS / "networks.md", folder / "networks")
    model = folder / "networks" / variables["folder"]
    start, *kinds = code_blocks(read(DOCS / "networks.md"), "toml")
    outputs = []
    for kind in kinds:
        (model / "model.toml").write_text(start + kind, encoding="utf-8")
        write_selfcheck(model)
        detector = Detector(load_checked(model, torch.device("cpu")))
        volume = read_volume(nifti(np.ones((20, 18, 24), dtype=np.float32)))
        landmarks = detector.detect(volume).landmarks
        assert [landmark.name for landmark in landmarks] == ["left", "right"]
        outputs.append(detector.model.manifest.network.output)
    assert outputs == ["heatmaps", "votes", "coordinates", "heatmaps", "heatmaps", "coordinates"]
    scores = torch.randn(1, 3, 9, 7, 8, generator=torch.Generator().manual_seed(0)) * 4
    found = variables["Centroids"](torch.nn.Identity())(scores)[0]
    for mask, row in zip(scores[0].softmax(0)[1:] >= 0.5, found, strict=True):
        assert_allclose(row[:3], mask.nonzero().double().mean(0), atol=1e-5)


@pytest.mark.parametrize(("kind", "passes"), [("nnunet", 2), ("monai", 1)])
def test_training_is_imported_by_the_command_of_the_page(
    tmp_path: Path, kind: str, passes: int
) -> None:
    (command,) = [line for line in LINES if line.startswith(f"landmarkd import {kind}")]
    arguments = shlex.split(command.replace("NAME", "blobs"))[1:]
    results = tmp_path / arguments[2]
    results.mkdir(parents=True)
    if kind == "monai":
        write_bundle(results, build_monai())
    else:
        write_results(results, [nnunet_results.build(), nnunet_results.build()])
    with chdir(tmp_path):
        landmarkd(*arguments)
    model = load_checked(tmp_path / "models" / "blobs", torch.device("cpu"))
    assert model.network.passes == passes


def test_readmes_python_client_finds_landmarks(service: ServiceProcess, folder: Path) -> None:
    variables = run_python(README, folder, service.url)
    assert len(variables["answer"].landmarks) == 45


def test_page_on_python_keeps_a_case_and_registers_two_scans(
    service: ServiceProcess, tmp_path: Path
) -> None:
    variables = run_python(DOCS / "python.md", tmp_path, service.url)
    case = variables["case"]
    assert (case.placed, case.accepted, case.unjudged) == (1, 1, 4)
    (later,) = variables["later"]
    assert later.landmarks == variables["first"].landmarks
    fit = variables["fit"]
    assert_allclose(fit.fixed_to_moving, variables["motion"], atol=0.01)
    assert len(fit.residual_mm) == 5
    assert fit.rms_mm <= fit.left_out_mm < 0.1
    assert (tmp_path / "after_to_before.tfm").exists()
    moved = read_landmarks(tmp_path / "after.csv")
    true = {one.name: one.ras_mm for one in variables["second"].landmarks if one.ras_mm is not None}
    assert moved.keys() == true.keys()
    assert_allclose([*moved.values()], [true[name] for name in moved], atol=0.1)


def test_page_on_morphometrics_finds_components(folder: Path) -> None:
    variables = run_python(DOCS / "morphometrics.md", folder)
    assert variables["space"].specimens == ("a", "b", "c")


def test_readme_shows_the_answer_for_a_skull(service: ServiceProcess, data_dir: Path) -> None:
    (shown,) = [json.loads(block) for block in code_blocks(read(README), "json")]
    scan = data_dir / "mouse-skull" / "scans" / "NU_J.nii.gz"
    url = f"{service.url}/v1/landmarks?model=mouse-skull"
    answer = httpx.post(url, content=scan.read_bytes(), headers=RAW, timeout=60).json()
    assert shown["model"].items() <= answer["model"].items()
    assert shown["volume"]["shape"] == answer["volume"]["shape"]
    assert shown["volume"]["orientation"] == answer["volume"]["orientation"]
    assert_allclose(shown["volume"]["spacing_mm"], answer["volume"]["spacing_mm"], atol=1e-3)
    (example,) = shown["landmarks"]
    (found,) = [each for each in answer["landmarks"] if each["name"] == example["name"]]
    assert example["status"] == found["status"]
    # A processor without bfloat16 computes in float32, up to 0.04 mm or 0.3 voxels away.
    for name in ("confidence", "region95_mm", "ijk", "ras_mm", "lps_mm"):
        assert_allclose(example[name], found[name], atol=0.3 if name == "ijk" else 0.045)


def test_problem_of_the_http_page_is_what_is_answered(
    service: ServiceProcess, folder: Path
) -> None:
    blocks = [json.loads(block) for block in code_blocks(read(DOCS / "http.md"), "json")]
    (shown,) = [block for block in blocks if "status" in block]
    scan = (folder / "scan.nii").read_bytes()
    answer = httpx.post(f"{service.url}/v1/landmarks", content=scan, headers=RAW, timeout=60)
    assert answer.json() | {"request_id": shown["request_id"]} == shown


def test_events_of_the_http_page_are_those_that_are_sent(
    service: ServiceProcess, folder: Path
) -> None:
    (shown,) = [each for each in code_blocks(read(DOCS / "http.md"), "text") if "event:" in each]
    url = f"{service.url}/v1/landmarks?model=mouse-skull"
    headers = RAW | {"Accept": "text/event-stream"}
    scan = (folder / "scan.nii").read_bytes()
    sent = events(httpx.post(url, content=scan, headers=headers, timeout=60).text)
    for name, example in events(shown):
        assert any(name == other and example.keys() <= data.keys() for other, data in sent), name


def events(text: str) -> list[tuple[str, dict[str, Any]]]:
    found = re.findall(r"^event: (\w+)\ndata: (.*)$", text, flags=re.MULTILINE)
    return [(name, json.loads(data)) for name, data in found]


def test_key_is_hashed_as_the_service_does() -> None:
    (block,) = [each for each in code_blocks(read(DOCS / "http.md"), "sh") if "sha256sum" in each]
    script = block.replace("$(openssl rand -hex 32)", "secret") + "printenv LANDMARKD_API_KEYS"
    done = subprocess.run(["bash", "-euc", script], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == hash_key("secret")
