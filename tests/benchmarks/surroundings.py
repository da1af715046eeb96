"""this machine and checkout -> Surroundings: what a figure is worth nothing without."""

import os
import platform
import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

import torch

ROOT: Final = Path(__file__).resolve().parents[2]
RESULTS: Final = "tests/benchmarks/results"


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Where and with what figures were measured.

    Attributes:
        date: UTC day.
        commit: Of the checkout.
        dirty: Whether files differ from that commit, results aside.
        device: Name of the CPU, and of the CUDA device if there is one.
        cores: CPUs this process may use.
        torch_threads: Threads of torch.
        python: Version, as all below; ``none`` where it is not installed.
    """

    date: str
    commit: str
    dirty: bool
    device: str
    cores: int
    torch_threads: int
    python: str
    torch: str
    numpy: str
    triton: str
    tensorflow: str
    fastapi: str
    litserve: str
    bentoml: str
    ray: str


def look_around() -> Surroundings:
    """Describe this machine and this checkout."""
    return Surroundings(
        date=datetime.now(UTC).date().isoformat(),
        commit=_git("rev-parse", "--short=12", "HEAD") or "none",
        dirty=bool(_git("status", "--porcelain", "--", ".", f":!{RESULTS}")),
        device=_device(),
        cores=len(os.sched_getaffinity(0)),
        torch_threads=torch.get_num_threads(),
        python=platform.python_version(),
        torch=version("torch"),
        numpy=version("numpy"),
        triton=_version("triton"),
        tensorflow=_version("tensorflow", "tensorflow-cpu"),
        fastapi=version("fastapi"),
        litserve=_version("litserve"),
        bentoml=_version("bentoml"),
        ray=_version("ray"),
    )


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def _device() -> str:
    names = [platform.processor() or platform.machine()]
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
        names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")][:1]
    if torch.cuda.is_available():
        names.append(torch.cuda.get_device_name())
    return " + ".join(names)


def _version(*packages: str) -> str:
    for package in packages:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return "none"
