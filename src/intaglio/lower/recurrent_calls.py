"""Lower LSTM, GRU and plain RNN."""

from __future__ import annotations

from torch import fx

from intaglio.fxgraph.node_info import fixed_size, known_type, origin
from intaglio.fxgraph.nodes import operator
from intaglio.ir import DType, Op, TensorType
from intaglio.lower.graph_builder import GraphBuilder
from intaglio.ops.products.recurrent import result_shapes
from intaglio.quant.annotate.recurrent_sites import RECURRENT_CALL


def is_recurrent_part(node: fx.Node) -> bool:
    """Return whether a node is a recurrent layer, or takes one of its results."""
    source = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
    return operator(node) == RECURRENT_CALL or (source is not None and operator(source) == RECURRENT_CALL)


def lower_recurrent(builder: GraphBuilder, node: fx.Node) -> None:
    """Lower a recurrent layer to one operator. Its getitem nodes refer to the results."""
    if operator(node) != RECURRENT_CALL:
        source, index = node.args
        builder.values[node] = builder.items[source][index]
        return
    kind, x, scales, _, _, constants, states, layers, directions, batch_first, cell = node.args
    attrs = {
        "layers": layers,
        "directions": directions,
        "batch_first": batch_first,
        "cell": cell,
        "rows": scales is not None,
    }
    where = origin(node)
    stem = where.path.replace("@", "_call") or kind
    names = [builder.values[x], *([builder.values[scales]] if scales is not None else [])]
    for constant in constants:
        array = getattr(builder.module, constant.target).numpy()
        stored = known_type(constant)
        names.append(
            builder.add_weight(constant, array, stored.qparams)
            if stored.dtype is DType.S8
            else builder.add_constant(constant.target, array, stored.dtype)
        )
    names += [builder.float_value(state) for state in states]
    shapes = result_shapes(kind, attrs, builder.types[names[0]].shape, fixed_size(constants[1], 1))
    outputs = tuple(
        builder.add_value(f"{stem}_{part}", TensorType(shape, DType.F32))
        for part, shape in zip(("y", "h", "c")[cell:], shapes, strict=False)
    )
    builder.ops.append(Op(kind, tuple(names), outputs, attrs, origin=where))
    builder.items[node] = outputs
    builder.values[node] = outputs[0]
