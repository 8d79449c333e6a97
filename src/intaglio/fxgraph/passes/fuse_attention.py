"""Fusion of matmul, softmax and matmul into scaled dot product attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from intaglio.fusion.table import ATTENTION_FUSION, MATMUL_TARGETS
from intaglio.fxgraph.fx_graph_view import FxGraphView
from intaglio.fxgraph.node_info import known_type, tensor_type
from intaglio.fxgraph.nodes import arguments, call_before, is_constant, operator, replace_node
from intaglio.ir import DType, TensorType
from intaglio.ops.products.attention import MAX_HEAD_WIDTH

aten = torch.ops.aten
MUL_TARGETS = ("aten.mul.Tensor", "aten.mul.Scalar")
DIV_TARGETS = ("aten.div.Tensor", "aten.div.Scalar")
ADD_TARGETS = ("aten.add.Tensor", "aten.add.Scalar")
FEWEST_MASK_AXES = 2
"""Fewest axes of a mask of the operator: [queries, keys]."""
MASKED_FILL_TARGETS = ("aten.masked_fill.Scalar", "aten.masked_fill.Tensor")
WHERE_TARGETS = ("aten.where.self", "aten.where.ScalarOther", "aten.where.ScalarSelf", "aten.where.Scalar")
ATTENTION_TARGET = "aten.scaled_dot_product_attention.default"
MASKED_SCORE = -1e4
"""Scores at or below this value, added or filled in, mask a key."""
LARGEST_MASKED = -1e30
"""Score in a float mask in place of finite numbers that mask a key. Other scores added to it do not change it."""
NUMBER_OPERATORS: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    "aten.zeros.default": lambda given: 0,
    "aten.full.default": lambda given: given["fill_value"],
    "aten.scalar_tensor.default": lambda given: given["s"],
}
"""Operators that create a number, each with a function that returns it."""


@dataclass
class ScoreOperators:
    """Operators found between the softmax and the product of queries and keys."""

    product: fx.Node | None = None
    scale: float = 1.0
    mask: fx.Node | None = None
    true_keeps: bool = True
    """True if a boolean mask is true where scores are kept, false if where they are masked."""
    fill: float = -math.inf
    """Score where a boolean mask masks."""
    scale_after_mask: float = 1.0
    """Factor applied after the mask."""


def fuse_attention(module: fx.GraphModule) -> int:
    """Fuse ``softmax(q @ k.T * scale + mask) @ v`` to ``scaled_dot_product_attention(q, k, v, mask)``.

    Factors may come before or after the product, masks may be added or filled in, and keys may be transposed in any
    way. No operator in between has another reader. The result of a query without any key is 0 after the fusion if its
    scores are minus infinity, and NaN before it. For finite numbers it is the mean of the values.
    """
    hits, view = 0, FxGraphView(module.graph)
    masks: dict[tuple[fx.Node, bool], fx.Node] = {}
    for node in list(module.graph.nodes):
        match = next(ATTENTION_FUSION.find(node, view), None)
        found = None if match is None else _match_scores(module, match["probabilities"])
        if (
            found is not None
            and found.product is not None
            and _replace_by_attention(module, node, found, found.product, masks)
        ):
            hits += 1
    return hits


def attention_to_four_axes(module: fx.GraphModule) -> int:
    """Give attention whose heads are part of the batch an axis of one head, as kernels take four axes."""
    hits = [node for node in module.graph.nodes if operator(node) == ATTENTION_TARGET and _has_three_axes(node)]
    for node in hits:
        values, kind = list(node.args), known_type(node)
        for place in (0, 1, 2, 3):
            value = values[place] if place < len(values) else None
            if not isinstance(value, fx.Node) or len(known_type(value).shape) < 3:
                continue
            batch, *rest = known_type(value).shape
            wide = TensorType((batch, 1, *rest), known_type(value).dtype)
            values[place] = call_before(node, wide, aten.unsqueeze.default, value, 1)
        wide = TensorType((kind.shape[0], 1, *kind.shape[1:]), kind.dtype)
        found = call_before(node, wide, aten.scaled_dot_product_attention.default, *values, **node.kwargs)
        replace_node(node, call_before(node, kind, aten.squeeze.dim, found, 1))
    return len(hits)


def _has_three_axes(node: fx.Node) -> bool:
    """Return whether queries, keys and values have three axes each, and all are positional arguments."""
    kinds = [tensor_type(value) for value in node.args[:3] if isinstance(value, fx.Node)]
    return len(kinds) == 3 and all(kind is not None and len(kind.shape) == 3 for kind in kinds)


def _match_scores(module: fx.GraphModule, softmax: fx.Node) -> ScoreOperators | None:
    """Walk from the softmax back to the product, and collect factors and one mask."""
    rank, dim = len(known_type(softmax).shape), softmax.args[1]
    if dim % rank != rank - 1 or tensor_type(softmax) != tensor_type(softmax.args[0]):
        return None
    found, value = ScoreOperators(), softmax.args[0]
    while value is not None and found.product is None:
        if len(value.users) != 1 or tensor_type(value) != tensor_type(softmax):
            return None
        value = _match_score_operator(module, value, found)
    return found if found.product is not None else None


def _match_score_operator(module: fx.GraphModule, node: fx.Node, found: ScoreOperators) -> fx.Node | None:
    """Record an operator on the scores in `found` and return the scores it reads; ``None`` if this is not attention."""
    name = operator(node)
    if name in MATMUL_TARGETS:
        found.product = node
        return node
    if name == "aten.baddbmm.default" and found.mask is None and found.scale_after_mask == 1:
        given = arguments(node)
        if given["beta"] == 1:
            found.product, found.mask, found.scale = node, node.args[0], found.scale * given["alpha"]
            return node
        return None
    factor = _factor(module, node)
    if factor is not None:
        found.scale *= factor[1]
        found.scale_after_mask *= factor[1] if found.mask is None else 1
        return factor[0]
    return _match_mask_operator(module, node, found)


def _match_mask_operator(module: fx.GraphModule, node: fx.Node, found: ScoreOperators) -> fx.Node | None:
    """Match an operator that masks the scores, record it, and return the scores it reads; ``None`` for no match."""
    name = operator(node)
    if name in ADD_TARGETS:
        scores, other = _scores_and_other(module, node)
        if scores is None:
            return None
        if _number(module, other) == 0:
            return scores
        if found.mask is not None or not isinstance(other, fx.Node) or arguments(node)["alpha"] != 1:
            return None
        condition = _as_condition(module, other)
        if condition is None and found.scale_after_mask != 1:
            return None
        found.mask = other if condition is None else condition
        found.fill = -math.inf if condition is None else _masked_score(module, other.args[2])
        return scores
    if found.mask is not None:
        return None
    if name in MASKED_FILL_TARGETS and (score := _masked_score(module, node.args[2])):
        found.mask, found.true_keeps, found.fill = node.args[1], False, score
        return node.args[0]
    if name in WHERE_TARGETS and (score := _masked_score(module, node.args[2])):
        found.mask, found.fill = node.args[0], score
        return node.args[1]
    if name in WHERE_TARGETS and (score := _masked_score(module, node.args[1])):
        found.mask, found.true_keeps, found.fill = node.args[0], False, score
        return node.args[2]
    return None


def _scores_and_other(module: fx.GraphModule, node: fx.Node) -> tuple[Any, Any]:
    """Return the operand of an addition that holds the scores, and the other operand."""
    for value, other in (node.args[:2], node.args[1::-1]):
        inner = value
        while isinstance(inner, fx.Node) and operator(inner) not in (*MATMUL_TARGETS, "aten.baddbmm.default"):
            factor = _factor(module, inner)
            steps = operator(inner) in (*MASKED_FILL_TARGETS, *ADD_TARGETS)
            inner = factor[0] if factor else inner.args[0] if steps else None
        if isinstance(inner, fx.Node) and tensor_type(value) == tensor_type(node):
            return value, other
    return None, None


def _as_condition(module: fx.GraphModule, mask: fx.Node) -> fx.Node | None:
    """Return the condition of a mask ``where(condition, 0, -inf)`` that is added to the scores."""
    if (
        operator(mask) not in WHERE_TARGETS
        or _number(module, mask.args[1]) != 0
        or not _masked_score(module, mask.args[2])
    ):
        return None
    return mask.args[0] if known_type(mask.args[0]).shape == known_type(mask).shape else None


def _factor(module: fx.GraphModule, node: Any) -> tuple[fx.Node, float] | None:
    """Match ``x * number`` and ``x / number``, and return x and the factor."""
    name = operator(node) if isinstance(node, fx.Node) else ""
    if name not in (*MUL_TARGETS, *DIV_TARGETS):
        return None
    a, b = node.args[:2]
    left, right = _number(module, a), _number(module, b)
    if right is not None and isinstance(a, fx.Node) and name in MUL_TARGETS:
        return a, right
    if right and isinstance(a, fx.Node) and name in DIV_TARGETS:
        return a, 1 / right
    return (b, left) if left is not None and isinstance(b, fx.Node) and name in MUL_TARGETS else None


def _number(module: fx.GraphModule, value: Any) -> float | None:
    """Return the value of a number or of a constant with one element, else ``None``."""
    if isinstance(value, fx.Node):
        if operator(value) in NUMBER_OPERATORS and not known_type(value).shape:
            return float(NUMBER_OPERATORS[operator(value)](arguments(value)))
        if not is_constant(value) or getattr(module, value.target).numel() != 1:
            return None
        return float(getattr(module, value.target).item())
    return float(value) if isinstance(value, (int, float)) else None


def _masked_score(module: fx.GraphModule, value: Any) -> float:
    """Return a score that masks a key, and 0 for other values."""
    number = _number(module, value)
    return number if number is not None and number <= MASKED_SCORE else 0.0


def _replace_by_attention(
    module: fx.GraphModule,
    node: fx.Node,
    found: ScoreOperators,
    product: fx.Node,
    masks: dict[tuple[fx.Node, bool], fx.Node],
) -> bool:
    """Replace the second product by attention; return false if the shapes are not those of attention.

    Heads wider than the kernel takes stay two products, as those of attention between channels of images are.
    """
    q, k_t = product.args[-2:] if operator(product) in MATMUL_TARGETS else product.args[1:3]
    v, leading = node.args[1], set()
    for kind in map(tensor_type, (q, k_t, v)):
        if kind is None or kind.dtype is not DType.F32 or len(kind.shape) < 3:
            return False
        leading.add(kind.shape[:-2])
    widths = (known_type(q).shape[-1], known_type(v).shape[-1])
    if len(leading) != 1 or not all(isinstance(size, int) and size <= MAX_HEAD_WIDTH for size in widths):
        return False
    q, scale = _skip_factors(module, q, found.scale)
    k_t, scale = _skip_factors(module, k_t, scale)
    k, scale = _skip_factors(module, _transposed(node, k_t), scale)
    mask = _mask(module, node, found, masks)
    while mask is not None and len(known_type(mask).shape) < FEWEST_MASK_AXES:
        kind = TensorType((1, *known_type(mask).shape), known_type(mask).dtype)
        mask = call_before(node, kind, aten.unsqueeze.default, mask, 0)
    replace_node(
        node,
        call_before(
            node, known_type(node), aten.scaled_dot_product_attention.default, q, k, v, mask, 0.0, False, scale=scale
        ),
    )
    return True


def _mask(
    module: fx.GraphModule, node: fx.Node, found: ScoreOperators, masks: dict[tuple[fx.Node, bool], fx.Node]
) -> fx.Node | None:
    """Return the mask of attention in front of a node, boolean only if no query without a key gets a mean of values.

    Args:
        module: the graph.
        node: the second product of attention.
        found: what was found between softmax and the first product.
        masks: float masks that were made for other layers, by the boolean mask and whether it is true for kept scores.
    """
    mask = found.mask
    if mask is None or known_type(mask).dtype is not DType.BOOL:
        return mask
    kind = known_type(mask)
    if math.isfinite(found.fill) and not _keeps_a_key(module, mask, found.true_keeps):
        if (key := (mask, found.true_keeps)) not in masks:
            scores = (0.0, LARGEST_MASKED) if found.true_keeps else (LARGEST_MASKED, 0.0)
            masks[key] = call_before(node, TensorType(kind.shape, DType.F32), aten.where.Scalar, mask, *scores)
        return masks[key]
    if not found.true_keeps:
        inverted = operator(mask) == "aten.logical_not.default" and known_type(mask.args[0]).dtype is DType.BOOL
        mask = mask.args[0] if inverted else call_before(node, kind, aten.logical_not.default, mask)
    return mask


def _keeps_a_key(module: fx.GraphModule, mask: fx.Node, true_keeps: bool) -> bool:
    """Return whether a mask is a constant with a key for every query, or a part of one that keeps the first key."""
    sliced = False
    while operator(mask) == "aten.slice.Tensor":
        given, sliced = arguments(mask), True
        if given["dim"] % len(known_type(mask).shape) == len(known_type(mask).shape) - 1 and given["start"] not in (
            None,
            0,
        ):
            return False
        mask = mask.args[0]
    if not is_constant(mask):
        return False
    values = getattr(module, mask.target)
    kept = values if true_keeps else ~values
    return bool((kept[..., 0] if sliced else kept.any(-1)).all())


def _skip_factors(module: fx.GraphModule, value: fx.Node, scale: float) -> tuple[fx.Node, float]:
    """Skip factors in front of an operand that only this product reads, and return the operand and the new scale."""
    factor = _factor(module, value)
    while factor is not None and len(value.users) <= 1 and tensor_type(factor[0]) == tensor_type(value):
        value, scale = factor[0], scale * factor[1]
        factor = _factor(module, value)
    return value, scale


def _transposed(before: fx.Node, value: fx.Node) -> fx.Node:
    """Return the value with its last two axes swapped, merged with a permutation it may come from."""
    name, kind = operator(value), known_type(value)
    axes, source = len(kind.shape), value
    order = list(range(axes))
    if name in ("aten.transpose.int", "aten.permute.default"):
        source = value.args[0]
        if name == "aten.permute.default":
            order = [axis % axes for axis in value.args[1]]
        else:
            a, b = (axis % axes for axis in value.args[1:3])
            order[a], order[b] = order[b], order[a]
    order[-2:] = order[:-3:-1]
    if order == sorted(order):
        return source
    shape = tuple(known_type(source).shape[axis] for axis in order)
    return call_before(before, TensorType(shape, kind.dtype), aten.permute.default, source, order)
