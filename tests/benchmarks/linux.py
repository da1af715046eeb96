"""/proc -> memory and CPU time of processes."""

import os
import sys
from pathlib import Path
from typing import Final

PROC: Final = Path("/proc")


def available_bytes() -> int:
    """Say how much memory this machine could still give."""
    return _kib_of(PROC / "meminfo", "MemAvailable")


def resident_bytes(process: int | None = None, *, peak: bool = False) -> int:
    """Say how much memory a process, or this one, holds or ever held at once."""
    return _kib_of(PROC / str(process or "self") / "status", "VmHWM" if peak else "VmRSS")


def forget_peak(process: int) -> None:
    """Let the peak of a process be counted anew from what it holds now."""
    (PROC / str(process) / "clear_refs").write_text("5")


def family_of(process: int) -> list[int]:
    """List a process and its children and theirs."""
    family = [process]
    for number in family:
        for children in (PROC / str(number) / "task").glob("*/children"):
            family += [int(word) for word in children.read_text().split()]
    return family


def is_running(process: int) -> bool:
    """Say whether a process is there and has not ended, whoever may have yet to ask how."""
    try:
        stat = (PROC / str(process) / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(") ")[2][0] not in "ZX"


def bind(process: int, core: int) -> None:
    """Keep a process, with all threads that it has and will have, on one core."""
    for task in (PROC / str(process) / "task").iterdir():
        os.sched_setaffinity(int(task.name), {core})


def title_of(process: int) -> str:
    """Read what a process calls itself, at first its command line."""
    return (PROC / str(process) / "cmdline").read_bytes().replace(b"\0", b" ").decode()


def cpu_s(process: int) -> float:
    """Sum the CPU time of a process and its children so far; clock ticks would be too coarse."""
    files = [
        file
        for member in family_of(process)
        for file in (PROC / str(member) / "task").glob("*/schedstat")
    ]
    return sum(int(file.read_text().split()[0]) for file in files) / 1e9


def _kib_of(file: Path, key: str) -> int:
    for line in file.read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) << 10
    raise OSError(f"expected {key} in {file}, which Linux has, got none on {sys.platform}")
