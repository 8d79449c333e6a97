"""What kernels of rows and of recurrent layers rely on: a scale for every row, a number for every column."""

from __future__ import annotations

import numpy as np

from intaglio.ir import DType, Graph, Op
from intaglio.ops.dynamic_quant import ROW_MODES, row_accumulator, row_levels, scales_shape
from intaglio.ops.products.lstm_gru import GATES, PER_DIRECTION, result_shapes, states


def check_rows(op: Op, graph: Graph) -> None:
    """ValueError for levels whose scales are not those made with them, or constants of another length."""
    if op.kind == "quantize_rows":
        kinds = [graph.types[name] for name in (*op.inputs, *op.outputs)]
        shapes = [kind.shape for kind in kinds]
        expected = [shapes[0], scales_shape(shapes[0])]
        if not shapes[0] or shapes[1:] != expected or kinds[1].q != row_levels(op.outputs[1]):
            raise ValueError(f"%{op.output}: {kinds[1]} and {kinds[2]} of {kinds[0]}")
        if op.attrs.get("mode") not in ROW_MODES or not isinstance(shapes[0][-1], int):
            raise ValueError(f"quantize_rows of {kinds[0]} with {dict(op.attrs)}")
        return
    acc, scales, columns, bias = (graph.types[name] for name in op.inputs)
    made = any(one.kind == "quantize_rows" and op.inputs[1] == one.outputs[1] for one in graph.ops)
    if not made or acc.q != row_accumulator(op.inputs[1]) or scales.shape != scales_shape(acc.shape):
        raise ValueError(f"%{op.output}: an accumulator {acc} with scales {scales} of %{op.inputs[1]}")
    constant = all(name in graph.constants for name in op.inputs[2:])
    if not constant or bias.shape != acc.shape[-1:] or columns.shape not in ((1,), bias.shape):
        raise ValueError(f"%{op.output}: columns {columns} and bias {bias} of {acc}")


def check_recurrent(op: Op, graph: Graph) -> None:
    """ValueError for weights, scales or biases of other sizes than the geometry says, or states and results that are
    not the model's."""
    attrs = op.attrs
    flags, counts = [attrs.get(key) for key in FLAGS], [attrs.get(key) for key in COUNTS]
    if set(attrs) != {*FLAGS, *COUNTS} or not all(type(flag) is bool for flag in flags):
        raise ValueError(f"{op.kind} with {dict(attrs)}")
    layers, directions = counts
    if type(layers) is not int or layers < 1 or directions not in (1, 2):
        raise ValueError(f"{op.kind} with {dict(attrs)}")
    first, places = 1 + attrs["rows"], layers * directions
    x, given = graph.types[op.inputs[0]], op.inputs[first + PER_DIRECTION * places :]
    if len(op.inputs) not in (first + PER_DIRECTION * places, first + PER_DIRECTION * places + states(op.kind)):
        raise ValueError(f"{op.kind} of {len(op.inputs)} operands with {dict(attrs)}")
    if x.dtype is not DType.U8 or x.q is None or len(x.shape) != 3 - attrs["cell"] or not isinstance(x.shape[-1], int):
        raise ValueError(f"%{op.inputs[0]} is {x}; {op.kind} reads levels")
    if attrs["rows"]:
        made = any(one.kind == "quantize_rows" and one.outputs == op.inputs[:2] for one in graph.ops)
        if not made or x.q != row_levels(op.inputs[1]):
            raise ValueError(f"%{op.inputs[0]} is {x}, with scales %{op.inputs[1]}")
    elif isinstance(x.q.axis, int) or len(x.q.scales) != 1:
        raise ValueError(f"%{op.inputs[0]} is {x}; {op.kind} reads levels of one scale")
    hidden = int(graph.types[op.inputs[first + 1]].shape[1])  # type: ignore[arg-type]
    for place in range(places):
        names = op.inputs[first + PER_DIRECTION * place : first + PER_DIRECTION * (place + 1)]
        width = x.shape[-1] if place < directions else directions * hidden
        _check_place(names, GATES[op.kind] * hidden, int(width), hidden, graph)
    shapes = result_shapes(op.kind, attrs, x.shape, hidden)
    results = [graph.types[name] for name in op.outputs]
    if tuple(kind.shape for kind in results) != shapes or any(kind.dtype is not DType.F32 for kind in results):
        raise ValueError(f"{op.kind} gives {shapes}, not {[str(kind) for kind in results]}")
    for name in given:
        kind = graph.types[name]
        if kind.shape != shapes[-1] or kind.dtype is not DType.F32 or name in graph.constants:
            raise ValueError(f"%{name} is {kind}; a state of {op.kind} is {shapes[-1]}")


FLAGS, COUNTS = ("batch_first", "cell", "rows"), ("layers", "directions")


def _check_place(names: tuple[str, ...], gates: int, inputs: int, hidden: int, graph: Graph) -> None:
    """Six constants: two weights, their scales, their biases."""
    expected = [(gates, inputs), (gates, hidden), *[(gates,)] * (PER_DIRECTION - 2)]
    for name, shape in zip(names, expected, strict=True):
        kind = DType.S8 if len(shape) == 2 else DType.F32
        if name not in graph.constants or (graph.types[name].shape, graph.types[name].dtype) != (shape, kind):
            raise ValueError(f"%{name} is {graph.types[name]}, not a constant {kind} of {shape}")
        if kind is DType.F32 and not np.isfinite(graph.constants[name]).all():
            raise ValueError(f"%{name}: numbers that are not finite")
