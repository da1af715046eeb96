"""Calibration runs -> 95 % regions and presence thresholds, written into the ``model.toml``."""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from app.errors import BadParameter
from app.inference import Uncertainty, load_checked
from app.model import (
    LoadedModel,
    PrecisionSetting,
    choose_precision,
    editing,
    read_manifest,
    update_hashes,
)
from app.training.calibrate.calibration_runs import (
    KINDS,
    CalibrationRuns,
    choose_thresholds,
    networks_of,
)
from app.training.calibrate.regions import (
    COVERAGE,
    Region,
    calibrate_intervals,
    calibrate_regions,
    detected_errors,
    in_units_of_growth,
    leave_one_out,
    region_margin,
    usual_uncertainty,
)
from app.training.calibrate.thresholds import Thresholds
from app.training.data.check_data import check_data
from app.training.data.folds import (
    Folds,
    check_same_data,
    content_digests,
    read_folds,
    subject_as_known,
)
from app.training.evaluate.digits import decimals_of, format_number
from app.training.evaluate.metrics import measure_presence
from app.training.evaluate.model_card import REGIONS, drop_sections, write_section
from app.training.evaluate.outcomes import Outcome, summarise_errors
from app.training.files import FOLDS, OUTCOMES, REFINE
from app.training.record import check_alike


@dataclass(frozen=True, slots=True)
class Calibration:
    """Regions and thresholds of a model.

    Attributes:
        regions: By landmark.
        thresholds: Of each network; None where masses are too few.
        interval_scale: What propagated intervals of measurements must be multiplied by; None where
            measurements are too few.
        margin_mm: Least distance from the scan's border of a landmark with a region.
        usual: Uncertainty of a scan from which on its regions grow.
        coverage: What is known of the regions' coverage.
        folded: Whether the regions are based on the models of folds.
    """

    regions: Mapping[str, Region]
    thresholds: Sequence[Thresholds | None]
    interval_scale: float | None
    margin_mm: float
    usual: Uncertainty
    coverage: str
    folded: bool

    def summary(self) -> str:
        """Describe the regions and their coverage."""
        where = f"{format_number(self.margin_mm)} mm and more from the scan's border"
        if (mm := self.usual.from_shape_mm) is not None:
            where += f", wider if landmarks are over {format_number(mm)} mm from the fitted shape"
        if (mm := self.usual.spread_mm) is not None:
            where += f", wider if votes scatter by over {format_number(mm)} mm"
        return f"{describe_regions(self.regions)}, {where}; {self.coverage}"


def finished_folds(folder: Path, scans: Path, landmarks: Path) -> Folds:
    """Read the folds of a model, and check that they are finished and of these data.

    Raises:
        BadParameter: The model has no folds, or they lack a network or were trained otherwise.
        ModelRefused: The folder is no model.
        StartupError: The data have changed since the folds were made.
    """
    folds = read_folds(folder)
    if folds is None:
        raise BadParameter(
            f"expected a model that was trained with --folds, found none in {folder / FOLDS}"
        )
    check_same_data(folder, folds, content_digests(check_data(scans, landmarks).specimens))
    refine = read_manifest(folder).refine
    for number in range(1, len(folds.members) + 1):
        fold = folds.folder(folder, number)
        path = fold if refine is None else fold / REFINE
        if not (path / OUTCOMES).exists():
            command = "train" if refine is None else "refine"
            raise BadParameter(f"expected {path} to be done; landmarkd {command} --folds does it")
        check_alike(folder, fold)
        if refine is not None:  # Whose folder people may have renamed since.
            check_alike(folder / refine.folder, path)
    return folds


def load_fold_models(
    folder: Path, folds: Folds, device: torch.device, precision: PrecisionSetting = "float32"
) -> dict[str, LoadedModel]:
    """Load the models of all folds, with as many networks as the model itself has.

    For ``auto`` they compute in what the model itself does, as folds are verified in no precision.

    Returns:
        For each scan, the model that was not trained on it.

    Raises:
        ModelRefused: The folder of a fold breaks the contract.
    """
    models: dict[str, LoadedModel] = {}
    manifest = read_manifest(folder)
    alone, chosen = manifest.refine is None, choose_precision(manifest, device, precision)
    for number, names in enumerate(folds.members, start=1):
        model = load_checked(folds.folder(folder, number), device, chosen)
        if alone:  # A second network is trained in the folds first.
            model = replace(model, refine=None)
        models |= dict.fromkeys(names, model)
    return models


def calibrate_model(
    folder: Path,
    model: LoadedModel,
    runs: CalibrationRuns,
    console: Console,
    folds: Folds | None = None,
) -> None:
    """Choose regions and thresholds, print what they are based on, and write them.

    Without folds, the runs are of the model itself.

    Raises:
        BadParameter: There are too few errors for a region; nothing is written.
    """
    specs, measured = model.manifest.landmarks, runs.whole()
    console.print(summarise_errors(measured))
    usual = usual_uncertainty(measured)
    scaled = in_units_of_growth(measured, usual)
    regions = calibrate_regions(scaled, specs)
    if regions is None:
        raise BadParameter(describe_too_few(measured))
    calibration = Calibration(
        regions,
        choose_thresholds(model, runs.before),
        calibrate_intervals(model.manifest.measurements, measured, regions, usual),
        region_margin(measured, networks_of(model)[-1].manifest.voting.radius_mm),
        usual,
        describe_coverage(regions, folds, {outcome.scan for outcome in measured}),
        folded=folds is not None,
    )
    print_thresholds(model, calibration.thresholds, console)
    print_presence(runs, console)
    if len({subject_as_known(run.scan, folds) for run in runs.before}) == 1:
        console.print("One subject: its thresholds were measured on itself.", style="yellow")
    console.print(calibration.summary())
    if model.manifest.measurements:
        scale = calibration.interval_scale
        by = (
            "too few, so left as they are"
            if scale is None
            else f"{scale:.3f} times what propagates"
        )
        console.print(f"intervals of measurements: {by}")
    shares = leave_one_out(scaled, specs, folds).items()
    covered = ", ".join(f"{name} {100 * share:.0f} %" for name, share in shares)
    console.print(f"errors within the regions of the other scans: {covered or 'too few scans'}")
    write_calibration(folder, calibration)


def print_thresholds(
    model: LoadedModel, thresholds: Sequence[Thresholds | None], console: Console
) -> None:
    """Print the new thresholds of each network beside those that it has."""
    titles = ("thresholds", "thresholds of the second network")
    for title, chosen, network in zip(titles, thresholds, networks_of(model), strict=False):
        old = [landmark.presence_threshold for landmark in network.manifest.landmarks]
        console.print(f"{title}: {describe_thresholds(chosen, old)}")


def describe_too_few(outcomes: Sequence[Outcome]) -> str:
    """Describe that the errors are too few, and which coverage they allow."""
    count = len(detected_errors(outcomes))
    required = math.ceil(COVERAGE / (1 - COVERAGE))
    return (
        f"expected at least {required} errors of detected landmarks for a region of 95 %, got "
        f"{count}, which allow {100 * count / (count + 1):.0f} % at most; nothing was written"
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
    parts = []
    own = [region for region in regions.values() if region.of == "landmark"]
    if own:
        radii = [region.radius_mm for region in own]
        parts.append(
            f"{len(own)} landmarks have a region of their own, {format_number(min(radii))} to "
            f"{format_number(max(radii))} mm, of at least {min(one.errors for one in own)} errors"
        )
    shared = Counter(region for region in regions.values() if region.of != "landmark")
    for region, count in shared.items():
        whose = "their group" if region.of == "group" else "all landmarks"
        parts.append(
            f"{count} landmarks share one of {format_number(region.radius_mm)} mm, of "
            f"{region.errors} errors of {whose}: it holds on average over them"
        )
    return f"regions: {'; '.join(parts)}"


def describe_coverage(
    regions: Mapping[str, Region], folds: Folds | None, scans: Collection[str]
) -> str:
    """Describe the probability that a further error stays within its region."""
    coverage = min(region.coverage for region in regions.values())
    subjects = {subject_as_known(scan, folds) for scan in scans}
    specimens, whose = len(subjects), "scan" if len(subjects) == len(scans) else "subject"
    if folds is not None:
        return (
            f"a further error is expected within with about {100 * coverage:.1f} %, as these are "
            f"errors of {len(folds.members)} models on {specimens} {whose}s that they were not "
            "trained on (cross-conformal)"
        )
    if whose == "scan" and all(region.of == "landmark" for region in regions.values()):
        return f"a further error stays within with {100 * coverage:.1f} %"
    return (
        f"about {100 * coverage:.1f} % of further errors are expected within, over scans; "
        f"errors of one {whose} are alike, and these are of {specimens}"
    )


def print_presence(runs: CalibrationRuns, console: Console) -> None:
    """Print what is missed and what is invented, before and after."""
    table = Table("scans", "present", "missed", "after", "absent", "invented", "after", box=None)
    for kind in KINDS:
        was, now = (
            measure_presence([one for run in some if run.kind == kind for one in run.answer])
            for some in (runs.before, runs.after)
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

    The second network's is written first: with half of both, the hash of it in the first one's does
    not fit, so that nobody serves these.
    """
    folders = [folder / name for name in read_manifest(folder).folders]
    for inner, thresholds in reversed([*zip(folders, calibration.thresholds, strict=True)]):
        regions = calibration.regions if inner == folders[-1] else {}
        with editing(inner) as document:
            write_landmarks(document["landmarks"], regions, thresholds)
            if regions:
                document["voting"]["region_margin_mm"] = _round_up(calibration.margin_mm)
                usual = calibration.usual
                for section, key, mm in (
                    ("shape", "region_scale_mm", usual.from_shape_mm),
                    ("voting", "region_spread_mm", usual.spread_mm),
                ):
                    document.get(section, {}).pop(key, None)
                    if mm is not None:
                        document[section][key] = mm
            if (scale := calibration.interval_scale) is not None:
                for measurement in document.get("measurements", []):
                    measurement["interval_scale"] = _round_up(scale)
            update_hashes(inner, document)
    if calibration.folded:
        text = f"By `landmarkd calibrate`: {calibration.summary()}."
        write_section(folder, REGIONS, f"## 95 % regions\n\n{text}")
    else:
        drop_sections(folder, REGIONS)


def write_landmarks(
    landmarks: Iterable[dict[str, object]],
    regions: Mapping[str, Region],
    thresholds: Thresholds | None,
) -> None:
    """Write regions, of those that have one, and thresholds into the landmarks of a manifest."""
    for index, landmark in enumerate(landmarks):
        if thresholds is not None:
            landmark["presence_threshold"] = round(thresholds.values[index], 3)
        if region := regions.get(str(landmark["name"])):
            landmark["region95_mm"] = _round_up(region.radius_mm)


def _round_up(value: float) -> float:
    """Round for writing; up, as the coverage of a radius holds for no smaller one."""
    places = 10.0 ** decimals_of(value)
    return math.ceil(places * value) / places
