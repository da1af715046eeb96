"""Follow one upload through the packages: which borders it crosses, and how often it turns back.

    python -m tests.support.package_walk SCAN.nii.gz --model NAME

A border is crossed where a function of one package calls one of another, and where the caller goes
on to the next; the same call made again, for another tile or landmark, counts once. A turn is a
change of direction, down towards the data or up towards the client. Making a value of a dataclass
is no call, and what all packages speak (errors, settings, geometry, compute) is passed over.
"""

import argparse
import asyncio
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Final

import typer
from fastapi.testclient import TestClient

from app.api.app import create_app
from app.settings import Settings

ORDER: Final = (
    "io", "shapes", "model", "preprocessing", "voting", "inference", "engine", "jobs", "api",
    "server", "cli",
)  # fmt: skip
"""From below, as the contract of layers in pyproject.toml has them."""


def package_of(module: str) -> str | None:
    """Name the package of a module; None for what is passed over."""
    top, _, rest = module.partition(".")
    name = rest.partition(".")[0]
    return name if top == "app" and name in ORDER else None


class Walk:
    """Records calls from one package into another, in the order in which they happen.

    Attributes:
        recording: Whether calls count now.
        visited: The packages, one after the other.
    """

    def __init__(self, package_of: Callable[[str], str | None] = package_of) -> None:
        """Begin with nothing; ``package_of`` names the package of a module."""
        self.recording = False
        self.visited: list[str] = []
        self._package_of = package_of
        self._calls: set[tuple[CodeType | None, CodeType]] = set()

    def profile(self, frame: FrameType, event: str, _argument: object) -> None:
        """Note a call; see ``sys.setprofile``."""
        if not self.recording or event != "call" or frame.f_code.co_filename == "<string>":
            return
        package = self._package(frame)
        if package is None:
            return
        caller = frame.f_back
        while caller is not None and self._package(caller) is None:
            caller = caller.f_back
        call = (caller.f_code if caller else None, frame.f_code)
        if call in self._calls:
            return
        self._calls.add(call)
        for name in (self._package(caller) if caller else package, package):
            if name is not None and (not self.visited or self.visited[-1] != name):
                self.visited.append(name)

    def _package(self, frame: FrameType) -> str | None:
        return self._package_of(frame.f_globals.get("__name__", ""))


def count_turns(visited: Sequence[str]) -> int:
    """Count the changes of direction on a way through the packages."""
    upwards = [ORDER.index(b) > ORDER.index(a) for a, b in pairwise(visited)]
    return sum(a != b for a, b in pairwise(upwards))


def follow_upload(scan: Path, model: str, models: Path, walk: Walk) -> None:
    """Have a service answer a scan twice, and record the second time, on all threads.

    Args:
        scan: A NIfTI file.
        model: Name of the model that is asked.
        models: The models folder.
        walk: Records it.
    """
    threading.setprofile(walk.profile)
    sys.setprofile(walk.profile)
    app = create_app(Settings(models_dir=models, device="cpu"))

    async def loaded() -> None:
        await asyncio.shield(app.state.starting)

    with TestClient(app, base_url="http://localhost") as client:
        assert client.portal is not None
        client.portal.call(loaded)
        for recording in (False, True):
            walk.recording = recording
            url = f"/v1/landmarks?model={model}"
            answer = client.post(url, content=scan.read_bytes())
            walk.recording = False
            answer.raise_for_status()
    threading.setprofile(None)
    sys.setprofile(None)


def main() -> None:
    """Print the figures of one upload."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scan", type=Path)
    parser.add_argument("--model", default="mouse-skull")
    parser.add_argument("--models", type=Path, default=Path("models"))
    arguments = parser.parse_args()
    walk = Walk()
    follow_upload(arguments.scan, arguments.model, arguments.models, walk)
    borders = Counter(pairwise(walk.visited))
    typer.echo(f"{len(set(walk.visited))} of {len(ORDER)} packages")
    typer.echo(f"{sum(borders.values())} borders crossed, {count_turns(walk.visited)} turns")
    for (source, target), count in borders.most_common():
        typer.echo(f"{count:5} {source} -> {target}")


if __name__ == "__main__":
    main()
