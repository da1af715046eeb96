"""Ours with a network that misbehaves on command: ``python -m tests.benchmarks.chaos.service``."""

from app.server.process import serve
from tests.support.faulty_network import install

if __name__ == "__main__":
    install()
    raise SystemExit(serve())
