"""What is freed when: nothing by the garbage collector, where a test says so."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Keep the collector off: what lies in cycles stays, and only the rest is freed."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
