"""The engine's states: loading, running, draining."""

import asyncio
import threading
from pathlib import Path

import pytest
import torch

from app.engine import engine as engine_module
from app.engine.engine import Engine
from app.engine.metrics import Metrics
from app.inference.load import load_checked
from app.model import LoadedModel
from tests.support.device_loops import until, wait_for
from tests.support.model_folders import make_model_folder
from tests.support.services import toy_models, toy_settings


@pytest.mark.parametrize("others", [0, 1], ids=["while the last loads", "with more to load"])
def test_engine_that_is_stopped_while_models_load_stays_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: int
) -> None:
    """The stop was asked for, so that a model which is refused by it is no failure."""
    models = toy_models(tmp_path)
    for number in range(others):
        make_model_folder(models, f"toy{number}")
    loading, finish_loading = threading.Event(), threading.Event()

    def load_slowly(folder: Path, device: torch.device, **options: object) -> LoadedModel:
        del options
        loading.set()
        assert finish_loading.wait(timeout=30)
        return load_checked(folder, device)

    monkeypatch.setattr(engine_module, "load_checked", load_slowly)

    async def scenario() -> None:
        engine = Engine(toy_settings(models), Metrics())
        starting = asyncio.create_task(engine.start())
        await wait_for(loading)
        engine.close()
        stopping = asyncio.create_task(engine.stop())
        # Its queue is closed while the thread still loads, and refuses the next model.
        await until(lambda: engine.devices.loops[0].submit(int).done())
        finish_loading.set()
        await starting
        assert engine.readiness().reason == "the service is stopping"
        await stopping

    asyncio.run(scenario())
