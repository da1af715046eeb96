"""The demo: sends a generated scan to the service and compares the answer with its landmarks."""

import threading
import time
from typing import Final

import numpy as np
from rich.console import Console
from rich.table import Table

from app.cli.client import Client, ProblemError, Unreachable
from app.io import LandmarksAnswer
from app.phantom import Phantom, make_phantom, scan_bytes

MODEL: Final = "phantom"
SEED: Final = 6
"""A phantom without its ring, to show that absent landmarks are reported as absent."""

READY_TIMEOUT_S: Final = 120.0
POLL_S: Final = 0.2


def start_demo(url: str, console: Console) -> threading.Thread:
    """Start the demo in a thread, beside the service that is starting at a URL."""
    thread = threading.Thread(target=_demo, args=(url, console), name="demo", daemon=True)
    thread.start()
    return thread


def _demo(url: str, console: Console) -> None:
    with Client(url) as client:
        try:
            _wait_until_ready(client)
            models = client.models().models
            phantom = make_phantom(SEED)
            answer = client.detect(scan_bytes(phantom), model=MODEL)
        except (ProblemError, Unreachable, TimeoutError) as error:
            console.print(
                f"The generated scan was not answered: {error}", style="red", markup=False
            )
            return
    console.print(landmark_table(answer, phantom))
    console.print(f"Service at {url} with these models:")
    for model in models:
        console.print(f"  {model.name}: {model.status}. {model.description or ''}")
    console.print(
        f"\nTo try a scan of your own, drop it on {url}/, or send it:\n"
        f"  curl --data-binary @scan.nii.gz '{url}/v1/landmarks?model=mouse-skull'\n"
        f"API documentation: {url}/docs. Stop with Ctrl-C.",
        highlight=False,
        soft_wrap=True,
    )


def _wait_until_ready(client: Client) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    reason = "no answer"
    while time.monotonic() < deadline:
        try:
            readiness = client.readiness()
        except Unreachable:
            pass
        else:
            if readiness.ready:
                return
            reason = readiness.reason
        time.sleep(POLL_S)
    raise TimeoutError(f"expected the service to be ready in {READY_TIMEOUT_S:g} s, got: {reason}")


def landmark_table(answer: LandmarksAnswer, phantom: Phantom) -> Table:
    """Compare the answer for a phantom with its landmarks: a row each, with the error in mm."""
    duration = f"{answer.timing_ms.total:.0f} ms"
    table = Table(title=f"A generated scan, answered by {answer.model.name} in {duration}")
    for heading in ("landmark", "status", "x mm", "y mm", "z mm", "error mm"):
        table.add_column(heading, justify="left" if heading in ("landmark", "status") else "right")
    truth = dict(zip(phantom.names, phantom.points, strict=True))
    for landmark in answer.landmarks:
        true = truth[landmark.name]
        if landmark.ras_mm is None:
            comparison = "truly absent" if np.isnan(true).any() else "missed"
            table.add_row(landmark.name, landmark.status, "", "", "", comparison)
            continue
        error = float(np.linalg.norm(np.asarray(landmark.ras_mm) - true))
        comparison = f"{error:.2f}" if np.isfinite(error) else "is absent"
        position = [f"{mm:.2f}" for mm in landmark.ras_mm]
        table.add_row(landmark.name, landmark.status, *position, comparison)
    return table
