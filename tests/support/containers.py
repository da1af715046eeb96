"""The service in a container, as docker-compose.yml starts it from the image ``landmarkd:cpu``."""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from tempfile import NamedTemporaryFile
from typing import IO, Final

from app.settings import PREFIX
from tests.benchmarks.servers import free_port
from tests.support.documents import ROOT

DOCKER: Final = os.environ.get("DOCKER", "docker")
IMAGE: Final = "landmarkd:cpu"
SERVICE: Final = "landmarkd"


def docker(*arguments: str) -> str:
    """Run a command of Docker; return what it prints, without the last newline."""
    return _run([DOCKER, *arguments], None)


def compose(*arguments: str, **environment: str) -> str:
    """Run a command of Docker Compose beside docker-compose.yml, with no settings but these."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    # In the place of the file .env of whoever runs the tests.
    with NamedTemporaryFile() as empty:
        command = [*_compose_command(), "--env-file", empty.name, *arguments]
        return _run(command, own | environment)


@cache
def _compose_command() -> tuple[str, ...]:
    plugin = subprocess.run([DOCKER, "compose", "version"], check=False, capture_output=True)
    if plugin.returncode == 0:
        return DOCKER, "compose"
    program = shutil.which("docker-compose")
    assert program, f"expected Docker Compose as {DOCKER} compose or docker-compose, got neither"
    return (program,)


def _run(command: list[str], environment: dict[str, str] | None) -> str:
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, cwd=ROOT, env=environment
    )
    assert done.returncode == 0, f"{command}: {done.stderr or done.stdout}"
    return done.stdout.rstrip("\n")


class ServiceContainer:
    """A container of the service; a context manager, after which it is removed.

    Attributes:
        id: The container's.
        url: Where its port is published, on 127.0.0.1.
    """

    def __init__(self, **environment: str) -> None:
        """Start it; wait until Docker finds it healthy and its models are loaded.

        Args:
            environment: What docker-compose.yml takes from the environment.
        """
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._environment = {"PORT": str(port), "COMPOSE_PROJECT_NAME": f"landmarkd-{port}"}
        self._environment |= environment
        try:
            self._start()
        except BaseException:
            self._remove()
            raise

    def _start(self, *options: str) -> None:
        start = str(int(time.time()))
        self._compose("up", "--detach", "--no-build", *options, SERVICE)
        self.id = self._compose("ps", "--quiet", SERVICE)
        events = ["events", "--since", start, "--filter", f"container={self.id}"]
        self._wait_for_line("health_status: healthy", *events, "--format", "{{.Action}}")
        self._wait_for_line('"message": "started"', "logs", "--follow", self.id)

    def __enter__(self) -> "ServiceContainer":
        """Return it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Remove it."""
        self._remove()

    def _remove(self) -> None:
        self._compose("down", "--volumes", "--timeout", "0")

    def _compose(self, *arguments: str) -> str:
        return compose(*arguments, **self._environment)

    def _wait_for_line(self, expected: str, *command: str) -> None:
        """Read what a command of Docker prints as things happen, until a line says so."""
        with _reading(command) as lines:
            for line in lines:
                if expected in line:
                    return
                # The action when it ends; the log then ends, too.
                assert line.strip() != "die", docker("logs", self.id)
        raise AssertionError(f"expected {expected}, got {docker('logs', self.id)}")

    def execute(self, *command: str, user: str = "") -> "subprocess.CompletedProcess[str]":
        """Run a command in the container, as the service's user or another."""
        options = ["--user", user] if user else []
        return subprocess.run(
            [DOCKER, "exec", *options, self.id, *command],
            check=False,
            capture_output=True,
            text=True,
        )

    def read(self, *paths: str) -> str:
        """Read the first of some files that exists in the container."""
        return self.execute("sh", "-c", " || ".join(f"cat {path}" for path in paths)).stdout

    def inspect(self, field: str) -> object:
        """Ask Docker for a field of the container, such as ``State.ExitCode``."""
        value: object = json.loads(docker("inspect", "--format", f"{{{{json .{field}}}}}", self.id))
        return value

    def replace(self) -> None:
        """Have Compose put another container in its place, as for a new image; its volume stays."""
        self._start("--force-recreate")

    def stop(self) -> None:
        """Stop it by SIGTERM, as ``docker compose stop`` does, and wait for its end."""
        self._compose("stop", SERVICE)


@contextmanager
def _reading(arguments: tuple[str, ...]) -> Iterator[IO[str]]:
    process = subprocess.Popen(
        [DOCKER, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    try:
        yield process.stdout
    finally:
        process.terminate()
        process.communicate()
