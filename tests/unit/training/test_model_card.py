"""Sections of a model card."""

from pathlib import Path

import pytest

from app.training.evaluate.model_card import drop_sections, write_section
from tests.support.full_disk import limited_files


def test_a_section_of_a_card_is_replaced_and_the_rest_stays(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    write_section(folder, "a", "first \\1 text")
    card = folder / "README.md"
    assert card.read_text().startswith("# mine\n\n<!-- landmarkd: a -->\nfirst \\1 text\n")
    card.write_text(f"{card.read_text()}\nby hand\n")
    write_section(folder, "b", "other")
    write_section(folder, "a", "second")
    text = card.read_text()
    assert "first" not in text
    assert text.index("second") < text.index("by hand") < text.index("other")


def test_a_section_of_a_card_is_dropped_and_the_rest_stays(tmp_path: Path) -> None:
    drop_sections(tmp_path, "a")
    assert not list(tmp_path.iterdir())
    card = tmp_path / "README.md"
    card.write_text("# mine\n\nby hand\n")
    for key in ("a", "b"):
        write_section(tmp_path, key, "text")
    drop_sections(tmp_path, "a")
    text = "# mine\n\nby hand\n\n<!-- landmarkd: b -->\ntext\n<!-- landmarkd: end of b -->\n"
    assert card.read_text() == text


def test_a_disk_that_is_full_leaves_what_people_wrote(tmp_path: Path) -> None:
    """A limit on the size of files stands for it: what followed a section was lost."""
    card = tmp_path / "README.md"
    write_section(tmp_path, "a", "text")
    card.write_text(f"{card.read_text()}\nby hand\n")
    written = card.read_text()
    with limited_files(50_000), pytest.raises(OSError, match="File too large"):
        write_section(tmp_path, "a", "a longer text " * 10_000)
    assert card.read_text() == written
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]
