"""Sections of a model card."""

from pathlib import Path

from app.training.evaluate.model_card import write_section


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
