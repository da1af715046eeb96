"""Ours on Ray, by ``python -m tests.benchmarks.ray_replicas FOLDER PORT DEVICE REPLICAS``.

One machine, no dashboard, no word to anyone; ends, with all of Ray, at SIGTERM. Model and device
are in the settings, as for ours without Ray. ``TMPDIR`` says where Ray keeps its files.
"""

import os
import secrets
import signal
import sys
from pathlib import Path


def main() -> None:
    """Serve until told to stop."""
    port, replicas = int(sys.argv[2]), int(sys.argv[4])
    keep_to(Path(os.environ["TMPDIR"]))
    import ray  # noqa: PLC0415 - it reads the variables now
    from ray import serve  # noqa: PLC0415

    from app.server.ray_serve import NAME, Scale, application  # noqa: PLC0415

    stops = {signal.SIGTERM, signal.SIGINT}
    # Before Ray starts threads, so that they leave them to us.
    signal.pthread_sigmask(signal.SIG_BLOCK, stops)
    ray.init("local", num_cpus=replicas, include_dashboard=False, object_store_memory=100 << 20)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(application(Scale(min_replicas=replicas, max_replicas=replicas)), name=NAME)
        signal.sigwait(stops)
        # Without this, the proxy goes first, and with it the connections of who waits.
        serve.delete(NAME)
        serve.shutdown()
    finally:
        ray.shutdown()


def keep_to(folder: Path) -> None:
    """Let Ray write into a folder only: what it would put into the home folder is a token."""
    token = folder / "token"
    token.write_text(secrets.token_hex(32))
    os.environ |= {
        "RAY_TMPDIR": str(folder),
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_USAGE_STATS_ENABLED": "0",
        # Ray's processes would yield to whatever else this machine does, our clients included.
        "RAY_worker_niceness": "0",
    }


if __name__ == "__main__":
    main()
