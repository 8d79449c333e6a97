"""Sorts, counts, sums of integers and writes at indices as operators that programs compute.

Routers of experts select the best experts of each token with `topk`, sort the tokens by expert, and count them.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from intaglio.fxgraph.graph_constants import add_constant
from intaglio.fxgraph.node_info import known_type, tensor_type
from intaglio.fxgraph.nodes import (
    arguments,
    call_before,
    constant_node,
    operator,
    replace_node,
    reshape_before,
    resolve_dims,
)
from intaglio.ir import DType, TensorType, numel
from intaglio.signature import TORCH_DTYPES

aten = torch.ops.aten
SORTS = ("aten.sort.default", "aten.sort.stable", "aten.topk.default", "aten.argsort.default")
STABLE_SORT = "aten.argsort.stable"
SORTED_TYPES = (DType.F32, DType.I64, DType.I32, DType.BOOL)
STARTS = {"sum": 0.0, "amax": float("-inf"), "amin": float("inf")}
"""Number that a reduction of floats begins with."""
INTEGER_SUMS = ("aten.sum.dim_IntList", "aten.sum.default")
MAX_COUNTED = 2048
"""Largest number of integers that a histogram counts; PyTorch's puts all of them into the right bins up to there."""
TYPES_OF_NUMBERS = {DType.F32: float, DType.I64: int}
"""Types that PyTorch converts a number to before a scatter writes it."""


def canonicalize_sorts(module: fx.GraphModule) -> int:
    """Replace sort, topk and argsort by a stable argsort, a slice of its first places, and the elements there.

    Equal elements keep their order, which PyTorch leaves open unless a sort is stable.
    """
    hits = [node for node in module.graph.nodes if operator(node) in SORTS and _is_sortable(node)]
    for node in hits:
        given, kind = arguments(node), known_type(node.args[0])
        axis, count = given["dim"] % len(kind.shape), given.get("k")
        descending = given["largest"] if "largest" in given else given["descending"]
        places = _in_order(node, node.args[0], axis, bool(descending))
        shape = kind.shape
        if count is not None and resolve_dims(count) != shape[axis]:
            shape = (*shape[:axis], resolve_dims(count), *shape[axis + 1 :])
            places = call_before(node, TensorType(shape, DType.I64), aten.slice.Tensor, places, axis, 0, count)
        if tensor_type(node) is not None:  # an argsort
            replace_node(node, places)
            continue
        for user in list(node.users):
            found = places
            if user.args[1] == 0:
                found = call_before(user, known_type(user), aten.gather.default, node.args[0], axis, places)
            replace_node(user, found)
        module.graph.erase_node(node)
    return len(hits)


def _is_sortable(node: fx.Node) -> bool:
    """Return whether a tensor with axes and elements that kernels compare is sorted."""
    kind = tensor_type(node.args[0])
    return kind is not None and len(kind.shape) > 0 and kind.dtype in SORTED_TYPES


def _in_order(node: fx.Node, value: fx.Node, axis: int, descending: bool) -> fx.Node:
    """Insert a stable argsort in front of a node; int32 is cast to int64, which kernels compare."""
    kind = known_type(value)
    if kind.dtype is DType.I32:
        wide = TensorType(kind.shape, DType.I64)
        value = call_before(node, wide, aten._to_copy.default, value, dtype=torch.int64)
    made, options = TensorType(kind.shape, DType.I64), {"stable": True, "dim": axis, "descending": descending}
    return call_before(node, made, aten.argsort.stable, value, **options)


def counts_of_integers(module: fx.GraphModule) -> int:
    """Replace histograms with one bin for each integer by sums of ones at the integers.

    Experts count their tokens with such a histogram of float32 values. A cumulative sum of integers reads the counts
    as integers.
    """
    hits = [node for node in module.graph.nodes if _counts_integers(node)]
    for node in hits:
        given, source = arguments(node), node.args[0].args[0]
        low, bins = int(given["min"]), given["bins"]
        kind = TensorType((numel(known_type(source).shape),), DType.I64)
        value = reshape_before(node, source, kind.shape)
        value = call_before(node, kind, aten.clamp.default, value, low - 1, low + bins)
        place = call_before(node, kind, aten.sub.Tensor, value, low - 1)  # others go to one bin on either side
        ones = call_before(node, kind, aten.clamp.default, value, 1, 1)  # of any size, which may be free
        name = add_constant(module, "no_counts", torch.zeros(bins + 2, dtype=torch.int64))
        zeros, all_bins = constant_node(module, name, node.name), TensorType((bins + 2,), DType.I64)
        sums = call_before(node, all_bins, aten.scatter_add.default, zeros, 0, place, ones)
        counts = call_before(node, TensorType((bins,), DType.I64), aten.slice.Tensor, sums, 0, 1, bins + 1)
        for user in [user for user in node.users if _sums_integers(user)]:
            user.replace_input_with(node, counts)
        replace_node(node, call_before(node, known_type(node), aten._to_copy.default, counts, dtype=torch.float32))
    return len(hits)


def _counts_integers(node: fx.Node) -> bool:
    """Return whether a node is a histogram of integers, cast to float32, with one bin for each of a few integers."""
    if operator(node) != "aten.histc.default" or operator(node.args[0]) != "aten._to_copy.default":
        return False
    given, source = arguments(node), tensor_type(node.args[0].args[0])
    low, high, bins = given["min"], given["max"], given["bins"]
    whole = all(isinstance(number, (int, float)) and number == int(number) for number in (low, high))
    is_integer = source is not None and source.dtype is DType.I64 and known_type(node).dtype is DType.F32
    return is_integer and whole and 2 <= bins == high - low + 1 and bins <= MAX_COUNTED


def _sums_integers(user: fx.Node) -> bool:
    return operator(user) == "aten.cumsum.default" and arguments(user)["dtype"] in (torch.int32, torch.int64)


def sums_of_integers(module: fx.GraphModule) -> int:
    """Replace sums of integers and booleans by one sum after the other along each of the axes.

    The operator is nansum: programs compute `aten.sum` with floats.
    """
    hits = [node for node in module.graph.nodes if operator(node) in INTEGER_SUMS and _adds_integers(node)]
    for node in hits:
        given, value = arguments(node), node.args[0]
        shape, keeps = known_type(value).shape, bool(given.get("keepdim"))
        axes = given.get("dim") or range(len(shape))
        if known_type(value).dtype is DType.I32:
            wide = TensorType(shape, DType.I64)
            value = call_before(node, wide, aten._to_copy.default, value, dtype=torch.int64)
        for axis in sorted((axis % len(shape) for axis in axes), reverse=True):
            shape = (*shape[:axis], *((1,) if keeps else ()), *shape[axis + 1 :])
            value = call_before(node, TensorType(shape, DType.I64), aten.nansum.default, value, [axis], keeps)
        if known_type(node).dtype is DType.I32:
            value = call_before(node, known_type(node), aten._to_copy.default, value, dtype=torch.int32)
        replace_node(node, value)
    return len(hits)


def _adds_integers(node: fx.Node) -> bool:
    """Return whether integers or booleans of a tensor with axes are added, to integers."""
    kind, result = tensor_type(node.args[0]), known_type(node).dtype
    if kind is None or not kind.shape or result not in (DType.I64, DType.I32):
        return False
    return kind.dtype in (DType.I64, DType.I32, DType.BOOL)


def scatter_value_to_tensor(module: fx.GraphModule) -> int:
    """Replace the number that a scatter writes by a tensor of it."""
    hits = [node for node in module.graph.nodes if operator(node) == "aten.scatter.value"]
    hits = [
        node for node in hits if known_type(node).dtype in TYPES_OF_NUMBERS and not isinstance(node.args[3], fx.Node)
    ]
    for node in hits:
        value, axis, index, given = node.args[:4]
        number = TYPES_OF_NUMBERS[known_type(node).dtype](given)
        kind = TensorType(known_type(index).shape, known_type(node).dtype)
        source = call_before(node, known_type(index), aten.clamp.default, index, 0, 0)  # of any size, which may be free
        if kind.dtype is not DType.I64:
            source = call_before(node, kind, aten._to_copy.default, source, dtype=TORCH_DTYPES[kind.dtype])
        source = call_before(node, kind, aten.add.Tensor, source, number)
        replace_node(node, call_before(node, known_type(node), aten.scatter.src, value, axis, index, source))
    return len(hits)


def scatter_without_self(module: fx.GraphModule) -> int:
    """Replace reductions at indices that leave the elements out which are there before.

    Those without an index stay as they are; the others are reduced from the start of their reduction.
    """
    hits = [node for node in module.graph.nodes if operator(node) == "aten.scatter_reduce.two" and _leaves_out(node)]
    for node in hits:
        given, whole = arguments(node), known_type(node)
        value, axis, index, source, mode = (given[name] for name in ("self", "dim", "index", "src", "reduce"))
        start = call_before(node, whole, aten.full_like.default, value, STARTS[mode])
        found = call_before(node, whole, node.target, start, axis, index, source, mode)
        zeros = call_before(node, whole, aten.full_like.default, value, 0.0)
        ones = call_before(node, known_type(source), aten.full_like.default, source, 1.0)
        met = call_before(node, whole, aten.scatter.src, zeros, axis, index, ones)
        met = call_before(node, replace(whole, dtype=DType.BOOL), aten.ne.Scalar, met, 0.0)
        replace_node(node, call_before(node, whole, aten.where.self, met, found, value))
    return len(hits)


def _leaves_out(node: fx.Node) -> bool:
    given = arguments(node)
    return given["include_self"] is False and given["reduce"] in STARTS and known_type(node).dtype is DType.F32


def index_put_to_scatter(module: fx.GraphModule) -> int:
    """Replace writes of single elements of a tensor with one axis by a scatter.

    The inverse of a permutation is written in this way. Indices must be places of an argsort, which are never negative:
    a scatter does not count from the end. If there are as many as elements, all are written, so that any tensor may be
    the first operand, which PyTorch leaves uninitialized.
    """
    hits = [node for node in module.graph.nodes if _scatters(node)]
    for node in hits:
        value, (index,), source = node.args[:3]
        value = index if tensor_type(index) == tensor_type(value) else value
        replace_node(node, call_before(node, known_type(node), aten.scatter.src, value, 0, index, source))
    return len(hits)


def _scatters(node: fx.Node) -> bool:
    """Return whether a node writes as many elements of a tensor with one axis as an argsort has places."""
    if operator(node) != "aten.index_put.default":
        return False
    given = arguments(node)
    index = given["indices"][0]
    if given["accumulate"] or len(given["indices"]) != 1 or not isinstance(index, fx.Node):
        return False
    whole, written = known_type(node), known_type(given["values"])
    return operator(index) == STABLE_SORT and len(whole.shape) == 1 and written.shape == known_type(index).shape
