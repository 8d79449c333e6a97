"""Operators that a rotation of the last axis passes through, and operators of norms, which it does not change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import fx

from intaglio.fxgraph.node_info import known_type, tensor_type
from intaglio.fxgraph.nodes import arguments, call_of, is_constant, operator, record_of
from intaglio.fxgraph.overloads import SDPA_TARGET
from intaglio.ir import Shape

LAYER_NORM, RMS_NORM, AFFINE = "aten.layer_norm.default", "aten.rms_norm.default", "aten.addcmul.default"
HEAD_RESHAPE = "aten.reshape.default"
ADDITIONS = ("aten.add.Tensor", "aten.sub.Tensor")
ROW_MEANS = ("aten.mean.dim", "aten.sum.dim_IntList")


def passing_operands(node: fx.Node, size: int) -> tuple[fx.Node, ...] | None:
    """Return the operands that are rotated exactly if the result is; ``None`` if no rotation passes through a node.

    Args:
        node: the node.
        size: size of the last axis of the rotated values.
    """
    if size_of_rows(node) != size or node.op != "call_function":
        return None
    found = PASSING.get(operator(node), _moved)(node)
    rotated = tuple(value for value in found if isinstance(value, fx.Node) and size_of_rows(value) == size)
    return rotated if rotated and len(rotated) == len(found) else None


def is_sum(node: fx.Node) -> bool:
    """Return whether a node adds or subtracts two tensors."""
    return operator(node) in ADDITIONS


def is_attention(node: fx.Node) -> bool:
    """Return whether a node is attention."""
    record = record_of(node)
    return record is not None and record.is_attention


def is_norm(node: fx.Node) -> bool:
    """Return whether a node is a layer norm or an RMS norm."""
    return operator(node) in (LAYER_NORM, RMS_NORM)


def is_layer_norm(node: fx.Node) -> bool:
    """Return whether a node is a layer norm, which subtracts the mean of each row."""
    return operator(node) == LAYER_NORM


def scales_channels(node: fx.Node) -> bool:
    """Return whether a node multiplies channels by factors or adds offsets, which layers behind it can absorb."""
    factors = [arguments(node).get(name) for name in ("weight", "bias")] if is_norm(node) else []
    return operator(node) == AFFINE or any(factor is not None for factor in factors)


def measures_rows(user: fx.Node, value: fx.Node) -> bool:
    """Return whether a node squares a value for sums or means of its rows, which no rotation changes."""
    powers = operator(user) == "aten.pow.Tensor_Scalar" and user.args[1] == 2
    squares = powers or (operator(user) == "aten.mul.Tensor" and user.args[0] is user.args[1])
    rank = len(known_type(value).shape)
    return squares and all(operator(one) in ROW_MEANS and _axes(one, rank) == [rank - 1] for one in user.users)


def splits_heads(node: fx.Node, size: int) -> bool:
    """Return whether a node splits the last axis of its operand into heads of this size."""
    return operator(node) == HEAD_RESHAPE and _are_heads(known_type(node.args[0]).shape, known_type(node).shape, size)


def merges_heads(node: fx.Node, size: int) -> bool:
    """Return whether a node joins heads of this size to one axis."""
    return operator(node) == HEAD_RESHAPE and _are_heads(known_type(node).shape, known_type(node.args[0]).shape, size)


def _are_heads(joined: Shape, split: Shape, size: int) -> bool:
    return len(split) > 1 and split[-1] == size and joined == (*split[:-2], split[-2] * size)


def size_of_rows(value: fx.Node) -> Any:
    """Return the size of the last axis; ``None`` for numbers and tuples."""
    kind = tensor_type(value)
    return kind.shape[-1] if kind is not None and kind.shape else None


def _axes(node: fx.Node, rank: int) -> list[int]:
    given = node.args[1]
    return [axis % rank for axis in given] if isinstance(given, (list, tuple)) else []


def moves_rows(node: fx.Node) -> bool:
    """Return whether a node only moves rows of the last axis of one operand, if their size stays the same."""
    if operator(node) in MOVING:
        return True
    record = record_of(node)
    if record is None or not record.moves_data or record.variadic:
        return False
    call = call_of(node, record)
    return record.keeps_last_axis(record.bind(call), len(call.shape()))


def _moved(node: fx.Node) -> tuple[Any, ...]:
    return node.args[:1] if moves_rows(node) else ()


def _summands(node: fx.Node) -> tuple[Any, ...]:
    return node.args[:2]


def _operand(node: fx.Node) -> tuple[Any, ...]:
    return node.args[:1]


def _scaled_rows(node: fx.Node) -> tuple[Any, ...]:
    """Return the operand of a product or quotient that the other one, a number or one for each row, scales."""
    x, factor = node.args[:2]
    if isinstance(x, fx.Node) and size_of_rows(x) == 1 and operator(node) == "aten.mul.Tensor":
        x, factor = factor, x
    return (x,) if not isinstance(factor, fx.Node) or size_of_rows(factor) in (None, 1) else ()


def _joined(node: fx.Node) -> tuple[Any, ...]:
    """Return the operands of a concatenation along another axis than the last."""
    rank = len(known_type(node).shape)
    return () if arguments(node)["dim"] % rank == rank - 1 else tuple(node.args[0])


def _indexed(node: fx.Node) -> tuple[Any, ...]:
    """Return the operand of which whole rows are taken."""
    rank = len(known_type(node.args[0]).shape)
    return node.args[:1] if len(node.args[1]) < rank else ()


def _selected(node: fx.Node) -> tuple[Any, ...]:
    rank = len(known_type(node.args[0]).shape)
    return () if node.args[1] % rank == rank - 1 else node.args[:1]


def _normalized(node: fx.Node) -> tuple[Any, ...]:
    """Return the operand of a norm over the last axis with constant factors."""
    given = arguments(node)
    factors = [value for name in ("weight", "bias") if (value := given.get(name)) is not None]
    return node.args[:1] if len(given["normalized_shape"]) == 1 and all(map(is_constant, factors)) else ()


def _scaled_channels(node: fx.Node) -> tuple[Any, ...]:
    """Return the operand that is multiplied by a constant for each channel before another is added."""
    shift, x, scale = node.args
    constants = all(
        is_constant(one) and known_type(one).shape[:-1].count(1) == len(known_type(one).shape) - 1
        for one in (shift, scale)
    )
    return (x,) if constants and arguments(node)["value"] == 1 else ()


def _attended(node: fx.Node) -> tuple[Any, ...]:
    """Return the values of attention, of which each result is a weighted mean."""
    return node.args[2:3]


MOVING = ("aten.alias.default", "aten.expand.default", "aten.index.Tensor", "aten.index_select.default")
"""Operators in `PASSING` that move rows of one operand."""
PASSING: Mapping[str, Callable[[fx.Node], tuple[Any, ...]]] = {
    **dict.fromkeys(ADDITIONS, _summands),
    "aten.neg.default": _operand,
    "aten.mul.Tensor": _scaled_rows,
    "aten.mul.Scalar": _scaled_rows,
    "aten.div.Tensor": _scaled_rows,
    "aten.div.Scalar": _scaled_rows,
    "aten.alias.default": _operand,
    "aten.expand.default": _operand,
    "aten.cat.default": _joined,
    "aten.index.Tensor": _indexed,
    "aten.index_select.default": _selected,
    LAYER_NORM: _normalized,
    RMS_NORM: _normalized,
    AFFINE: _scaled_channels,
    SDPA_TARGET: _attended,
}
"""Operators that a rotation passes through, besides data movement of whole rows -> their operands to be rotated."""
