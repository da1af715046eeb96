"""The same detector behind LitServe, alone or in batches of whole requests.

``python -m tests.benchmarks.rivals.litserve_app FOLDER PORT DEVICE BATCH`` serves the model in a
folder. Batches follow its documentation: requests that come within the timeout are computed
together.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import litserve
import torch
from fastapi import HTTPException, Request

from app.errors import RequestError
from app.inference.detector import Detector
from app.inference.load import load_checked
from app.io.volume import Volume, read_volume
from tests.benchmarks.rivals.plain_answer import Answer, answer_of
from tests.benchmarks.rivals.tile_batches import Landmarks, find_together

BATCH_TIMEOUT_S: Final = 0.05


class OneByOne(litserve.LitAPI):  # type: ignore[misc]
    """One request at a time."""

    def __init__(self, folder: Path, **options: Any) -> None:
        """Args: the model folder."""
        super().__init__(**options)
        self._folder = folder

    def setup(self, device: str) -> None:
        """Load the model, in the process that computes."""
        self._detector = Detector(load_checked(self._folder, torch.device(device), "auto"))

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
        """Find the landmarks of all."""
        return find_together(self._detector, volumes)

    def unbatch(self, output: list[Landmarks]) -> list[Landmarks]:
        """Give each request its own."""
        return output


if __name__ == "__main__":
    folder, port, device, batch = sys.argv[1:]
    api = (
        Batched(Path(folder), max_batch_size=int(batch), batch_timeout=BATCH_TIMEOUT_S)
        if int(batch) > 1
        else OneByOne(Path(folder))
    )
    litserve.LitServer(api, accelerator=device, devices=1, timeout=600).run(
        host="127.0.0.1", port=int(port), log_level="error", generate_client_file=False
    )
