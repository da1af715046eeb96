"""Programs are data: what torch exports runs the same here, and nothing else in a file runs."""

import io
import json
import os
import pickle
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from app.errors import ModelRefused
from app.model.exported.program import read_program, read_script
from tests.support.model_folders import (
    TILE,
    build_network,
    edit_archive,
    exported,
    manifest_table,
    scripted,
)


@cache
def toy() -> nn.Module:
    return build_network(manifest_table())


@cache
def toy_program() -> bytes:
    return exported(toy())


class Shapes(nn.Module):
    """Uses sizes, constants, several outputs of one call, and asks for a device and a type."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.tensor([2.0, -1.0]), persistent=False)
        self.tied = nn.Parameter(torch.rand(1, 3))
        self.twin = self.tied

    def forward(self, tiles: Tensor) -> Tensor:
        first, second = torch.split(tiles, [16, tiles.shape[2] - 16], dim=2)
        rows = tiles.flatten(1).shape[1] // tiles.shape[3]
        flat = tiles.reshape(tiles.shape[0], rows, tiles.shape[3]).clamp(min=-float("inf"))
        mask = torch.zeros(tiles.shape[0], 1, 1, 1, 1, device=tiles.device, dtype=tiles.dtype)
        top, _ = flat.topk(2, dim=2)
        weight = (self.tied + self.twin).sum() + (top * self.table).mean() + flat.mean()
        return torch.cat([second, first], dim=2) * weight + mask


@pytest.mark.parametrize("decomposed", [False, True])
@pytest.mark.parametrize("make", [toy, Shapes])
def test_program_answers_what_its_module_answers(
    make: Callable[[], nn.Module], decomposed: bool
) -> None:
    module = make().eval()
    read = read_program(exported(module, decomposed=decomposed))
    tiles = torch.rand(3, 1, *TILE)
    with torch.inference_mode():
        torch.testing.assert_close(read(tiles), module(tiles))
    assert read.input_shape == (None, 1, *TILE)


class Payload:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.trace),)


def saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def test_pickle_in_the_sample_inputs_is_never_read(tmp_path: Path) -> None:
    trace = tmp_path / "unpickled"
    bad = saved(((Payload(trace),), {}))
    data = edit_archive(
        toy_program(), lambda name, old: bad if name.startswith("data/sample_inputs") else old
    )
    tiles = torch.rand(1, 1, *TILE)
    torch.testing.assert_close(read_program(data)(tiles), toy()(tiles))
    assert not trace.exists()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        torch.load(
            io.BytesIO(archive.read("archive/data/sample_inputs/model.pt")), weights_only=False
        )
    assert trace.exists(), "the payload does nothing, so this test shows nothing"


@pytest.mark.parametrize("kind", ["weights", "constants"])
def test_pickled_tensors_are_refused_unread(tmp_path: Path, kind: str) -> None:
    trace = tmp_path / "unpickled"
    payload = pickle.dumps(Payload(trace))

    def edit(name: str, old: bytes) -> bytes:
        if name == f"data/{kind}/model_{kind}_config.json":
            config = {"path_name": "opaque_obj_0", "is_param": False, "use_pickle": True}
            return json.dumps({"config": {"x": {**config, "tensor_meta": None}}}).encode()
        return old

    with pytest.raises(
        ModelRefused, match=f"expected plain tensors in data/{kind}, 'x' is pickled"
    ):
        read_program(edit_archive(toy_program(), edit, {f"data/{kind}/opaque_obj_0": payload}))
    assert not trace.exists()


def edit_model(change: Callable[[dict[str, Any]], None]) -> bytes:
    def edit(name: str, old: bytes) -> bytes:
        if name != "models/model.json":
            return old
        model = json.loads(old)
        change(model)
        return json.dumps(model).encode()

    return edit_archive(toy_program(), edit)


TRACE = "landmarkd-ran-this"
CODE = f"__import__('os').mkdir('{TRACE}')"


def run_guard(model: dict[str, Any]) -> None:
    model["guards_code"] = [CODE]


def run_size(model: dict[str, Any]) -> None:
    sizes = model["graph_module"]["graph"]["tensor_values"]["conv3d"]["sizes"]
    sizes[0] = {"as_expr": {"expr_str": CODE, "hint": None}}


def run_name(model: dict[str, Any]) -> None:
    node = model["graph_module"]["graph"]["nodes"][-1]
    node["name"] = f"x = {CODE} #"
    node["metadata"]["stack_trace"] = f"x\n{CODE}"


@pytest.mark.parametrize("inject", [run_guard, run_size, run_name])
def test_code_in_strings_is_never_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inject: Callable[[dict[str, Any]], None]
) -> None:
    monkeypatch.chdir(tmp_path)
    program = read_program(edit_model(inject))
    tiles = torch.rand(1, 1, *TILE)
    torch.testing.assert_close(program(tiles), toy()(tiles))
    assert not (tmp_path / TRACE).exists()


def set_target(target: str) -> Callable[[dict[str, Any]], None]:
    def change(model: dict[str, Any]) -> None:
        model["graph_module"]["graph"]["nodes"][0]["target"] = target

    return change


@pytest.mark.parametrize(
    "target",
    [
        "torch.hub.load",
        "torch.ops.higher_order.cond",
        "torch.ops.aten.from_file.default",
        "torch.ops.debugprims.load_tensor.default",
        "torch.ops.aten.conv3d.__call__",
        "torch.ops.aten.__class__.mro",
        "torch.ops.aten.no_such_thing.default",
        "math.sqrt",
        "_operator.attrgetter",
        "#triton:kernel",
    ],
)
def test_other_operators_are_refused_by_name(target: str) -> None:
    with pytest.raises(ModelRefused, match=r"expected .*operators.*, got ") as refusal:
        read_program(edit_model(set_target(target)))
    assert target in str(refusal.value)


def test_other_arguments_are_refused() -> None:
    def change(model: dict[str, Any]) -> None:
        argument = {"as_custom_obj": {"name": "x", "class_fqn": "y"}}
        model["graph_module"]["graph"]["nodes"][0]["inputs"][0]["arg"] = argument

    with pytest.raises(ModelRefused, match="numbers and tensors as arguments, got as_custom_obj"):
        read_program(edit_model(change))


def test_tensor_past_the_end_of_its_bytes_is_refused() -> None:
    def edit(name: str, old: bytes) -> bytes:
        return old[:-8] if name.endswith("weight_0") else old

    with pytest.raises(ModelRefused, match=r"got RuntimeError: setStorage"):
        read_program(edit_archive(toy_program(), edit))


def test_program_of_another_schema_is_refused() -> None:
    def change(model: dict[str, Any]) -> None:
        model["schema_version"]["major"] = 7

    with pytest.raises(ModelRefused, match="expected schema 8, got 7"):
        read_program(edit_model(change))


def test_program_that_changes_its_buffers_is_refused() -> None:
    network = nn.Sequential(nn.Conv3d(1, 2, 1), nn.BatchNorm3d(2)).train()
    with pytest.raises(
        ModelRefused, match=r"got a buffer_mutation; call eval\(\) before the export"
    ):
        read_program(exported(network, decomposed=True))


def test_two_outputs_are_refused() -> None:
    class Two(nn.Module):
        def forward(self, tiles: Tensor) -> tuple[Tensor, Tensor]:
            return tiles + 1, tiles + 2

    with pytest.raises(ModelRefused, match="one input and one output tensor, got 1 and 2"):
        read_program(exported(Two()))


@pytest.mark.parametrize("read", [read_program, read_script])
def test_file_that_is_no_archive_is_refused(read: Callable[[bytes], nn.Module]) -> None:
    with pytest.raises(ModelRefused, match="expected a zip archive"):
        read(b"not a zip archive")


def test_compressed_archive_is_refused() -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/models/model.json", b"0" * 4096)
    with pytest.raises(ModelRefused, match="without compression"):
        read_program(buffer.getvalue())


def test_archive_of_another_kind_is_refused() -> None:
    with pytest.raises(ModelRefused, match=r"expected a member models/model.json, found none"):
        read_program(saved({"weight": torch.zeros(2)}))


def test_torchscript_answers_what_its_module_answers() -> None:
    read = read_script(scripted(toy()))
    tiles = torch.rand(3, 1, *TILE)
    torch.testing.assert_close(read(tiles), toy()(tiles))


class Writes(nn.Module):
    """Writes a file when it is called."""

    def forward(self, tiles: Tensor) -> Tensor:
        torch.save(tiles, "stolen")
        return tiles


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_torchscript_that_writes_files_is_refused() -> None:
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(Writes()), buffer)
    with pytest.raises(ModelRefused, match=r"expected plain tensor operators, got torch.save"):
        read_script(buffer.getvalue())


def test_pickle_posing_as_torchscript_is_refused_unread(tmp_path: Path) -> None:
    trace = tmp_path / "unpickled"
    with pytest.raises(ModelRefused, match="expected a TorchScript file"):
        read_script(saved(Payload(trace)))
    assert not trace.exists()
