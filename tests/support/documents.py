"""The documents of the repository, and the examples in them."""

import re
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
README: Final = ROOT / "README.md"
DOCS: Final = ROOT / "docs"
PAGES: Final = (README, *sorted(DOCS.glob("*.md")))
"""What is read by users of the service, and has examples that run."""

DOCUMENTS: Final = (
    *PAGES,
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    ROOT / "SECURITY.md",
    *sorted((ROOT / "models").glob("**/README.md")),
)
FENCED: Final = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)


def read(path: Path) -> str:
    """Read a document."""
    return path.read_text(encoding="utf-8")


def code_blocks(text: str, language: str) -> list[str]:
    """List the fenced blocks of a language in Markdown."""
    return [block for found, block in FENCED.findall(text) if found == language]


def section(text: str, heading: str) -> str:
    """Cut out a section with its subsections, from its heading line to the next of its level."""
    level = heading.split(" ", maxsplit=1)[0]
    _, _, rest = f"\n{text}".partition(f"\n{heading}\n")
    return re.split(rf"\n{level} ", rest)[0]


def prose(text: str) -> str:
    """Drop fenced blocks from Markdown."""
    return FENCED.sub("", text)
