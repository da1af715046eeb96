"""Calibration runs -> 95 % regions and presence thresholds, written into the ``model.toml``."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import tomlkit
import torch
from rich.console import Console
from rich.table import Table

from app.errors import BadParameter
from app.inference import load_checked
from app.model import LoadedModel, read_manifest
from app.training.calibrate.calibration_runs import (
    KINDS,
    CalibrationRun,
    choose_thresholds,
    networks_of,
)
from app.training.calibrate.regions import (
    COVERAGE,
    Region,
    calibrate_intervals,
    calibrate_regions,
    detected_errors,
    leave_one_out,
    max_coverage,
    proven_coverage,
)
from app.training.calibrate.thresholds import Thresholds
from app.training.data.check_data import check_data
from app.training.data.folds import Folds, check_same_data, content_digests, read_folds
from app.training.evaluate.metrics import measure_presence
from app.training.evaluate.model_card import write_section
from app.training.evaluate.outcomes import Outcome, summarise_errors
from app.training.files import FOLDS, OUTCOMES
from app.training.fit.export import attach_refine


@dataclass(frozen=True, slots=True)
class Calibration:
    """Regions and thresholds of a model.

    Attributes:
        regions: By landmark.
        thresholds: Of each network; None where masses are too few.
        folds: The folds whose models the runs are of; None: they are of the model itself.
        scales: By measurement: what its propagated interval must be multiplied by.
    """

    regions: Mapping[str, Region]
    thresholds: Sequence[Thresholds | None]
    folds: Folds | None
    scales: Mapping[str, float]

    def summary(self) -> str:
        """Describe the regions and their coverage."""
        return f"{describe_regions(self.regions)}; {describe_coverage(self.regions, self.folds)}"


def finished_folds(folder: Path, model: LoadedModel, scans: Path, landmarks: Path) -> Folds:
    """Read the folds of a model, and check that they are finished and of these data.

    Raises:
        BadParameter: The model has no folds, or they lack a network.
        StartupError: The data have changed since the folds were made.
    """
    folds = read_folds(folder)
    if folds is None:
        raise BadParameter(
            f"--folds: expected a model that was trained with --folds, found none in "
            f"{folder / FOLDS}"
        )
    check_same_data(folder, folds, content_digests(check_data(scans, landmarks).specimens))
    refine = model.manifest.refine
    inner = "" if refine is None else refine.folder
    for number in range(1, len(folds.members) + 1):
        path = folds.folder(folder, number) / inner
        if not (path / OUTCOMES).exists():
            command = "train" if refine is None else "refine"
            raise BadParameter(
                f"--folds: expected {path} to be done; landmarkd {command} --folds does it"
            )
    return folds


def load_fold_models(folder: Path, folds: Folds, device: torch.device) -> dict[str, LoadedModel]:
    """Load the models of all folds.

    Returns:
        For each scan, the model that was not trained on it.

    Raises:
        ModelRefused: The folder of a fold breaks the contract.
    """
    models: dict[str, LoadedModel] = {}
    for number, names in enumerate(folds.members, start=1):
        model = load_checked(folds.folder(folder, number), device)
        models |= dict.fromkeys(names, model)
    return models


def calibrate_model(
    folder: Path,
    model: LoadedModel,
    before: Sequence[CalibrationRun],
    after: Sequence[CalibrationRun],
    console: Console,
    folds: Folds | None = None,
) -> None:
    """Choose regions and thresholds, print what they are based on, and write them.

    Args:
        folder: The model folder.
        model: The model as it is.
        before: Runs of all scans with the model as it is, for the thresholds.
        after: Runs of each scan with the thresholds that follow from the others, for the regions.
        console: Where to print.
        folds: The folds whose models the runs are of, each with scans that its model was not
            trained on; None: they are of the model itself.

    Raises:
        BadParameter: There are too few errors for a region; nothing is written.
    """
    names = [landmark.name for landmark in model.manifest.landmarks]
    whole = [outcome for run in after if run.kind == "whole" for outcome in run.answer]
    console.print(summarise_errors(whole))
    regions = calibrate_regions(whole, names)
    if regions is None:
        raise BadParameter(describe_too_few(whole))
    scales = calibrate_intervals(model.manifest.measurements, whole, regions)
    calibration = Calibration(regions, choose_thresholds(model, before), folds, scales)
    titles = ("thresholds", "thresholds of the second network")
    networks = zip(titles, calibration.thresholds, networks_of(model), strict=False)
    for title, chosen, network in networks:
        old = [landmark.presence_threshold for landmark in network.manifest.landmarks]
        console.print(f"{title}: {describe_thresholds(chosen, old)}")
    print_presence(before, after, console)
    if len({run.scan for run in before}) == 1:
        console.print("[yellow]One scan: its thresholds were measured on itself.[/yellow]")
    console.print(calibration.summary())
    if scales:
        low, high = min(scales.values()), max(scales.values())
        console.print(f"intervals of measurements: {low:.2f} to {high:.2f} times what propagates")
    shares = leave_one_out(whole, names)
    covered = ", ".join(f"{name} {100 * share:.0f} %" for name, share in shares.items())
    console.print(f"errors within the regions of the other scans: {covered or 'too few scans'}")
    write_calibration(folder, calibration)


def describe_too_few(outcomes: Sequence[Outcome]) -> str:
    """Describe that the errors are too few, and which coverage they allow."""
    count = len(detected_errors(outcomes))
    required = math.ceil(COVERAGE / (1 - COVERAGE))
    return (
        f"expected at least {required} errors of detected landmarks for a region of 95 %, got "
        f"{count}, which allow {100 * max_coverage(count):.0f} % at most; nothing was written"
    )


def describe_thresholds(chosen: Thresholds | None, old: Sequence[float]) -> str:
    """Describe new thresholds, and what they are based on."""
    was = f"was {min(old):.3f} to {max(old):.3f}"
    if chosen is None:
        return f"too few masses, so none is changed ({was})"
    lower, upper = chosen.masses.bounds()
    values, masses = chosen.values, chosen.masses
    return (
        f"{min(values):.3f} to {max(values):.3f} ({was}), {chosen.own} of {len(values)} landmarks "
        f"by their own masses; of all, 2 % of {len(masses.present)} correct answers have less than "
        f"{upper:.3f}, 2 % of {len(masses.absent)} absent ones more than {lower:.3f}"
    )


def describe_regions(regions: Mapping[str, Region]) -> str:
    """Describe the regions, and what they are based on."""
    own = [region for region in regions.values() if region.own]
    shared = [region for region in regions.values() if not region.own]
    parts = []
    if own:
        radii = [region.radius_mm for region in own]
        parts.append(
            f"{len(own)} landmarks have a region of their own, {min(radii):.3f} to "
            f"{max(radii):.3f} mm, of at least {min(region.errors for region in own)} errors"
        )
    if shared:
        parts.append(
            f"{len(shared)} landmarks share one of {shared[0].radius_mm:.3f} mm, of "
            f"{shared[0].errors} errors of all landmarks: it holds on average over them"
        )
    return f"regions: {'; '.join(parts)}"


def describe_coverage(regions: Mapping[str, Region], folds: Folds | None) -> str:
    """Describe the probability that a further error stays within its region."""
    coverage = min(region.coverage for region in regions.values())
    if folds is None:
        return f"a further error stays within with {100 * coverage:.1f} %"
    specimens, count = len(set(folds.held_out_subjects().values())), len(folds.members)
    proven = proven_coverage(specimens, count)
    return (
        f"a further error is expected within with about {100 * coverage:.1f} %, as these are "
        f"errors of {count} models on {specimens} specimens that they were not trained on "
        f"(cross-conformal); at least {100 * proven:.0f} % is proven for regions around the "
        "answers of these models, and for those of one model trained on all specimens only as far "
        "as it answers as they do"
    )


def print_presence(
    before: Sequence[CalibrationRun], after: Sequence[CalibrationRun], console: Console
) -> None:
    """Print what is missed and what is invented, before and after."""
    table = Table("scans", "present", "missed", "after", "absent", "invented", "after", box=None)
    for kind in KINDS:
        was, now = (
            measure_presence([one for run in runs if run.kind == kind for one in run.answer])
            for runs in (before, after)
        )
        table.add_row(
            kind,
            str(was.present), percent(was.missed, was.present), percent(now.missed, now.present),
            str(was.absent), percent(was.invented, was.absent), percent(now.invented, now.absent),
        )  # fmt: skip
    console.print(table)
    console.print("missed: present, but not detected; invented: absent, but detected")


def percent(part: int, whole: int) -> str:
    """Format a share in per cent; empty if the whole is 0."""
    return f"{100 * part / whole:.1f} %" if whole else ""


def write_calibration(folder: Path, calibration: Calibration) -> None:
    """Write regions and thresholds into the ``model.toml`` of each network.

    Regions go to the second network if there is one, as the answers come from it. Those based on
    folds are also described in the model card.
    """
    refine = read_manifest(folder).refine
    folders = [folder] if refine is None else [folder, folder / refine.folder]
    for inner, thresholds in zip(folders, calibration.thresholds, strict=True):
        path = inner / "model.toml"
        document = tomlkit.parse(path.read_text(encoding="utf-8"))
        for index, landmark in enumerate(document["landmarks"]):
            if thresholds is not None:
                landmark["presence_threshold"] = round(thresholds.values[index], 3)
            if inner == folders[-1]:
                # Rounded up, as the coverage of the radius holds for no smaller one.
                radius = calibration.regions[landmark["name"]].radius_mm
                landmark["region95_mm"] = math.ceil(1000 * radius) / 1000
        _write_scales(document, calibration.scales)
        path.write_text(tomlkit.dumps(document), encoding="utf-8")
    if refine is not None:
        attach_refine(folders[-1])
    if calibration.folds is not None:
        text = f"By `landmarkd calibrate --folds`: {calibration.summary()}."
        write_section(folder, "calibration", f"## 95 % regions\n\n{text}")


def _write_scales(document: tomlkit.TOMLDocument, scales: Mapping[str, float]) -> None:
    """Set the factor of each measurement's interval, rounded up."""
    for measurement in document.get("measurements", []):
        if measurement["name"] in scales:
            measurement["interval_scale"] = math.ceil(1000 * scales[measurement["name"]]) / 1000
