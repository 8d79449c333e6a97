"""Side conditions of fusions: predicates that return why a match cannot be one kernel, or ``None``."""

from __future__ import annotations

from intaglio.fusion.matcher import GraphView, Match, N
from intaglio.ops.products.conv import output_axis


def adds_without_broadcast(found: Match[N], view: GraphView[N]) -> str | None:
    """Refuse a residual sum that broadcasts, or whose factors are not one per output channel of the anchor."""
    total, anchor = found.nodes[-2:]
    shape = view.type_of(total).shape
    if any(value is None or view.type_of(value).shape != shape for value in view.operands(total)[:2]):
        return "the sum broadcasts an operand"
    axis = view.attributes(total).get("axis")
    channels = output_axis(view.kinds(anchor)[0], len(shape))
    return None if axis in (None, channels) else "the factors of the sum are not one per output channel"


def scales_output_channels(found: Match[N], view: GraphView[N]) -> str | None:
    """Refuse factors that are not one constant per output channel of an ungrouped anchor, and offsets that are not
    zero.
    """
    affine, anchor = found.root, found.anchor
    _, factor, offset = view.operands(affine)
    if factor is None or offset is None or not (view.constant(factor) and view.constant(offset)):
        return "the factor or the offset is not a constant"
    if view.attributes(anchor).get("groups", 1) != 1:
        return "kernels of grouped convolutions do not support factors"
    if view.array(offset).any():
        return "the offset is not zero"
    channels = output_axis(view.kinds(anchor)[0], len(view.type_of(affine).shape))
    return None if view.attributes(affine)["axis"] == channels else "the factors are not one per output channel"


def scales_by_positive_number(found: Match[N], view: GraphView[N]) -> str | None:
    """Refuse a number that cannot be folded into the scale of an accumulator: zero, negative or not finite."""
    number = view.attributes(found.root).get("other")
    if isinstance(number, (int, float)) and 0 < number < float("inf"):
        return None
    return f"the factor is {number}, but must be positive and finite"


def keeps_shape(found: Match[N], view: GraphView[N]) -> str | None:
    """Refuse a gate that is broadcast."""
    return None if view.type_of(found["x"]) == view.type_of(found.root) else "the gate broadcasts an operand"
