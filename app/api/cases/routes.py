"""``/v1/cases``: scans that are kept with their corrected landmarks, if the service has a store."""

import math
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Final, cast

import numpy as np
from fastapi import APIRouter, Depends, Path, Query, Request, Response
from pydantic import BaseModel, Field

from app.api.cases.store import CaseStore, Keeper
from app.api.corrections import CORRECTIONS_BYTES, MAX_ANSWER_BYTES, read_corrections
from app.api.dependencies import (
    CallDep,
    KeyDep,
    SelectionQuery,
    SharedDep,
    TimeLimit,
    hash_key,
    name_key,
    request_timeout_s,
    require_api_key,
)
from app.api.openapi import CASE_BODY, problems
from app.api.upload.kinds import CASE
from app.api.upload.receive import cancel_on_disconnect, read_upload
from app.engine import Engine
from app.errors import BadParameter, NotConfigured, TooLarge
from app.geometry import is_inside
from app.io import (
    SEARCH_BYTES,
    CaseAnswer,
    CasesAnswer,
    Content,
    LandmarksAnswer,
    Selection,
    Volume,
    VolumeLimits,
    check_header,
    check_start,
    is_dicom,
    pack_scan,
    read_volume,
    write_case,
)

ID_DIGITS: Final = 32
"""Of a scan's digest, hex: 128 bits."""

KEEP_BYTES: Final = 24
"""Per voxel of a scan that is kept: as stored, scaled to 8 bytes, written and packed."""

BASE_BYTES: Final = 1 << 20
"""Of any request."""

AFFINE_MM: Final = 1e-6
"""Between an affine and itself as JSON."""

MAX_LISTED: Final = 100
"""Cases, each read from a file of some 10 KB."""

cases_router: Final = APIRouter(tags=["cases"], dependencies=[Depends(require_api_key)])


class KeepQuery(SelectionQuery):
    """Query of ``POST /v1/cases``."""

    timeout_s: TimeLimit = None


class CasesQuery(BaseModel, extra="forbid"):
    """Query of ``GET /v1/cases``; unknown parameters are refused."""

    model: str = Field(description="Name of the model, without a version.")
    after: str = Field("", description="`next` of the part of the list before.")
    limit: int = Field(MAX_LISTED, ge=1, le=MAX_LISTED, description="Most cases to list.")


async def get_store(request: Request) -> CaseStore:
    """Return the store.

    Raises:
        NotConfigured: The service has none.
    """
    if request.app.state.cases is None:
        raise NotConfigured("expected a service that keeps cases, got one without LANDMARKD_STORE")
    return cast("CaseStore", request.app.state.cases)


StoreDep = Annotated[CaseStore, Depends(get_store)]


async def get_keeper(shared: SharedDep, key: KeyDep) -> Keeper:
    """Return who keeps or deletes a case."""
    settings = shared.settings
    is_admin = key is not None and hash_key(key.credentials) == settings.admin_key_hash
    return Keeper(name_key(settings, key), is_admin=is_admin)


KeeperDep = Annotated[Keeper, Depends(get_keeper)]


@cases_router.post(
    "/v1/cases",
    summary="Keep a corrected case",
    status_code=201,
    responses=problems(400, 401, 403, 404, 408, 413, 415, 422, 429, 500, 501, 503, 504, 507),
    openapi_extra=CASE_BODY,
)
async def keep_case(
    call: CallDep,
    store: StoreDep,
    keeper: KeeperDep,
    query: Annotated[KeepQuery, Query()],
) -> CaseAnswer:
    """Keep a scan with its landmarks as a person has corrected them, to learn from it.

    A case is named by its scan's content: one that is kept again replaces the one before, if that
    is of the same key. What nobody has judged counts as right, unless it is doubtful.
    """
    engine = call.engine
    timeout_s = request_timeout_s(query.timeout_s, call.shared.settings)
    check_head = partial(_check_head, engine.limits, query.selection)
    content, corrected = await read_upload(call, CASE, check_head)
    if (got := len(corrected)) > MAX_ANSWER_BYTES:
        raise TooLarge(f"expected an answer of at most {MAX_ANSWER_BYTES} bytes, got {got}")

    async def keep() -> CaseAnswer:
        compute = partial(engine.compute, admitted=call.admitted, timeout_s=timeout_s)
        answer = await compute(
            lambda _: read_corrections(corrected, engine), memory=CORRECTIONS_BYTES
        )
        call.record.model = check_landmarks(answer, engine)
        look = partial(check_header, content, engine.limits, query.selection)
        header = await compute(look, memory=SEARCH_BYTES)
        frame = query.frame if header.frames > 1 else None
        case = describe_case(answer, frame, keeper.name)

        def write(check_cancelled: Callable[[], None]) -> None:
            volume = read_volume(content, engine.limits, query.selection, check_cancelled)
            _check_same(answer, volume)
            scan = pack_scan(content, volume, check_cancelled, as_uploaded=frame is None)
            check_cancelled()
            store.keep(case, scan, write_case(answer, case), keeper)

        # A file is packed as it is, which may hold more than its voxels.
        memory = BASE_BYTES + KEEP_BYTES * math.prod(header.shape) + len(content)
        await compute(write, memory=memory)
        return case

    return await cancel_on_disconnect(call.request.receive, keep())


@cases_router.get(
    "/v1/cases",
    summary="List the cases of a model",
    responses=problems(401, 422, 429, 501, 503, 504, 507),
)
async def list_cases(
    call: CallDep, store: StoreDep, query: Annotated[CasesQuery, Query()]
) -> CasesAnswer:
    """List what is kept for a model, in the order of the ids, a part at a time."""
    call.admitted.start_work()
    cases, last = await call.engine.compute(
        lambda _: store.list(query.model, query.after, query.limit),
        admitted=call.admitted,
        memory=BASE_BYTES,
    )
    return CasesAnswer(cases=cases, next=last)


@cases_router.delete(
    "/v1/cases/{model}/{id}",
    summary="Delete a case",
    status_code=204,
    response_class=Response,
    responses=problems(401, 403, 404, 429, 501, 503, 504, 507),
)
async def delete_case(
    call: CallDep,
    store: StoreDep,
    keeper: KeeperDep,
    model: str,
    case: Annotated[str, Path(alias="id")],
) -> None:
    """Delete a scan and its landmarks, which this key has kept, from the store."""
    call.admitted.start_work()
    await call.engine.compute(
        lambda _: store.delete(model, case, keeper), admitted=call.admitted, memory=BASE_BYTES
    )


def _check_head(limits: VolumeLimits, selection: Selection, head: Content) -> None:
    if is_dicom(head):
        check_start(head)
    else:
        check_header(head, limits, selection)


def describe_case(answer: LandmarksAnswer, frame: int | None, key: str | None) -> CaseAnswer:
    """Describe a case that is kept now; all frames of a file have one digest."""
    counts = Counter(landmark.judgement for landmark in answer.landmarks)
    suffix = "" if frame is None else f"-frame{frame}"
    return CaseAnswer(
        id=answer.volume.digest[:ID_DIGITS] + suffix,
        model=answer.model,
        kept=datetime.now(UTC).isoformat(timespec="seconds"),
        key=key,
        placed=counts["placed"],
        accepted=counts["accepted"],
        absent=counts["absent"],
        unjudged=counts["unjudged"],
    )


def check_landmarks(answer: LandmarksAnswer, engine: Engine) -> str:
    """Check that an answer has the landmarks of its model; return the model's name.

    Raises:
        UnknownModel: The model is not loaded.
        BadParameter: The landmarks are others, or one is not in the scan.
    """
    manifest = engine.registry.get(answer.model.name).manifest
    expected = [landmark.name for landmark in manifest.landmarks]
    if [landmark.name for landmark in answer.landmarks] != expected:
        raise BadParameter(
            f"answer: expected the {len(expected)} landmarks of {manifest.name} in their order, "
            f"got {len(answer.landmarks)} that are others or in another order"
        )
    shape = np.array(answer.volume.shape)
    for landmark in answer.landmarks:
        if landmark.ijk is not None and not is_inside(landmark.ijk, shape):
            raise BadParameter(
                f"landmark {landmark.name!r}: expected a position in the scan of "
                f"{' x '.join(map(str, answer.volume.shape))} voxels, got {list(landmark.ijk)}"
            )
    if not any(one.status == "detected" for one in answer.landmarks):
        raise BadParameter(
            "answer: expected a landmark that is detected or placed, got none: training looks "
            "around the landmarks of a scan, and learns nothing from one that shows none"
        )
    return manifest.name


def _check_same(answer: LandmarksAnswer, volume: Volume) -> None:
    """Refuse landmarks of another scan."""
    if answer.volume.digest != volume.digest:
        raise BadParameter(
            f"answer: expected that to the scan in this upload, whose digest is {volume.digest}, "
            f"got one to {answer.volume.digest[: ID_DIGITS * 2]!r}"
        )
    same_place = np.allclose(answer.volume.affine, volume.affine, rtol=0, atol=AFFINE_MM)
    if answer.volume.shape != volume.voxels.shape or not same_place:
        raise BadParameter("answer: expected shape and affine of this scan, got others")
