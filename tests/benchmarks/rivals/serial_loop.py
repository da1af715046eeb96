"""files -> answers, one after the other: the same steps without any serving."""

import json
from collections.abc import Sequence

from app.inference.detector import Detector
from app.io.volume import read_volume
from tests.benchmarks.rivals.plain_answer import answer_of


def find_all(detector: Detector, contents: Sequence[bytes]) -> list[bytes]:
    """Find the landmarks of every file."""
    return [
        json.dumps(answer_of(detector.detect(read_volume(content)).landmarks)).encode()
        for content in contents
    ]
