"""model + held-out scans -> what its networks say of them: whole, cut in halves, and blank."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from app.io import Volume, read_volume
from app.model import LoadedModel
from app.training.calibrate.stage_outputs import Looker, with_thresholds
from app.training.calibrate.synthetic_crops import blanks, halves
from app.training.calibrate.thresholds import Thresholds, calibrate_thresholds
from app.training.evaluate.outcomes import Outcome, Pair, compare, read_truth
from app.training.options import Missing

Kind = Literal["whole", "half", "blank"]
KINDS: Final[tuple[Kind, ...]] = ("whole", "half", "blank")


@dataclass(frozen=True, slots=True)
class Trial:
    """One scan, or what was made of it, as one model answers it.

    Attributes:
        scan: Name of the scan.
        kind: What was made of it.
        networks: Outcomes of each of the model's networks alone; of the second none where the first
            has found no pose.
        answer: Outcomes as the service tells them.
    """

    scan: str
    kind: Kind
    networks: tuple[tuple[Outcome, ...], ...]
    answer: tuple[Outcome, ...]


def try_scan(model: LoadedModel, pair: Pair, missing: Missing = "unknown") -> list[Trial]:
    """Run a model over a scan, its halves and blank scans like it.

    Args:
        model: The model.
        pair: Name, scan and landmark file.
        missing: What a landmark is that the file does not have.

    Returns:
        A trial for each.

    Raises:
        LandmarkdError: The scan cannot be read or answered.
        ValueError: The landmark file cannot be read.
    """
    name, scan, landmarks = pair
    volume, truth = read_volume(scan.read_bytes()), read_truth(landmarks)
    looker = Looker(model)
    trials = []
    volumes: tuple[tuple[Kind, Iterable[Volume]], ...] = (
        ("whole", [volume]), ("half", halves(volume)), ("blank", blanks(volume))
    )  # fmt: skip
    for kind, made in volumes:
        # Nothing is where it was in a scan that shows nothing, whatever the file has.
        there, lacking = ({}, "absent") if kind == "blank" else (truth, missing)
        for part in made:
            looks = looker.look(part)
            alone = [looks.first, *([] if model.refine is None else [looks.second or ()])]
            networks = tuple(compare(name, part, there, found, lacking) for found in alone)
            answer = compare(name, part, there, looks.answer, lacking)
            trials.append(Trial(name, kind, networks, answer))
    return trials


def thresholds_from(model: LoadedModel, trials: Sequence[Trial]) -> list[Thresholds | None]:
    """Choose the thresholds of each network of a model.

    Blank scans do not count: they are easy, and would only thin out the landmarks that were cut
    away from scans that show all the rest.

    Args:
        model: The model.
        trials: Of scans that no weight was trained on.

    Returns:
        Thresholds of its network, and of its second if it has one; None where masses are too few.
    """
    chosen = []
    for index, network in enumerate(networks_of(model)):
        outcomes = [
            outcome
            for trial in trials
            if trial.kind != "blank"
            for outcome in trial.networks[index]
        ]
        names = [landmark.name for landmark in network.manifest.landmarks]
        radius_mm = network.manifest.voting.radius_mm
        chosen.append(calibrate_thresholds(outcomes, names, radius_mm))
    return chosen


def apply_thresholds(model: LoadedModel, chosen: Sequence[Thresholds | None]) -> LoadedModel:
    """Give a model the thresholds that were chosen, in memory; it keeps those that were not."""
    values = [
        [landmark.presence_threshold for landmark in network.manifest.landmarks]
        if thresholds is None
        else thresholds.values
        for network, thresholds in zip(networks_of(model), chosen, strict=True)
    ]
    return with_thresholds(model, values)


def networks_of(model: LoadedModel) -> list[LoadedModel]:
    """List a model and, if it has one, its second model."""
    return [model] if model.refine is None else [model, model.refine]


def try_again(
    model: LoadedModel, pair: Pair, trials: Sequence[Trial], missing: Missing = "unknown"
) -> list[Trial]:
    """Run a model over a scan with the thresholds that the other scans' trials say.

    Args:
        model: The model.
        pair: Name, scan and landmark file.
        trials: Of all scans. If this is the only one, its own count.
        missing: What a landmark is that the file does not have.

    Returns:
        As ``try_scan``.
    """
    others = [trial for trial in trials if trial.scan != pair[0]] or trials
    return try_scan(apply_thresholds(model, thresholds_from(model, others)), pair, missing)
