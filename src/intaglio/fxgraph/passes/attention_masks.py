"""Simplification of attention masks: conditions that always hold are removed."""

from __future__ import annotations

import torch
from torch import fx

from intaglio.fxgraph.integer_ranges import RESHAPING_TARGETS, IotaRange, iota_range_of, uniform_value
from intaglio.fxgraph.node_info import known_type, tensor_type
from intaglio.fxgraph.nodes import arguments, call_before, operator, replace_node, size_of
from intaglio.fxgraph.overloads import SDPA_TARGET
from intaglio.ir import Dim, DType, TensorType

aten = torch.ops.aten
AND = ("aten.__and__.Tensor", "aten.bitwise_and.Tensor", "aten.logical_and.default")
OR = ("aten.__or__.Tensor", "aten.bitwise_or.Tensor", "aten.logical_or.default")
NOT = ("aten.logical_not.default", "aten.bitwise_not.default")
ONES = ("aten.ones.default", "aten.new_ones.default", "aten.ones_like.default")
ZERO_FILLS = ("aten.zeros.default", "aten.new_zeros.default", "aten.zeros_like.default")
FULLS = ("aten.full.default", "aten.new_full.default", "aten.full_like.default")


def simplify_attention_masks(module: fx.GraphModule) -> int:
    """Remove conditions that always hold from masks, and indexing of a mask with its whole range.

    For example ``arange >= 0`` is true, and so is a difference of 1 between its neighbours. ``and`` with a true operand
    becomes the other operand. A mask indexed by the whole range of each axis becomes a reshape. Attention with an
    all-true mask loses the mask, and attention whose mask is true on and below the diagonal becomes causal.
    """
    ranges: dict[fx.Node, IotaRange] = {}
    constant_conditions: dict[fx.Node, bool] = {}
    uniform_values: dict[fx.Node, int] = {}
    hits = 0
    for node in list(module.graph.nodes):
        if node.op != "call_function" or tensor_type(node) is None:
            continue
        if (iota := iota_range_of(node, ranges)) is not None:
            ranges[node] = iota
        elif (number := uniform_value(node, ranges, uniform_values, constant_conditions)) is not None:
            uniform_values[node] = number
        elif (held := _constant_condition(node, ranges, uniform_values, constant_conditions)) is not None:
            constant_conditions[node] = held
        else:
            hits += _simplify(node, ranges, constant_conditions)
    return hits


def _constant_condition(
    node: fx.Node,
    ranges: dict[fx.Node, IotaRange],
    uniform_values: dict[fx.Node, int],
    constant_conditions: dict[fx.Node, bool],
) -> bool | None:
    """Return the value that a condition has for all elements, or ``None``."""
    name = operator(node)
    if known_type(node).dtype is not DType.BOOL:
        return None
    if name in ONES or name in ZERO_FILLS:
        return name in ONES
    if name in FULLS:
        return bool(arguments(node)["fill_value"])
    if name in RESHAPING_TARGETS:
        return constant_conditions.get(node.args[0])
    if name in NOT:
        return None if node.args[0] not in constant_conditions else not constant_conditions[node.args[0]]
    if name in AND or name in OR:
        found = [constant_conditions.get(value) for value in node.args[:2]]
        strong = name in OR  # the operand value that decides the result
        return strong if strong in found else (not strong if None not in found else None)
    if len(node.args) != 2:
        return None
    number, other = uniform_values.get(node.args[0]), node.args[1]
    other = uniform_values.get(other) if isinstance(other, fx.Node) else other
    if number is not None and isinstance(other, int) and name.split(".")[1] in ("eq", "ne"):
        return (number == other) is (name.split(".")[1] == "eq")
    return _compare_range(name, ranges.get(node.args[0]), node.args[1])


def _compare_range(name: str, iota: IotaRange | None, number: object) -> bool | None:
    """Return the result of comparing a range with a number if it is the same for all elements, else ``None``."""
    kind = name.removeprefix("aten.").removesuffix(".Scalar")
    if iota is None or not isinstance(number, int) or kind not in ("ge", "gt", "lt", "le"):
        return None
    bound = number + (kind in ("gt", "le"))  # for integers, > 3 is >= 4
    at_least = True if iota.start >= bound else False if iota.last is not None and iota.last < bound else None
    return at_least if at_least is None or kind in ("ge", "gt") else not at_least


def _simplify(node: fx.Node, ranges: dict[fx.Node, IotaRange], constant_conditions: dict[fx.Node, bool]) -> bool:
    """Simplify one node by the known values of its operands, and return whether it changed."""
    name = operator(node)
    if name in AND or name in OR:
        idle = next((value for value in node.args[:2] if constant_conditions.get(value) is (name in AND)), None)
        other = node.args[1] if idle is node.args[0] else node.args[0]
        return idle is not None and known_type(other).dtype is DType.BOOL and _replace_expanded(node, other)
    if name in ("aten.where.self", "aten.where.ScalarOther", "aten.masked_fill.Scalar", "aten.masked_fill.Tensor"):
        is_fill = "fill" in name
        condition = constant_conditions.get(node.args[1] if is_fill else node.args[0])
        if condition is None or (is_fill and condition):
            return is_fill and condition is None and _fill_as_where(node)
        other = node.args[0] if is_fill else node.args[1 if condition else 2]
        same = isinstance(other, fx.Node) and known_type(other).dtype is known_type(node).dtype
        return same and _replace_expanded(node, other)
    if name == "aten.index.Tensor":
        return _simplify_full_index(node, ranges)
    return name == SDPA_TARGET and _simplify_attention_mask(node, ranges, constant_conditions)


def _fill_as_where(node: fx.Node) -> bool:
    """Replace ``masked_fill`` of zeros or ones by a ``where`` with two numbers."""
    base, condition, fill = node.args
    kind, name = known_type(node), operator(base)
    if name not in (*ZERO_FILLS, *ONES) or isinstance(fill, fx.Node) or kind.dtype is not DType.F32:
        return False
    if known_type(condition).shape != kind.shape:
        return False
    replace_node(node, call_before(node, kind, aten.where.Scalar, condition, float(fill), float(name in ONES)))
    return True


def _replace_expanded(node: fx.Node, value: fx.Node) -> bool:
    """Replace a node by a value, expanded to its shape."""
    wanted, shape = known_type(node).shape, known_type(value).shape
    if wanted != shape:
        aligned = (1,) * (len(wanted) - len(shape)) + shape
        sizes = [
            -1 if a == b and i >= len(wanted) - len(shape) else size_of(node, b)
            for i, (a, b) in enumerate(zip(aligned, wanted, strict=True))
        ]
        if None in sizes:
            return False
        value = call_before(node, known_type(node), aten.expand.default, value, sizes)
    replace_node(node, value)
    return True


def _simplify_full_index(node: fx.Node, ranges: dict[fx.Node, IotaRange]) -> bool:
    """Replace ``mask[i, j]`` by a reshape if the indices are the whole ranges of its axes in order."""
    source, indices = node.args
    found = [iota for index in indices if (iota := ranges.get(index)) is not None]
    shape, result = known_type(source).shape, known_type(node).shape
    if len(found) != len(indices) or [(iota.start, iota.length) for iota in found] != [(0, size) for size in shape]:
        return False
    ranks = [len(known_type(index).shape) for index in indices]
    axes = [len(result) - rank + iota.axis for iota, rank in zip(found, ranks, strict=True)]
    spread: list[Dim] = [1] * len(result)
    for axis, size in zip(axes, shape, strict=True):
        spread[axis] = size
    if sorted(set(axes)) != axes or tuple(spread) != result:
        return False
    sizes = [-1 if axis == axes[-1] else size_of(node, size) for axis, size in enumerate(result)]
    if None in sizes:
        return False
    reshaped = call_before(node, TensorType(result, known_type(node).dtype), aten.reshape.default, source, sizes)
    replace_node(node, reshaped)
    if (iota := iota_range_of(reshaped, ranges)) is not None:
        ranges[reshaped] = iota
    return True


def _simplify_attention_mask(
    node: fx.Node, ranges: dict[fx.Node, IotaRange], constant_conditions: dict[fx.Node, bool]
) -> bool:
    """Remove an all-true mask from attention, and replace a causal one by ``is_causal``."""
    given = arguments(node)
    mask = given["attn_mask"]
    causal = isinstance(mask, fx.Node) and _is_causal(mask, ranges)
    if constant_conditions.get(mask) is not True and not causal:
        return False
    node.args = (*node.args[:3], None, given["dropout_p"], causal)
    node.kwargs = {key: value for key, value in node.kwargs.items() if key in ("scale", "enable_gqa")}
    return True


def _is_causal(mask: fx.Node, ranges: dict[fx.Node, IotaRange]) -> bool:
    """Match ``key <= query`` for ranges of equal length along the last two axes."""
    while operator(mask) == "aten.expand.default":
        mask = mask.args[0]
    kind = operator(mask)
    if kind not in ("aten.le.Tensor", "aten.ge.Tensor"):
        return False
    key, query = mask.args[:2] if kind == "aten.le.Tensor" else mask.args[1::-1]
    a, b = ranges.get(key), ranges.get(query)
    if a is None or b is None or (a.start, a.length) != (b.start, b.length):
        return False
    return a.axis == len(known_type(key).shape) - 1 and b.axis == len(known_type(query).shape) - 2
