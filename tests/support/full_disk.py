"""A limit on the size of files, which stands for a full disk: the system refuses to write more."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def limited_files(max_bytes: int) -> Iterator[None]:
    """Let this process write no file of more bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
