"""Preconditions of a graph: element types, requirements of kernels for a deserialized graph, sizes of a call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from intaglio.ir import Dim, DType, Graph, Op, Shape
from intaglio.ir.verify import TypeRule, verify_graph
from intaglio.ops.loop_ops.loop_space import body_of
from intaglio.ops.loop_ops.primitives import infer
from intaglio.ops.opdef import OpDef
from intaglio.ops.records import OPS, op_def

AT_LEAST_ONE = ("stride", "kernel", "dilation", "groups", "step", "factor", "taps")
"""Attributes of windows that must be at least 1; the others must be at least 0."""


def verify(graph: Graph, after: str = "") -> Graph:
    """Return the graph if it is valid; otherwise raise `VerifyError` with pass, operator and rule."""
    return verify_graph(graph, type_rule, _body_rule, after)


def type_rule(op: Op) -> TypeRule | None:
    """Return the element types that an operator accepts and returns; ``None`` if it accepts any."""
    record = OPS.get(op.kind)
    types = None if record is None else record.types
    return types if types is None or isinstance(types, TypeRule) else types(op.attrs)


def _body_rule(op: Op) -> TypeRule | None:
    """Return the type rule of an operator in a loop body.

    Only quantize and dequantize have the same rule inside of a loop; its other operators are primitives.
    """
    record = OPS.get(op.kind)
    return type_rule(op) if record is not None and record.converts else None


def check_graph(graph: Graph, hosts: Mapping[str, OpDef] | None = None) -> None:
    """Check the preconditions of kernels in a deserialized graph.

    Raises:
        ValueError: The shape of a result differs from what the operator's record infers, a window is empty, or tables
            are too short or lead outside of a tensor.
    """
    for op in graph.ops:
        if op.is_island:
            continue
        record = _record(op, hosts)
        if record is None:
            raise ValueError(f"%{op.output}: the operator {op.kind} does not exist")
        if op.is_host and not all(_is_quantized(op, index, record, graph) for index in range(len(op.inputs))):
            raise ValueError(
                f"%{op.output}: {record.name} expects u8 activations and constants, "
                f"but got {[str(graph.types[name]) for name in op.inputs]}"
            )
        if record.window:
            _check_window(op)
        record.validate(op, graph)
        if (shape := wrong_shape(op, graph, record)) is not None:
            raise ValueError(f"%{op.output} is {graph.types[op.output]}, but {op.kind} computes the shape {shape}")


def wrong_shapes(graph: Graph, hosts: Mapping[str, OpDef] | None = None) -> Iterator[tuple[Op, Shape]]:
    """Yield operators whose results do not have the shape that their records infer, and that shape.

    Of a loop, this is the shape of the first value in its body that has another one.
    """
    for op in graph.ops:
        record = None if op.is_island else _record(op, hosts)
        shape = None if record is None else wrong_shape(op, graph, record)
        if op.is_loop:
            shape = next(_wrong_shapes_in_loop(op), None)
        if shape is not None:
            yield op, shape


def _wrong_shapes_in_loop(op: Op) -> Iterator[Shape]:
    body = body_of(op)
    for step in body.ops:
        shape = infer(step.kind, step.attrs, [body.types[name].shape for name in step.inputs])
        if shape != body.types[step.output].shape:
            yield shape


def wrong_shape(op: Op, graph: Graph, record: OpDef) -> Shape | None:
    """Return the shape that a record infers, or ``None`` if results have it or the operator has a body."""
    if record.has_body:
        return None
    shape = tuple(record.infer(op.attrs, [graph.types[name].shape for name in op.inputs]))
    checked = op.outputs[: 1 if record.results_differ else None]
    return shape if any(shape != graph.types[name].shape for name in checked) else None


def _record(op: Op, hosts: Mapping[str, OpDef] | None) -> OpDef | None:
    return (hosts or {}).get(op.attrs["operator"]) if op.is_host else OPS.get(op.kind)


def _is_quantized(op: Op, index: int, record: OpDef, graph: Graph) -> bool:
    """Return whether an operand of a host operator is quantized where its record says so, and a constant elsewhere."""
    name, kind = op.inputs[index], graph.types[op.inputs[index]]
    if index in record.roles.x:
        return kind.dtype is DType.U8 and kind.q is not None and name not in graph.constants
    return name in graph.constants


def _check_window(op: Op) -> None:
    """Raise `ValueError` for a negative attribute of a window, or for a zero that must be at least 1."""
    for key, value in op.attrs.items():
        least = 1 if key in AT_LEAST_ONE else 0
        if any(number < least for number in _integers(value)):
            raise ValueError(f"{op.kind} has {key} {value}, but numbers must be at least {least}")


def _integers(value: Any) -> Iterable[int]:
    """Return all integers of an attribute."""
    if isinstance(value, tuple):
        return [number for item in value for number in _integers(item)]
    return [value] if isinstance(value, int) else []


@dataclass(frozen=True)
class Need:
    """An expression that must not be negative in a call, the operator it belongs to, and the problem if it is."""

    value: Dim
    where: str
    operator: str
    problem: str


def needs(graph: Graph) -> tuple[Need, ...]:
    """Return what a program requires of the free sizes of a call.

    No size may be negative, slices must be inside of their axes, reflection padding must be narrower than what it
    reflects, and windows must have a result. Requirements without free sizes are omitted.
    """
    found: dict[Dim, Need] = {}
    known: set[tuple[Shape, int]] = set()
    for op in graph.ops:
        where = op.origin.path or op.outputs[0]
        for value, problem in (*_sizes(op, graph, known), *_of_record(op, graph)):
            if not isinstance(value, int):
                found.setdefault(value, Need(value, where, op.origin.operator or op.kind, problem))
    return tuple(found.values())


def _sizes(op: Op, graph: Graph, known: set[tuple[Shape, int]]) -> Iterable[tuple[Dim, str]]:
    """Yield the requirements that no axis is negative and that a window has at least one pixel.

    Args:
        op: the operator.
        graph: its graph.
        known: shapes, and the least numbers of pixels, of operators in front of it. Layers of a decoder have the same
            ones, and their requirements are yielded once. Those of this operator are added.
    """
    least = 0 if op.kind not in OPS else op_def(op).min_pixels
    for shape in (graph.types[name].shape for name in op.outputs):
        if (shape, least) in known:
            continue
        known.add((shape, least))
        for axis, size in enumerate(shape):
            smallest = least if axis > 1 else 0
            text = ", ".join(map(str, shape))
            yield size - smallest, f"its result [{text}] would have a size below {smallest} along axis {axis}"


def _of_record(op: Op, graph: Graph) -> Iterable[tuple[Dim, str]]:
    return op_def(op).needs(op, graph) if op.kind in OPS else ()
