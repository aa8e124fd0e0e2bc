"""An ONNX graph that is read from its end: which operation makes a value, from which inputs.

Readers ask for the operation, settings and constants that they expect. Whatever differs raises a `CheckpointError`,
and so does what no reader asked for: a network that was read is the whole graph.
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx
import torch
from google.protobuf.message import DecodeError
from onnx import numpy_helper
from torch import Tensor

from specguard.errors import CheckpointError
from specguard.records.files import read_file, reading

Sizes = tuple[int | None, ...]  # None: the number of images, which only a call determines
_LARGEST = 2**24  # bytes of a file; the benchmark's have less than 2**19
_DTYPES = (onnx.TensorProto.FLOAT, onnx.TensorProto.INT64)
_TENSOR = onnx.AttributeProto.TENSOR
_OPSET = 9  # the release of the operations, which later ones changed
_NO_EFFECT = ("momentum",)  # of a normalization that is not trained
# What a setting is where a node does not name it.
_DEFAULTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "Conv": {"auto_pad": b"NOTSET", "dilations": [1, 1], "group": 1, "pads": [0, 0, 0, 0]},
        "Gemm": {"alpha": 1.0, "beta": 1.0, "transA": 0, "transB": 0},
        "ReduceMean": {"keepdims": 1},
    }
)


class Graph:
    """The operations and constants of an ONNX file.

    Args:
        path: The file, which has one input and one output.

    Raises:
        CheckpointError: If it is not such a file, or not complete in itself.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.proto = _parse(path)
        graph, opsets = self.proto.graph, [(each.domain, each.version) for each in self.proto.opset_import]
        if opsets != [("", _OPSET)]:
            raise self.refused(f"its operations are of {opsets}, not of opset {_OPSET}")
        inputs = [value for value in graph.input if value.name not in {tensor.name for tensor in graph.initializer}]
        if len(inputs) != 1 or len(graph.output) != 1:
            raise self.refused(f"it has {len(inputs)} inputs and {len(graph.output)} outputs, not one of each")
        self.input, self.output = inputs[0].name, graph.output[0].name
        self.shape = tuple(size.dim_value for size in inputs[0].type.tensor_type.shape.dim)
        self.constants: dict[str, np.ndarray[Any, Any]] = {}
        self._makers: dict[str, onnx.NodeProto] = {}
        self._read: set[str] = set()
        for tensor in graph.initializer:
            self._add_constant(tensor.name, tensor)
        for node in graph.node:
            self._add_node(node)

    def refused(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is not a network that can be read: {why}")

    def maker(self, value: str) -> str:
        """The name of the operation that makes a value."""
        node = self._makers.get(value)
        return "input" if node is None else node.op_type

    def inputs(self, value: str, operation: str, count: int | None, /, **settings: Any) -> tuple[str, ...]:
        """The inputs of the operation that makes `value`, with exactly these settings."""
        node = self._node(value, operation)
        found = dict(_DEFAULTS.get(operation, {})) | {
            a.name: onnx.helper.get_attribute_value(a) for a in node.attribute if a.name not in _NO_EFFECT
        }
        expected = dict(_DEFAULTS.get(operation, {})) | settings
        for name in sorted(found.keys() | expected.keys()):
            if name not in found or name not in expected or found[name] != expected[name]:
                given = f"has {name} {found[name]}" if name in found else f"has no {name}"
                raise self.refused(f"the {operation} of {value!r} {given}, not {expected.get(name, 'none')}")
        if count is not None and len(node.input) != count:
            raise self.refused(f"the {operation} of {value!r} has {len(node.input)} inputs, not {count}")
        return tuple(node.input)

    def integers(self, value: str, operation: str, name: str) -> list[int]:
        """A setting of the operation that makes `value`: a list of whole numbers."""
        found: list[int] = self._setting(value, operation, name, onnx.AttributeProto.INTS)
        return found

    def number(self, value: str, operation: str, name: str) -> float:
        """A setting of the operation that makes `value`: a number."""
        return float(self._setting(value, operation, name, onnx.AttributeProto.FLOAT))

    def with_constant(self, value: str, operation: str) -> tuple[str, str]:
        """The inputs of a sum or product with one constant: the other input, and the constant."""
        first, second = self.inputs(value, operation, 2)
        if (first in self.constants) == (second in self.constants):
            raise self.refused(f"the {operation} of {value!r} does not have one constant")
        return (second, first) if first in self.constants else (first, second)

    def constant(self, name: str, *shape: int | None) -> Tensor:
        """A constant of float32 in float64; None is any size."""
        found = self.constants.get(name)
        if found is None or found.dtype != np.float32:
            raise self.refused(f"{name!r} is not a constant of float32")
        if len(found.shape) != len(shape) or any(
            n not in (m, None) for m, n in zip(found.shape, shape, strict=True)
        ):
            sizes = " x ".join("any" if size is None else str(size) for size in shape) or "a single number"
            raise self.refused(f"{name!r} has shape {found.shape}, not {sizes}")
        if name in self._read:
            raise self.refused(f"the weights {name!r} occur twice")
        self._read.add(name)
        return torch.from_numpy(found.copy()).double()

    def zeros(self, value: str, known: Mapping[str, Sizes]) -> Sizes:
        """The sizes of a tensor of zeros."""
        filled = self._setting(value, "ConstantOfShape", "value", _TENSOR)
        if not np.array_equal(self._array(value, filled), np.zeros(1, np.float32)):
            raise self.refused(f"{value!r} is not a tensor of zeros")
        (sizes,) = self.inputs(value, "ConstantOfShape", 1, value=filled)
        return self.sizes(sizes, known)

    def sizes(self, value: str, known: Mapping[str, Sizes]) -> Sizes:
        """The sizes that `value` holds: constants, or sizes of the `known` values."""
        parts = self.inputs(value, "Concat", None, axis=0)
        return tuple(size for part in parts for size in self._some_sizes(part, known))

    def finish(self) -> None:
        """Refuse operations and constants that no reader asked for."""
        for name in (*self._makers, *self.constants):
            if name not in self._read:
                raise self.refused(f"it has {name!r}, which is no part of the network")

    def _some_sizes(self, value: str, known: Mapping[str, Sizes]) -> Sizes:
        """Constants, one size of a value, or the first sizes of a value."""
        if value in self.constants:
            return self._whole_numbers(value)
        if self.maker(value) == "Slice":
            ends = self.integers(value, "Slice", "ends")
            (shape,) = self.inputs(value, "Slice", 1, axes=[0], starts=[0], ends=ends)
            return self._shape(shape, known)[: ends[0]]
        (size,) = self.inputs(value, "Unsqueeze", 1, axes=[0])
        shape, index = self.inputs(size, "Gather", 2, axis=0)
        sizes, place = self._shape(shape, known), self._whole_numbers(index)
        if len(place) != 1 or not 0 <= place[0] < len(sizes):
            raise self.refused(f"{size!r} is not one of the sizes that are known, {sizes}")
        return (sizes[place[0]],)

    def _shape(self, value: str, known: Mapping[str, Sizes]) -> Sizes:
        (of,) = self.inputs(value, "Shape", 1)
        if of not in known:
            raise self.refused(f"{value!r} is the shape of {of!r}, on which nothing here should depend")
        return known[of]

    def _whole_numbers(self, name: str) -> tuple[int, ...]:
        held = self.constants.get(name)
        if held is None or held.dtype != np.int64 or held.ndim > 1:
            raise self.refused(f"{name!r} is not a constant that holds sizes")
        self._read.add(name)
        return tuple(held.reshape(-1).tolist())

    def _setting(self, value: str, operation: str, name: str, kind: int) -> Any:
        for attribute in self._node(value, operation).attribute:
            if attribute.name == name and attribute.type == kind:
                return onnx.helper.get_attribute_value(attribute)
        raise self.refused(f"the {operation} of {value!r} has no proper {name}")

    def _node(self, value: str, operation: str) -> onnx.NodeProto:
        if self.maker(value) != operation:
            raise self.refused(f"{value!r} comes from {self.maker(value)!r}, not from {operation!r}")
        self._read.add(value)
        return self._makers[value]

    def _add_node(self, node: onnx.NodeProto) -> None:
        made = self._makers.keys() | self.constants.keys() | {self.input}
        if node.domain or len(node.output) != 1 or node.output[0] in made:
            raise self.refused(f"the operation {node.name!r} is not of ONNX, or does not make one new value")
        if missing := [name for name in node.input if name not in made]:
            raise self.refused(f"the operation {node.name!r} takes {missing[0]!r}, which is not made before it")
        self._makers[node.output[0]] = node
        if node.op_type == "Constant":
            self._add_constant(node.output[0], self._setting(node.output[0], "Constant", "value", _TENSOR))
            self._read.remove(node.output[0])

    def _add_constant(self, name: str, tensor: onnx.TensorProto) -> None:
        if name in self.constants or name == self.input:
            raise self.refused(f"it has two values of the name {name!r}")
        value = self._array(name, tensor)
        if not np.isfinite(value).all():
            raise self.refused(f"the constant {name!r} has entries that are not finite")
        self.constants[name] = value

    def _array(self, name: str, tensor: onnx.TensorProto) -> np.ndarray[Any, Any]:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            raise self.refused(f"the constant {name!r} lies in another file")
        if tensor.data_type not in _DTYPES:
            raise self.refused(f"the constant {name!r} is neither of float32 nor of int64")
        try:
            return numpy_helper.to_array(tensor)
        except ValueError:
            raise self.refused(f"the constant {name!r} does not have as many entries as its shape says") from None


def _parse(path: Path) -> onnx.ModelProto:
    with reading(path, CheckpointError):
        content = read_file(path, _LARGEST)
    try:
        return onnx.load_model_from_string(content)
    except DecodeError:
        raise CheckpointError(f"{path} is not an ONNX file") from None
