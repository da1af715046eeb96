"""Fills numba's tables of functions when it is imported: half of what a fork would do to start."""

from numba.core.registry import cpu_target

cpu_target.target_context.refresh()
