"""A cohort's shapes -> a folder: one HTML page, the scores and the mean shape."""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Final

import numpy as np

from app.durable import write_file
from app.io import csv_text, markups_json
from app.report import (
    BLUE,
    GREY,
    ORANGE,
    make_figure,
    make_page,
    make_picture,
    make_table,
    write_svg,
)
from app.shapes.cohort import Cohort
from app.shapes.outliers import Outlier, find_outliers
from app.shapes.procrustes import ShapeSpace, analyse_shapes

SHOWN_COMPONENTS: Final = 5
SHOWN_SDS: Final = 2.0
"""Standard deviations from the mean at which a component's shapes are drawn."""

MAX_NAMES: Final = 15
"""With more specimens than this, only those with wrong points are named in the plot."""


def write_shape_report(cohort: Cohort, folder: Path) -> ShapeSpace:
    """Write ``report.html``, ``scores.csv`` and ``mean_shape.mrk.json``.

    The mean shape has the specimens' mean centroid size; its pose is that of one of them.

    Raises:
        BadParameter: There are too few specimens.
    """
    space = analyse_shapes(cohort)
    outliers = find_outliers(cohort)
    folder.mkdir(parents=True, exist_ok=True)
    mean_mm = space.mean * space.size_mm.mean()
    markups = markups_json(space.landmarks, mean_mm)
    write_file(folder / "mean_shape.mrk.json", markups.encode())
    write_file(folder / "scores.csv", _write_scores(space).encode())
    page = make_page("Shapes", _parts(cohort, space, outliers))
    write_file(folder / "report.html", page.encode())
    return space


def _write_scores(space: ShapeSpace) -> str:
    names = [f"PC{number}" for number in range(1, len(space.explained) + 1)]
    rows = [["specimen", "centroid_size_mm", "procrustes_distance", *names]]
    for row, name in enumerate(space.specimens):
        numbers = [space.size_mm[row], space.distance[row], *space.scores[row]]
        rows.append([name, *(f"{number:.8g}" for number in numbers)])
    return csv_text(rows)


def _parts(cohort: Cohort, space: ShapeSpace, outliers: Sequence[Outlier] | None) -> list[str]:
    missing = int((~space.known).sum())
    left_out = sorted(set(cohort.specimens) - set(space.specimens))
    text = (
        f"{len(space.specimens)} specimens, {len(space.landmarks)} landmarks, {missing} points "
        "missing. Shapes are superimposed by generalised Procrustes analysis; a missing point "
        "counts as lying where the mean shape has it."
    )
    if left_out:
        text += f" Too few landmarks, or all in one place, and left out: {', '.join(left_out)}."
    return [
        "<h1>Shapes</h1>",
        f"<p>{escape(text)}</p>",
        "<h2>Points to look at</h2>",
        *_outlier_parts(outliers),
        *_component_parts(space, outliers or ()),
        "<h2>Specimens</h2>",
        _specimen_table(space),
    ]


def _outlier_parts(outliers: Sequence[Outlier] | None) -> list[str]:
    if outliers is None:
        return ["<p>Not looked for: the specimens have no constellation in common.</p>"]
    if not outliers:
        return ["<p>None: every point lies where the others put it.</p>"]
    lines = []
    for one in outliers:
        points = [
            f"{name} ({one.distance_mm[name]:.2g} mm, {times:.1f} times its limit)"
            for name, times in one.misplaced.items()
        ]
        lines.append((one.specimen, "; ".join(one.swaps), ", ".join(points)))
    return [
        make_table(("specimen", "exchanged names", "points far from where the others are"), lines),
        "<p>Distances are from where the specimen's other points and the other specimens put a "
        "point, exchanged names put right; a point has the name that its specimen gives it. The "
        "limit is five robust standard deviations.</p>",
    ]


def _component_parts(space: ShapeSpace, outliers: Sequence[Outlier]) -> list[str]:
    if not space.explained.size:
        return ["<p>All specimens have the same shape.</p>"]
    share = "".join(
        f" PC{number} {100 * part:.1f} %,"
        for number, part in enumerate(space.explained[:SHOWN_COMPONENTS].tolist(), start=1)
    )
    return [
        "<h2>Principal components</h2>",
        f"<p>Share of the variance:{share.rstrip(',')}. Points are taken as they are, right or "
        "wrong: one specimen's wrong points may make a component of their own.</p>",
        make_picture(_plot_scores(space, outliers), "Scores of the specimens"),
        make_picture(
            _plot_component(space),
            f"PC1, from {SHOWN_SDS:g} standard deviations below the mean (blue rings) to as many "
            "above it (orange crosses), seen along three axes",
        ),
    ]


def _plot_scores(space: ShapeSpace, outliers: Sequence[Outlier]) -> str:
    figure, views = make_figure(9.5, 4.4, columns=2)
    wrong = {one.specimen for one in outliers if one.swaps or one.misplaced}
    padded = np.pad(space.scores, ((0, 0), (0, 3)))
    for axes, (x, y) in zip(views, ((0, 1), (0, 2)), strict=True):
        for name, scores in zip(space.specimens, padded, strict=True):
            form, colour = ("^", ORANGE) if name in wrong else ("o", BLUE)
            axes.plot(scores[x], scores[y], form, ms=5, mfc="none", color=colour)
            if name in wrong or len(space.specimens) <= MAX_NAMES:
                axes.annotate(name, (scores[x], scores[y]), fontsize=5, color=GREY)
        axes.set_xlabel(f"PC{x + 1}")
        axes.set_ylabel(f"PC{y + 1}")
    views[0].set_title("triangles: specimens with points to look at", fontsize=8)
    return write_svg(figure)


def _plot_component(space: ShapeSpace) -> str:
    figure, views = make_figure(9.5, 3.6, columns=3)
    step = SHOWN_SDS * space.scores[:, 0].std(ddof=1) * space.components[0]
    low, high = space.mean - step, space.mean + step
    # Along its own axes, as the pose of a scan shows little.
    turn = np.linalg.svd(space.mean, full_matrices=False)[2].T
    low, high = low @ turn, high @ turn
    for axes, (x, y) in zip(views, ((0, 1), (0, 2), (1, 2)), strict=True):
        axes.plot([low[:, x], high[:, x]], [low[:, y], high[:, y]], "-", lw=1, color=GREY)
        axes.plot(low[:, x], low[:, y], "o", ms=4, mfc="none", color=BLUE)
        axes.plot(high[:, x], high[:, y], "x", ms=4, color=ORANGE)
        axes.set_aspect("equal")
        axes.set_xticks([])
        axes.set_yticks([])
    return write_svg(figure)


def _specimen_table(space: ShapeSpace) -> str:
    order = np.argsort(-space.distance).tolist()
    lines = [
        (
            space.specimens[row],
            f"{space.size_mm[row]:.5g}",
            f"{space.distance[row]:.4f}",
            str(int((~space.known[row]).sum())),
            *(f"{score:.4f}" for score in space.scores[row][:SHOWN_COMPONENTS].tolist()),
        )
        for row in order
    ]
    components = [f"PC{n + 1}" for n in range(min(SHOWN_COMPONENTS, len(space.explained)))]
    headings = ("specimen", "centroid size, mm", "Procrustes distance", "missing", *components)
    return make_table(headings, lines)
