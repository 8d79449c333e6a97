"""Operators on ids that run outside of loops: embedding_bag and arange."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from intaglio import numerics
from intaglio.errors import INDEX_OUT_OF_RANGE
from intaglio.ir import Attrs, DType, Graph, Op, Shape, TensorType
from intaglio.numerics import float_math
from intaglio.ops.opdef import OpDef

MODES = ("sum", "mean", "max")
"""Reductions in torch's order."""
NO_PADDING = -1
"""Sentinel for ``padding_idx=None``."""


def operands_of_bags(op: Op, is_quantized: bool) -> Mapping[str, str]:
    """Return the value of each operand by name: table, ids, offsets, scales and zero points, weights.

    Scales and zero points exist if the table ``is_quantized``, weights of samples if the operator has them.

    Raises:
        ValueError: The number of operands is wrong.
    """
    names = ("table", "ids", "offsets", *(("scales", "zero_points") if is_quantized else ()))
    names = (*names, "weights") if op.attrs["weighted"] else names
    return dict(zip(names, op.inputs, strict=True))


def bags_shape(attrs: Attrs, shapes: Sequence[Shape]) -> Shape:
    """Return [bags, row length]."""
    table, _, offsets = shapes[:3]
    return (offsets[0] - int(attrs["ends"]), table[1])


def bags_reference(op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType) -> np.ndarray:
    """Return f32[B, D] of a table f32 or u8[V, D], ids i64[L] and offsets i64[B].

    Bag b has the ids from its offset up to the next offset, the last bag those up to the end. With attribute ``ends``
    there is one more offset than bags, which ends the last bag, as torch documents it (some of its modes use all ids
    instead).

    Starting from 0, rows times their weights are added in the order of ids. "mean" divides the sum by
    ``float32(count)``, "max" takes `float_math.maximum`. Ids equal to ``padding`` are ignored, and an empty bag is 0.

    Raises:
        IndexError: An id is out of range, or offsets do not start at 0, decrease or exceed the number of ids.
    """
    given = dict(zip(operands_of_bags(op, types[0].dtype is DType.U8), args, strict=True))
    ids, offsets = given["ids"], given["offsets"]
    ends = offsets if op.attrs["ends"] else np.append(offsets, len(ids))
    if len(ends) > 1 and (ends[0] != 0 or (np.diff(ends) < 0).any() or ends[-1] > len(ids)):
        raise IndexError(INDEX_OUT_OF_RANGE)
    by_row = [given[name] for name in ("scales", "zero_points") if name in given]
    look_up = float_math.gather_quantized_rows if by_row else float_math.gather_rows
    rows = look_up(given["table"], ids[: ends[-1] if len(ends) > 1 else 0, None], *by_row)
    if "weights" in given:
        with np.errstate(all="ignore"):
            rows = rows * given["weights"][: len(rows), None]
    found = [range(a, b) for a, b in pairwise(ends)]
    kept = [[i for i in bag if ids[i] != op.attrs["padding"]] for bag in found]
    joined = [_joined(rows[bag], op.attrs["mode"]) for bag in kept]
    return np.array(joined, np.float32).reshape(len(found), given["table"].shape[1])


def _joined(rows: numerics.FloatArray, mode: str) -> numerics.FloatArray:
    """Reduce f32[count, D] to f32[D], row after row."""
    total = np.zeros(rows.shape[1], np.float32)
    with np.errstate(all="ignore"):
        for index, row in enumerate(rows):
            total = total + row if mode != "max" else row if index == 0 else float_math.maximum(row, total)
        return total / np.float32(len(rows)) if mode == "mean" and len(rows) else total


def arange_shape(attrs: Attrs, shapes: Sequence[Shape]) -> Shape:
    """Return [size]."""
    return (attrs["size"],)


def arange_reference(op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType) -> np.ndarray:
    """Return i64[size]: ``start + i * step``."""
    return op.attrs["start"] + op.attrs["step"] * np.arange(op.attrs["size"], dtype=np.int64)


ATTRS = {"mode": str, "ends": bool, "weighted": bool, "padding": int}


def valid_bags(op: Op, graph: Graph) -> None:
    """Check that the table is constant with parameters for all of its rows, and that ids and offsets are integers."""
    if {name: type(value) for name, value in op.attrs.items()} != ATTRS or op.attrs["mode"] not in MODES:
        raise ValueError(
            f"embedding_bag has the wrong attributes {dict(op.attrs)}; expected are {sorted(ATTRS)}, with a known mode"
        )
    first = graph.types[op.inputs[0]]
    values = operands_of_bags(op, first.dtype is DType.U8)
    kinds = {name: graph.types[value] for name, value in values.items()}
    held = [values[name] for name in ("table", "scales", "zero_points") if name in values]
    ids, rows = kinds["ids"].shape, first.shape[:1]
    shapes = {"scales": rows, "zero_points": rows, "weights": ids}
    are_integers = all(kinds[name].dtype is DType.I64 and len(kinds[name].shape) == 1 for name in ("ids", "offsets"))
    fits = all(kind.dtype is DType.F32 and kind.shape == shapes[name] for name, kind in kinds.items() if name in shapes)
    plain = first.dtype in (DType.U8, DType.F32) and first.q is None and len(first.shape) == 2
    if not (are_integers and fits and plain and set(held) <= set(graph.constants)):
        raise ValueError(
            f"embedding_bag expects a constant table [rows, width], i64 ids and offsets, and f32 parameters per row, "
            f"but got {[str(kind) for kind in kinds.values()]}"
        )
    if graph.types[op.output].dtype is not DType.F32 or len(op.outputs) != 1:
        raise ValueError(f"embedding_bag returns one f32 value, but its result is {graph.types[op.output]}")


def valid_range(op: Op, graph: Graph) -> None:
    """Check that a range has a start, a step and a size, and returns integers."""
    if op.inputs or set(op.attrs) != {"start", "step", "size"} or not isinstance(op.attrs["step"], int):
        raise ValueError(
            f"arange expects only the attributes start, step and size, but got {op.inputs} and {dict(op.attrs)}"
        )
    if graph.types[op.output].dtype is not DType.I64:
        raise ValueError(f"arange returns i64 values, but its result is {graph.types[op.output]}")


EMBEDDING_BAG = OpDef(
    name="embedding_bag",
    infer=bags_shape,
    reference=bags_reference,
    validate=valid_bags,
    emit="embedding_bag",
    kernel="tables",
)
ARANGE = OpDef(
    name="arange", infer=arange_shape, reference=arange_reference, validate=valid_range, emit="arange", kernel="tables"
)
EMBEDDING_OPS = (EMBEDDING_BAG, ARANGE)
