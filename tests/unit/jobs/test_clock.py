"""What is kept of jobs, where the clock is set."""

import time
from pathlib import Path

import pytest

from app.jobs import JobFolder
from app.jobs.store import JobStore
from app.jobs.uploads import UploadStore
from tests.unit.jobs import DAY_S, ENOUGH, MODEL, order, pass_time


@pytest.mark.parametrize("set_s", [-30 * DAY_S, 30 * DAY_S])
def test_clock_that_is_set_moves_the_times_of_what_is_kept(
    set_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that has no battery starts in 1970: all answers were gone once it knew the time."""
    folder = JobFolder(tmp_path, ENOUGH, DAY_S)
    store, uploads = JobStore(folder), UploadStore(folder)
    store.accept(order(), b"scan", None)
    claim = store.claim([MODEL])
    assert claim is not None
    store.settle(claim, "done", "{}")
    upload = uploads.start(order(), 10)
    now = time.time() + set_s
    monkeypatch.setattr(time, "time", lambda: now)
    for kept in (store, uploads):
        assert kept.sweep() == pytest.approx(DAY_S, abs=60)
    assert store.list_jobs("anna")[0].finished_s == pytest.approx(now, abs=60)
    assert uploads.look("anna", upload.id).expires_s == pytest.approx(now + DAY_S, abs=60)
    pass_time(monkeypatch, now + DAY_S)
    assert (store.sweep(), uploads.sweep()) == (None, None)
    assert store.list_jobs("anna") == []
    folder.close()
