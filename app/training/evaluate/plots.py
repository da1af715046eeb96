"""Outcomes -> plots, as self-contained SVG."""

from collections.abc import Sequence
from typing import Final

import numpy as np

from app.geometry import spacing_of, transform
from app.io import Volume
from app.report import BLUE, GREY, ORANGE, make_figure, write_svg
from app.training.evaluate.metrics import errors_mm, group
from app.training.evaluate.outcomes import Outcome

VIEW_VOXELS: Final = 24
"""Half the edge of a view of a large error, unless the error is larger."""

MAX_LABELS: Final = 60
"""With more landmarks than this, they are not named along the axis."""


def plot_errors(outcomes: Sequence[Outcome]) -> str:
    """Plot the errors of each landmark as dots, with a bar at the median."""
    groups = group(outcomes, lambda outcome: outcome.landmark)
    figure, (axes,) = make_figure(max(6.0, min(14.0, 0.22 * len(groups) + 1)), 3.2)
    for x, members in enumerate(groups.values()):
        mm = errors_mm(members)
        axes.plot(np.full(len(mm), x), mm, "o", ms=3, mfc="none", color=BLUE, alpha=0.8)
        if mm.size:
            axes.plot([x - 0.35, x + 0.35], [np.median(mm)] * 2, "-", lw=2, color=ORANGE)
    if len(groups) <= MAX_LABELS:
        # At their ends, as a browser's font may be wider than the one that measured them.
        axes.set_xticks(
            range(len(groups)), groups, rotation=90, rotation_mode="anchor", ha="right", va="center"
        )
    axes.set_xlabel("landmark (orange bar: median)")
    axes.set_ylabel("error in mm")
    axes.set_ylim(bottom=0)
    return write_svg(figure)


def plot_success(outcomes: Sequence[Outcome]) -> str:
    """Plot which share of present landmarks was placed within each distance."""
    mm = np.sort(errors_mm(outcomes))
    present = max(1, sum(outcome.present for outcome in outcomes))
    figure, (axes,) = make_figure(5.0, 3.2)
    axes.step(np.r_[0, mm], 100 * np.arange(len(mm) + 1) / present, where="post", color=BLUE)
    axes.set_xlim(0, 1.3 * float(np.percentile(mm, 99)) if mm.size and mm.any() else 1.0)
    axes.set_ylim(0, 101)
    axes.set_xlabel("within this distance of the truth, mm")
    axes.set_ylabel("share of present landmarks, %")
    axes.grid(alpha=0.25)
    return write_svg(figure)


def plot_confidence(outcomes: Sequence[Outcome]) -> str:
    """Plot confidence against error; absent landmarks have a line of their own."""
    figure, (axes,) = make_figure(5.0, 3.2)
    for detected, form, colour in ((True, "o", BLUE), (False, "^", ORANGE)):
        some = [
            outcome
            for outcome in outcomes
            if np.isfinite(outcome.error_mm) and (outcome.status == "detected") == detected
        ]
        label = "detected" if detected else "other status"
        x, y = [outcome.confidence for outcome in some], [outcome.error_mm for outcome in some]
        axes.plot(x, y, form, ms=4, mfc="none", color=colour, label=f"{label} ({len(some)})")
    absent = [one.confidence for one in outcomes if one.known and not one.present]
    if absent:
        along_top = axes.get_xaxis_transform()
        label = f"absent ({len(absent)})"
        above = np.full(len(absent), 1.03)
        axes.plot(absent, above, "|", color=GREY, transform=along_top, clip_on=False)
        axes.plot([], [], "|", color=GREY, label=label)
    axes.set_xlim(-0.02, 1.02)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("confidence")
    axes.set_ylabel("error in mm")
    axes.legend(loc="upper right", fontsize=8, labelcolor=GREY, framealpha=0.0)
    return write_svg(figure)


def plot_in_scan(outcome: Outcome, volume: Volume) -> str:
    """Plot a scan in three planes through the true position, with the true and the found one."""
    to_voxels = np.linalg.inv(volume.affine)
    true, found = (
        transform(to_voxels, np.full(3, np.nan) if point is None else point)
        for point in (outcome.true_mm, outcome.found_mm)
    )
    spacing = spacing_of(volume.affine)
    # The same length in mm along every axis, and at least that many voxels along the coarsest.
    reach_mm = max(VIEW_VOXELS * float(spacing.min()), 1.3 * outcome.error_mm)
    figure, views = make_figure(6.6, 2.5, columns=3)
    centre = np.clip(np.rint(true), 0, np.array(volume.voxels.shape) - 1).astype(int)
    for axis, axes in enumerate(views):
        x, y = (other for other in range(3) if other != axis)
        reach = (reach_mm / spacing[[x, y]]).astype(int) + 2
        first = np.maximum(centre[[x, y]] - reach, 0)
        plane = np.take(volume.voxels, centre[axis], axis=axis)
        plane = plane[first[0] : centre[x] + reach[0] + 1, first[1] : centre[y] + reach[1] + 1]
        axes.imshow(
            plane.T,
            cmap="gray",
            origin="lower",
            extent=_extent(first, plane.shape),
            aspect=spacing[y] / spacing[x],
        )
        axes.plot(true[x], true[y], "o", ms=11, mfc="none", mew=1.5, color=BLUE, label="true")
        axes.plot(found[x], found[y], "x", ms=8, mew=1.5, color=ORANGE, label="found")
        axes.set_xlim(true[x] - reach_mm / spacing[x], true[x] + reach_mm / spacing[x])
        axes.set_ylim(true[y] - reach_mm / spacing[y], true[y] + reach_mm / spacing[y])
        axes.set_xlabel(f"{'ijk'[x]}, at {'ijk'[axis]} = {centre[axis]}")
        axes.set_ylabel("ijk"[y])
    views[0].legend(loc="upper left", fontsize=7, labelcolor="#ffffff", framealpha=0.0)
    return write_svg(figure)


def _extent(first: np.ndarray, shape: tuple[int, ...]) -> tuple[float, float, float, float]:
    """Return the outer edges of an image: half a voxel beyond the centres."""
    left, bottom = (float(n) - 0.5 for n in first)
    return left, left + shape[0], bottom, bottom + shape[1]
