"""Ours with a network that misbehaves on command: ``python -m tests.benchmarks.chaos.service``."""

import sys

from app.cli.main import main
from tests.support.faulty_network import install

if __name__ == "__main__":
    install()
    sys.argv[1:] = ["serve"]
    main()
