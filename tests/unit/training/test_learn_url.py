"""``landmarkd learn --watch --url``: the service that is to load the version in place."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from app.errors import BadParameter
from app.training.cli import learn as command
from tests.support.training_data import landmarkd


def test_watch_asks_a_service_again_that_did_not_load_the_version_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It went on with the version before until cases changed, as nobody asked it again."""
    asked, slept = [], []

    def reload(*given: object) -> None:
        asked.append(given)
        if len(asked) == 1:
            raise BadParameter("expected a service, got a busy one")

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            raise TimeoutError

    better = SimpleNamespace(describe=str, is_better=True, versions=("1.0.0", "1.0.1"))
    monkeypatch.setattr("app.training.learn.learn", lambda *_: better)
    monkeypatch.setattr(command, "_reload", reload)
    monkeypatch.setattr(command, "time", SimpleNamespace(sleep=sleep))
    with pytest.raises(TimeoutError):
        landmarkd("learn", tmp_path, "--from", tmp_path, "--watch")
    assert len(asked) == 2
    assert slept == [command.WATCH_S] * 3
