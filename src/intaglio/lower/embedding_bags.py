"""Lower embedding bags and integer ranges."""

from __future__ import annotations

from operator import getitem
from typing import Any

from torch import fx

from intaglio.fxgraph.integer_ranges import ARANGES
from intaglio.fxgraph.node_info import fixed_size, known_type, origin
from intaglio.fxgraph.nodes import arguments, is_constant, operator, resolve_dims
from intaglio.ir import DType, Expression, Op, TensorType
from intaglio.lower.graph_builder import GraphBuilder
from intaglio.ops.embedding import MODES, NO_PADDING
from intaglio.quant.annotate.embedding_tables import EMBEDDING_BAG_TARGETS, bag_refusal, table_operands


def is_embedding_bag_part(node: fx.Node) -> bool:
    """Return whether a node is an embedding bag with a kernel, or takes the result of one."""
    if node.target is getitem and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return operator(node) in EMBEDDING_BAG_TARGETS and bag_refusal(node) is None


def lower_embedding_bag(builder: GraphBuilder, node: fx.Node) -> None:
    """Lower an embedding bag at the getitem node of its first result, the only one that may be read."""
    if operator(node) in EMBEDDING_BAG_TARGETS:
        builder.values[node] = ""
        return
    bag = node.args[0]
    given = arguments(bag)
    names = [_named(builder, given[name]) for name in ("weight", "indices", "offsets")]
    table = table_operands(given["weight"])
    names += [_named(builder, part) for part in table[1:]] if table is not None else []
    weighted = given["per_sample_weights"] is not None
    names += [_named(builder, given["per_sample_weights"])] if weighted else []
    attrs: dict[str, Any] = {"mode": MODES[given["mode"]], "ends": bool(given["include_last_offset"])}
    attrs |= {"weighted": weighted, "padding": _padding(bag, given)}
    where, kind = origin(bag), known_type(node)
    stem = where.path.replace("@", "_call") or node.name
    builder.values[node] = builder.add_op(
        "embedding_bag", names, stem, TensorType(kind.shape, DType.F32), where, **attrs
    )


def _named(builder: GraphBuilder, node: fx.Node) -> str:
    return builder.add_parameter(node) if is_constant(node) else builder.float_value(node)


def _padding(node: fx.Node, given: dict[str, Any]) -> int:
    """Return the id that contributes to no bag, or `NO_PADDING`.

    A negative id counts from the end of the table, except in the inner `aten._embedding_bag` operators, where it means
    that every id contributes.
    """
    padding = given.get("padding_idx")
    if padding is None or (padding < 0 and "._" in operator(node)):
        return NO_PADDING
    return int(padding) % fixed_size(given["weight"], 0)


def arange_attributes(node: fx.Node) -> dict[str, Any] | None:
    """Return the attributes of an i64 arange, or None for any other node."""
    if operator(node) not in ARANGES or known_type(node).dtype is not DType.I64:
        return None
    given = {name: resolve_dims(value) for name, value in arguments(node).items()}
    start, step = given.get("start", 0), given.get("step", 1)
    if not isinstance(start, (int, Expression)) or not isinstance(step, int):
        return None
    return {"start": start, "step": step, "size": known_type(node).shape[0]}


def lower_arange(builder: GraphBuilder, node: fx.Node, attrs: dict[str, Any]) -> None:
    """Add an integer range."""
    name = builder.add_value(node.name, known_type(node), node)
    builder.ops.append(Op("arange", (), (name,), attrs, origin=origin(node)))
