"""Bundles are read as data: hostile ones are refused, and nothing of them is run."""

import io
import json
import pickle
import shlex
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from app.errors import BadParameter, ModelRefused
from app.exchange.monai import import_monai
from tests.support.monai_bundles import (
    ARGUMENTS,
    RADIUS_MM,
    build,
    make_config,
    make_metadata,
    write_bundle,
)

RAN = "it ran"


class Malicious:
    """What a checkpoint must not make."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path(RAN),)


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a bundle, in a folder where nothing may appear."""
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    return write_bundle(tmp_path / "bundle", build())


def refused(bundle: Path, match: str) -> None:
    with pytest.raises(ModelRefused, match=match):
        import_monai(bundle, bundle.with_name("blobs"), given=[RADIUS_MM])
    assert not bundle.with_name("blobs").exists()
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.parametrize(
    ("definition", "message"),
    [
        ({"_target_": "os.system", "command": f"touch '{RAN}'"}, "expected a module of monai"),
        ({"_target_": "pathlib.Path.touch", "self": RAN}, "expected a module of monai"),
        ({"_target_": f"$__import__('os').mkdir('{RAN}')"}, "expected the name of a class"),
        ({"_target_": "monai.networks.nets./../../x.UNet"}, "expected the name of a class"),
        ({"_target_": "torch"}, "expected a network of monai"),
        (f"$__import__('os').mkdir('{RAN}')", "expected the name of a class"),
        ({"in_channels": f"$__import__('os').mkdir('{RAN}')"}, "in_channels: expected a literal"),
        ({"norm": ["BATCH", {"x": f"$open('{RAN}', 'w')"}]}, "norm: expected a literal"),
        ({"act": {"_target_": "pathlib.Path"}}, "act: expected a literal"),
        ({"channels": "%other.json::x"}, "channels: expected a literal"),
        ({"_mode_": "debug"}, "_mode_: expected a literal"),
        ({"spatial_dims": None}, "spatial_dims: expected a literal"),
        ({"norm": [[[[[[[[[[1]]]]]]]]]]}, "norm: expected a literal"),
        ({"channels": [8, 16, 32000]}, "about the size of its weights"),
        ({"nonsense": 3}, "nonsense"),
    ],
)  # fmt: skip
def test_network_definition_is_never_run(bundle: Path, definition: object, message: str) -> None:
    plain = {"_target_": "UNet", **ARGUMENTS}
    given = plain | definition if isinstance(definition, dict) else definition
    config = make_config(network_def=given)
    (bundle / "configs" / "inference.json").write_text(json.dumps(config))
    refused(bundle, message)


def test_expressions_elsewhere_are_never_run(bundle: Path) -> None:
    run = f"$__import__('os').mkdir('{RAN}')"
    called = {"_target_": "os.mkdir", "path": RAN}
    config = make_config(imports=[run], initialize=[run], run=[called], device=called)
    config["preprocessing"]["transforms"] += [called, run]
    (bundle / "configs" / "inference.json").write_text(json.dumps(config))
    with pytest.raises(BadParameter, match="--ignore mkdir") as refusal:
        import_monai(bundle, bundle.with_name("blobs"), given=[RADIUS_MM])
    # As a shell reads what the error says.
    _, *options = str(refusal.value).split("--ignore ")
    ignored = [shlex.split(option)[0].rstrip(",") for option in options]
    import_monai(bundle, bundle.with_name("blobs"), given=[RADIUS_MM], ignored=ignored)
    assert list(Path.cwd().iterdir()) == []


def bomb() -> bytes:
    """Make a file of some kilobytes, whose one tensor has 4 TB."""
    file = io.BytesIO()
    torch.save({"weight": torch.zeros(1).expand(1 << 40)}, file)
    return file.getvalue()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (pickle.dumps(Malicious(), protocol=2), "nothing but tensors, numbers and text"),
        (pickle.dumps([1, 2], protocol=2), "nothing but tensors, numbers and text"),
        (b"", "nothing but tensors"),
        (b"PK\x05\x06" + bytes(18), "nothing but tensors"),
        (bomb(), "as large as their file"),
    ],
    ids=["code", "pickle", "empty", "archive of nothing", "bomb"],
)
def test_weights_run_no_code(bundle: Path, content: bytes, message: str) -> None:
    (bundle / "models" / "model.pt").write_bytes(content)
    refused(bundle, message)


def test_checkpoint_with_code_among_its_weights_runs_none(bundle: Path) -> None:
    torch.save({"model": build().state_dict(), "x": Malicious()}, bundle / "models/model.pt")
    refused(bundle, "nothing but tensors, numbers and text")


def test_compressed_weights_are_not_inflated_without_bounds(bundle: Path) -> None:
    with zipfile.ZipFile(bundle / "models/model.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data/0", bytes(1 << 24))
    refused(bundle, "as large as their file")


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("metadata.json", b"[]", "expected an object"),
        ("metadata.json", b"{}", "expected the metadata of a MONAI bundle"),
        ("metadata.json", b'{"network_data_format": {"inputs": 3}}', "the metadata of a MONAI"),
        ("metadata.json", b"[" * 100_000, "expected metadata.json to read"),
        ("metadata.json", b" " * (17 << 20) + b"{}", "at most"),
        ("inference.json", b'{"x": ' + b"9" * 5000 + b"}", "expected inference.json to read"),
        ("inference.json", b"\xff", "expected inference.json to read"),
    ],
    ids=["list", "empty", "number", "deep", "huge", "digits", "no text"],
)
def test_json_is_bounded(bundle: Path, file: str, content: bytes, message: str) -> None:
    (bundle / "configs" / file).write_bytes(content)
    refused(bundle, message)


def test_scans_of_several_channels_are_refused(bundle: Path) -> None:
    metadata = make_metadata()
    metadata["network_data_format"]["inputs"]["image"]["num_channels"] = 4
    (bundle / "configs" / "metadata.json").write_text(json.dumps(metadata))
    refused(bundle, "one channel, got 4")


def test_channels_without_a_name_are_refused(bundle: Path) -> None:
    metadata = make_metadata(channel_def={"0": "bright", "2": "dark"})
    (bundle / "configs" / "metadata.json").write_text(json.dumps(metadata))
    refused(bundle, r"channel_def: expected channels 0, 1, ..., got \['0', '2'\]")


@pytest.mark.parametrize(
    "given", ["radius", "network.weights", "schema=2", "landmarks=[]", "input.tile_shape.x=3"]
)
def test_option_must_be_a_key_and_a_value(bundle: Path, given: str) -> None:
    with pytest.raises(BadParameter, match="--set: expected KEY=VALUE"):
        import_monai(bundle, bundle.with_name("blobs"), given=[given])


def test_bundle_without_a_network_is_refused(bundle: Path) -> None:
    (bundle / "models" / "model.pt").unlink()
    refused(bundle, r"expected one of models/model\.onnx")
