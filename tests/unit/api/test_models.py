"""``/v1/models``: the models of a service, listed and described."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from app.api.dependencies import hash_key
from app.io import SCAN_FORMATS
from app.io.schemas import LandmarksAnswer, ModelInfo, ModelsAnswer
from app.model import read_manifest
from tests.support.services import (
    MODEL,
    RAW,
    Response,
    problem_of,
    running,
    toy_models,
    toy_scan,
    toy_settings,
    until,
)

URL = "/v1/landmarks"
OF_ALL = {
    "content-type", "content-length", "cache-control",
    "x-request-id", "x-content-type-options", "tus-resumable",
}  # fmt: skip
"""Headers that are named for all calls together, or that no program reads."""
SKULL = Path(__file__).resolve().parents[3] / "models" / "mouse-skull"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    with running(toy_settings(toy_models(tmp_path_factory.mktemp("models")))) as client:
        yield client


def test_docs_offer_formats_and_the_models_that_are_loaded(client: TestClient) -> None:
    version = ModelInfo.model_validate_json(client.get(f"/v1/models/{MODEL}").content).version
    document = client.get("/openapi.json").json()
    schemas = {
        (path, parameter["name"]): parameter["schema"]
        for path, calls in document["paths"].items()
        for call in calls.values()
        for parameter in call.get("parameters", [])
    }
    for path in (URL, "/v1/heatmaps", "/v1/jobs", "/v1/uploads"):
        model = schemas[path, "model"]
        assert (model["type"], model["enum"]) == ("string", [MODEL, f"{MODEL}@{version}"])
        assert "anyOf" not in model
    assert "enum" not in schemas["/v1/cases", "model"]
    assert schemas[URL, "format"]["enum"] == [form.name for form in SCAN_FORMATS]
    assert schemas["/v1/votes", "format"]["enum"][-1] == "nii.gz"
    assert f"/v1/landmarks?model={MODEL}'" in document["info"]["description"]
    assert f'model="{MODEL}")' in document["info"]["description"]


def test_docs_name_what_is_answered_and_no_body_where_there_is_none(client: TestClient) -> None:
    document = client.get("/openapi.json").json()
    calls = {
        (method, path): {
            status: sorted(response.get("content", ()))
            for status, response in call["responses"].items()
        }
        for path, methods in document["paths"].items()
        for method, call in methods.items()
    }
    bare = {"default": ["application/problem+json"]}
    assert calls["options", "/v1/uploads"] == bare | {"204": []}
    assert calls["post", "/v1/uploads"] == bare | {"201": []}
    assert calls["get", "/v1/uploads/{upload}"] == bare | {"200": []}
    assert "text/event-stream" in calls["post", URL]["200"]
    assert "text/event-stream" not in calls["get", "/v1/jobs/{job}/scans/{number}"]["200"]
    content = document["paths"][URL]["post"]["responses"]["200"]["content"]
    LandmarksAnswer.model_validate(content["application/json"]["example"])
    assert content["application/vnd.slicer.markups+json"]["schema"] == {"type": "object"}
    # FastAPI's own, which is never answered.
    assert "HTTPValidationError" not in document["components"]["schemas"]
    # Generators take a constant for an enumeration of texts.
    alive = document["components"]["schemas"]["AliveAnswer"]["properties"]["alive"]
    assert (alive["type"], "const" in alive) == ("boolean", False)


def test_docs_name_the_headers_of_answers_that_only_some_calls_have(tmp_path: Path) -> None:
    settings = toy_settings(toy_models(tmp_path), jobs=tmp_path / "jobs")
    scan, part = toy_scan() + b"padding", RAW | {"Content-Type": "application/offset+octet-stream"}
    with running(settings) as client:
        paths = client.get("/openapi.json").json()["paths"]

        def send(method: str, path: str, at: str = "", **options: Any) -> Response:
            response = client.request(method, at or path, **options)
            described = paths[path][method.lower()]["responses"][str(response.status_code)]
            unnamed = {*response.headers} - OF_ALL - {*map(str.lower, described.get("headers", ()))}
            assert unnamed == set(), (method, path)
            return response

        assert "X-Warnings" in send("POST", URL, content=scan, headers=RAW).headers
        assert "X-Warnings" in send("POST", "/v1/heatmaps", content=scan, headers=RAW).headers
        wants_job = RAW | {"Prefer": "respond-async"}
        assert send("POST", URL, content=scan, headers=wants_job).status_code == 202
        job = send("POST", "/v1/jobs", content=scan, headers=RAW).headers["Location"]
        one = "/v1/jobs/{job}"
        until(lambda: send("GET", one, job).json()["state"] == "finished")
        result = send("GET", f"{one}/scans/{{number}}", f"{job}/scans/0")
        assert "X-Warnings" in result.headers
        uploads = "/v1/uploads"
        send("OPTIONS", uploads)
        length = {"Upload-Length": str(len(scan))}
        upload = send("POST", uploads, headers=length).headers["Location"]
        for start, content in ((0, scan[:99]), (99, scan[99:])):
            at = part | {"Upload-Offset": str(start)}
            send("PATCH", f"{uploads}/{{upload}}", upload, content=content, headers=at)
            send("GET", f"{uploads}/{{upload}}", upload)


def test_docs_name_calls_and_the_keys_they_need_for_generated_clients(
    client: TestClient, tmp_path: Path
) -> None:
    def calls_of(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
        calls = [call for methods in document["paths"].values() for call in methods.values()]
        return {call["operationId"]: call for call in calls}

    document = client.get("/openapi.json").json()
    calls = calls_of(document)
    assert len(calls) == sum(map(len, document["paths"].values()))
    assert {"find_landmarks", "create_job", "get_job_result", "list_models"} <= calls.keys()
    for call in calls.values():
        problem = call["responses"].get("default", {"content": {}})["content"]
        schemas = [content["schema"] for content in problem.values()]
        assert schemas in ([], [{"$ref": "#/components/schemas/Problem"}])
    # Generators make clients that ask for a key where a call is said to need one.
    assert [name for name, call in calls.items() if call["security"] not in ([], [{}])] == [
        "reload_model"
    ]
    settings = toy_settings(tmp_path, api_keys=[hash_key("key")])
    with running(settings) as guarded:
        document = guarded.get("/openapi.json", headers={"Authorization": "Bearer key"}).json()
    security = {name: call["security"] for name, call in calls_of(document).items()}
    assert security.pop("reload_model") == [{"admin_key": []}]
    assert security.pop("get_livez") == []
    assert security.pop("get_readyz") == [{"api_key": []}, {}]
    assert [name for name, keys in security.items() if keys != [{"api_key": []}]] == []


def test_docs_leave_the_model_open_while_none_is_loaded(tmp_path: Path) -> None:
    with running(toy_settings(tmp_path)) as client:
        (model,) = [
            parameter["schema"]
            for parameter in client.get("/openapi.json").json()["paths"][URL]["post"]["parameters"]
            if parameter["name"] == "model"
        ]
    assert "enum" not in model


def test_models_are_listed_and_described(client: TestClient) -> None:
    listed = ModelsAnswer.model_validate_json(client.get("/v1/models").content).models
    assert [(item.name, item.status) for item in listed] == [(MODEL, "ready")]
    info = ModelInfo.model_validate_json(client.get(f"/v1/models/{MODEL}").content)
    assert info.digest == listed[0].digest
    assert len(info.landmarks) == listed[0].landmarks
    (device,) = info.devices
    assert (device.name, device.status, device.precision) == ("cpu", "ready", "float32")


@pytest.mark.parametrize("default", [None, f"{MODEL}@9.2.0", MODEL, "zz-refused"])
def test_default_and_newest_versions_are_listed_first_as_the_page_chooses(
    tmp_path: Path, default: str | None
) -> None:
    """By their texts, the page's first choice was the oldest; it was never the default."""
    toy = toy_models(tmp_path) / MODEL
    ordered = [f"{MODEL}@{version}" for version in ("10.0.0", "9.10.0", "9.2.0")]
    for name in ordered:
        folder = shutil.copytree(toy, tmp_path / name)
        text = (folder / "model.toml").read_text(encoding="utf-8")
        changed = re.sub(r'(?m)^version = ".*"$', f'version = "{name.partition("@")[2]}"', text)
        (folder / "model.toml").write_text(changed, encoding="utf-8")
    shutil.rmtree(toy)
    (tmp_path / "zz-refused").mkdir()
    (tmp_path / "zz-refused" / "model.toml").touch()
    with running(toy_settings(tmp_path, default_model=default)) as client:
        listed = client.get("/v1/models").json()["models"]
        document = client.get("/openapi.json").json()
    by_name = [*ordered, "zz-refused"]
    first = ordered[2] if default == ordered[2] else ordered[0]
    assert [one["name"] for one in listed] == sorted(by_name, key=lambda one: one != first)
    assert {one["name"] for one in listed if one["status"] == "ready"} == set(ordered)
    offered = document["paths"][URL]["post"]["parameters"]
    (model,) = (one["schema"] for one in offered if one["name"] == "model")
    assert model["enum"] == [MODEL, *ordered]


def test_landmarks_are_described_by_the_network_that_decides_on_them(tmp_path: Path) -> None:
    """That is the second one, where there is one: the first one's have no regions."""
    (tmp_path / "mouse-skull").symlink_to(SKULL)
    decides = read_manifest(SKULL / "refine").landmarks
    with running(toy_settings(tmp_path)) as client:
        info = ModelInfo.model_validate_json(client.get("/v1/models/mouse-skull").content)
    assert [one.name for one in info.landmarks] == [one.name for one in decides]
    thresholds = [one.presence_threshold for one in decides]
    assert [one.presence_threshold for one in info.landmarks] == thresholds
    assert [one.region95_mm for one in info.landmarks] == [one.region95_mm for one in decides]
    assert (info.landmarks[1].mirror, info.landmarks[1].description[:4]) == ("3", "left")


def test_broken_model_is_listed_with_its_reason_and_the_other_serves(tmp_path: Path) -> None:
    models = toy_models(tmp_path)
    (models / "broken").mkdir()
    (models / "broken" / "model.toml").write_text("schema = 2")
    with running(toy_settings(models)) as client:
        listed = {
            item["name"]: item["status"] for item in client.get("/v1/models").json()["models"]
        }
        assert "schema" in listed["broken"]
        problem = problem_of(client.get("/v1/models/broken"))
        assert "schema" in problem.detail
        response = client.post(URL, content=toy_scan(), headers=RAW, params={"model": MODEL})
        assert response.status_code == 200


def test_reload_of_a_broken_folder_is_refused_and_no_failure_of_the_service(tmp_path: Path) -> None:
    models = toy_models(tmp_path)
    settings = toy_settings(models, admin_key_hash=hash_key("admin"))
    with running(settings) as client:
        url, key = f"/v1/models/{MODEL}/reload", {"Authorization": "Bearer admin"}
        assert client.post(url, headers=key).status_code == 200
        (models / MODEL / "model.toml").write_text("schema = 2")
        problem = problem_of(client.post(url, headers=key))
        assert (problem.status, problem.code) == (409, "model-refused")
        assert "schema" in problem.detail
        response = client.post(URL, content=toy_scan(), headers=RAW)
        assert response.status_code == 200


def test_no_key_reloads_a_model_where_none_is_set(client: TestClient) -> None:
    key = {"Authorization": "Bearer admin"}
    problem = problem_of(client.post(f"/v1/models/{MODEL}/reload", headers=key))
    assert (problem.status, "LANDMARKD_ADMIN_KEY_HASH" in problem.detail) == (401, True)


def test_versions_side_by_side_are_asked_for_by_name_and_version(tmp_path: Path) -> None:
    models = toy_models(tmp_path)
    old, new = models / MODEL, models / f"{MODEL}@1.10.0"
    shutil.copytree(old, new)
    text = (new / "model.toml").read_text()
    (new / "model.toml").write_text(text.replace('version = "1.0.0"', 'version = "1.10.0"'))
    settings = toy_settings(models, admin_key_hash=hash_key("admin"))
    with running(settings) as client:
        names = [item["name"] for item in client.get("/v1/models").json()["models"]]
        assert names == [MODEL, new.name]
        for wanted, version in (
            (MODEL, "1.10.0"),
            (f"{MODEL}@1.10.0", "1.10.0"),
            (f"{MODEL}@1.0.0", "1.0.0"),
        ):
            params = {"model": wanted}
            answer = client.post(URL, content=toy_scan(), headers=RAW, params=params).json()
            assert (answer["model"]["name"], answer["model"]["version"]) == (MODEL, version)
            assert client.get(f"/v1/models/{wanted}").json()["version"] == version
        unknown = client.get(f"/v1/models/{MODEL}@3")
        assert problem_of(unknown).code == "unknown-model"
        key = {"Authorization": "Bearer admin"}
        for folder, version in ((old, "1.0.0"), (new, "1.10.0")):
            response = client.post(f"/v1/models/{folder.name}/reload", headers=key)
            assert response.json()["version"] == version
