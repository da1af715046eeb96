"""names of bars -> a table, and a CSV file each: the command ``python -m tests.benchmarks``.

Ends with 0 even where a bar is missed, because it reports; with 1 where two sides that are to be
compared do not compute the same.
"""

import argparse
import signal
import sys
from pathlib import Path

from rich.console import Console

from tests.benchmarks.bars import BARS
from tests.benchmarks.harness import DisagreementError, Row, Run, measure_bar
from tests.benchmarks.report import table_of, write_csv
from tests.benchmarks.surroundings import RESULTS, ROOT, look_around


def main(words: list[str] | None = None) -> int:
    """Measure bars, print the table and write the files.

    Args:
        words: The command's words; None: those of the process.

    Returns:
        Exit code.
    """
    options = _parse(words)
    # In a file or a pipe rich would take 80 columns, which break every cell.
    console = Console(width=None if sys.stdout.isatty() else 120)
    progress = Console(stderr=True)
    surroundings = look_around()
    rows: dict[str, list[Row]] = {}
    for name in options.bars or BARS:
        progress.print(f"[dim]{name} ...[/dim]")
        try:
            rows[name] = list(measure_bar(BARS[name], Run(options.fast, options.minutes)))
        except DisagreementError as error:
            progress.print(f"[red]{name}: the two sides differ. {error}[/red]", soft_wrap=True)
            return 1
        if options.results is not None:
            options.results.mkdir(parents=True, exist_ok=True)
            write_csv(options.results / f"{name}.csv", rows[name], surroundings)
    console.print(table_of(rows))
    console.print(f"{surroundings.device}, {surroundings.torch_threads} threads", highlight=False)
    return 0


def _parse(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks", description="Measure the bars."
    )
    parser.add_argument("bars", nargs="*", help=f"of {', '.join(BARS)}; none: all of them")
    parser.add_argument("--fast", action="store_true", help="small and rough: shows that it works")
    parser.add_argument(
        "--minutes",
        type=float,
        default=10.0,
        help="of chaos and learning curves; with --fast: less",
    )
    parser.add_argument(
        "--results", type=Path, help=f"folder for CSV files; without --fast: {RESULTS}"
    )
    options = parser.parse_args(words)
    unknown = [name for name in options.bars if name not in BARS]
    if unknown:
        parser.error(f"expected bars of {', '.join(BARS)}, got {', '.join(unknown)}")
    if options.results is None and not options.fast:
        options.results = ROOT / RESULTS
    return options


if __name__ == "__main__":
    # As an exception, so that servers under measurement end with us.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    raise SystemExit(main())
