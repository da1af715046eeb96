"""Volume -> what each network of a model answers alone, and what both answer together."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from app.inference import Detector, ScanState, collect, launch
from app.io import Volume
from app.model import LoadedModel
from app.voting import Landmark


@dataclass(frozen=True, slots=True)
class StageOutputs:
    """Landmarks of one scan.

    Attributes:
        first: Of the model's network, in its last pass that showed a pose.
        second: Of its second network alone, in its last pass; None if the first has found no pose.
        answer: What the service would answer.
    """

    first: tuple[Landmark, ...]
    second: tuple[Landmark, ...] | None
    answer: tuple[Landmark, ...]


class StageRunner:
    """Runs the networks of a model and keeps what each answers alone."""

    def __init__(self, model: LoadedModel) -> None:
        self._detector = Detector(model)

    def run(self, volume: Volume) -> StageOutputs:
        """Find the landmarks of one scan.

        Raises:
            LandmarkdError: As ``Detector.detect``.
        """
        state = self._detector.prepare(volume)
        last, answer = None, self._run_pass(state)
        while isinstance(answer, ScanState):
            last = answer if answer.pose is not None else last
            answer = self._run_pass(answer)
        if last is None:
            return StageOutputs(answer, None, answer)
        return StageOutputs(last.coarse, last.locate(), answer)

    def _run_pass(self, state: ScanState) -> tuple[Landmark, ...] | ScanState:
        for index in range(state.tiles):
            collect(launch([(state, index)]))
        return self._detector.finish(state)


def with_thresholds(
    model: LoadedModel, thresholds: Sequence[Sequence[float] | None]
) -> LoadedModel:
    """Give a model other presence thresholds, in memory.

    Args:
        model: The model.
        thresholds: Those of its network, and of its second one if it has one, by landmark; None: it
            keeps its own.
    """
    refine = model.refine
    if refine is not None:
        refine = with_thresholds(refine, thresholds[1:])
    if thresholds[0] is None:
        return replace(model, refine=refine)
    landmarks = tuple(
        landmark.model_copy(update={"presence_threshold": threshold})
        for landmark, threshold in zip(model.manifest.landmarks, thresholds[0], strict=True)
    )
    manifest = model.manifest.model_copy(update={"landmarks": landmarks})
    return replace(model, manifest=manifest, refine=refine)
