"""The same detector behind BentoML, alone or with its adaptive batching.

``python -m tests.benchmarks.rivals.bentoml_app FOLDER PORT DEVICE BATCH`` serves the model in a
folder, as ``bentoml serve`` does: one worker with one thread that computes. Alone it gets the raw
body, which BentoML hands over as a file ("root input" in its documentation). Batching takes lists
only, which BentoML joins and cuts as they are, so no two scans need have one shape; but it reads
files in lists from forms only, so a request is a form of one file and its answer a list of one.
"""

import os
import sys
from http import HTTPStatus
from pathlib import Path
from typing import Final

import bentoml
import torch
from bentoml.exceptions import BentoMLException

from app.errors import RequestError
from app.inference.detector import Detector
from app.inference.load import load_checked
from app.io.volume import Volume, read_volume
from tests.benchmarks.rivals.plain_answer import Answer, answer_of
from tests.benchmarks.rivals.tile_batches import find_together

BATCH: Final = 8
TIMEOUT_S: Final = 600

FOLDER: Final = "BENCHMARKS_FOLDER"
DEVICE: Final = "BENCHMARKS_DEVICE"
"""Variables, because BentoML's workers are processes that get no words from us."""

SERVING: Final = {
    "workers": 1,
    "threads": 1,
    "traffic": {"timeout": TIMEOUT_S},
    "logging": {"access": {"enabled": False}},
}


@bentoml.service(**SERVING)
class OneByOne:
    """One request at a time."""

    def __init__(self) -> None:
        """Load the model, in the process that computes."""
        self._detector = load_detector()

    @bentoml.api  # type: ignore[untyped-decorator]
    def predict(self, volume: Path, /) -> Answer:
        """Find the landmarks."""
        return answer_of(self._detector.detect(read(volume)).landmarks)


@bentoml.service(**SERVING)
class Batched:
    """Several requests at a time; tiles of one shape share forward passes."""

    def __init__(self) -> None:
        """Load the model, in the process that computes."""
        self._detector = load_detector()

    @bentoml.api(batchable=True, max_batch_size=BATCH, max_latency_ms=1000 * TIMEOUT_S)  # type: ignore[untyped-decorator]
    def predict(self, volumes: list[Path]) -> list[Answer]:
        """Find the landmarks of all."""
        found = find_together(self._detector, [read(volume) for volume in volumes])
        return [answer_of(landmarks) for landmarks in found]


def load_detector() -> Detector:
    """Load the model that was asked for."""
    return Detector(
        load_checked(Path(os.environ[FOLDER]), torch.device(os.environ[DEVICE]), "auto")
    )


def read(path: Path) -> Volume:
    """Read an uploaded file."""
    try:
        return read_volume(path.read_bytes())
    except RequestError as error:
        raise BentoMLException(str(error), error_code=HTTPStatus(error.status)) from error


if __name__ == "__main__":
    folder, port, device, batch = sys.argv[1:]
    target = f"tests.benchmarks.rivals.bentoml_app:{'Batched' if int(batch) > 1 else 'OneByOne'}"
    words = ["-m", "bentoml", "serve", target, "--host", "127.0.0.1", "--port", port]
    chosen = {FOLDER: folder, DEVICE: device, "BENTOML_DO_NOT_TRACK": "True"}
    os.execve(sys.executable, [sys.executable, *words], os.environ | chosen)  # noqa: S606
