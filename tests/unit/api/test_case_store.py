"""The store of cases: whole ones only, whenever its process is killed, and no more than allowed."""

import json
from functools import partial
from pathlib import Path

import pytest

from app.api.cases.store import FILE_BYTES, CaseStore, Keeper
from app.errors import Forbidden, NotStored, StartupError, UnknownCase
from app.io import CaseAnswer, ModelRef
from tests.support.killing import killed_at

MODEL = "toy"
SCAN = b"a scan" * 1000
QUOTA = 100 * FILE_BYTES
CASE_BYTES = 2 * FILE_BYTES
ANYBODY = Keeper()
ANNA, BERT, ADMIN = Keeper("anna"), Keeper("bert"), Keeper("admin", is_admin=True)
FIRST, SECOND = "1" * 32, "2" * 32 + "-frame3"
KILLED = 100
"""More than a process makes steps here."""


def case_of(case_id: str, key: str | None = None) -> CaseAnswer:
    model = ModelRef(name=MODEL, version="1", digest="0")
    return CaseAnswer(
        id=case_id, model=model, kept="2026-01-01T00:00:00+00:00", key=key, placed=1, accepted=0,
        absent=0, unjudged=0,
    )  # fmt: skip


def keep(store: CaseStore, case_id: str, scan: bytes = SCAN, keeper: Keeper = ANYBODY) -> None:
    case = case_of(case_id, keeper.name)
    markup = {"controlPoints": [], "landmarkd": case.model_dump(mode="json")}
    store.keep(case, scan, json.dumps({"markups": [markup]}).encode(), keeper)


def files_of(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()} - {".lock"}


def paths_of(case_id: str) -> set[str]:
    return {f"{MODEL}/scans/{case_id}.nii.gz", f"{MODEL}/landmarks/{case_id}.mrk.json"}


def test_process_killed_at_any_step_leaves_whole_cases(tmp_path: Path) -> None:
    def work(root: Path) -> None:
        store = CaseStore(root, QUOTA)
        keep(store, SECOND)
        keep(store, FIRST, SCAN * 2)  # replaces
        store.delete(MODEL, FIRST, ANYBODY)

    states = set()
    for step in range(KILLED):
        root = tmp_path / str(step)
        keep(CaseStore(root, QUOTA), FIRST)
        killed = killed_at(step, partial(work, root))
        # Whoever starts next finds whole cases only.
        cases, _ = CaseStore(root, QUOTA).list(MODEL, "", 10)
        ids = {case.id for case in cases}
        assert files_of(root) == set().union(*map(paths_of, ids))
        states.add(tuple(sorted(ids)))
        if not killed:
            break
    assert not killed
    assert states == {(FIRST,), (FIRST, SECOND), (SECOND,)}


def test_nobody_else_on_the_machine_can_read_the_folder(tmp_path: Path) -> None:
    keep(CaseStore(tmp_path / "store", QUOTA), FIRST)
    assert (tmp_path / "store").stat().st_mode & 0o077 == 0


def test_case_kept_twice_replaces_itself(tmp_path: Path) -> None:
    store = CaseStore(tmp_path, QUOTA)
    keep(store, FIRST)
    keep(store, FIRST, b"another")
    assert files_of(tmp_path) == paths_of(FIRST)
    assert (tmp_path / MODEL / "scans" / f"{FIRST}.nii.gz").read_bytes() == b"another"


def test_case_over_the_quota_is_refused_and_leaves_the_others(tmp_path: Path) -> None:
    quota = 3 * FILE_BYTES
    store = CaseStore(tmp_path, quota)
    keep(store, FIRST)
    with pytest.raises(NotStored, match=f"at most {quota:,} bytes"):
        keep(store, SECOND, bytes(2 * FILE_BYTES + 1))
    assert files_of(tmp_path) == paths_of(FIRST)
    keep(store, FIRST, bytes(2 * FILE_BYTES))  # The one that it replaces makes room.
    store.delete(MODEL, FIRST, ANYBODY)
    keep(store, SECOND, bytes(2 * FILE_BYTES))


def test_quota_bounds_the_number_of_cases_however_small_they_are(tmp_path: Path) -> None:
    store = CaseStore(tmp_path, 5 * CASE_BYTES)
    for number in range(5):
        keep(store, f"{number:032x}", b"tiny")
    with pytest.raises(NotStored):
        keep(store, FIRST, b"tiny")


def test_one_key_leaves_room_to_others(tmp_path: Path) -> None:
    ids = [f"{number:032x}" for number in range(5)]
    store = CaseStore(tmp_path, 4 * CASE_BYTES, 0.75)
    for case_id in ids[:3]:
        keep(store, case_id, keeper=ANNA)
    # Another process counts what it has not kept itself.
    for one in (store, CaseStore(tmp_path, 4 * CASE_BYTES, 0.75)):
        with pytest.raises(NotStored, match=f"{3 * CASE_BYTES:,} of this key"):
            keep(one, ids[3], keeper=ANNA)
        keep(one, ids[2], SCAN * 2, ANNA)  # In its own place there is room.
    keep(store, ids[3], keeper=BERT)
    with pytest.raises(NotStored):
        keep(store, ids[4], keeper=BERT)
    store.delete(MODEL, ids[0], ANNA)
    keep(store, ids[4], keeper=BERT)
    everything = CaseStore(tmp_path / "keyless", 4 * CASE_BYTES, 0.75)
    for case_id in ids[:4]:
        keep(everything, case_id)  # Without keys, all are one client.


def test_case_is_changed_by_its_keeper_and_the_admin_only(tmp_path: Path) -> None:
    store = CaseStore(tmp_path, QUOTA)
    keep(store, FIRST, keeper=ANNA)
    with pytest.raises(Forbidden, match="anna has kept"):
        keep(store, FIRST, b"another", BERT)
    with pytest.raises(Forbidden, match="anna has kept"):
        store.delete(MODEL, FIRST, BERT)
    assert (tmp_path / MODEL / "scans" / f"{FIRST}.nii.gz").read_bytes() == SCAN
    keep(store, FIRST, SCAN * 2, ANNA)
    keep(store, FIRST, SCAN * 3, ADMIN)
    with pytest.raises(Forbidden, match="admin has kept"):
        store.delete(MODEL, FIRST, ANNA)
    store.delete(MODEL, FIRST, ADMIN)
    keep(store, SECOND)  # Before there were keys.
    keep(store, SECOND, keeper=BERT)
    store.delete(MODEL, SECOND, ANYBODY)  # There are none any more.


def test_disk_that_fails_leaves_no_half_of_a_case(tmp_path: Path) -> None:
    store = CaseStore(tmp_path, QUOTA)
    (tmp_path / MODEL).mkdir()
    (tmp_path / MODEL / "landmarks").write_text("no folder")
    with pytest.raises(NotStored, match="expected a disk"):
        keep(store, FIRST)
    assert not list((tmp_path / MODEL / "scans").iterdir())
    (tmp_path / MODEL / "landmarks").unlink()
    (tmp_path / MODEL / "landmarks").symlink_to("landmarks")
    with pytest.raises(NotStored, match="Too many levels"):
        store.list(MODEL, "", 10)


def test_store_that_is_not_mounted_any_more_is_not_another_one(tmp_path: Path) -> None:
    root, disk = tmp_path / "store", tmp_path / "disk"
    store = CaseStore(root, QUOTA)
    keep(store, FIRST)
    root.rename(disk)
    root.mkdir()  # Where the disk was mounted.
    with pytest.raises(NotStored, match="that has the store"):
        keep(store, SECOND)
    with pytest.raises(NotStored):
        store.list(MODEL, "", 10)
    with pytest.raises(NotStored):
        store.delete(MODEL, FIRST, ANYBODY)
    assert list(root.iterdir()) == []
    root.rmdir()
    with pytest.raises(NotStored):
        keep(store, SECOND)
    disk.rename(root)
    keep(store, SECOND)
    assert files_of(root) == paths_of(FIRST) | paths_of(SECOND)


def test_cases_are_listed_in_parts(tmp_path: Path) -> None:
    store = CaseStore(tmp_path, QUOTA)
    ids = [f"{number:032x}" for number in range(5)]
    for case_id in reversed(ids):
        keep(store, case_id)
    listed: list[str] = []
    after: str | None = ""
    while after is not None:
        cases, after = store.list(MODEL, after, 2)
        assert len(cases) <= 2
        listed += [case.id for case in cases]
    assert listed == ids
    assert store.list("other", "", 2) == ([], None)


def test_what_others_put_there_is_neither_listed_nor_removed(tmp_path: Path) -> None:
    folder = tmp_path / MODEL
    names = ("scans/mine.nii.gz", "landmarks/notes.mrk.json", "landmarks/other.mrk.json")
    for name, text in zip(names, ("a scan", "{}", "[]"), strict=True):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    before = files_of(tmp_path)
    store = CaseStore(tmp_path, 5 * FILE_BYTES, 0.5)
    assert store.list(MODEL, "", 10) == ([], None)
    assert files_of(tmp_path) == before
    keep(store, FIRST, keeper=ANNA)  # They count, as nobody's.
    with pytest.raises(NotStored):
        keep(store, SECOND)


def test_folder_beside_those_of_models_may_be_unreadable(tmp_path: Path) -> None:
    """As lost+found is where the store is a disk; not even root reads a link to itself."""
    (tmp_path / "lost+found").symlink_to("lost+found")
    store = CaseStore(tmp_path, QUOTA)
    keep(store, FIRST)
    assert files_of(tmp_path) == paths_of(FIRST)


@pytest.mark.parametrize(
    ("model", "case_id"), [("..", FIRST), (MODEL, "../x"), (MODEL, ""), (MODEL, FIRST), ("", FIRST)]
)
def test_unknown_case_is_not_deleted(tmp_path: Path, model: str, case_id: str) -> None:
    """Nor is any other file, wherever such a name would lead to."""
    store = CaseStore(tmp_path / "store", QUOTA)
    names = {f"{folder}landmarks/{FIRST}.mrk.json" for folder in ("", "store/")}
    names |= {f"store/{MODEL}/{name}.mrk.json" for name in ("x", "landmarks/")}
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    with pytest.raises(UnknownCase, match=f"got '.*{case_id}'"):
        store.delete(model, case_id, ANYBODY)
    assert files_of(tmp_path) == names | {"store/.lock"}


def test_landmark_file_from_elsewhere_is_deleted(tmp_path: Path) -> None:
    """Put into the store without its scan; the answer said that it could not be deleted."""
    store = CaseStore(tmp_path, QUOTA)
    (tmp_path / MODEL / "landmarks").mkdir(parents=True)
    (tmp_path / MODEL / "landmarks" / f"{FIRST}.mrk.json").write_text('{"markups": []}')
    store.delete(MODEL, FIRST, ANYBODY)
    assert files_of(tmp_path) == set()


def test_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StartupError, match="LANDMARKD_STORE"):
        CaseStore(tmp_path / "file" / "store", QUOTA)
