"""The bars of landmarkd: what it is measured against, and by how much it must be better.

``python -m tests.benchmarks`` measures them all, ``python -m tests.benchmarks V1 V4`` some.
"""

import app

# Before torch, whose threads it sets up: else what is measured in this process would be slower.
__all__ = ["app"]
