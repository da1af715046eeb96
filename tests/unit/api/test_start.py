"""What an operator is told of a start that fails."""

import asyncio
import threading
from pathlib import Path

import pytest

from app.api.app import create_app
from tests.support.services import toy_models, toy_settings


def test_start_where_no_thread_can_load_models_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start = threading.Thread.start

    def start_none_to_load(thread: threading.Thread) -> None:
        if thread.name == "load":
            raise RuntimeError("can't start new thread")  # As Python says it.
        start(thread)

    async def scenario() -> None:
        fatal = asyncio.Event()
        app = create_app(toy_settings(toy_models(tmp_path)), fatal.set)
        async with app.router.lifespan_context(app):
            await asyncio.wait([app.state.starting])
            assert fatal.is_set()
            assert app.state.starting.exception() is not None

    monkeypatch.setattr(threading.Thread, "start", start_none_to_load)
    asyncio.run(scenario())
    (failure,) = [line for line in caplog.records if line.message == "the engine cannot start"]
    assert "allow more processes and threads" in getattr(failure, "reason", "")
