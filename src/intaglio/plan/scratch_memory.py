"""Memory that threads need for themselves while a step runs: packed operands, scores of a few queries."""

from __future__ import annotations

from collections.abc import Mapping

from intaglio.ir.dims import Dim, numel
from intaglio.ir.graph import Op
from intaglio.ir.types import TensorType

QUERIES = 24
"""Rows of queries whose scores are in memory at once, at most."""
SHARERS = 32
"""Threads that have such memory; more than these find nothing to do."""
LINE = 64
"""Bytes; all parts are whole lines."""


def scratch_lines(op: Op, types: Mapping[str, TensorType]) -> Dim:
    """Lines of 64 bytes that one thread needs; 0 for operators that need none. Twins: ``attention`` and ``product`` of
    native/attention.h, which cut them up in the same order."""
    if op.kind == "attention":
        _, k, v = (types[name].shape for name in op.inputs[:3])
        depth, width, keys = 4 * _whole(k[-1], 4), 16 * _whole(v[-1], 16), _whole(v[-2], LINE)
        # Per 64 keys: K and V packed, sums of K and the mask in 32 bits, scores in float and as levels.
        return keys * (depth + width + 2 * 4 + QUERIES * (4 + 1)) + QUERIES * width // 16
    if op.kind == "bmm":
        *_, inner, columns = types[op.inputs[1]].shape
        return _whole(columns, LINE) * (4 * _whole(inner, 4) + 4)
    return 0


def recurrent_lines(op: Op, types: Mapping[str, TensorType]) -> Dim:
    """Lines of 64 bytes that all threads of an LSTM or GRU share; 0 for other operators. Twin: ``cut_up`` of
    native/recurrent.h, which takes the parts in the same order."""
    if op.kind not in ("lstm", "gru"):
        return 0
    x, (gates, hidden) = types[op.inputs[0]].shape, types[op.inputs[2 + op.attrs["rows"]]].shape
    d, batch, rows = op.attrs["directions"], x[int(not (op.attrs["cell"] or op.attrs["batch_first"]))], numel(x[:-1])
    wide, cells = d * hidden, d * batch
    state, result = cells * hidden, rows * wide
    floats: tuple[Dim, ...] = (d * rows * gates, result, rows, cells * gates, state, state, cells)
    total: Dim = 0
    for size in (*(4 * count for count in floats), result, state):
        total = total + _whole(size, LINE)
    return total


def _whole(size: Dim, step: int) -> Dim:
    """How many steps hold so many."""
    return (size + (step - 1)) // step
