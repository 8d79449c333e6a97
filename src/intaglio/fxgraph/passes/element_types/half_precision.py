"""Conversion of bfloat16 and float16 models to float32, with casts at inputs and outputs."""

from __future__ import annotations

import dataclasses

import torch
from torch import fx

from intaglio.fxgraph.graph_constants import in_file
from intaglio.fxgraph.node_info import known_type, origin, set_info, tensor_type, update_info
from intaglio.fxgraph.nodes import operator
from intaglio.ir import DType
from intaglio.ops import BY_TARGET
from intaglio.torch_private import pytree

HALF_DTYPES = {DType.BF16: torch.bfloat16, DType.F16: torch.float16}
UPCAST_NOTE = "values in bfloat16 or float16 are computed as float32; inputs and results keep their element type"


def upcast_half_precision(module: fx.GraphModule) -> int:
    """Convert a graph whose matrix products use bfloat16 or float16 to float32, with casts at its inputs and outputs.

    Weights keep their values exactly, but intermediate results are not rounded to half precision any more. A graph that
    reinterprets bits is not changed.
    """
    graph = module.graph
    if not any(_is_half_product(node) for node in graph.nodes) or any(map(_reinterprets_bits, graph.nodes)):
        return 0
    given = [node for node in graph.nodes if node.op == "placeholder" and _half_dtype(node) is not None]
    end = next(node for node in graph.nodes if node.op == "output")
    results = [(place, _half_dtype(node)) for place, node in enumerate(end.args[0])]
    hits = [node for node in graph.nodes if node.op in ("get_attr", "call_function") and _upcast(node, module)]
    first = [node for node in graph.nodes if node.op == "placeholder"][-1].next
    for node in given:
        if node.users:
            cast = _cast_before(first, node, torch.float32, DType.F32)
            node.replace_all_uses_with(cast, delete_user_cb=lambda user, own=cast: user is not own)
    values = list(end.args[0])
    for place, half in results:
        if half is not None:
            values[place] = _cast_before(end, values[place], HALF_DTYPES[half], half)
    end.args = (tuple(values),)
    return len(hits)


def before_cast(node: fx.Node) -> fx.Node:
    """Return the float32 node that a node casts to half precision, or any other node unchanged."""
    source = node.args[0] if operator(node) == "aten._to_copy.default" else None
    if not isinstance(source, fx.Node) or _half_dtype(node) is None or known_type(source).dtype is not DType.F32:
        return node
    return source


def _half_dtype(node: fx.Node) -> DType | None:
    kind = tensor_type(node)
    return kind.dtype if kind is not None and kind.dtype in HALF_DTYPES else None


def _is_half_product(node: fx.Node) -> bool:
    record = BY_TARGET.get(operator(node))
    return record is not None and record.computed_in_float32 and _half_dtype(node) is not None


def _reinterprets_bits(node: fx.Node) -> bool:
    """Return whether a node reinterprets the bits of a value, which widening would change."""
    return operator(node) == "aten.view.dtype"


def _upcast(node: fx.Node, module: fx.GraphModule) -> bool:
    """Convert a constant to float32, or half types in an operator's arguments; return whether the result was half."""
    halves = tuple(HALF_DTYPES.values())
    if node.op == "get_attr":
        tensor = getattr(module, str(node.target))
        if tensor.dtype in halves:
            module.register_buffer(str(node.target), in_file(tensor.float()))
    else:
        converted = pytree.tree_map(
            lambda leaf: torch.float32 if leaf in halves else leaf, (node.args, dict(node.kwargs))
        )
        node.args, node.kwargs = converted
    if _half_dtype(node) is None:
        return False
    update_info(node, type=dataclasses.replace(known_type(node), dtype=DType.F32))
    return True


def _cast_before(place: fx.Node, node: fx.Node, wanted: torch.dtype, dtype: DType) -> fx.Node:
    with node.graph.inserting_before(place):
        cast = node.graph.call_function(torch.ops.aten._to_copy.default, (node,), {"dtype": wanted})
    set_info(cast, type=dataclasses.replace(known_type(node), dtype=dtype), origin=origin(node))
    return cast
