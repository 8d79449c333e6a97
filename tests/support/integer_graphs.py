"""Integer graphs written by hand: shapes from the operators' records, scales that spread the quantized values of a
sample."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from intaglio import numerics
from intaglio.ir import (
    Dim,
    DType,
    Graph,
    Input,
    Op,
    Origin,
    Output,
    Packing,
    QParams,
    Signature,
    TensorType,
    evaluate,
    symbol,
)
from intaglio.lower import Lowered
from intaglio.ops import OPS, run_op, verify
from intaglio.ops.dynamic_quant import per_token_accumulator_qparams, per_token_qparams, quantize_dynamic, scales_shape
from intaglio.ops.products.grouped_linear import group_accumulator_qparams

N, H, W = symbol("n"), symbol("h"), symbol("w")


def sizes(batch: int) -> dict[str, int]:
    """Free dimensions for a batch; images grow with it."""
    return {"n": batch, "h": 6 + batch, "w": 11}


class Net:
    """Adds one operator per call and returns the name of its value. ``net.value`` holds each value for a sample."""

    def __init__(self, seed: int = 0) -> None:
        self.draw = np.random.default_rng(seed)
        self.types: dict[str, TensorType] = {}
        self.constants: dict[str, np.ndarray] = {}
        self.value: dict[str, np.ndarray] = {}
        self.ops: list[Op] = []
        self.inputs: list[str] = []

    # -- values

    def input(self, *shape: Dim, dtype: DType = DType.F32) -> str:
        """Floats, booleans or integers."""
        name = f"x{len(self.inputs)}"
        self.inputs.append(name)
        self.types[name] = TensorType(shape, dtype)
        drawn = self.draw.normal(size=[evaluate(d, sizes(2)) for d in shape])
        kinds = {DType.BOOL: drawn > 0, DType.I64: (drawn * 3).astype(np.int64)}
        self.value[name] = kinds.get(dtype, drawn.astype(np.float32))
        return name

    def input_levels(self, *shape: Dim) -> str:
        """Quantized values that the caller holds."""
        name = f"x{len(self.inputs)}"
        self.inputs.append(name)
        self.types[name] = TensorType(shape, DType.U8, self._q(1.0, None))
        drawn = self.draw.integers(0, 256, [evaluate(d, sizes(2)) for d in shape])
        self.value[name] = drawn.astype(np.uint8)
        return name

    def constant(self, array: np.ndarray) -> str:
        return self._constant(array, DType.F32)

    def _constant(self, array: np.ndarray, dtype: DType) -> str:
        name = f"c{len(self.constants)}"
        self.constants[name] = self.value[name] = array
        self.types[name] = TensorType(array.shape, dtype)
        return name

    def _op(self, kind: str, inputs: Sequence[str], dtype: DType, q: QParams | None, **attrs: Any) -> str:
        name = f"{kind}{len(self.ops)}"
        shape = OPS[kind].infer(attrs, [self.types[value].shape for value in inputs])
        self.types[name] = TensorType(shape, dtype, q)
        self.ops.append(Op(kind, tuple(inputs), (name,), attrs, origin=Origin(name)))
        (self.value[name],) = run_op(self.ops[-1], [self.value[v] for v in inputs], self, OPS, sizes(2))
        return name

    def _q(self, spread: float, zero_point: int | None) -> QParams:
        """Parameters of about 60 quantized values for ``spread``."""
        zero = int(self.draw.integers(0, 256)) if zero_point is None else zero_point
        return QParams((float(np.float32(max(spread, 1e-6) / 60)),), (zero,), 0, 255)

    def _real(self, name: str) -> np.ndarray:
        q = self.types[name].qparams
        return (self.value[name].astype(np.float64) - q.zero) * q.step

    # -- operators

    def quantize(self, x: str, zero_point: int | None = None) -> str:
        return self._op("quantize", [x], DType.U8, self._q(self.value[x].std(), zero_point))

    def dequantize(self, x: str) -> str:
        return self._op("dequantize", [x], DType.F32, None)

    def conv(
        self,
        x: str,
        outputs: int,
        kernel: int | tuple[int, int],
        stride: int = 1,
        padding: Any = 0,
        dilation: int = 1,
        groups: int = 1,
        **tail: Any,
    ) -> str:
        """conv2d and its tail, see `_tail`."""
        kernel, sides = (kernel, kernel) if isinstance(kernel, int) else kernel, (padding,) * 4
        attrs = {
            "stride": (stride, stride),
            "padding": sides if isinstance(padding, int) else padding,
            "dilation": (dilation, dilation),
            "groups": groups,
        }
        return self._matmul("conv2d", x, (outputs, self.types[x].shape[1] // groups, *kernel), 1, attrs, tail)

    def linear(self, x: str, outputs: int, group: int = 0, **tail: Any) -> str:
        """linear and its tail, see `_tail`. ``group``: size of the groups of 4-bit weights; 0 for int8 weights."""
        shape = self.types[x].shape
        return self._matmul("linear", x, (outputs, shape[-1]), len(shape) - 1, {}, tail, group)

    def _matmul(
        self, kind: str, x: str, shape: tuple[int, ...], axis: int, attrs: dict, tail: dict, group: int = 0
    ) -> str:
        weight = self._int4(shape, group) if group else self._int8(shape)
        bias = self._constant(self.draw.integers(-3000, 3000, shape[0]).astype(np.int32), DType.I32)
        scales = self.draw.uniform(0.001, 0.003, shape[0]).astype(np.float32)
        unit = tuple(map(float, numerics.accumulator_scale(self.types[x].qparams.step, scales)))
        q = QParams(unit, (0,) * shape[0], -(2**31), 2**31 - 1, axis)
        return self._tail(self._op(kind, [x, weight, bias], DType.I32, q, **attrs), np.array(unit), axis, **tail)

    def _int8(self, shape: tuple[int, ...]) -> str:
        return self._constant(self.draw.integers(-127, 128, shape).astype(np.int8), DType.S8)

    def _int4(self, shape: tuple[int, ...], group: int) -> str:
        """A weight of 4 bits, with a multiple for each group of inputs; some groups are all at one end."""
        rows, inputs = shape
        multiples = self.draw.integers(1, 16, (rows, -(-inputs // group)))
        values = self.draw.choice([-8, 7, *range(-8, 8)], shape)
        values[: rows // 4] = self.draw.choice([-8, 7])
        weight = self._constant((values * np.repeat(multiples, group, 1)[:, :inputs]).astype(np.int8), DType.S8)
        self.types[weight] = replace(self.types[weight], packing=Packing(4, -8, group))
        return weight

    def _tail(
        self,
        acc: str,
        unit: np.ndarray,
        axis: int,
        add: str | None = None,
        low: int = 0,
        high: int = 255,
        zero_point: int | None = None,
        f32: bool = False,
    ) -> str:
        """requantize, add a residual operand, or dequantize."""
        if f32:
            return self._op("dequantize", [acc], DType.F32, None)
        shape = [1] * self.value[acc].ndim
        shape[axis] = -1
        q = self._q((self.value[acc] * unit.reshape(shape)).std(), zero_point)
        factor = self._constant(numerics.multiplier(unit, q.step), DType.F32)
        bounds = {"low": low, "high": high}
        if add is None:
            return self._op("requantize", [acc, factor], DType.U8, q, **bounds)
        other = self._constant(np.float32([self.types[add].qparams.step / q.step]), DType.F32)
        return self._op("add", [acc, add, factor, other], DType.U8, q, **bounds)

    def quantize_rows(self, x: str, mode: str = "token") -> tuple[str, str]:
        """Quantized values and scales of rows."""
        quantized, scales = f"rows{len(self.ops)}", f"scales{len(self.ops)}"
        shape = self.types[x].shape
        self.types[quantized] = TensorType(shape, DType.U8, per_token_qparams(scales))
        self.types[scales] = TensorType(scales_shape(shape), DType.F32)
        self.ops.append(Op("quantize_rows", (x,), (quantized, scales), {"mode": mode}, origin=Origin(quantized)))
        self.value[quantized], self.value[scales] = quantize_dynamic(self.value[x], mode)
        return quantized, scales

    def linear_rows(self, quantized: str, scales: str, outputs: int, group: int = 0) -> str:
        """A linear layer on rows, dequantized."""
        shape = (outputs, self.types[quantized].shape[-1])
        weight = self._int4(shape, group) if group else self._int8(shape)
        start = self._constant(np.zeros(outputs, np.int32), DType.I32)
        columns = self._constant(self.draw.uniform(0.001, 0.003, outputs).astype(np.float32), DType.F32)
        bias = self._constant(self.draw.normal(size=outputs).astype(np.float32), DType.F32)
        acc = self._op("linear", [quantized, weight, start], DType.I32, per_token_accumulator_qparams(scales))
        return self._op("dequantize_rows", [acc, scales, columns, bias], DType.F32, None)

    def grouped_linear(self, x: str, ends: str, outputs: int, scales: str | None = None, single: bool = False) -> str:
        """A linear layer for each group of rows, dequantized.

        ``scales``: those of rows, from `quantize_rows`; ``single``: all outputs have one scale."""
        (groups,), depth = self.types[ends].shape, self.types[x].shape[-1]
        count = groups * outputs
        weight = self._constant(self.draw.integers(-127, 128, (count, depth)).astype(np.int8), DType.S8)
        columns = self.draw.uniform(0.001, 0.003, 1 if single else count).astype(np.float32)
        if scales is not None:
            start = self._constant(np.zeros(count, np.int32), DType.I32)
            bias = self._constant(self.draw.normal(size=count).astype(np.float32), DType.F32)
            operands = [x, weight, start, ends]
            acc = self._op("grouped_linear", operands, DType.I32, per_token_accumulator_qparams(scales))
            tail = [acc, scales, self._constant(columns, DType.F32), bias, ends]
            return self._op("dequantize_rows", tail, DType.F32, None)
        bias = self._constant(self.draw.integers(-3000, 3000, count).astype(np.int32), DType.I32)
        unit = tuple(map(float, numerics.accumulator_scale(self.types[x].qparams.step, columns)))
        acc = self._op("grouped_linear", [x, weight, bias, ends], DType.I32, group_accumulator_qparams(unit))
        return self._op("dequantize_groups", [acc, ends], DType.F32, None)

    def centred(self, x: str) -> str:
        """The value with parameters that a second factor of a product of activations has: zero point 128, quantized
        values from 1, which its operator must give."""
        q = self.types[x].qparams
        self.types[x] = replace(self.types[x], q=QParams(q.scale, (128,), 1, 255))
        self.value[x] = np.maximum(self.value[x], 1)
        return x

    def attention(
        self, q: str, k: str, v: str, mask: str | None = None, causal: bool = False, f32: bool = False
    ) -> str:
        """Scores of a spread of about 2."""
        spread = self._real(q).std() * self._real(k).std() * self.types[q].shape[-1] ** 0.5
        inputs, attrs = [q, k, v, *([mask] if mask else [])], {"scale": float(2 / max(spread, 1e-6)), "causal": causal}
        if f32:
            return self._op("attention", inputs, DType.F32, None, **attrs)
        return self._op("attention", inputs, DType.U8, self._q(self._real(v).std() / 2, None), **attrs)

    def bmm(self, a: str, b: str, **tail: Any) -> str:
        """A product of activations and its tail, see `_tail`."""
        unit = float(numerics.accumulator_scale(self.types[a].qparams.step, self.types[b].qparams.step))
        acc = self._op("bmm", [a, b], DType.I32, QParams((unit,), (0,), -(2**31), 2**31 - 1))
        return self._tail(acc, np.array([unit]), -1, **tail)

    def add(self, a: str, b: str, low: int = 0, high: int = 255) -> str:
        q = self._q((self._real(a) + self._real(b)).std(), None)
        factors = [self._constant(np.float32([self.types[v].qparams.step / q.step]), DType.F32) for v in (a, b)]
        return self._op("add", [a, b, *factors], DType.U8, q, low=low, high=high)

    def mul(self, a: str, b: str, low: int = 0, high: int = 255) -> str:
        """Of two images, or of an image and one pixel on either side."""
        q = self._q((self._real(a) * self._real(b)).std(), None)
        step = np.float64(self.types[a].qparams.step) * np.float64(self.types[b].qparams.step)
        factor = self._constant(np.float32([step / q.step]), DType.F32)
        name, image = self._op("mul", [a, b, factor], DType.U8, q, low=low, high=high), max(a, b, key=self._size)
        self.types[name] = TensorType(self.types[image].shape, DType.U8, q)
        return name

    def _size(self, name: str) -> int:
        return self.value[name].size

    def same(self, kind: str, x: str, **attrs: Any) -> str:
        """An operator that keeps its input's parameters: clamp, slice, pad, reshape, max_pool2d."""
        return self._op(kind, [x], self.types[x].dtype, self.types[x].q, **attrs)

    def join(self, values: Sequence[str], axis: int = 1) -> str:
        return self._op("cat", values, DType.U8, self.types[values[0]].q, axis=axis)

    def table(self, x: str) -> str:
        quantized = self._constant(self.draw.permutation(256).astype(np.uint8), DType.U8)
        return self._op("table", [x, quantized], DType.U8, self._q(1.0, None))

    def mean(self, kind: str, x: str, **attrs: Any) -> str:
        """avg_pool2d or adaptive_avg_pool2d."""
        q, shape = self._q(self._real(x).std() / 2, None), self.types[x].shape
        table, _ = OPS[kind].constants(attrs, shape, (), self.types[x].qparams.step, q.step)
        return self._op(kind, [x, self._constant(table["factors"], DType.F32)], DType.U8, q, **attrs)

    # -- the whole

    def graph(self, *outputs: str) -> Graph:
        return verify(Graph(tuple(self.inputs), outputs, self.types, tuple(self.ops), self.constants))

    def lowered(self, *outputs: str) -> Lowered:
        """A model that takes every input and gives a tuple of outputs."""
        graph = self.graph(*outputs)
        inputs = tuple(Input(name, leaf, graph.types[name]) for leaf, name in enumerate(graph.inputs))
        trees = pytree.tree_structure((tuple(graph.inputs), {})), pytree.tree_structure(outputs)
        return Lowered(graph, {}, Signature(inputs, tuple(map(Output, outputs)), *trees))

    def batch(self, size: int, seed: int = 0) -> list[torch.Tensor]:
        """Random inputs, infinities and NaN among them."""
        draw = np.random.default_rng(seed)
        found = []
        for name in self.inputs:
            shape = [evaluate(d, sizes(size)) for d in self.types[name].shape]
            if self.types[name].dtype is DType.U8:
                found.append(torch.from_numpy(draw.integers(0, 256, shape).astype(np.uint8)))
                continue
            x = draw.normal(size=shape).astype(np.float32)
            if self.types[name].dtype is DType.I64:
                found.append(torch.from_numpy((x * 3).astype(np.int64)))
                continue
            if self.types[name].dtype is DType.BOOL:
                found.append(torch.from_numpy(x > -0.5))
                continue
            strange = draw.random(x.shape) < 0.02
            x[strange] = draw.choice([np.nan, np.inf, -np.inf, 1e30, -1e30, -0.0, 1e-40], int(strange.sum()))
            found.append(torch.from_numpy(x))
        return found
