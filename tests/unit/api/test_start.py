"""What an operator is told of a start that fails."""

import asyncio
import threading
from pathlib import Path

import pytest

from app.api.app import create_app
from tests.support.services import toy_models, toy_settings


@pytest.mark.parametrize("purpose", ["load", "cpu", "cpu pass 0"])
def test_start_where_a_thread_cannot_start_says_so(
    purpose: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    start = threading.Thread.start

    def start_all_others(thread: threading.Thread) -> None:
        if thread.name == purpose:
            raise RuntimeError("can't start new thread")  # As Python says it.
        start(thread)

    async def scenario() -> None:
        fatal = asyncio.Event()
        app = create_app(toy_settings(toy_models(tmp_path)), fatal.set)
        async with app.router.lifespan_context(app):
            await asyncio.wait([app.state.starting])
            assert fatal.is_set()
            assert app.state.starting.exception() is not None

    monkeypatch.setattr(threading.Thread, "start", start_all_others)
    asyncio.run(scenario())
    assert "device thread ended" not in caplog.messages
    (failure,) = [line for line in caplog.records if line.message == "the engine cannot start"]
    assert "allow more processes and threads" in getattr(failure, "reason", "")
