"""An answer as a person corrected it -> the same, checked, and measured again."""

from codecs import BOM_UTF8
from typing import Final

import numpy as np
from pydantic import ValidationError
from pydantic_core import from_json

from app.api.problems import quote
from app.engine import Engine
from app.errors import BadParameter
from app.geometry import LPS_FROM_RAS, transform
from app.inference import measure_answer
from app.io import Content, LandmarkAnswer, LandmarksAnswer

MAX_ANSWER_BYTES: Final = 4 << 20
"""Of an answer; one of 256 landmarks with candidates takes 1 MB."""

MAX_PARTS: Final = 1 << 16
"""Lists, objects and fields of an answer; one of 256 landmarks with 16 candidates each has 50,000.
Each becomes a Python object while no other thread can run."""

CORRECTIONS_BYTES: Final = 64 << 20
"""What an answer of that size takes while it is read, checked and written in another format."""

TOLERANCE_MM: Final = 1e-3
"""Between positions in different frames; far below what anybody can place."""


def read_corrections(content: Content, engine: Engine) -> LandmarksAnswer:
    """Read an answer of ``POST /v1/landmarks``, check it, and measure again what was corrected.

    Returns:
        The answer. Its measurements are left out, with a warning, if its model is not loaded.

    Raises:
        BadParameter: It is no answer, the frames of a position disagree, or a status and its
            position do.
    """
    text = bytes(content)
    if (got := sum(text.count(mark) for mark in (b"[", b"{", b":"))) > MAX_PARTS:
        raise BadParameter(
            f"expected an answer of POST /v1/landmarks, with at most {MAX_PARTS:,} lists, objects "
            f"and fields, got {got:,}"
        )
    try:
        # In two steps: each error of the second refers to its part, and would else copy it.
        answer = LandmarksAnswer.model_validate(from_json(text.removeprefix(BOM_UTF8)))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = quote(".".join(map(str, first["loc"])))
        raise BadParameter(
            f"expected an answer of POST /v1/landmarks, got JSON with {error.error_count()} "
            f"errors, the first one in {where}: {first['msg']}"
        ) from error
    except ValueError:
        raise BadParameter("expected an answer of POST /v1/landmarks, got no JSON") from None
    affine = np.array((*answer.volume.affine,), dtype=np.float64)
    for landmark in answer.landmarks:
        _check_position(landmark, affine)
    if not any(landmark.decided_by == "person" for landmark in answer.landmarks):
        return answer
    loaded = engine.registry.models.values()
    model = next((one for one in loaded if one.digest == answer.model.digest), None)
    if model is not None:
        measured = measure_answer(answer.landmarks, model.manifest.measurements)
        return answer.model_copy(update={"measurements": measured})
    if not answer.measurements:
        return answer
    warning = (
        f"The measurements are left out, because the model that names them, {answer.model.name} "
        f"{answer.model.version}, is not loaded any more."
    )
    changes = {"measurements": [], "warnings": [*answer.warnings, warning]}
    return answer.model_copy(update=changes)


def _check_position(landmark: LandmarkAnswer, affine: np.ndarray) -> None:
    place = f"landmark {landmark.name!r}"
    if landmark.ijk is None or landmark.ras_mm is None or landmark.lps_mm is None:
        found = landmark.status in {"detected", "low_confidence"}
        if found or {landmark.ijk, landmark.ras_mm, landmark.lps_mm} != {None}:
            raise BadParameter(
                f"{place}: expected ijk, ras_mm and lps_mm, or none of them and status not_found; "
                f"got status {landmark.status} and a null"
            )
        return
    if landmark.status in {"not_found", "out_of_field"}:
        raise BadParameter(f"{place}: expected no position, as it is {landmark.status}; got one")
    ras = transform(affine, np.array(landmark.ijk))
    lps = transform(LPS_FROM_RAS, np.array(landmark.ras_mm))
    for name, expected, got in (("ras_mm", ras, landmark.ras_mm), ("lps_mm", lps, landmark.lps_mm)):
        if not np.abs(expected - np.array(got)).max() <= TOLERANCE_MM:
            numbers = ", ".join(f"{mm:.4f}" for mm in expected)
            raise BadParameter(f"{place}: expected {name} {numbers}; got {list(got)}")
