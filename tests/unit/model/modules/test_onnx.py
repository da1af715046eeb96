"""ONNX files: they answer what torch answers, and what is no plain network is refused."""

import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from monai.networks.nets.basic_unet import BasicUNet
from onnx import ModelProto, TensorProto, helper
from torch import nn

from app.errors import ModelRefused
from app.inference.detector import Detector
from app.inference.load import load_checked
from app.io import Volume
from app.model.loader import load_module
from app.model.manifest import read_manifest
from app.model.modules.onnx import Session, read_onnx
from app.model.selfcheck import write_selfcheck
from app.phantom import make_phantom
from tests.support.model_folders import TILE, exported, make_blob_folder, toy_onnx
from tests.support.onnx_files import (
    TILES,
    array,
    branching,
    elsewhere,
    function,
    graph,
    marked,
    node,
    value,
)

MODELS = Path(__file__).parents[4] / "models"
CPU = torch.device("cpu")

RELATIVE = 1e-4
"""Norm of the difference over the norm: float32 sums in another order."""

SAME_MM = 1e-3


@cache
def basic_unet() -> tuple[nn.Module, bytes]:
    """Make a network and its export for batches and tiles of any size."""
    torch.manual_seed(5)
    features = (4, 4, 8, 8, 8, 4)
    network = BasicUNet(spatial_dims=3, in_channels=1, out_channels=8, features=features).eval()
    dynamic = {0: "n", 2: "i", 3: "j", 4: "k"}
    return network, exported(network, torch.rand(2, 1, 32, 48, 16), dynamic)


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.shape == expected.shape
    assert (found - expected).norm() <= RELATIVE * expected.norm()


@pytest.mark.no_cover
@pytest.mark.parametrize("shape", [(1, 32, 48, 16), (3, 48, 16, 32), (2, 64, 32, 48)])
@torch.inference_mode()
def test_dynamic_network_answers_what_torch_answers(shape: tuple[int, ...]) -> None:
    network, data = basic_unet()
    tiles = torch.rand(shape[0], 1, *shape[1:])
    read = read_onnx(data)
    assert read.input_shape == (None, 1, None, None, None)
    assert_same(read(tiles), network(tiles))


@torch.inference_mode()
def test_tile_is_answered_in_a_batch_as_alone() -> None:
    read = read_onnx(basic_unet()[1])
    tiles = torch.rand(3, 1, 32, 16, 48).to(memory_format=torch.channels_last_3d)
    assert_same(read(tiles)[1:2], read(tiles[1:2]))


@pytest.mark.no_cover
@torch.inference_mode()
def test_batch_of_a_network_for_one_tile_is_computed_tile_by_tile() -> None:
    tiles = torch.rand(3, 1, *TILE)
    one = read_onnx(toy_onnx(dynamic=False))
    assert one.input_shape == (1, 1, *TILE)
    assert_same(one(tiles), read_onnx(toy_onnx())(tiles))


@torch.inference_mode()
def test_binding_gives_what_a_run_gives() -> None:
    """It is the way of CUDA devices, here on the CPU."""
    read = read_onnx(toy_onnx())
    tiles = torch.rand(2, 1, *TILE)
    assert torch.equal(read.run_bound(tiles), read(tiles))


def test_network_computes_with_as_many_threads_as_torch_and_none_of_them_spins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Any] = []
    make = onnxruntime.InferenceSession

    def observe(*arguments: Any, **named: Any) -> Session:
        seen.append(arguments[1])
        return make(*arguments, **named)

    monkeypatch.setattr(onnxruntime, "InferenceSession", observe)
    read_onnx(toy_onnx())
    (options,) = seen
    assert options.intra_op_num_threads == torch.get_num_threads()
    assert options.get_session_config_entry("session.intra_op.allow_spinning") == "0"


def test_onnx_runtime_keeps_and_reports_nothing(tmp_path: Path) -> None:
    """Its telemetry keeps an identifier and what it is to report in the home folder."""
    home, file = tmp_path / "home", tmp_path / "network.onnx"
    home.mkdir()
    file.write_bytes(toy_onnx())
    read = "from pathlib import Path\nfrom app.model.modules.onnx import read_onnx\n"
    program = f"{read}read_onnx(Path({str(file)!r}).read_bytes())"
    environment = {"HOME": str(home), "PYTHONPATH": str(Path(__file__).resolve().parents[4])}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)
    assert list(home.rglob("*")) == []


@pytest.mark.parametrize("shape", [(), TILES[:4], (*TILES, 2)])
def test_a_network_of_other_axes_is_refused(tmp_path: Path, shape: tuple[str | int, ...]) -> None:
    """As of images with two axes, or of tiles with channels last."""
    ends = {"inputs": [value("x", shape)], "outputs": [value("y", shape)]}
    data = graph([node("Relu", "x", "y")], **ends).SerializeToString()
    with pytest.raises(ModelRefused, match=r"expected an input of shape .* got \("):
        make_blob_folder(tmp_path, data, network={"output": "heatmaps", "activation": "none"})


@pytest.fixture(scope="module")
def phantom_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the shipped phantom model with an ONNX file in the place of its weights."""
    folder = tmp_path_factory.mktemp("models") / "phantom"
    folder.mkdir()
    network = load_module(MODELS / "phantom", read_manifest(MODELS / "phantom"))
    (folder / "network.onnx").write_bytes(exported(network, torch.rand(2, 1, 48, 48, 48), {0: "n"}))
    text = (MODELS / "phantom" / "model.toml").read_text()
    text = re.sub(r"^architecture = .*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"^weights = .*$", 'program = "network.onnx"', text, flags=re.MULTILINE)
    text = re.sub(
        r"^\[network.arguments\][^\[]*(\[[^\n]*\n[^\[]*)*?(?=^\[voting\])",
        "",
        text,
        flags=re.MULTILINE,
    )
    (folder / "model.toml").write_text(text)
    write_selfcheck(folder)
    return folder


def detect(folder: Path, volume: Volume) -> dict[str, Any]:
    found = Detector(load_checked(folder, CPU, "auto")).detect(volume)
    return {landmark.name: landmark for landmark in found.landmarks}


@pytest.mark.no_cover
def test_landmarks_are_where_torch_finds_them(phantom_folder: Path) -> None:
    volume = make_phantom(11).volume
    expected, found = detect(MODELS / "phantom", volume), detect(phantom_folder, volume)
    assert [mark.status for mark in found.values()] == [mark.status for mark in expected.values()]
    points = [name for name, mark in expected.items() if mark.ras_mm is not None]
    assert len(points) >= 3
    for name in points:
        np.testing.assert_allclose(found[name].ras_mm, expected[name].ras_mm, atol=SAME_MM)


def sparse() -> ModelProto:
    values, indices = array("w", [1.0]), array("i", [0], "i8")
    model = graph([node("ReduceSum", "w", "s", keepdims=0), node("Add", "x s", "y")])
    model.graph.sparse_initializer.append(
        helper.make_sparse_tensor(values, indices, [1 << 20, 1 << 20])
    )
    return model


INSIDE = {"functions": [function("F", node("Foo", "a", "b", domain="evil"))], "domains": ["mine"]}
CYCLE = {"functions": [function("F", node("F", "a", "b", domain="mine"))], "domains": ["mine"]}
LOCAL = {"functions": [function("F", node("Relu", "a", "b"))], "domains": ["mine"]}
CALL = node("F", "x", "y", domain="mine")
RELU = node("Relu", "x", "y")
ADD = node("Add", "x w", "y")
OTHER_FILE = "expected all weights in the file, 'w' lies in another; export it with external_data="

REFUSED: dict[str, tuple[Callable[[], ModelProto], str]] = {
    "external": (lambda: graph([ADD], elsewhere("w", "weights.bin")), OTHER_FILE),
    "path": (lambda: graph([ADD], elsewhere("w", "../../etc/hostname")), OTHER_FILE),
    "address": (lambda: graph([ADD], elsewhere("w", "*/_ORT_MEM_ADDR_/*")), OTHER_FILE),
    "unmarked": (lambda: graph([ADD], marked("w")), OTHER_FILE),
    "in a branch": (lambda: branching(elsewhere("w", "weights.bin")), OTHER_FILE),
    "in a function": (
        lambda: graph(
            [CALL],
            functions=[
                function(
                    "F",
                    node("Constant", "", "w", value=elsewhere("w", "x")),
                    node("Add", "a w", "b"),
                )
            ],
            domains=["mine"],
        ),
        OTHER_FILE,
    ),
    "sparse": (sparse, "expected dense tensors, got a sparse one"),
    "huge": (
        lambda: graph([ADD], TensorProto(name="w", data_type=1, dims=[1 << 40], raw_data=b"0000")),
        "expected a valid ONNX file, got ValidationError: ",
    ),
    "custom": (
        lambda: graph([node("Foo", "x", "y", domain="evil")], domains=["evil"]),
        "expected operators of ONNX, got evil:Foo",
    ),
    "custom in a function": (
        lambda: graph([CALL], **INSIDE),
        "expected operators of ONNX, got evil:Foo",
    ),
    "file reader": (
        lambda: graph(
            [node("EPContext", "x", "y", domain="com.microsoft")], domains=["com.microsoft"]
        ),
        "expected operators of ONNX, got com.microsoft:EPContext",
    ),
    "unknown": (
        lambda: graph(
            [node("NoSuch", "x", "y", domain="com.microsoft")], domains=["com.microsoft"]
        ),
        "expected a network that ONNX Runtime can load, got Fail: .*com.microsoft:NoSuch",
    ),
    "computed in doubles": (
        lambda: graph(
            [
                node("Cast", "x", "a", to=11),
                node("Conv", "a w", "b"),
                node("Cast", "b", "y", to=1),
            ],
            array("w", [[[[[1.0]]]]], "f8"),
        ),
        "got NotImplemented: .* Conv.*; export it in float32, or in float16$",
    ),
    "recursive": (lambda: graph([CALL], **CYCLE), "expected a valid ONNX file, got "),
    "stride 0": (
        lambda: graph(
            [node("MaxPool", "x", "y", kernel_shape=[2, 2, 2], strides=[0, 1, 1])],
            outputs=[value("y", ("n", 1, "a", "b", "c"))],
            inputs=[value("x", (1, 1, 8, 8, 8))],
        ),
        "expected a valid ONNX file, got InferenceError",
    ),
    "two inputs": (
        lambda: graph([ADD], inputs=[value("x", TILES), value("w", [1])]),
        r"expected one input and one output of float32 or float16, got inputs \[x: tensor\(float\) "
        r"\['n', 1, 'i', 'j', 'k'\], w: tensor\(float\) \[1\]\] and outputs \[y: ",
    ),
    "two outputs": (
        lambda: graph([RELU], outputs=[value("y", TILES), value("x", TILES)]),
        r"expected one input and one output .* and outputs \[y: .*, x: ",
    ),
    "integers": (
        lambda: graph(
            [node("Cast", "x", "y", to=1)], inputs=[value("x", TILES, TensorProto.INT32)]
        ),
        r"expected one input .* got inputs \[x: tensor\(int32\) ",
    ),
    "doubles": (
        lambda: graph(
            [node("Cast", "x", "y", to=11)], outputs=[value("y", TILES, TensorProto.DOUBLE)]
        ),
        r"expected one input .* and outputs \[y: tensor\(double\) ",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_plain_network_is_refused(case: str) -> None:
    make, message = REFUSED[case]
    with pytest.raises(ModelRefused, match=message):
        read_onnx(make().SerializeToString())


@pytest.mark.parametrize("length", [0, 8, 400, -100])
def test_damaged_file_is_refused(length: int) -> None:
    with pytest.raises(ModelRefused, match="expected a valid ONNX file, got "):
        read_onnx(toy_onnx()[:length])


def test_larger_file_than_protobuf_allows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    data = toy_onnx()
    monkeypatch.setattr("app.model.modules.onnx.MAX_BYTES", len(data) - 1)
    with pytest.raises(ModelRefused, match=f"up to {len(data) - 1} bytes, got {len(data)}"):
        read_onnx(data)


def test_file_that_passes_for_another_format_is_read_as_onnx() -> None:
    model = graph([RELU])
    model.producer_name = "ORTM"  # where files of ONNX Runtime's own format have their name
    data = model.SerializeToString()
    assert data[4:8] == b"ORTM"
    assert read_onnx(data)(-torch.ones(1, 1, 2, 3, 4)).sum() == 0


def test_fields_that_were_not_checked_do_not_reach_onnx_runtime(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unknown = b"\xc2\x3e\x04spam"  # field 1000, of which this version knows nothing
    seen: list[bytes] = []
    make = onnxruntime.InferenceSession

    def observe(data: bytes, *rest: Any, **named: Any) -> Session:
        seen.append(data)
        return make(data, *rest, **named)

    monkeypatch.setattr(onnxruntime, "InferenceSession", observe)
    data = graph([RELU]).SerializeToString()
    read_onnx(data + unknown)
    assert seen == [data]


def test_functions_of_the_file_itself_are_computed() -> None:
    read = read_onnx(graph([CALL], **LOCAL).SerializeToString())
    assert read(-torch.ones(2, 1, 2, 3, 4)).tolist() == torch.zeros(2, 1, 2, 3, 4).tolist()


def test_half_precision_inputs_and_outputs_are_served() -> None:
    half = [value(name, TILES, TensorProto.FLOAT16) for name in "xy"]
    model = graph([ADD], array("w", [0.5], "f2"), inputs=half[:1], outputs=half[1:])
    output = read_onnx(model.SerializeToString())(torch.ones(1, 1, 2, 3, 4))
    assert output.dtype == torch.float16
    assert torch.equal(output, torch.full((1, 1, 2, 3, 4), 1.5, dtype=torch.float16))


def test_shortage_of_memory_is_told_from_other_errors() -> None:
    huge = graph(
        [
            node("ConstantOfShape", "w", "h"),
            node("ReduceMax", "h", "s", keepdims=0),
            node("Add", "x s", "y"),
        ],
        array("w", [1 << 45], "i8"),
    )
    with pytest.raises(MemoryError, match="allocate memory"):
        read_onnx(huge.SerializeToString())(torch.ones(1, 1, 2, 3, 4))
    with pytest.raises(RuntimeError, match="index: 2 Got: 3 Expected: 32"):
        read_onnx(toy_onnx())(torch.ones(1, 1, 3, 24, 40))


@pytest.mark.parametrize("package", ["onnx", "onnxruntime"])
def test_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    data = toy_onnx()
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ModelRefused, match=rf"package {package}; pip install 'landmarkd\[onnx\]'"):
        read_onnx(data)


@pytest.mark.no_cover
def test_packages_are_imported_only_for_a_model_that_needs_them() -> None:
    code = (
        "import sys, app.inference; sys.exit('onnx' in sys.modules or 'onnxruntime' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.no_cover
@pytest.mark.parametrize("kind", ["bytes", "fields"])
def test_mutated_files_are_read_or_refused_in_bounded_memory(tmp_path: Path, kind: str) -> None:
    model = onnx.load_model_from_string(toy_onnx())
    for message in (model, model.graph, *model.graph.node, *model.graph.value_info):
        del message.metadata_props[:]  # half of the file, and nobody reads it
    path = tmp_path / "network.onnx"
    path.write_bytes(model.SerializeToString())
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.onnx_mutations", path, "2500", kind],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    read, refused, grown_mib = map(int, done.stdout.split())
    assert read > 50
    assert refused > 1500
    assert grown_mib < 100
