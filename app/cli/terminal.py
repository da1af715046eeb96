"""What the command says on standard error, beside its answers."""

from typing import NoReturn

from rich.console import Console

from app.errors import show_controls

console = Console(stderr=True)


def fail(message: str) -> NoReturn:
    """Print an error and exit with status 1."""
    print_error(message)
    raise SystemExit(1)


def describe_fault(error: OSError) -> str:
    """Say which file or folder cannot be used, and why."""
    if error.filename is None:
        return str(error)
    return f"cannot read or write {error.filename}: {error.strerror}"


def print_error(message: str) -> None:
    """Print an error."""
    _print(message, "red")


def print_warning(message: str) -> None:
    """Print a warning."""
    _print(message, "yellow")


def _print(message: str, style: str) -> None:
    # A message may hold a file name, which must not be taken for markup, or words of a model.
    text = show_controls(message, kept="\n")
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)
