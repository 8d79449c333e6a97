"""What kernels of rows rely on: a scale for every row, a number for every column."""

from __future__ import annotations

from intaglio.ir import Graph, Op
from intaglio.ops.rows import ROW_MODES, row_accumulator, row_levels, scales_shape


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
