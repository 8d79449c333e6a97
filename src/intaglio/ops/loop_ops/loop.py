"""The loop operator: a graph of elementwise operators and reductions along one axis, compiled to one kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from intaglio.ir import DType, Graph, Op, TensorType
from intaglio.ops.loop_ops.loop_space import body_of, row_axis, space
from intaglio.ops.loop_ops.primitives import PRIMITIVES, infer, primitive
from intaglio.ops.opdef import Layout, OpDef, Result

LOOP_DTYPES = (DType.F32, DType.BF16, DType.U8, DType.BOOL, DType.I64)
"""Element types of a loop's operands and results."""


def loop_reference(op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType) -> Result:
    """Run the body, one primitive after the other."""
    body = body_of(op)
    values = {**body.constants, **dict(zip(body.inputs, args, strict=True))}
    for step in body.ops:
        read = [body.types[name] for name in step.inputs]
        reference = PRIMITIVES[step.kind].reference
        values[step.output] = reference(step, [values[name] for name in step.inputs], read, body.types[step.output])
    return tuple(np.ascontiguousarray(values[name]).reshape(np.shape(values[name])) for name in body.outputs)


def check_loop(op: Op, graph: Graph) -> None:
    """Raise `ValueError` for a body that kernels cannot run: unknown primitives, wrong types, wrong shapes."""
    body, constants = body_of(op), {name: np.shape(array) for name, array in body_of(op).constants.items()}
    if any(shape != () or body.types[name].dtype not in (DType.F32, DType.I64) for name, shape in constants.items()):
        raise ValueError(f"%{op.output}: constants in a loop body must be single numbers, f32 or i64")
    for names, inner in ((op.inputs, body.inputs), (op.outputs, body.outputs)):
        if [_end(graph.types[name]) for name in names] != [_end(body.types[name]) for name in inner]:
            raise ValueError(f"%{op.output}: the types of operands and results differ from those of the loop body")
    tables = _tables(op, body, graph)
    for name in (*body.inputs, *body.outputs):
        kind = body.types[name]
        if kind.dtype not in LOOP_DTYPES or (kind.dtype is DType.U8 and name not in tables) != (kind.q is not None):
            raise ValueError(f"%{op.output}: a loop cannot read or write {kind}")
    if set(body.outputs) & {*body.inputs, *body.constants} or len(set(body.outputs)) != len(body.outputs):
        raise ValueError(f"%{op.output}: a loop must compute each of its results, and only once")
    for step in body.ops:
        _check_step(step, op, body)
    axis, shape = row_axis(body), space(body)
    for step in body.ops:
        if axis is not None and PRIMITIVES[step.kind].reduces and body.types[step.inputs[0]].shape[axis] != shape[axis]:
            raise ValueError(f"%{op.output}: {step.kind} reduces a value that has only one number per row")


def _tables(op: Op, body: Graph, graph: Graph) -> set[str]:
    """Return the quantized tables that the body reads; raise `ValueError` if one or its parameters are not constant."""
    outer = dict(zip(body.inputs, op.inputs, strict=True))
    reads = [(step.inputs[0], *step.inputs[2:]) for step in body.ops if step.kind == "gather_levels"]
    if any(outer.get(name) not in graph.constants for names in reads for name in names):
        raise ValueError(f"%{op.output}: a quantized table and its parameters must be constants")
    return {names[0] for names in reads} - {n for s in body.ops if s.kind != "gather_levels" for n in s.inputs}


def _end(kind: TensorType) -> tuple[object, ...]:
    """Return the properties in which an operand must agree with the body's input."""
    return kind.shape, kind.dtype, kind.q


def _check_step(step: Op, op: Op, body: Graph) -> None:
    """Raise `ValueError` for a primitive with wrong attributes, types, shapes or quantization parameters."""
    row, result, where = PRIMITIVES.get(step.kind), body.types[step.output], f"%{op.output}: {step.kind}"
    if row is None or len(step.outputs) != 1 or set(step.attrs) != set(row.attrs):
        raise ValueError(f"{where} with {dict(step.attrs)} is not an operator of loops")
    types = [body.types[name] for name in step.inputs]
    given = [kind.dtype for kind in types]
    fits = any(len(given) == len(one) and all(d in a for d, a in zip(given, one, strict=True)) for one in row.operands)
    gives = given[0] if step.kind in ("squeeze", "unsqueeze") else row.result_of(given[-1]) if given else None
    casts = (DType.F32, DType.BF16, DType.BOOL, DType.I64)
    wrong = result.dtype not in casts if gives is None else result.dtype is not gives
    if not fits or wrong:
        raise ValueError(f"{where} cannot compute {result} from {[str(kind) for kind in types]}")
    if infer(step.kind, step.attrs, [kind.shape for kind in types]) != result.shape:
        raise ValueError(f"{where} computes another shape than {result}")
    for name, kind in ((step.inputs[0], types[0]), (step.output, result)):
        if row.gathers or kind.dtype is not DType.U8:
            continue
        if kind.q is None or kind.q.axis is not None or len(kind.q.scales) != 1:
            raise ValueError(f"{where}: %{name} needs one scale and one zero point")
    if step.kind == "quantize" and not 0 <= result.qparams.qmin <= result.qparams.zero <= result.qparams.qmax <= 255:
        raise ValueError(f"{where}: the zero point {result.qparams.zero} is out of the range of {result}")
    if any(key != "axis" and not isinstance(value, (int, float)) for key, value in step.attrs.items()):
        raise ValueError(f"{where}: its attributes must be numbers, but are {dict(step.attrs)}")
    if step.kind == "unsqueeze" and step.inputs[0] not in body.inputs:
        raise ValueError(f"{where} must read an operand of the loop")
    if row.gathers and not {*step.inputs} <= {*body.inputs, *_views(body)}:
        raise ValueError(f"{where} must read operands of the loop, also through unsqueeze")
    read = {name for other in body.ops for name in other.inputs}
    if step.kind == "squeeze" and (step.output in read or step.output not in body.outputs):
        raise ValueError(f"{where} must compute a result of the loop, which no other operator reads")


def _views(body: Graph) -> set[str]:
    """Return the values that are operands with an added axis."""
    return {op.output for op in body.ops if primitive(op).adds_axis}


def layout_of_rows(op: Op, types: Mapping[str, TensorType]) -> Layout:
    """Return the layout of a loop: a shared one if it is purely elementwise, any if it has rows."""
    return Layout.SAME if row_axis(body_of(op)) is None else Layout.ANY


LOOP = OpDef(
    name="loop",
    reference=loop_reference,
    has_body=True,
    validate=check_loop,
    layout=layout_of_rows,
    any_strides=True,
    kernel="loop",
)
LOOP_OPS = (LOOP,)
