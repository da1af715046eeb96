"""text -> a section of a model's card: what a command found out, in its ``README.md``.

A section lies between two marks, which a page does not show, and is replaced when its command runs
again. All else in the file is people's, and stays.
"""

import re
from pathlib import Path
from typing import Final

CARD: Final = "README.md"


def write_section(folder: Path, key: str, text: str) -> None:
    """Write a section of a model's card, in place of what its command wrote before, or at the end.

    Args:
        folder: The model folder.
        key: Tells the section from those of other commands.
        text: In Markdown.
    """
    path = folder / CARD
    card = path.read_text(encoding="utf-8") if path.exists() else f"# {folder.name}\n"
    first, last = f"<!-- landmarkd: {key} -->", f"<!-- landmarkd: end of {key} -->"
    section = f"{first}\n{text.strip()}\n{last}"
    before = re.compile(f"{re.escape(first)}.*?{re.escape(last)}", re.DOTALL)
    if before.search(card):
        card = before.sub(lambda _: section, card, count=1)
    else:
        card = f"{card.rstrip()}\n\n{section}\n"
    path.write_text(card, encoding="utf-8")
