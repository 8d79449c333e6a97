"""embedding_bag: rows of a table, joined bag by bag; arange: whole numbers, equally far apart. Both stay outside of
loops.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from intaglio import numerics
from intaglio.ir import DType, Op, Shape, TensorType
from intaglio.numerics import float_math
from intaglio.ops.opdef import Attrs, OpDef

MODES = ("sum", "mean", "max")
"""In torch's order."""
NO_PADDING = -1
"""In place of the id that counts nowhere."""


def operands_of_bags(op: Op, levels: bool) -> Mapping[str, str]:
    """Operand -> value: table, ids, offsets; of a table of ``levels`` scales and zero points; weights of samples, if
    the operator has them. ValueError for another number of them.
    """
    names = ("table", "ids", "offsets", *(("scales", "zero_points") if levels else ()))
    names = (*names, "weights") if op.attrs["weighted"] else names
    return dict(zip(names, op.inputs, strict=True))


def bags_shape(attrs: Attrs, shapes: Sequence[Shape]) -> Shape:
    table, _, offsets = shapes[:3]
    return (offsets[0] - int(attrs["ends"]), table[1])


def bags_meaning(op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType) -> np.ndarray:
    """f32 or u8[V, D], ids i64[L], offsets i64[B] -> f32[B, D]. Bag b has the ids from its offset up to the next one's;
    the last up to the end, or with attribute ``ends``, where there is an offset more than bags, up to that one, as
    torch documents it (some of its modes go on to the end).

    Starting from 0, rows times their weights are added in the order of ids; "mean" divides by ``float32(count)``;
    "max" takes `float_math.maximum` of them. ``padding`` counts nowhere, an empty bag is 0. IndexError for ids that the
    table does not have and for offsets that do not begin at 0, fall or lead outside.
    """
    given = dict(zip(operands_of_bags(op, types[0].dtype is DType.U8), args, strict=True))
    ids, offsets = given["ids"], given["offsets"]
    ends = offsets if op.attrs["ends"] else np.append(offsets, len(ids))
    if len(ends) > 1 and (ends[0] != 0 or (np.diff(ends) < 0).any() or ends[-1] > len(ids)):
        raise IndexError("index out of range in self")
    by_row = [given[name] for name in ("scales", "zero_points") if name in given]
    look_up = float_math.rows_of_levels if by_row else float_math.rows_of
    rows = look_up(given["table"], ids[: ends[-1] if len(ends) > 1 else 0, None], *by_row)
    if "weights" in given:
        with np.errstate(all="ignore"):
            rows = rows * given["weights"][: len(rows), None]
    found = [range(a, b) for a, b in pairwise(ends)]
    kept = [[i for i in bag if ids[i] != op.attrs["padding"]] for bag in found]
    joined = [_joined(rows[bag], op.attrs["mode"]) for bag in kept]
    return np.array(joined, np.float32).reshape(len(found), given["table"].shape[1])


def _joined(rows: numerics.F32, mode: str) -> numerics.F32:
    """f32[count, D] -> f32[D], row after row."""
    total = np.zeros(rows.shape[1], np.float32)
    with np.errstate(all="ignore"):
        for index, row in enumerate(rows):
            total = total + row if mode != "max" else row if index == 0 else float_math.maximum(row, total)
        return total / np.float32(len(rows)) if mode == "mean" and len(rows) else total


def arange_shape(attrs: Attrs, shapes: Sequence[Shape]) -> Shape:
    return (attrs["size"],)


def arange_meaning(op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType) -> np.ndarray:
    """i64[size]: ``start + i * step``."""
    return op.attrs["start"] + op.attrs["step"] * np.arange(op.attrs["size"], dtype=np.int64)


EMBEDDING_BAG = OpDef(name="embedding_bag", infer=bags_shape, meaning=bags_meaning, kernel="tables")
ARANGE = OpDef(name="arange", infer=arange_shape, meaning=arange_meaning, kernel="tables")
OPS = (EMBEDDING_BAG, ARANGE)
