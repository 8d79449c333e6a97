"""What the kernel of bags relies on: a table that is there, parameters for all of its rows, whole numbers."""

from __future__ import annotations

from intaglio.ir import DType, Graph, Op
from intaglio.ops.embedding import MODES, operands_of_bags

ATTRS = {"mode": str, "ends": bool, "weighted": bool, "padding": int}


def check_tables(op: Op, graph: Graph) -> None:
    """ValueError for a bag, or a range, that no kernel could make."""
    if op.kind == "arange":
        if op.inputs or set(op.attrs) != {"start", "step", "size"} or not isinstance(op.attrs["step"], int):
            raise ValueError(f"arange of {op.inputs} with {dict(op.attrs)}")
        if graph.types[op.output].dtype is not DType.I64:
            raise ValueError(f"arange gives {graph.types[op.output]}")
        return
    if {name: type(value) for name, value in op.attrs.items()} != ATTRS or op.attrs["mode"] not in MODES:
        raise ValueError(f"embedding_bag with {dict(op.attrs)}")
    first = graph.types[op.inputs[0]]
    values = operands_of_bags(op, first.dtype is DType.U8)
    kinds = {name: graph.types[value] for name, value in values.items()}
    held = [values[name] for name in ("table", "scales", "zero_points") if name in values]
    ids, rows = kinds["ids"].shape, first.shape[:1]
    shapes = {"scales": rows, "zero_points": rows, "weights": ids}
    whole = all(kinds[name].dtype is DType.I64 and len(kinds[name].shape) == 1 for name in ("ids", "offsets"))
    fits = all(kind.dtype is DType.F32 and kind.shape == shapes[name] for name, kind in kinds.items() if name in shapes)
    plain = first.dtype in (DType.U8, DType.F32) and first.q is None and len(first.shape) == 2
    if not (whole and fits and plain and set(held) <= set(graph.constants)):
        raise ValueError(f"embedding_bag of {[str(kind) for kind in kinds.values()]}")
    if graph.types[op.output].dtype is not DType.F32 or len(op.outputs) != 1:
        raise ValueError(f"embedding_bag gives {graph.types[op.output]}")
