"""Sections of a model's ``README.md`` that commands write.

A section lies between two HTML comments, and is replaced when its command runs again. The rest of
the file belongs to people and is kept.
"""

import re
from pathlib import Path
from typing import Final

from app.durable import replacing

CARD: Final = "README.md"

REGIONS: Final = "calibration"
"""Section that describes the 95 % regions in ``model.toml``; it goes with them."""

FIRST_ALONE: Final = "crossvalidation"
BOTH_NETWORKS: Final = "crossvalidation of both networks"
LEARNED: Final = "learn"

OF_BOTH: Final = (REGIONS, BOTH_NETWORKS)
"""Sections on what was measured of both networks, which go when the second one is another."""

OF_FIRST: Final = (*OF_BOTH, FIRST_ALONE, LEARNED)
"""Those that go when the first network is another."""


def write_section(folder: Path, key: str, text: str) -> None:
    """Write a section of a model card, in Markdown, in place of its previous one, or at the end."""
    path = folder / CARD
    card = path.read_text(encoding="utf-8") if path.exists() else f"# {folder.name}\n"
    first, last = f"<!-- landmarkd: {key} -->", f"<!-- landmarkd: end of {key} -->"
    section = f"{first}\n{text.strip()}\n{last}"
    previous = re.compile(f"{re.escape(first)}.*?{re.escape(last)}", re.DOTALL)
    if previous.search(card):
        card = previous.sub(lambda _: section, card, count=1)
    else:
        card = f"{card.rstrip()}\n\n{section}\n"
    _write(path, card)


def drop_sections(folder: Path, *keys: str) -> None:
    """Take sections out of a model card, if they are there."""
    path = folder / CARD
    for key in keys if path.exists() else ():
        before, first, rest = path.read_text(encoding="utf-8").partition(
            f"<!-- landmarkd: {key} -->"
        )
        _, last, after = rest.partition(f"<!-- landmarkd: end of {key} -->")
        if first and last:
            parts = [part.strip("\n") for part in (before, after)]
            _write(path, "\n\n".join(filter(None, parts)) + "\n")


def _write(path: Path, card: str) -> None:
    """Write a model card, a new one for all to read: a service may be another user."""
    with replacing(path) as partial:
        partial.write_text(card, encoding="utf-8")
        partial.chmod(0o644)
