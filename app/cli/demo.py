"""ready service -> proof: a generated scan goes in, and its known landmarks come out."""

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
"""A phantom without its ring, to show that what is absent is said to be absent."""
READY_TIMEOUT_S: Final = 120.0
POLL_S: Final = 0.2


def start_demo(url: str, console: Console) -> threading.Thread:
    """Show, beside the service that is starting, that it works; the service goes on afterwards.

    Args:
        url: Where the service will answer.
        console: Where to print.

    Returns:
        The thread that does it.
    """
    thread = threading.Thread(target=_demo, args=(url, console), name="demo", daemon=True)
    thread.start()
    return thread


def _demo(url: str, console: Console) -> None:
    with Client(url) as client:
        try:
            _wait_until_ready(client)
            phantom = make_phantom(SEED)
            answer = client.detect(scan_bytes(phantom), model=MODEL)
        except (ProblemError, Unreachable, TimeoutError) as error:
            console.print(f"[red]The phantom scan was not answered: {error}[/red]")
            return
        console.print(landmark_table(answer, phantom))
        console.print(f"Service at {url} with these models:")
        for model in client.models().models:
            console.print(f"  {model.name}: {model.status}. {model.description or ''}")
    console.print(
        f"\nNext, a scan of your own: drop it on {url}/, or\n"
        f"  curl --data-binary @scan.nii.gz '{url}/v1/landmarks?model=mouse-skull'\n"
        f"All calls: {url}/docs. Stop with Ctrl-C.",
        highlight=False,
        soft_wrap=True,
    )


def _wait_until_ready(client: Client) -> None:
    give_up = time.monotonic() + READY_TIMEOUT_S
    reason = "no answer"
    while time.monotonic() < give_up:
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
    """Set what was found beside what is true.

    Args:
        answer: Of the service, for the phantom.
        phantom: With its true landmarks.

    Returns:
        One row per landmark, with the error in mm.
    """
    took = f"{answer.timing_ms.total:.0f} ms"
    table = Table(title=f"A generated scan, answered by {answer.model.name} in {took}")
    for heading in ("landmark", "status", "x mm", "y mm", "z mm", "error mm"):
        table.add_column(heading, justify="left" if heading in ("landmark", "status") else "right")
    truth = dict(zip(phantom.names, phantom.points, strict=True))
    for landmark in answer.landmarks:
        true = truth[landmark.name]
        if landmark.ras_mm is None:
            verdict = "truly absent" if np.isnan(true).any() else "missed"
            table.add_row(landmark.name, landmark.status, "", "", "", verdict)
            continue
        error = float(np.linalg.norm(np.asarray(landmark.ras_mm) - true))
        verdict = f"{error:.2f}" if np.isfinite(error) else "is absent"
        place = [f"{mm:.2f}" for mm in landmark.ras_mm]
        table.add_row(landmark.name, landmark.status, *place, verdict)
    return table
