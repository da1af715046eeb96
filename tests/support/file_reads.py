"""Which text files are read, and how often."""

from pathlib import Path
from typing import Any

import pytest


def count_reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return a list that every text file is added to whenever it is read from now on."""
    read: list[Path] = []
    read_text = Path.read_text

    def read_and_count(path: Path, *args: Any, **options: Any) -> str:
        read.append(path)
        return read_text(path, *args, **options)

    monkeypatch.setattr(Path, "read_text", read_and_count)
    return read
