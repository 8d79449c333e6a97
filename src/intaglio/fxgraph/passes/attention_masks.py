"""Simplification of attention masks: conditions that always hold are removed."""

from __future__ import annotations

import torch
from torch import fx

from intaglio.fxgraph.integer_ranges import RESHAPING_TARGETS, Ramp, alike, ramp_of
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


def resolve_masks(module: fx.GraphModule) -> int:
    """Remove conditions that always hold from masks, and indexing of a mask with its whole range.

    For example ``arange >= 0`` is true, and so is a difference of 1 between its neighbours. ``and`` with a true operand
    becomes the other operand. A mask indexed by the whole range of each axis becomes a reshape. Attention with an
    all-true mask loses the mask, and attention whose mask is true on and below the diagonal becomes causal.
    """
    ramps: dict[fx.Node, Ramp] = {}
    always: dict[fx.Node, bool] = {}
    numbers: dict[fx.Node, int] = {}
    hits = 0
    for node in list(module.graph.nodes):
        if node.op != "call_function" or tensor_type(node) is None:
            continue
        if (ramp := ramp_of(node, ramps)) is not None:
            ramps[node] = ramp
        elif (number := alike(node, ramps, numbers, always)) is not None:
            numbers[node] = number
        elif (held := _always(node, ramps, numbers, always)) is not None:
            always[node] = held
        else:
            hits += _rewrite(node, ramps, always)
    return hits


def _always(
    node: fx.Node, ramps: dict[fx.Node, Ramp], numbers: dict[fx.Node, int], always: dict[fx.Node, bool]
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
        return always.get(node.args[0])
    if name in NOT:
        return None if node.args[0] not in always else not always[node.args[0]]
    if name in AND or name in OR:
        found = [always.get(value) for value in node.args[:2]]
        strong = name in OR  # the operand value that decides the result
        return strong if strong in found else (not strong if None not in found else None)
    if len(node.args) != 2:
        return None
    number, other = numbers.get(node.args[0]), node.args[1]
    other = numbers.get(other) if isinstance(other, fx.Node) else other
    if number is not None and isinstance(other, int) and name.split(".")[1] in ("eq", "ne"):
        return (number == other) is (name.split(".")[1] == "eq")
    return _compared(name, ramps.get(node.args[0]), node.args[1])


def _compared(name: str, ramp: Ramp | None, number: object) -> bool | None:
    """Return the result of comparing a range with a number if it is the same for all elements, else ``None``."""
    kind = name.removeprefix("aten.").removesuffix(".Scalar")
    if ramp is None or not isinstance(number, int) or kind not in ("ge", "gt", "lt", "le"):
        return None
    bound = number + (kind in ("gt", "le"))  # for integers, > 3 is >= 4
    at_least = True if ramp.start >= bound else False if ramp.last is not None and ramp.last < bound else None
    return at_least if at_least is None or kind in ("ge", "gt") else not at_least


def _rewrite(node: fx.Node, ramps: dict[fx.Node, Ramp], always: dict[fx.Node, bool]) -> bool:
    """Simplify one node by the known values of its operands, and return whether it changed."""
    name = operator(node)
    if name in AND or name in OR:
        idle = next((value for value in node.args[:2] if always.get(value) is (name in AND)), None)
        other = node.args[1] if idle is node.args[0] else node.args[0]
        return idle is not None and known_type(other).dtype is DType.BOOL and _widened(node, other)
    if name in ("aten.where.self", "aten.where.ScalarOther", "aten.masked_fill.Scalar", "aten.masked_fill.Tensor"):
        fills = "fill" in name
        held = always.get(node.args[1] if fills else node.args[0])
        if held is None or (fills and held):
            return fills and held is None and _chosen(node)
        other = node.args[0] if fills else node.args[1 if held else 2]
        same = isinstance(other, fx.Node) and known_type(other).dtype is known_type(node).dtype
        return same and _widened(node, other)
    if name == "aten.index.Tensor":
        return _whole_index(node, ramps)
    return name == SDPA_TARGET and _without_mask(node, ramps, always)


def _chosen(node: fx.Node) -> bool:
    """Replace ``masked_fill`` of zeros or ones by a ``where`` with two numbers."""
    base, condition, fill = node.args
    kind, name = known_type(node), operator(base)
    if name not in (*ZERO_FILLS, *ONES) or isinstance(fill, fx.Node) or kind.dtype is not DType.F32:
        return False
    if known_type(condition).shape != kind.shape:
        return False
    replace_node(node, call_before(node, kind, aten.where.Scalar, condition, float(fill), float(name in ONES)))
    return True


def _widened(node: fx.Node, value: fx.Node) -> bool:
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


def _whole_index(node: fx.Node, ramps: dict[fx.Node, Ramp]) -> bool:
    """Replace ``mask[i, j]`` by a reshape if the indices are the whole ranges of its axes in order."""
    source, indices = node.args
    found = [ramp for index in indices if (ramp := ramps.get(index)) is not None]
    shape, result = known_type(source).shape, known_type(node).shape
    if len(found) != len(indices) or [(ramp.start, ramp.length) for ramp in found] != [(0, size) for size in shape]:
        return False
    ranks = [len(known_type(index).shape) for index in indices]
    axes = [len(result) - rank + ramp.axis for ramp, rank in zip(found, ranks, strict=True)]
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
    if (ramp := ramp_of(reshaped, ramps)) is not None:
        ramps[reshaped] = ramp
    return True


def _without_mask(node: fx.Node, ramps: dict[fx.Node, Ramp], always: dict[fx.Node, bool]) -> bool:
    """Remove an all-true mask from attention, and replace a causal one by ``is_causal``."""
    given = arguments(node)
    mask = given["attn_mask"]
    causal = isinstance(mask, fx.Node) and _is_causal(mask, ramps)
    if always.get(mask) is not True and not causal:
        return False
    node.args = (*node.args[:3], None, given["dropout_p"], causal)
    node.kwargs = {key: value for key, value in node.kwargs.items() if key in ("scale", "enable_gqa")}
    return True


def _is_causal(mask: fx.Node, ramps: dict[fx.Node, Ramp]) -> bool:
    """Match ``key <= query`` for ranges of equal length along the last two axes."""
    while operator(mask) == "aten.expand.default":
        mask = mask.args[0]
    kind = operator(mask)
    if kind not in ("aten.le.Tensor", "aten.ge.Tensor"):
        return False
    key, query = mask.args[:2] if kind == "aten.le.Tensor" else mask.args[1::-1]
    a, b = ramps.get(key), ramps.get(query)
    if a is None or b is None or (a.start, a.length) != (b.start, b.length):
        return False
    return a.axis == len(known_type(key).shape) - 1 and b.axis == len(known_type(query).shape) - 2
