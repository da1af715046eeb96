"""Fills numba's tables of functions, which takes as long as all other of a forked start."""

from numba.core.registry import cpu_target

cpu_target.target_context.refresh()
