"""Integers as programs compute them: int32 values in int64, and sizes in arithmetic as tensors."""

from __future__ import annotations

import operator as python_operators
from dataclasses import replace

import torch
from torch import fx

from intaglio.fxgraph.node_info import inherit_info, known_type, tensor_type, update_info
from intaglio.fxgraph.nodes import arguments, call_before, operator, replace_node, resolve_dims, tensor_nodes
from intaglio.ir import DType, TensorType, symbols_of
from intaglio.signature import DTYPES, TORCH_DTYPES

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
        *("gather.default", "index.Tensor", "index_select.default"),
    )
)
"""Operators whose results are elements of their operands, or numbers that int32 holds."""
BITS = 32
WITH_SIZES = tuple(
    f"aten.{name}.{overload}"
    for name in ("add", "sub", "mul", "div", "lt", "le", "gt", "ge", "eq", "ne")
    for overload in ("Tensor", "Scalar")
)
"""Operators that read a tensor, and a tensor or a number."""


def type_as_to_cast(module: fx.GraphModule) -> int:
    """Replace ``x.type_as(y)`` by a cast, or by ``x`` if it has the element type already."""
    hits = [node for node in module.graph.nodes if operator(node) == "aten.type_as.default"]
    for node in hits:
        kind, source = known_type(node), node.args[0]
        same = known_type(source).dtype is kind.dtype
        dtype = TORCH_DTYPES[kind.dtype]
        replace_node(node, source if same else call_before(node, kind, aten._to_copy.default, source, dtype=dtype))
    return len(hits)


def cast_before_cumsum(module: fx.GraphModule) -> int:
    """Replace the argument ``dtype`` of cumulative sums by casts.

    A sum in int32 is the low half of one in int64, which programs compute.
    """
    hits = [node for node in module.graph.nodes if operator(node) == "aten.cumsum.default" and _casts_first(node)]
    for node in hits:
        given, source = arguments(node), node.args[0]
        wide = torch.float32 if given["dtype"] is torch.float32 else torch.int64
        kind = replace(known_type(source), dtype=DTYPES[wide])
        if known_type(source).dtype is not kind.dtype:
            source = call_before(node, kind, aten._to_copy.default, source, dtype=wide)
        found = call_before(node, kind, aten.cumsum.default, source, given["dim"])
        if given["dtype"] is not wide:
            found = call_before(node, known_type(node), aten._to_copy.default, found, dtype=given["dtype"])
        replace_node(node, found)
    return len(hits)


def _casts_first(node: fx.Node) -> bool:
    """Return whether a cumulative sum has a dtype that it casts integers, booleans or float32 to."""
    dtype, kind = arguments(node)["dtype"], known_type(node.args[0]).dtype
    if dtype in (torch.int32, torch.int64):
        return kind in (DType.I64, DType.I32, DType.BOOL)
    return dtype is torch.float32 and kind in (DType.F32, DType.I64, DType.BOOL)


def sizes_to_tensors(module: fx.GraphModule) -> int:
    """Replace a size that arithmetic or a comparison reads, such as the length of a cache, by a tensor of one element.

    Decoders compute positions in that way. Loops combine tensors with numbers and with tensors, but not with sizes. A
    size that depends on values is computed by the island that computes the value.
    """
    inputs = [known_type(node).shape for node in module.graph.nodes if node.op == "placeholder" and tensor_type(node)]
    known = {name for shape in inputs for dim in shape for name in symbols_of(dim)}
    hits = [node for node in module.graph.nodes if _combines_size(node)]
    hits = [node for node in hits if symbols_of(resolve_dims(node.args[1])) <= known]
    for node in hits:
        value, size = node.args
        dtype = known_type(value).dtype
        with node.graph.inserting_before(node):
            end = node.graph.call_function(python_operators.add, (size, 1))
        inherit_info(end, node, dim=resolve_dims(size) + 1)
        number = call_before(node, TensorType((1,), DType.I64), aten.arange.start, size, end)
        if dtype is DType.F32:
            number = call_before(node, TensorType((1,), dtype), aten._to_copy.default, number, dtype=torch.float32)
        target = getattr(aten, operator(node).split(".")[1]).Tensor
        replace_node(node, call_before(node, known_type(node), target, value, number))
    return len(hits)


def _combines_size(node: fx.Node) -> bool:
    """Return whether an operator combines a tensor of int64 or float32 with a size, without another type as result."""
    name = operator(node)
    if name not in WITH_SIZES or len(node.args) < 2 or not isinstance(node.args[1], fx.Node):
        return False
    value, kind = tensor_type(node.args[0]), known_type(node)
    is_size = tensor_type(node.args[1]) is None and arguments(node).get("alpha", 1) == 1
    if not is_size or value is None or value.dtype not in (DType.I64, DType.F32) or value.q is not None:
        return False
    return bool(kind.shape) and kind.dtype in (value.dtype, DType.BOOL)


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
