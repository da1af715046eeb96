"""Figures and tables -> one self-contained HTML page.

Blue and orange are distinguishable for the colour-blind, and every marker should have its own form,
too. Backgrounds are transparent and text is mid-grey, to suit light and dark pages. Matplotlib is
an extra, so that it is imported only where a figure is made.
"""

import base64
import io
import re
import warnings
from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any, Final

from app.errors import show_controls

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE: Final = "#3d8fd1"
ORANGE: Final = "#e08214"
GREY: Final = "#808080"
"""Has a contrast of about 4:1 both to white and to black."""

FIGURE_STYLE: Final[Any] = {
    "svg.hashsalt": "landmarkd",  # reproducible files
    "svg.fonttype": "none",  # text, not outlines: names may need a font that browsers have
    "text.parse_math": False,  # names may hold dollars
    "font.size": 9,
    "text.color": GREY,
    "axes.labelcolor": GREY,
    "axes.titlecolor": GREY,
    "axes.edgecolor": GREY,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "axes.spines.top": False,
    "axes.spines.right": False,
}

PAGE_STYLE: Final = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 68rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; font-size: 0.85rem; display: block; overflow-x: auto; }
th, td { padding: 0.15rem 0.6rem; text-align: right; border-bottom: 1px solid #8886; }
th:first-child, td:first-child { text-align: left; }
img { max-width: 100%; }
.row { display: flex; flex-wrap: wrap; gap: 1rem; }
figure { margin: 0 0 1rem; }
figcaption { font-size: 0.85rem; }
"""


FORBIDDEN: Final = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What no XML may hold, and so no SVG (XML 1.0, 2.2): most control characters."""


def make_page(title: str, parts: Iterable[str]) -> str:
    """Make a page of a title, which is plain text, and parts, which are HTML."""
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{PAGE_STYLE}</style>'
    body = "".join(parts)
    return _spell_out(
        f'<!doctype html><html lang="en"><head>{head}</head><body>{body}</body></html>'
    )


def make_table(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Make a table of plain text."""
    head = "".join(f"<th>{escape(word)}</th>" for word in headings)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in line)}</tr>" for line in lines
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def make_picture(svg: str, caption: str) -> str:
    """Embed an SVG picture, with a caption in plain text."""
    data = base64.b64encode(svg.encode()).decode()
    words = escape(caption)
    return (
        f'<figure><img alt="{words}" src="data:image/svg+xml;base64,{data}">'
        f"<figcaption>{words}</figcaption></figure>"
    )


def make_figure(width: float, height: float, columns: int = 1) -> "tuple[Figure, list[Axes]]":
    """Make a figure of axes side by side; lengths are in inches."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(FIGURE_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        return figure, list(figure.subplots(1, columns, squeeze=False)[0])


def write_svg(figure: "Figure") -> str:
    """Write a figure as SVG, with its images inside."""
    import matplotlib as mpl
    from matplotlib.text import Text

    file = io.StringIO()
    with mpl.rc_context(FIGURE_STYLE), warnings.catch_warnings():
        for text in figure.findobj(Text):
            text.set_parse_math(False)  # Most were made outside of the style.
        # Matplotlib lacks a glyph only to measure it.
        warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    return _spell_out(file.getvalue())


def _spell_out(markup: str) -> str:
    """Write what would make a file invalid, such as of a name, as escapes that people can read."""
    return FORBIDDEN.sub(lambda found: show_controls(found[0]), markup)
