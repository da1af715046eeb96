"""landmarks -> what rivals answer: names and places, as in our own answers."""

from collections.abc import Sequence

from app.voting.landmarks import Landmark

Answer = dict[str, list[dict[str, object]]]


def answer_of(landmarks: Sequence[Landmark]) -> Answer:
    """Say where landmarks are, in mm, RAS; null where they are not."""
    return {
        "landmarks": [
            {"name": mark.name, "ras_mm": None if mark.ras_mm is None else mark.ras_mm.tolist()}
            for mark in landmarks
        ]
    }
