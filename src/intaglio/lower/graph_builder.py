"""`GraphBuilder`: builds an integer graph from the nodes of a reference graph."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from torch import fx

from intaglio import numerics
from intaglio.fxgraph.node_info import known_type, origin, tensor_type
from intaglio.ir import SIGN_OFFSET, Constants, DType, Graph, Op, Origin, QParams, TensorType, fresh
from intaglio.ir.names import sanitized
from intaglio.lower.lowered import Island
from intaglio.ops import OpDef


class GraphBuilder:
    """An integer graph under construction.

    Lowering functions add values, constants and operators, and note in `values` which value a node became.

    Attributes:
        module: Reference, whose buffers hold constants.
        types: Type of every value.
        constants: Arrays of values that are constants.
        ops: Operators in execution order.
        inputs: Names of the graph's inputs.
        outputs: Names of the graph's outputs.
        values: Value of each node: quantized for quantize and dequantize nodes, otherwise float.
        items: Values of a node with several results.
        low_bytes: For a value with 16 bits, the value that holds its low byte (see `numerics.widen_to_16bit`).
        islands: Float islands that the runtime calls, by key.
        hosts: Records of user-defined operators, by name.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        self.module = module
        self.types: dict[str, TensorType] = {}
        self.constants: dict[str, np.ndarray] = {}
        self.ops: list[Op] = []
        self.inputs: list[str] = []
        self.outputs: list[str] = []
        self.values: dict[fx.Node, str] = {}
        self.items: dict[fx.Node, tuple[str, ...]] = {}
        self.low_bytes: dict[str, str] = {}
        self.islands: dict[str, Island] = {}
        self.hosts: dict[str, OpDef] = {}
        self._reused: dict[str, str] = {}  # constants by the buffer of the reference
        self._floats: dict[str, str] = {}  # dequantized values by quantized value
        self._caller_layout: dict[str, str] = {}  # values in PyTorch's layout by value in kernel layout
        self._kernel_layout: dict[str, str] = {}  # the reverse; "" until made
        self.quantized: dict[tuple[str, QParams], str] = {}  # quantized values by float value
        self._signed: dict[str, str] = {}  # int8 values by uint8 value

    def add_value(self, stem: str, kind: TensorType, node: fx.Node | None = None) -> str:
        """Add a value with this type under an unused name, and return the name; `node` has this value."""
        name = fresh({**self.types, **self.constants}, plain_name(stem))
        self.types[name] = kind
        if node is not None:
            self.values[node] = name
        return name

    def add_constant(self, stem: str, array: np.ndarray, dtype: DType) -> str:
        """Add a constant of the graph and return its name. Memory of a tensor, which may be the caller's, is copied."""
        name = self.add_value(stem, TensorType(array.shape, dtype))
        owned = array if array.flags.owndata else array.copy()
        self.constants[name] = np.asarray(owned, order="C")  # ascontiguousarray would add an axis to a scalar
        return name

    def add_parameter(self, node: fx.Node) -> str:
        """Return the name of a float parameter of the model, and add it as a constant when it is first used."""
        stem = str(node.target)
        if stem not in self._reused:
            array = getattr(self.module, stem).detach().numpy()
            self._reused[stem] = self.add_constant(stem, array, known_type(node).dtype)
        return self._reused[stem]

    def add_weight(self, node: fx.Node, array: np.ndarray, q: QParams) -> str:
        """Return the name of a quantized weight, and add it as a constant when it is first used."""
        stem = str(node.target)
        if stem not in self._reused:
            self._reused[stem] = self.add_value(stem, TensorType(array.shape, DType.S8, q, known_type(node).packing))
            self.constants[self._reused[stem]] = np.ascontiguousarray(array)
        return self._reused[stem]

    def add_op(
        self,
        kind: str,
        inputs: Iterable[str],
        stem: str,
        result: TensorType,
        where: Origin,
        low_byte: QParams | None = None,
        **attrs: Any,
    ) -> str:
        """Add an operator and return the name of its first result. With `low_byte`, it has a second u8 result."""
        output = self.add_value(stem, result)
        outputs = [output]
        if low_byte is not None:
            self.low_bytes[output] = self.add_value(f"{stem}_rest", TensorType(result.shape, DType.U8, low_byte))
            outputs.append(self.low_bytes[output])
        self.ops.append(Op(kind, tuple(inputs), tuple(outputs), attrs, origin=where))
        return output

    def float_value(self, node: fx.Node) -> str:
        """Return the float value of a node. It is dequantized once for all consumers."""
        name = self.values[node]
        kind = self.types[name]
        if kind.dtype is not DType.U8 or kind.q is None:
            return name
        if name not in self._floats:
            where = origin(node)
            self._floats[name] = self.add_op(
                "dequantize", [name], f"{name}_f32", TensorType(kind.shape, DType.F32), where
            )
        return self._floats[name]

    def add_external(self, node: fx.Node) -> str:
        """Add a value from outside the program: an input or a result of an island. PyTorch determines its layout."""
        kind = known_type(node)
        name = self.add_value(node.name, kind, node)
        if kind.q is not None:
            self._kernel_layout[name] = ""
        return name

    def quantized_value(self, node: fx.Node) -> str:
        """Return a node's quantized value in the layout of kernels."""
        name = self.values[node]
        if self._kernel_layout.get(name) == "":
            inside = self._relayout(name, "levels", node)
            signed = self.types[name].dtype is DType.S8
            self._kernel_layout[name] = self._with_other_sign(inside, node) if signed else inside
        return self._kernel_layout.get(name, name)

    def external_value(self, node: fx.Node) -> str:
        """Return the value of a node for callers and islands: quantized if it belongs to a buffer, otherwise float."""
        name, kind = self.values[node], tensor_type(node)
        if kind is None or kind.dtype not in (DType.U8, DType.S8) or kind.q is None:
            return self.float_value(node)
        if kind.dtype is DType.S8 and self.types[name].dtype is DType.U8:
            if name not in self._signed:
                self._signed[name] = self._with_other_sign(name, node)
            name = self._signed[name]
        if name not in self._kernel_layout and name not in self._caller_layout:
            self._caller_layout[name] = self._relayout(name, "bytes", node)
        return self._caller_layout.get(name, name)

    def _with_other_sign(self, name: str, node: fx.Node) -> str:
        """Return int8 values as uint8 values that are 128 more, or the reverse."""
        kind, bits = self.types[name], np.arange(256, dtype=np.uint8) ^ SIGN_OFFSET
        dtype = DType.U8 if kind.dtype is DType.S8 else DType.S8
        q = kind.qparams.with_offset(SIGN_OFFSET if dtype is DType.U8 else -SIGN_OFFSET)
        lut = self.add_constant(f"{name}_sign", bits if dtype is DType.U8 else bits.view(np.int8), dtype)
        result = TensorType(kind.shape, dtype, q)
        return self.add_op("table", [name, lut], f"{name}_{dtype}", result, origin(node))

    def _relayout(self, name: str, stem: str, node: fx.Node) -> str:
        kind = self.types[name]
        return self.add_op("reshape", [name], f"{name}_{stem}", kind, origin(node), shape=kind.shape, relayout=True)

    def requantized(self, source: str, q: QParams, where: Origin) -> str:
        """Add a lookup table that converts a quantized value to other parameters, and return the name of the result."""
        old, shape = self.types[source].qparams, self.types[source].shape
        table = numerics.requantize_lut(old.step, old.zero, q.step, q.zero, q.qmin, q.qmax)
        lut = self.add_constant(f"{source}_table", table, DType.U8)
        return self.add_op("table", [source, lut], f"{source}_again", TensorType(shape, DType.U8, q), where)

    def scales_of(self, dequantize: fx.Node) -> tuple[float, ...]:
        """Return the scales of a dequantize node: one, or one per channel."""
        scale = dequantize.args[1]
        return tuple(getattr(self.module, scale.target).tolist()) if isinstance(scale, fx.Node) else (float(scale),)

    def graph(self) -> Graph:
        """Return the integer graph built so far."""
        return Graph(tuple(self.inputs), tuple(self.outputs), self.types, tuple(self.ops), Constants(self.constants))


def plain_name(stem: str) -> str:
    """Return a name of the integer graph for a node or constant of the reference."""
    return sanitized(stem).strip("_") or "v"


def flat_f32(values: np.ndarray) -> np.ndarray:
    """Return values as a 1-D float32 array."""
    return np.asarray(values, np.float32).reshape(-1)
