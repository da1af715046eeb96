"""Figures show whatever names people give."""

from xml.parsers.expat import ParserCreate

from app.report import make_figure, make_page, make_table, write_svg


def test_names_in_any_script_stay_text_that_a_browser_finds_a_font_for() -> None:
    """Outlines of a font that lacks them were empty boxes, with a warning for each glyph."""
    figure, (axes,) = make_figure(3.0, 2.0)
    axes.set_xticks([0, 1], ["左眼角", "nasion $x"])
    assert "text-anchor: middle" in (svg := write_svg(figure))
    for name in ("左眼角", "nasion $x"):
        assert f">{name}</text>" in svg


def test_names_with_several_dollars_are_no_formulas() -> None:
    figure, (axes,) = make_figure(3.0, 2.0)
    axes.set_xticks([0], ["paid_$1_$2"])
    axes.annotate("cost_$1_$2", (0, 0))
    svg = write_svg(figure)
    assert all(name in svg for name in ("paid_$1_$2", "cost_$1_$2"))


def test_what_no_markup_may_hold_is_spelled_out() -> None:
    """Browsers showed no figure of a specimen whose file's name held a control character."""
    figure, (axes,) = make_figure(3.0, 2.0)
    axes.annotate("a\x01b\x1b\N{ZERO WIDTH NON-JOINER}\ufffe", (0, 0))
    svg = write_svg(figure)
    assert "a\\x01b\\x1b\N{ZERO WIDTH NON-JOINER}\\ufffe</text>" in svg
    ParserCreate().Parse(svg, True)
    page = make_page("\x00", [make_table(["a\x0bb"], [["c\n"]])])
    assert "<title>\\x00</title>" in page
    assert "<th>a\\x0bb</th></tr><tr><td>c\n</td>" in page
