"""ONNX files made node by node, for tests of what is read and what is refused."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from onnx import (
    FunctionProto,
    ModelProto,
    NodeProto,
    TensorProto,
    ValueInfoProto,
    helper,
    numpy_helper,
)

TILES: Final = ("n", 1, "i", "j", "k")
"""Shape of any batch of tiles."""


def value(name: str, shape: Sequence[str | int], kind: int = TensorProto.FLOAT) -> ValueInfoProto:
    """Describe an input or output."""
    return helper.make_tensor_value_info(name, kind, shape)


def graph(nodes: Sequence[NodeProto], *weights: TensorProto, **changed: Any) -> ModelProto:
    """Make a network from nodes that turn x into y."""
    parts = {"inputs": [value("x", TILES)], "outputs": [value("y", TILES)], **changed}
    made = helper.make_graph(nodes, "g", parts["inputs"], parts["outputs"], weights)
    opsets = [helper.make_opsetid(domain, 1) for domain in parts.get("domains", ())]
    opsets.append(helper.make_opsetid("", 18))
    functions = parts.get("functions", ())
    return helper.make_model(made, opset_imports=opsets, functions=functions, ir_version=9)


def node(kind: str, inputs: str, outputs: str, **attributes: Any) -> NodeProto:
    """Make a node; names of its inputs and outputs are separated by spaces."""
    return helper.make_node(kind, inputs.split(), outputs.split(), **attributes)


def function(kind: str, *nodes: NodeProto) -> FunctionProto:
    """Make a function from a to b, in the domain "mine"."""
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("mine", 1)]
    return helper.make_function("mine", kind, ["a"], ["b"], nodes, opsets)


def array(name: str, numbers: object, dtype: str = "f4") -> TensorProto:
    """Make a tensor."""
    return numpy_helper.from_array(np.array(numbers, dtype), name)


def elsewhere(name: str, location: str) -> TensorProto:
    """Make a tensor whose data lie in another file."""
    tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=[1])
    tensor.data_location = TensorProto.EXTERNAL
    for key, text in (("location", location), ("offset", "0"), ("length", "4")):
        entry = tensor.external_data.add()
        entry.key, entry.value = key, text
    return tensor


def marked(name: str) -> TensorProto:
    """Make a tensor with data that names a file all the same."""
    tensor = elsewhere(name, "/etc/hostname")
    tensor.data_location = TensorProto.DEFAULT
    tensor.float_data.append(1.0)
    return tensor


def branching(weight: TensorProto) -> ModelProto:
    """Make a network with a weight in a branch of an If."""
    branch = helper.make_graph(
        [node("Constant", "", "w", value=weight), node("Add", "x w", "o")],
        "branch",
        [],
        [value("o", TILES)],
    )
    return graph(
        [node("If", "c", "y", then_branch=branch, else_branch=branch)], array("c", True, "?")
    )


def as_heatmap(stride: int = 1) -> bytes:
    """Make a network whose heatmap, of one landmark, is the scan itself, at a stride."""
    edges = [stride] * 3
    mean = node("AveragePool", "x", "y", kernel_shape=edges, strides=edges)
    outputs = [value("y", ("n", 1, "u", "v", "w"))]
    made: bytes = graph([mean], outputs=outputs).SerializeToString()
    return made


def centre_of_mass(tile: Sequence[int], *extras: float) -> bytes:
    """Make a network that answers the centre of mass of its tile, in voxels, as a coordinate.

    Args:
        tile: Edges of the tile.
        extras: What it answers besides, whatever the tile.
    """
    ramps = np.stack([*np.indices(tile).reshape(3, -1), np.ones(int(np.prod(tile)))], axis=1)
    nodes = [
        node("Flatten", "x", "flat", axis=1),
        node("MatMul", "flat ramps", "sums"),
        node("Split", "sums parts", "moments mass", axis=1),
        node("Div", "moments mass", "centre"),
        node("Mul", "mass zero", "none"),
        node("Add", "none extras", "rest"),
        node("Concat", "centre rest", "row", axis=1),
        node("Unsqueeze", "row axis", "y"),
    ]
    numbers = (
        array("ramps", ramps),
        array("parts", [3, 1], "i8"),
        array("zero", [0.0]),
        array("extras", [extras]),
        array("axis", [1], "i8"),
    )
    if not extras:
        nodes[4:7] = [node("Identity", "centre", "row")]
    inputs, outputs = [value("x", ("n", 1, *tile))], [value("y", ("n", 1, 3 + len(extras)))]
    made: bytes = graph(nodes, *numbers, inputs=inputs, outputs=outputs).SerializeToString()
    return made
