"""Fixtures that several test files share."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import settings

from tests.support.array_types import check_shapes_only_of_arrays
from tests.support.required import skip_unless_ci

if TYPE_CHECKING:
    from app.compute.device import NamedDevice
    from app.model.registry import LoadedModel
    from tests.support.device_loops import Faulty

check_shapes_only_of_arrays()

# An example that takes long tells of a busy machine and not of a fault.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")

CUDA = torch.cuda.is_available()
# Read when a kernel is defined: without a CUDA device, kernels run in Triton's interpreter.
if not CUDA:
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Tests that import ONNX Runtime themselves report nothing to its makers, either.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Toy networks gain nothing from threads, which on a busy machine wait for each other."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _uncovered_processes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a test is not covered, the processes that it starts are not, either."""
    if "no_cover" in request.fixturenames or request.node.get_closest_marker("no_cover"):
        monkeypatch.delenv("COVERAGE_PROCESS_CONFIG", raising=False)


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Find the folder of real scans: LANDMARKD_DATA, else ../shared/data beside the checkout.

    Without it tests skip; in continuous integration (CI=true) they fail.
    """
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    folder = Path(os.environ.get("LANDMARKD_DATA", beside))
    if not folder.is_dir():
        skip_unless_ci(f"expected real scans in {folder}; set LANDMARKD_DATA to their folder")
    return folder


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("cpu", marks=pytest.mark.skipif(CUDA, reason="kernels are compiled here")),
        pytest.param(
            "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="no CUDA device")]
        ),
    ],
)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Say where Triton's kernels run: on CUDA, or without it in the interpreter."""
    return torch.device(request.param)


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Let torch use two threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> "LoadedModel":
    """Make a toy model to whose network voxel values come unchanged."""
    from tests.support.device_loops import load_toy  # noqa: PLC0415 - not before TRITON_INTERPRET is set

    return load_toy(tmp_path_factory.mktemp("models"))


@pytest.fixture
def faulty(model: "LoadedModel", tmp_path: Path) -> "Iterator[Faulty]":
    """Give the toy's network a form that can be held and poisoned."""
    from tests.support.device_loops import make_faulty  # noqa: PLC0415 - as above

    yield from make_faulty(tmp_path, model)


@pytest.fixture(
    params=[{}, {"passes": 2}, {"asynchronous": True}], ids=["in turn", "side by side", "ahead"]
)
def where(request: pytest.FixtureRequest) -> "NamedDevice":
    """Say what computes: the CPU, as such; and driven as a device that is given batches ahead."""
    from app.compute.device import HOST  # noqa: PLC0415 - as above

    if "passes" in request.param:
        request.getfixturevalue("two_threads")
    return replace(HOST, **request.param)
