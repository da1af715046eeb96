"""Answers as a person corrected them: checked, measured again, and written with who decided."""

import csv
import io
import json
import re
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient

from app.api.corrections import read_corrections
from app.errors import BadParameter
from tests.support.answers import UNKNOWN
from tests.support.services import (
    MODEL,
    RAW,
    Response,
    problem_of,
    running,
    shared_of,
    toy_models,
    toy_scan,
    toy_settings,
)

WIDTH = '[[measurements]]\nname = "width"\nkind = "distance"\npoints = ["1", "2"]\n'


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    models = toy_models(tmp_path_factory.mktemp("corrections"))
    manifest = models / MODEL / "model.toml"
    manifest.write_text(f"{manifest.read_text(encoding='utf-8')}\n{WIDTH}", encoding="utf-8")
    with running(toy_settings(models)) as made:
        yield made


@pytest.fixture
def answer(client: TestClient) -> dict[str, Any]:
    """An answer in which a person placed the first landmark, accepted the second, denied the third.

    The scan's voxels are 1 by 1.25 by 0.8 mm, and its origin is that of the world.
    """
    made: dict[str, Any] = client.post("/v1/landmarks", content=toy_scan(), headers=RAW).json()
    first, second, third = made["landmarks"]
    for landmark in (first, third):
        landmark.update(dict.fromkeys(UNKNOWN), decided_by="person")
    first.update(status="detected", ijk=[2, 4, 10], ras_mm=[2, 5, 8], lps_mm=[-2, -5, 8])
    second.update(status="detected", ijk=[2, 8, 10], ras_mm=[2, 10, 8], lps_mm=[-2, -10, 8])
    second.update(confidence=0.75, decided_by="person")
    third.update(status="not_found", ijk=None, ras_mm=None, lps_mm=None)
    return made


def convert(client: TestClient, answer: dict[str, Any], form: str = "json") -> Response:
    return client.post(f"/page/landmarks?format={form}", content=json.dumps(answer))


def test_corrected_answer_is_measured_again(client: TestClient, answer: dict[str, Any]) -> None:
    converted = convert(client, answer).json()
    assert converted["landmarks"] == answer["landmarks"]
    (width,) = converted["measurements"]
    assert (width["name"], width["value"]) == ("width", pytest.approx(5.0))
    assert width["interval95"] is None
    assert converted["warnings"] == answer["warnings"]


def test_measurements_of_another_model_are_left_out(
    client: TestClient, answer: dict[str, Any]
) -> None:
    answer["model"]["digest"] = "0" * 64
    converted = convert(client, answer).json()
    assert converted["measurements"] == []
    assert "measurements are left out" in converted["warnings"][-1]
    assert convert(client, converted).json() == converted


def test_answer_without_corrections_stays_as_it_is(
    client: TestClient, answer: dict[str, Any]
) -> None:
    answer["model"]["digest"] = "0" * 64
    for landmark in answer["landmarks"]:
        landmark["decided_by"] = "network"
    assert convert(client, answer).json() == answer


def test_every_format_says_who_decided(client: TestClient, answer: dict[str, Any]) -> None:
    said = ["placed by a person", "accepted by a person", "marked absent by a person"]
    answer["landmarks"][0]["description"] = "Tip"
    texts = ["Tip; placed by a person", *said[1:]]
    (markup,) = convert(client, answer, "mrk.json").json()["markups"]
    assert [point["description"] for point in markup["controlPoints"]] == texts
    assert markup["measurements"][0]["controlPointValues"] == [1.0, 0.75, 0.0]
    for form, separator in (("csv", ","), ("tsv", "\t")):
        text = convert(client, answer, form).text
        rows = list(csv.DictReader(io.StringIO(text), delimiter=separator))
        assert [row["description"] for row in rows] == texts
    listed = convert(client, answer, "fcsv").text
    assert all(each in listed for each in said)
    rows = list(csv.DictReader(io.StringIO(convert(client, answer, "long").text)))
    assert [row["decided_by"] for row in rows] == ["person"] * 3


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"lps_mm": [2, -5, 8]}, "lps_mm -2.0000, -5.0000, 8.0000"),
        ({"ijk": [2.002, 4, 10]}, "ras_mm 2.0020, 5.0000, 8.0000"),
        ({"ijk": [1e308, 1e308, 1e308]}, "ras_mm"),
        ({"ijk": None}, "ijk, ras_mm and lps_mm"),
        ({"ras_mm": None}, "ijk, ras_mm and lps_mm"),
        ({"lps_mm": None}, "ijk, ras_mm and lps_mm"),
        ({"status": "not_found", "ijk": None}, "ijk, ras_mm and lps_mm"),
        ({"ijk": None, "ras_mm": None, "lps_mm": None}, "ijk, ras_mm and lps_mm"),
        ({"status": "not_found"}, "no position"),
    ],
)
def test_position_that_contradicts_itself_is_refused(
    client: TestClient, answer: dict[str, Any], changes: dict[str, Any], expected: str
) -> None:
    answer["landmarks"][0].update(changes)
    problem = problem_of(convert(client, answer))
    assert problem.code == "bad-parameter"
    assert problem.detail.startswith("landmark '1': expected")
    assert expected in problem.detail


@pytest.mark.parametrize(
    "content",
    [
        b'{"landmarks": [%b{}]}' % (b"{}," * 30_000),
        b'{"landmarks": [{%b}]}' % b",".join(b'"%x": 1' % at for at in range(20_000)),
        b'{"warnings": [%b1]}' % (b"1," * 50_000),
    ],
    ids=["landmarks", "keys", "warnings"],
)
def test_what_a_wrong_answer_takes_grows_with_its_size_and_not_with_its_errors(
    client: TestClient, content: bytes
) -> None:
    engine = shared_of(client).engine
    tracemalloc.start()
    try:
        with pytest.raises(BadParameter) as caught:
            read_corrections(content, engine)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    (errors,) = re.findall(r"(\d+) errors", str(caught.value))
    assert int(errors) < 25
    assert peak < 40 * len(content)


@pytest.mark.parametrize(
    "content",
    [
        b"[%b1]" % (b"[[[[]]]]," * 20_000),
        b"[%b1]" % (b"{}," * 70_000),
        b'{%b"a":1}' % (b'"a":1,' * 70_000),
    ],
    ids=["lists", "objects", "fields"],
)
def test_answer_of_more_parts_than_any_has_is_refused_unread(
    client: TestClient, content: bytes
) -> None:
    with pytest.raises(BadParameter, match="at most 65,536 lists, objects and fields, got"):
        read_corrections(content, shared_of(client).engine)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"ras_mm": [1, 2]}, "with 1 errors, the first one in landmarks.1.ras_mm"),
        ({"status": "seen"}, "landmarks.1.status: Input should be 'detected'"),
        ({"ijk": ["x" * 500, 0, 0]}, "landmarks.1.ijk.0: Input should be a valid number"),
    ],
    ids=["coordinates", "status", "number"],
)
def test_wrong_answer_is_told_where_it_is_wrong(
    client: TestClient, answer: dict[str, Any], change: dict[str, Any], said: str
) -> None:
    answer["landmarks"][1].update(change)
    problem = problem_of(convert(client, answer))
    assert said in problem.detail
    assert len(problem.detail) < 300


def test_byte_order_mark_is_passed_over(client: TestClient, answer: dict[str, Any]) -> None:
    content = json.dumps(answer).encode("utf-8-sig")
    assert read_corrections(content, shared_of(client).engine).landmarks


@pytest.mark.parametrize("content", [b"[" * 30_000, b"no JSON", b'{"a": "\xff"}', b""])
def test_what_is_no_json_is_refused(client: TestClient, content: bytes) -> None:
    with pytest.raises(BadParameter, match="got no JSON"):
        read_corrections(content, shared_of(client).engine)
