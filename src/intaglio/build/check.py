"""What kernels rely on and a graph read from a file could break."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from intaglio.build.check_rows import check_recurrent, check_rows
from intaglio.build.check_tables import check_tables
from intaglio.ir import DType, Graph, Op, Schedule, evaluate
from intaglio.ir.moves import MOVES
from intaglio.ir.verify import PAIRS, PRODUCTS
from intaglio.kernels import ISAS
from intaglio.numerics import LARGEST
from intaglio.ops import OPS, OpDef
from intaglio.ops.fused_activations import PRECISE
from intaglio.ops.loop_ops.loop import check_loop
from intaglio.ops.norm import LONGEST
from intaglio.ops.pool import counts
from intaglio.ops.products.lstm_gru import RECURRENT
from intaglio.plan import Buffer, Plan, misfit
from intaglio.plan.buffers import boxes

MANY = 4096
"""Stands for free sizes."""
AT_LEAST_ONE = ("stride", "kernel", "dilation", "groups", "step", "factor", "taps")
WINDOWS = (*PRODUCTS, *MOVES, *(kind for kind in OPS if "_pool" in kind))
"""Kinds whose attributes are sizes and places, none of them negative."""


def check_graph(graph: Graph, hosts: Mapping[str, OpDef] | None = None) -> None:
    """ValueError for an operator whose result does not have the shape its record gives, whose window is none, or whose
    tables are too short or lead outside a tensor."""
    for op in graph.ops:
        if op.kind == "island":
            continue
        record = (hosts or {}).get(op.attrs["operator"]) if op.kind == "host" else OPS.get(op.kind)
        if record is None:
            raise ValueError(f"there is no operator {op.kind}")
        if op.kind == "host" and not all(_is_levels(op, index, record, graph) for index in range(len(op.inputs))):
            raise ValueError(f"%{op.output}: {record.name} of {[str(graph.types[name]) for name in op.inputs]}")
        if op.kind == "loop":
            check_loop(op, graph)
            continue
        if op.kind in WINDOWS:
            _check_window(op)
        if op.kind in MOVES and op.kind != "reshape":
            _check_places(op, graph)
        if op.kind.startswith("upsample"):
            _check_factors(op) if "results" in op.attrs else _check_tables(op, graph)
        if op.kind in ("affine", "prelu"):
            _check_channels(op, graph)
        if op.kind == "add":
            _check_sum(op, graph)
        if op.kind == "layer_norm":
            _check_norm(op, graph)
        if op.kind == "activate":
            _check_function(op, graph)
        if op.kind == "linear_f32":
            _check_stored(op, graph)
        shapes = [graph.types[name].shape for name in op.inputs]
        shape = tuple(record.infer(op.attrs, shapes))
        if op.kind in ("quantize_rows", "dequantize_rows"):
            check_rows(op, graph)
        if op.kind in RECURRENT:
            check_recurrent(op, graph)
        if op.kind in ("embedding_bag", "arange"):
            check_tables(op, graph)
        for name in op.outputs[: 1 if op.kind in (*PAIRS, *RECURRENT) else None]:
            if shape != graph.types[name].shape:
                raise ValueError(f"%{name} is {graph.types[name]}; {op.kind} gives {shape}")
        if op.kind == "table" and shapes[1] != (256,):
            raise ValueError(f"%{op.inputs[1]} is {graph.types[op.inputs[1]]}; a table has 256 entries")
        if "avg_pool" in op.kind and shapes[1] != (len(counts(op.kind, op.attrs, shapes[0])),):
            raise ValueError(f"%{op.inputs[1]} is {graph.types[op.inputs[1]]}; {op.kind} reads others")


def _is_levels(op: Op, index: int, record: OpDef, graph: Graph) -> bool:
    """Levels where a host operator reads levels, or a constant where it does not."""
    name, kind = op.inputs[index], graph.types[op.inputs[index]]
    if index in record.roles.x:
        return kind.dtype is DType.U8 and kind.q is not None and name not in graph.constants
    return name in graph.constants


def check_schedules(schedules: Mapping[str, Mapping[str, Schedule]], plan: Plan) -> None:
    """ValueError for a schedule of nothing that is computed here, or that its instruction set has no kernels for."""
    products = {step.partition.output for step in plan.steps if step.partition.anchor.kind in PRODUCTS}
    for isa, chosen in schedules.items():
        for value, schedule in chosen.items():
            if isa not in ISAS or value not in products:
                raise ValueError(f"a schedule of %{value} for {isa}")
            if (problem := misfit(schedule, ISAS[isa])) is not None:
                raise ValueError(f"%{value}: {problem}")


def _check_window(op: Op) -> None:
    for key, value in op.attrs.items():
        least = 1 if key in AT_LEAST_ONE else 0
        if any(number < least for number in _integers(value)):
            raise ValueError(f"{op.kind} with {key} {value}")


def _check_places(op: Op, graph: Graph) -> None:
    """Every copy of a move stays inside its tensors. Row-major ones show it: some copy spans all their other axes. Free
    sizes are large ones here; those too small for a move are refused call by call (`ir.sizes.needs`)."""
    if op.kind == "slice" and not all(isinstance(op.attrs[end], int) for end in ("start", "stop")):
        return
    sizes = dict.fromkeys(graph.symbols(), MANY)
    buffers = {name: Buffer(name, graph.types[name].shape, DType.U8, rows=True) for name in (*op.inputs, op.output)}
    for box in boxes(op, [buffers[name] for name in op.inputs], buffers[op.output]):
        ends = [(op.output, box.result, [run.result for run in box.runs])]
        if not box.fill:
            ends.append((op.inputs[box.operand], box.source, [run.source for run in box.runs]))
        for name, start, steps in ends:
            reach = [(run.size - 1) * step for run, step in zip(box.runs, steps, strict=True)]
            far = [evaluate(one, sizes) for one in (start, buffers[name].size(), *reach)]
            first, size, spans = far[0], far[1], far[2:]
            if first + sum(min(span, 0) for span in spans) < 0 or first + sum(max(span, 0) for span in spans) >= size:
                raise ValueError(f"{op.kind} with {dict(op.attrs)} leaves %{name}, {graph.types[name]}")


def _check_tables(op: Op, graph: Graph) -> None:
    """Indices lie inside the axis they are for; each has its weights."""
    tables = [graph.constants[name] for name in op.inputs[1:]]
    indices = tables if "nearest" in op.kind else tables[:-1:2]
    for size, index in zip(graph.types[op.inputs[0]].shape[2:], indices, strict=True):
        if index.ndim != (1 if "nearest" in op.kind else 2) or not ((index >= 0) & (index < size)).all():
            raise ValueError(f"{op.kind} reads outside {graph.types[op.inputs[0]]}")
    if "nearest" not in op.kind:
        pairs = zip(indices, tables[1:-1:2], strict=True)
        if tables[-1].shape != (1,) or any(i.shape != w.shape or i.shape[1] != 2 for i, w in pairs):
            raise ValueError(f"%{op.output}: weights that do not go with their indices")


def _check_factors(op: Op) -> None:
    """Of an operator without tables: sizes, a factor or none for each axis."""
    sizes, results, scales = (op.attrs[name] for name in ("sizes", "results", "scales"))
    known = [scale is None or (isinstance(scale, (int, float)) and 0 < scale < float("inf")) for scale in scales]
    if not (len(sizes) == len(results) == len(scales) and all(known)):
        raise ValueError(f"{op.kind} with {dict(op.attrs)}")


def _check_channels(op: Op, graph: Graph) -> None:
    """As many constants as channels."""
    shape, axis = graph.types[op.inputs[0]].shape, op.attrs.get("axis", 1)
    first, second = (graph.types[name].shape for name in op.inputs[1:])
    allowed = ((1,), (shape[axis],)) if op.kind == "prelu" else ((shape[axis],),)
    fits = second in allowed and first == (allowed[0] if op.kind == "prelu" else second)
    if axis not in (1, len(shape) - 1) or not fits:
        raise ValueError(f"{op.kind} of {graph.types[op.inputs[0]]} with constants of {first} and {second}")


def _check_sum(op: Op, graph: Graph) -> None:
    """Rests only beside an accumulator, and lying as levels do; with an axis, a factor for every channel."""
    shape, axis = graph.types[op.inputs[1]].shape, op.attrs.get("axis")
    joins = graph.types[op.inputs[0]].dtype is DType.I32
    rests = [graph.types[name].shape for name in op.inputs[4:]]
    if any(rest != shape for rest in rests) or (not joins and (rests or op.outputs[1:])):
        raise ValueError(f"add of {graph.types[op.inputs[1]]} with rests of {rests}")
    if axis is None:
        return
    channels, factors = shape[axis : axis + 1], [graph.types[name].shape for name in op.inputs[2:4]]
    fits = factors[1] == channels if not joins else all(factor in (channels, (1,)) for factor in factors)
    if axis not in (1, len(shape) - 1) or not fits:
        raise ValueError(f"add along axis {axis} of {graph.types[op.inputs[1]]} with factors of {factors}")


def _check_norm(op: Op, graph: Graph) -> None:
    """A factor and an offset for every value of a row, one epsilon."""
    row = tuple(evaluate(dim, {}) for dim in graph.types[op.inputs[0]].shape[-1:])
    found = [graph.types[name].shape for name in op.inputs[1:]]
    if found != [row, row, (1,)] or row[0] > LONGEST:
        raise ValueError(f"layer_norm of {graph.types[op.inputs[0]]} with constants of {found}")


def _check_stored(op: Op, graph: Graph) -> None:
    """A constant weight as wide as a row, levels with a scale for every output, and as many biases."""
    x, weight, *bias = (graph.types[name] for name in op.inputs)
    fits = len(weight.shape) == 2 and len(x.shape) > 0 and x.shape[-1] == weight.shape[1] and not op.attrs
    scales = weight.q.scales if weight.q is not None else ()
    axis = None if weight.q is None else weight.q.axis
    wanted = (weight.shape[0], 0) if weight.dtype is DType.S8 else (0, None)
    if not (fits and (len(scales), axis) == wanted and all(kind.shape == weight.shape[:1] for kind in bias)):
        raise ValueError(f"linear_f32 of {x}, {weight} and {[str(kind) for kind in bias]}")
    if not set(op.inputs[1:]) <= set(graph.constants):
        raise ValueError(f"%{op.output}: a weight or bias that is no constant")


def _check_function(op: Op, graph: Graph) -> None:
    """A function there is, whose slope and units are finite, so that no accumulator gives NaN."""
    name, slope = op.attrs.get("function"), op.attrs.get("slope", 0.0)
    plain = isinstance(slope, (int, float)) and abs(slope) <= float(LARGEST)
    if name not in PRECISE or not plain or ("slope" in op.attrs) != (name == "leaky_relu"):
        raise ValueError(f"activate with {dict(op.attrs)}")
    if op.inputs[1] not in graph.constants or not np.isfinite(graph.constants[op.inputs[1]]).all():
        raise ValueError(f"%{op.inputs[1]}: units that are not finite")


def _integers(value: Any) -> Iterable[int]:
    if isinstance(value, tuple):
        return [number for item in value for number in _integers(item)]
    return [value] if isinstance(value, int) else []
