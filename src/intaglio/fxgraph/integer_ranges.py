"""Static analysis of integer tensors: ranges (arange) along an axis, and tensors whose elements are all equal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import fx

from intaglio.fxgraph.node_info import known_type
from intaglio.fxgraph.nodes import arguments, operator
from intaglio.ir import Dim, DType, Shape, numel

ARANGES = ("aten.arange.default", "aten.arange.start", "aten.arange.start_step")
ADDITION_TARGETS = ("aten.add.Tensor", "aten.add.Scalar", "aten.sub.Tensor", "aten.sub.Scalar")
RESHAPING_TARGETS = (
    "aten.unsqueeze.default",
    "aten.squeeze.dim",
    "aten.expand.default",
    "aten.repeat.default",
    "aten.reshape.default",
    "aten.slice.Tensor",
    "aten.transpose.int",
    "aten.permute.default",
    "aten._to_copy.default",
)


@dataclass(frozen=True)
class IotaRange:
    """The values ``start``, ``start + 1``, ... along one axis, repeated along all others."""

    start: int
    axis: int
    length: Dim

    @property
    def last(self) -> int | None:
        """Return the largest value; ``None`` if the length is dynamic."""
        return self.start + self.length - 1 if isinstance(self.length, int) else None


def iota_range_of(node: fx.Node, ranges: Mapping[fx.Node, IotaRange]) -> IotaRange | None:
    """Return the range that a node computes, or ``None``; `ranges` holds those of earlier nodes."""
    name, shape = operator(node), known_type(node).shape
    if name in ARANGES:
        given = arguments(node)
        start, step = given.get("start", 0), given.get("step", 1)
        return IotaRange(start, 0, shape[0]) if isinstance(start, int) and step == 1 else None
    source = ranges.get(node.args[0]) if node.args and isinstance(node.args[0], fx.Node) else None
    if source is None:
        return None
    if name in ADDITION_TARGETS:
        number = _added_integer(node)
        return None if number is None else replace(source, start=source.start + number)
    if name == "aten.unsqueeze.default":
        axis = node.args[1] % len(shape)
        return replace(source, axis=source.axis + (axis <= source.axis))
    if name == "aten.repeat.default":
        added = len(shape) - len(known_type(node.args[0]).shape)
        return replace(source, axis=source.axis + added) if node.args[1][source.axis + added] == 1 else None
    if name in ("aten.expand.default", "aten.reshape.default"):
        return _reshaped_range(source, known_type(node.args[0]).shape, shape)
    is_integer_cast = name == "aten._to_copy.default" and known_type(node).dtype in (DType.I64, DType.I32)
    return source if is_integer_cast else None


def _added_integer(node: fx.Node) -> int | None:
    """Return the integer that an addition or subtraction adds to a tensor."""
    number = node.args[1]
    if not isinstance(number, int) or arguments(node).get("alpha", 1) != 1:
        return None
    return number if "add" in operator(node) else -number


def _reshaped_range(iota: IotaRange, old: Shape, new: Shape) -> IotaRange | None:
    """Return the range after a reshape or expand, or ``None``.

    Its axis is the one with the same length and the same number of elements after it. Other axes repeat it.
    """
    behind = numel(old[iota.axis + 1 :])
    for axis, size in enumerate(new):
        if size == iota.length and numel(new[axis + 1 :]) == behind:
            return replace(iota, axis=axis)
    return None


def uniform_value(
    node: fx.Node,
    ranges: Mapping[fx.Node, IotaRange],
    uniform_values: Mapping[fx.Node, int],
    constant_conditions: Mapping[fx.Node, bool],
) -> int | None:
    """Return the value of all elements of an int64 tensor, or ``None`` if it is unknown.

    Differences of neighbours in a range are 1, also if the range's first element minus 1 is prepended. A cumulative sum
    of a condition that is always false is 0.
    """
    name = operator(node)
    if known_type(node).dtype is not DType.I64:
        return None
    if name in (*RESHAPING_TARGETS, "aten.index.Tensor"):
        return uniform_values.get(node.args[0])
    if name == "aten.cumsum.default":
        return 0 if constant_conditions.get(node.args[0]) is False else None
    if name != "aten.diff.default":
        return None
    given = arguments(node)
    iota, rank = ranges.get(given["self"]), len(known_type(node).shape)
    if iota is None or given["dim"] % rank != iota.axis or given["n"] != 1 or given["append"] is not None:
        return None
    return 1 if _precedes(given["prepend"], given["self"], iota) else None


def _precedes(node: fx.Node | None, value: fx.Node, iota: IotaRange) -> bool:
    """Return whether `node` is ``None`` or the first element of a range minus 1."""
    if node is None:
        return True
    if (
        operator(node) not in ADDITION_TARGETS
        or _added_integer(node) != -1
        or operator(node.args[0]) != "aten.slice.Tensor"
    ):
        return False
    given = arguments(node.args[0])
    place = given["dim"] % len(known_type(value).shape), given["start"] or 0, given["end"], given["step"]
    return given["self"] is value and place == (iota.axis, 0, 1, 1)
