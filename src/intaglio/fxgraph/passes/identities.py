"""Removal of copies, views, casts, assertions that do not change a value, and of padding that no maximum contains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from intaglio.fxgraph.node_info import known_type, tensor_type
from intaglio.fxgraph.nodes import arguments, operator
from intaglio.ops import BY_TARGET
from intaglio.ops.movement.shape import END

COPIES = (
    "aten.clone.default",
    "aten.alias.default",
    "aten.detach.default",
    "aten.lift_fresh.default",
    "aten.lift_fresh_copy.default",
    "aten.contiguous.default",
)

ASSERTIONS = (
    "aten._assert_async.default",
    "aten._assert_async.msg",
    "aten._assert_scalar.default",
    "aten._assert_tensor_metadata.default",
    "aten.sym_constrain_range.default",
    "aten.sym_constrain_range_for_size.default",
)

VIEW_TARGETS = ("aten.view.default", "aten._unsafe_view.default")

SAME_IF_EQUAL = (
    "aten._to_copy.default",
    "aten.expand.default",
    "aten.expand_as.default",
    "aten.reshape.default",
    "aten.to.dtype",
    "aten.type_as.default",
)

UPSAMPLING = tuple(target for target in BY_TARGET if target.startswith("aten.upsample_"))
PADS = ("aten.pad.default", "aten.constant_pad_nd.default")
MAX_POOLS = {f"aten.max_pool{axes}d.default": axes for axes in (1, 2, 3)}
POOL_ARGUMENTS = ("self", "kernel_size", "stride", "padding", "dilation", "ceil_mode")
BELOW_ALL_DATA = -65504.0
"""Largest number that models use instead of minus infinity: the lowest float16."""


def drop_assertions(module: fx.GraphModule) -> int:
    """Remove assertions on types and sizes, which tracing inserts (for ``x.float()``, among others).

    Intaglio checks types itself, and each assertion would count as a reader of its value.
    """
    hits = [node for node in module.graph.nodes if operator(node) in ASSERTIONS and not node.users]
    for node in hits:
        module.graph.erase_node(node)
    return len(hits)


def view_to_reshape(module: fx.GraphModule) -> int:
    """Replace view by reshape: once copies are removed, the operand may no longer be contiguous."""
    hits = [node for node in module.graph.nodes if operator(node) in VIEW_TARGETS]
    for node in hits:
        node.target = torch.ops.aten.reshape.default
    return len(hits)


def drop_empty_parts(module: fx.GraphModule) -> int:
    """Remove operands without elements from concatenations, as rotary embeddings of whole heads have them."""
    hits = 0
    for node in module.graph.nodes:
        if operator(node) != "aten.cat.default":
            continue
        parts = [part for part in node.args[0] if 0 not in known_type(part).shape]
        if parts and len(parts) < len(node.args[0]):
            node.args = (parts, *node.args[1:])
            hits += 1
    if hits:
        module.graph.eliminate_dead_code()
    return hits


def drop_identity(module: fx.GraphModule) -> int:
    """Remove copies, full slices, casts, views and resizing that do not change a value, except returned copies of
    inputs.
    """
    hits = [node for node in module.graph.nodes if _is_identity(node) and not _returned_input(node)]
    for node in hits:
        node.replace_all_uses_with(_only_operand(node))
        module.graph.erase_node(node)
    return len(hits)


def _only_operand(node: fx.Node) -> fx.Node:
    return node.args[0][0] if isinstance(node.args[0], (list, tuple)) else node.args[0]


def _is_identity(node: fx.Node) -> bool:
    name = operator(node)
    if name in COPIES:
        return True
    if name == "aten.cat.default":
        return len(node.args[0]) == 1
    if name == "aten.dropout.default":
        return arguments(node)["train"] is False or arguments(node)["p"] == 0
    if name == "aten.slice.Tensor":
        given = arguments(node)
        return given["start"] in (None, 0) and (given["end"] is None or _to_end(given)) and given["step"] == 1
    if name in UPSAMPLING and any(scale != 1 for scale in arguments(node)["scale_factors"] or ()):
        return False  # the size may be the same after rounding
    return name in (*SAME_IF_EQUAL, *UPSAMPLING) and tensor_type(node) == tensor_type(node.args[0]) is not None


def _to_end(given: dict[str, Any]) -> bool:
    return isinstance(given["end"], int) and given["end"] >= END


def _returned_input(node: fx.Node) -> bool:
    return _only_operand(node).op == "placeholder" and any(user.op == "output" for user in node.users)


def pads_of_max_pools(module: fx.GraphModule) -> int:
    """Replace padding with minus infinity, or a number used instead, by padding of the max pooling behind it.

    One scale for the data and such a number would leave nothing of the data. Pooling pads both ends of an axis alike
    and by at most half of its window. Other padding repeats the elements at the border, which changes no maximum: each
    window that begins before the border contains the element there.
    """
    hits = [node for node in module.graph.nodes if operator(node) in PADS and _is_no_maximum(node)]
    for node in hits:
        given = arguments(node)
        pads = {reader: _pads_by_axis(given["pad"], reader) for reader in node.users}
        if all(_pools_by_itself(reader, ends) for reader, ends in pads.items()):
            for reader, ends in pads.items():
                pool = arguments(reader) | {"self": given["self"], "padding": [begin for begin, _ in ends]}
                reader.args, reader.kwargs = tuple(pool[name] for name in POOL_ARGUMENTS), {}
            node.replace_all_uses_with(given["self"])
            module.graph.erase_node(node)
        else:
            ends = next(iter(pads.values()))
            node.target = torch.ops.aten.pad.default
            node.args = (given["self"], [end for pair in reversed(ends) for end in pair], "replicate")
            node.kwargs = {}
    return len(hits)


def _is_no_maximum(node: fx.Node) -> bool:
    """Return whether a padding with a number below all data is only read by max pooling that never returns it."""
    given = arguments(node)
    value, pads = given["value"], given["pad"]
    if given.get("mode", "constant") != "constant" or value is None or not value <= BELOW_ALL_DATA or not node.users:
        return False
    if not all(isinstance(size, int) and size >= 0 for size in pads):
        return False
    return all(_contains_data(reader, node) for reader in node.users)


def _contains_data(reader: fx.Node, padded: fx.Node) -> bool:
    """Return whether every window of a max pooling contains an element of the data next to the padding that it has."""
    axes, given = MAX_POOLS.get(operator(reader)), arguments(reader) if reader.op == "call_function" else {}
    if axes is None or len(known_type(padded).shape) not in (axes + 1, axes + 2) or given["ceil_mode"]:
        return False
    if any(given["padding"]) or any(step != 1 for step in given["dilation"]):
        return False
    pads = arguments(padded)["pad"]
    ends = zip(_pads_by_axis(pads, reader), _sizes(given["kernel_size"], axes), strict=True)
    return not any(pads[2 * axes :]) and all(max(pair) < size for pair, size in ends)


def _pads_by_axis(pads: Sequence[int], reader: fx.Node) -> list[tuple[int, int]]:
    """Return the padding before and after each axis that is pooled. `pads` begins with the last axis."""
    axes = MAX_POOLS[operator(reader)]
    padded = [*pads, *[0] * (2 * axes - len(pads))][: 2 * axes]
    return list(zip(padded[::2], padded[1::2], strict=True))[::-1]


def _pools_by_itself(reader: fx.Node, ends: Sequence[tuple[int, int]]) -> bool:
    """Return whether a max pooling can pad by these numbers itself."""
    sizes = _sizes(arguments(reader)["kernel_size"], len(ends))
    return all(begin == end <= size // 2 for (begin, end), size in zip(ends, sizes, strict=True))


def _sizes(given: Sequence[int], axes: int) -> list[int]:
    return list(given) * (axes // len(given))
