"""Numbers in words and tables: with as many decimals as show something of small ones, too."""

import math
from typing import Final

MOST_DECIMALS: Final = 9
"""Of a length in mm, a picometre: what is less is rounding, as of a deviation of equal errors."""


def decimals_of(value: float, least: int = 3) -> int:
    """Return with how many decimals a number is written, which may be infinite or NaN.

    At least so many, and as many as show as many digits of it: lengths in mm in scans with voxels
    of a micrometre would be 0.000.
    """
    if not math.isfinite(value) or value == 0.0:
        return least
    return min(max(least, least - 1 - math.floor(math.log10(abs(value)))), MOST_DECIMALS)


def format_number(value: float, least: int = 3) -> str:
    """Write a number with ``decimals_of`` it."""
    return f"{value:.{decimals_of(value, least)}f}"
