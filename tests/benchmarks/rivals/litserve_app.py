"""The same detector behind LitServe, alone or in batches of whole requests.

``python -m tests.benchmarks.rivals.litserve_app FOLDER PORT BATCH`` serves the model in a folder.
Batches follow its documentation: requests that come within the timeout are computed together.
"""

import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import litserve
import torch
from fastapi import HTTPException, Request

from app.case import Case
from app.detector import Detector
from app.errors import RequestError
from app.landmarks import Landmark
from app.loading import load_checked
from app.volume import Volume, read_volume
from tests.benchmarks.rivals.plain_answer import Answer, answer_of

BATCH_TIMEOUT_S: Final = 0.05
TILES: Final = 16
"""In one forward pass, at most."""

Landmarks = tuple[Landmark, ...]


class OneByOne(litserve.LitAPI):  # type: ignore[misc]
    """One request at a time."""

    def __init__(self, folder: Path, **options: Any) -> None:  # noqa: ANN401 - of LitServe
        """Args: the model folder."""
        super().__init__(**options)
        self._folder = folder

    def setup(self, device: str) -> None:
        """Load the model, in the process that computes."""
        self._detector = Detector(load_checked(self._folder, torch.device(device)))

    def decode_request(self, request: Request) -> Volume:
        """Read the uploaded file; LitServe has made a form of the request, told by this type."""
        try:
            return read_volume(request["volume"].file.read())
        except RequestError as error:
            raise HTTPException(error.status, str(error)) from error

    def predict(self, volume: Volume) -> Landmarks:
        """Find the landmarks."""
        return self._detector.detect(volume).landmarks

    def encode_response(self, found: Landmarks) -> Answer:
        """Write the answer."""
        return answer_of(found)


class Batched(OneByOne):
    """Several requests at a time; tiles of one shape share forward passes."""

    def batch(self, inputs: Sequence[Volume]) -> Sequence[Volume]:
        """Leave volumes as they are: no two need have one shape."""
        return inputs

    def predict(self, volumes: Sequence[Volume]) -> list[Landmarks]:  # type: ignore[override]
        """Find the landmarks of all; the second look of one shares batches with others, too."""
        found: list[Landmarks | Case] = [self._detector.prepare(volume) for volume in volumes]
        while cases := [case for case in found if isinstance(case, Case)]:
            lanes: dict[object, list[tuple[Case, int]]] = defaultdict(list)
            for case in cases:
                lanes[self._detector.lane(case)] += [(case, n) for n in range(len(case.plan))]
            for tiles in lanes.values():
                for first in range(0, len(tiles), TILES):
                    self._detector.run(tiles[first : first + TILES])
            found = [
                self._detector.finish(each) if isinstance(each, Case) else each for each in found
            ]
        return [each for each in found if not isinstance(each, Case)]

    def unbatch(self, output: list[Landmarks]) -> list[Landmarks]:
        """Give each request its own."""
        return output


if __name__ == "__main__":
    words = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    api = (
        Batched(words[0], max_batch_size=words[2], batch_timeout=BATCH_TIMEOUT_S)
        if words[2] > 1
        else OneByOne(words[0])
    )
    litserve.LitServer(api, accelerator="cpu", timeout=600).run(
        host="127.0.0.1", port=words[1], log_level="error", generate_client_file=False
    )
