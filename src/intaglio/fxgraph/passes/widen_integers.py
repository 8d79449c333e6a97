"""Integers as programs compute them: int32 values in int64, and ranges with their offset as start."""

from __future__ import annotations

import operator as python_operators
from dataclasses import replace

import torch
from torch import fx

from intaglio.fxgraph.integer_ranges import ADDITION_TARGETS, ARANGES
from intaglio.fxgraph.node_info import inherit_info, known_type, tensor_type, update_info
from intaglio.fxgraph.nodes import arguments, call_before, operator, replace_node, resolve_dims, tensor_nodes
from intaglio.ir import DType
from intaglio.signature import TORCH_DTYPES

aten = torch.ops.aten
CAST = "aten._to_copy.default"
SUMS = ("aten.add.Tensor", "aten.add.Scalar", "aten.sub.Tensor", "aten.sub.Scalar", "aten.rsub.Scalar")
WRAPPED = (*SUMS, "aten.mul.Tensor", "aten.mul.Scalar", "aten.neg.default", "aten.abs.default")
"""Arithmetic whose results may leave the range of int32."""
KEPT = tuple(
    f"aten.{name}"
    for name in (
        *("reshape.default", "view.default", "unsqueeze.default", "squeeze.dim", "squeeze.dims", "expand.default"),
        *("slice.Tensor", "select.int", "permute.default", "transpose.int", "cat.default", "repeat.default"),
        *("where.self", "where.ScalarOther", "where.ScalarSelf", "masked_fill.Scalar", "clamp.default"),
        *("clamp_min.default", "maximum.default", "minimum.default", "stack.default", "roll.default"),
    )
)
"""Operators whose results are elements of their operands, or numbers that int32 holds."""
BITS = 32


def type_as_to_cast(module: fx.GraphModule) -> int:
    """Replace ``x.type_as(y)`` by a cast, or by ``x`` if it has the element type already."""
    hits = [node for node in module.graph.nodes if operator(node) == "aten.type_as.default"]
    for node in hits:
        kind, source = known_type(node), node.args[0]
        same = known_type(source).dtype is kind.dtype
        dtype = TORCH_DTYPES[kind.dtype]
        replace_node(node, source if same else call_before(node, kind, aten._to_copy.default, source, dtype=dtype))
    return len(hits)


def offsets_to_start(module: fx.GraphModule) -> int:
    """Replace the sum of a range and a size, such as ``arange(n) + past``, by a range with another start.

    Decoders compute positions in that way. Loops add numbers and tensors to integers, but not sizes.
    """
    hits = [node for node in module.graph.nodes if _is_offset_range(node)]
    for node in hits:
        source, size = node.args
        given, subtracts = arguments(source), "sub" in operator(node)
        ends = [_moved(node, given.get(name, 0), size, subtracts) for name in ("start", "end")]
        replace_node(node, call_before(node, known_type(node), aten.arange.start_step, *ends, given.get("step", 1)))
    return len(hits)


def _is_offset_range(node: fx.Node) -> bool:
    """Return whether a node adds a size to an int64 range, or subtracts one from it."""
    if operator(node) not in ADDITION_TARGETS or operator(node.args[0]) not in ARANGES:
        return False
    is_size = isinstance(node.args[1], fx.Node) and tensor_type(node.args[1]) is None
    kinds = (known_type(node).dtype, known_type(node.args[0]).dtype)
    return is_size and kinds == (DType.I64, DType.I64) and arguments(node).get("alpha", 1) == 1


def _moved(before: fx.Node, place: int | fx.Node, size: fx.Node, subtracts: bool) -> fx.Node:
    """Return the node of ``place + size`` or ``place - size``, which is inserted."""
    action = python_operators.sub if subtracts else python_operators.add
    with before.graph.inserting_before(before):
        made = before.graph.call_function(action, (place, size))
    inherit_info(made, before, dim=action(resolve_dims(place), resolve_dims(size)))
    return made


def widen_integers(module: fx.GraphModule) -> int:
    """Compute int32 values in int64, and wrap what may leave the range of int32 around, as int32 does.

    A value that is returned, or that an operator reads which is not known to take any integers, is cast back.
    """
    hits = [node for node in module.graph.nodes if _is_int32(node) and _widens(node)]
    widened = set(hits)
    for node in hits:
        kind = known_type(node)
        update_info(node, type=replace(kind, dtype=DType.I64))
        if operator(node) == CAST:
            node.kwargs = {**node.kwargs, "dtype": torch.int64}
        for source in {leaf for leaf in tensor_nodes((node.args, node.kwargs)) if _is_int32(leaf)} - widened:
            wide = call_before(node, replace(known_type(source), dtype=DType.I64), aten._to_copy.default, source)
            wide.kwargs = {"dtype": torch.int64}
            node.replace_input_with(source, wide)
        if _may_leave_range(node):
            _wrap(node)
    for node in hits:
        _cast_back(node, widened)
    return len(hits)


def _is_int32(node: fx.Node) -> bool:
    kind = tensor_type(node)
    return kind is not None and kind.dtype is DType.I32 and kind.q is None


def _widens(node: fx.Node) -> bool:
    """Return whether an operator computes in int64 what it computes in int32, up to wrapping."""
    if operator(node) == CAST:
        source = tensor_type(node.args[0])
        return source is not None and source.dtype in (DType.BOOL, DType.I64, DType.I32)
    return operator(node) in (*WRAPPED, *KEPT) and node.kwargs.get("dtype") is None


def _may_leave_range(node: fx.Node) -> bool:
    """Return whether a widened result may not fit into int32. Casts of booleans, and their products, do."""
    if operator(node) == CAST:
        return known_type(node.args[0]).dtype is not DType.BOOL
    return operator(node) in WRAPPED


def _wrap(node: fx.Node) -> None:
    """Insert shifts behind a node that leave the low 32 bits, with their sign."""
    last = node
    users = list(node.users)
    for target in (aten.__lshift__.Scalar, aten.__rshift__.Scalar):
        with node.graph.inserting_after(last):
            made = node.graph.call_function(target, (last, BITS))
        made.meta = dict(node.meta)
        last = made
    for user in users:
        user.replace_input_with(node, last)


def _cast_back(node: fx.Node, widened: set[fx.Node]) -> None:
    """Cast a widened value for readers that need int32; casts of it to int64 disappear with the identities."""
    value = node
    while shifts := [user for user in value.users if operator(user).startswith(("aten.__lshift", "aten.__rshift"))]:
        value = shifts[0]
    for user in list(value.users):
        if user in widened or _takes_any_integers(user):
            continue
        kind = replace(known_type(value), dtype=DType.I32)
        narrow = call_before(user, kind, aten._to_copy.default, value, dtype=torch.int32)
        user.replace_input_with(value, narrow)


def _takes_any_integers(user: fx.Node) -> bool:
    """Return whether an operator gives the same result for int32 and int64 operands."""
    kind = tensor_type(user)
    if user.op != "call_function" or kind is None or kind.dtype is DType.I32:
        return False
    if operator(user) == CAST:
        return arguments(user)["dtype"] is not None
    return kind.dtype in (DType.BOOL, DType.I64, DType.F32)
