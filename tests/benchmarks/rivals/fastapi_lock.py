"""The plain way to serve: FastAPI, a multipart upload, and a lock around the detector.

``python -m tests.benchmarks.rivals.fastapi_lock FOLDER PORT DEVICE`` serves the model in a
folder. Steps and results are ours; only the serving differs.
"""

import sys
import threading
from pathlib import Path

import torch
import uvicorn
from fastapi import FastAPI, HTTPException, UploadFile

from app.errors import RequestError
from app.inference.detector import Detector
from app.inference.load import load_checked
from app.io.volume import read_volume
from tests.benchmarks.rivals.plain_answer import Answer, answer_of


def make_app(folder: Path, device: torch.device) -> FastAPI:
    """Make the application."""
    detector = Detector(load_checked(folder, device, "auto"))
    lock = threading.Lock()
    app = FastAPI()

    # Not async: FastAPI runs it in a thread, so uploads go on while the detector works.
    @app.post("/predict")
    def find(volume: UploadFile) -> Answer:
        try:
            scan = read_volume(volume.file.read())
        except RequestError as error:
            raise HTTPException(error.status, str(error)) from error
        with lock:
            return answer_of(detector.detect(scan).landmarks)

    @app.get("/health")
    async def health() -> str:
        return "ok"

    return app


if __name__ == "__main__":
    app = make_app(Path(sys.argv[1]), torch.device(sys.argv[3]))
    uvicorn.run(app, port=int(sys.argv[2]), log_level="error", access_log=False)
