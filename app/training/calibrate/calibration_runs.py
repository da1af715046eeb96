"""Model + held-out scans -> what its networks answer: to whole scans, halves, and blank scans."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from rich.console import Console
from rich.progress import track

from app.inference import Detector
from app.io import Volume
from app.model import LoadedModel
from app.training.calibrate.synthetic_crops import blanks, halves
from app.training.calibrate.thresholds import Thresholds, calibrate_thresholds, with_thresholds
from app.training.data.check_frames import read_in_frame
from app.training.data.folds import Folds, subject_as_known
from app.training.data.specimens import SpecimenFiles
from app.training.evaluate.outcomes import Outcome, compare
from app.training.options import Missing

Kind = Literal["whole", "half", "blank"]
KINDS: Final[tuple[Kind, ...]] = ("whole", "half", "blank")


@dataclass(frozen=True, slots=True)
class CalibrationRun:
    """What a model answers to one scan, or to a part or a blank version of it.

    Attributes:
        scan: Name of the scan.
        kind: Which version of it.
        networks: Outcomes of each of the model's networks alone; of the second none where the first
            has found no pose.
        answer: Outcomes of what the service would answer.
    """

    scan: str
    kind: Kind
    networks: tuple[tuple[Outcome, ...], ...]
    answer: tuple[Outcome, ...]


@dataclass(frozen=True, slots=True)
class CalibrationRuns:
    """Runs of scans with models that were not trained on them.

    Attributes:
        before: With the models as they are, for the thresholds.
        after: With the thresholds that follow from all other scans, for the regions.
    """

    before: Sequence[CalibrationRun]
    after: Sequence[CalibrationRun]

    def whole(self) -> list[Outcome]:
        """List what would be answered to the whole scans."""
        return [outcome for run in self.after if run.kind == "whole" for outcome in run.answer]


def run_all(
    models: Mapping[str, LoadedModel],
    specimens: Sequence[SpecimenFiles],
    console: Console,
    missing: Missing = "unknown",
    folds: Folds | None = None,
) -> CalibrationRuns:
    """Run models over scans, as they are and with the thresholds that follow from the others.

    Each scan is answered by the model of its name, which was not trained on it; those without one
    are left out. ``missing`` says how a landmark counts that the landmark file does not have. Folds
    know the subject that a scan shows, where its name does not tell.
    """
    specimens = [files for files in specimens if files.name in models]
    before: list[CalibrationRun] = []
    for files in track(specimens, "As it is", console=console):
        before += run_scan(models[files.name], files, missing)
    after: list[CalibrationRun] = []
    for files in track(specimens, "Calibrated by the others", console=console):
        after += run_scan_calibrated(models[files.name], files, before, missing, folds)
    return CalibrationRuns(before, after)


def run_scan(
    model: LoadedModel, files: SpecimenFiles, missing: Missing = "unknown"
) -> list[CalibrationRun]:
    """Run a model over a scan, its halves and blank scans of its shape.

    Raises:
        LandmarkdError: A file cannot be read, the scan not answered, or its landmarks are in
            another frame.
    """
    volume, truth = read_in_frame(files)
    detector = Detector(model)
    runs = []
    versions: tuple[tuple[Kind, Iterable[Volume]], ...] = (
        ("whole", [volume]), ("half", halves(volume)), ("blank", blanks(volume))
    )  # fmt: skip
    for kind, parts in versions:
        # In a blank scan every landmark is absent, whatever the file has.
        present, absence = ({}, "absent") if kind == "blank" else (truth, missing)
        for part in parts:
            located, _ = detector.locate(part)
            first, second = located.stages or (located.landmarks, ())
            alone = [first] if model.refine is None else [first, second]
            networks = tuple(compare(files.name, part, present, one, absence) for one in alone)
            answer = compare(files.name, part, present, located.landmarks, absence)
            runs.append(CalibrationRun(files.name, kind, networks, answer))
    return runs


def run_scan_calibrated(
    model: LoadedModel,
    files: SpecimenFiles,
    runs: Sequence[CalibrationRun],
    missing: Missing = "unknown",
    folds: Folds | None = None,
) -> list[CalibrationRun]:
    """Run a model over a scan with the thresholds that follow from scans of other subjects.

    If there are none, those of its own decide.
    """
    subject = subject_as_known(files.name, folds)
    others = [run for run in runs if subject_as_known(run.scan, folds) != subject] or runs
    chosen = choose_thresholds(model, others)
    values = [None if one is None else one.values for one in chosen]
    return run_scan(with_thresholds(model, values), files, missing)


def choose_thresholds(
    model: LoadedModel, runs: Sequence[CalibrationRun]
) -> list[Thresholds | None]:
    """Choose the thresholds of each network of a model.

    Blank scans do not count: they are easy, and would only dilute the landmarks that were cut away
    from scans that show all the rest.

    Returns:
        Thresholds of its network, and of its second if it has one; None where masses are too few.
    """
    chosen = []
    for index, network in enumerate(networks_of(model)):
        outcomes = [one for run in runs if run.kind != "blank" for one in run.networks[index]]
        names = [landmark.name for landmark in network.manifest.landmarks]
        radius_mm = network.manifest.voting.radius_mm
        chosen.append(calibrate_thresholds(outcomes, names, radius_mm))
    return chosen


def networks_of(model: LoadedModel) -> list[LoadedModel]:
    """List the first network of a model and, if it has one, the second."""
    return [model] if model.refine is None else [model, model.refine]
