"""Decomposition of data movement without a record into slices, concatenations, expands and reshapes."""

from __future__ import annotations

from typing import Any

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
    resolve_dims,
    size_along,
    size_of,
)
from intaglio.fxgraph.passes.constant_folding import fill_value, is_recurrent_state
from intaglio.fxgraph.passes.identities import PADS
from intaglio.ir import Dim, DType, Shape, TensorType, evaluate
from intaglio.signature import TORCH_DTYPES

aten = torch.ops.aten
COPY_TARGETS = ("aten.copy.default", "aten.fill.Tensor")
FEW_COPIES = 8
"""Largest number of copies that one concatenation makes."""


def call_like(old: fx.Node, shape: Shape, target: Any, *args: Any) -> fx.Node:
    """Insert a call with this shape and the element type of `old` in front of `old`."""
    return call_before(old, TensorType(shape, known_type(old).dtype), target, *args)


def reshape_like(old: fx.Node, value: fx.Node, shape: Shape) -> fx.Node | None:
    """Insert a reshape in front of `old`; return ``None`` if several free sizes of the shape are unavailable."""
    sizes = [size_of(old, dim) for dim in shape]
    if sizes.count(None) > 1:
        return None
    return call_like(old, shape, aten.reshape.default, value, [-1 if size is None else size for size in sizes])


def expand_filled(module: fx.GraphModule) -> int:
    """Replace tensors of a free size that are filled with one number by an expand of a constant."""
    hits = 0
    for node in list(module.graph.nodes):
        kind, number = tensor_type(node), fill_value(node)
        if (
            number is None
            or kind is None
            or kind.dtype not in TORCH_DTYPES
            or not kind.shape
            or is_recurrent_state(node)
        ):
            continue
        sizes = [size_of(node, dim) for dim in kind.shape]
        like = node.args[0]
        if None in sizes and isinstance(like, fx.Node) and (other := tensor_type(like)) and other.shape == kind.shape:
            sizes = [size_along(node, like, axis) for axis in range(len(sizes))]
        if None in sizes:
            continue
        name = add_constant(module, "filled", torch.full([1] * len(sizes), number, dtype=TORCH_DTYPES[kind.dtype]))
        one = constant_node(module, name, node.name)
        replace_node(node, call_like(node, kind.shape, aten.expand.default, one, sizes))
        hits += 1
    return hits


def decompose_expand(module: fx.GraphModule) -> int:
    """Add the axes that an expand adds by unsqueezes in front of it."""
    hits = 0
    for node in [node for node in module.graph.nodes if operator(node) == "aten.expand.default"]:
        value, sizes = node.args[:2]
        added = len(sizes) - len(known_type(value).shape)
        if added == 0:
            continue
        for _ in range(added):
            value = call_like(node, (1, *known_type(value).shape), aten.unsqueeze.default, value, 0)
        replace_node(node, call_like(node, known_type(node).shape, aten.expand.default, value, sizes))
        hits += 1
    return hits


def decompose_padding(module: fx.GraphModule) -> int:
    """Pad with 0, and write the number that padding has instead over it.

    Quantized values can be padded with 0 at every scale. The number is written between floats, so that it has no
    influence on the range of the values.
    """
    hits = [node for node in module.graph.nodes if _pads_with_number(node)]
    for node in hits:
        given, value, kind = arguments(node), node.args[0], known_type(node)
        padded = call_like(node, kind.shape, aten.constant_pad_nd.default, value, given["pad"])
        inside = _data_among_padding(module, node)
        if kind.dtype is DType.BOOL:
            outside = call_before(node, known_type(inside), aten.logical_not.default, inside)
            found = call_like(node, kind.shape, aten.logical_or.default, padded, outside)
        else:
            number = int(given["value"]) if kind.dtype is DType.I64 else float(given["value"])
            found = call_like(node, kind.shape, aten.where.ScalarOther, inside, padded, number)
        replace_node(node, found)
    return len(hits)


def _data_among_padding(module: fx.GraphModule, node: fx.Node) -> fx.Node:
    """Insert a condition in front of a padding that is true for data, and has one place along axes without padding."""
    value, pads, whole = node.args[0], arguments(node)["pad"], known_type(node).shape
    first = len(whole) - len(pads) // 2
    ones: Shape = tuple(1 if axis < first else size for axis, size in enumerate(known_type(value).shape))
    fixed = [size for size in ones if isinstance(size, int)]
    if len(fixed) == len(ones):
        inside = aten.constant_pad_nd.default(torch.ones(fixed, dtype=torch.bool), pads)
        return constant_node(module, add_constant(module, "inside", inside), node.name)
    one = constant_node(module, add_constant(module, "one", torch.ones([1] * len(ones), dtype=torch.bool)), node.name)
    sizes = [1 if axis < first else size_along(node, value, axis) for axis in range(len(ones))]
    data = call_before(node, TensorType(ones, DType.BOOL), aten.expand.default, one, sizes)
    made = TensorType((*ones[:first], *whole[first:]), DType.BOOL)
    return call_before(node, made, aten.constant_pad_nd.default, data, pads)


def _pads_with_number(node: fx.Node) -> bool:
    """Return whether a node pads a tensor of floats, integers or booleans with a number other than 0."""
    if operator(node) not in PADS:
        return False
    given = arguments(node)
    plain = isinstance(given.get("value"), (int, float)) and given["value"] != 0
    fixed = all(isinstance(amount, int) and amount >= 0 for amount in given["pad"])
    known = known_type(node).dtype in (DType.F32, DType.I64, DType.BOOL)
    return plain and fixed and known and given.get("mode", "constant") == "constant"


def decompose_repeat(module: fx.GraphModule) -> int:
    """Replace repeat by expands of axes of size 1, and by concatenations or a new axis for other axes."""
    hits = 0
    for node in [node for node in module.graph.nodes if operator(node) == "aten.repeat.default"]:
        source, counts = node.args[0], list(node.args[1])
        if 0 in known_type(node).shape:
            continue
        value: fx.Node | None = source
        shape = (*[1] * (len(counts) - len(known_type(source).shape)), *known_type(source).shape)
        if shape != known_type(source).shape:
            value = reshape_like(node, source, shape)
        for axis, count in enumerate(counts):
            if shape[axis] != 1 and count != 1 and value is not None:
                value, shape = _repeated(node, value, shape, axis, count)
        sizes = [count if size == 1 else -1 for size, count in zip(shape, counts, strict=True)]
        if value is None:
            continue
        if any(size not in (1, -1) for size in sizes):
            value = call_like(node, known_type(node).shape, aten.expand.default, value, sizes)
        replace_node(node, value)
        hits += 1
    return hits


def decompose_repeat_interleave(module: fx.GraphModule) -> int:
    """Replace ``x.repeat_interleave(count, axis)`` by the expand of a new axis behind it, which a reshape merges."""
    hits = 0
    for node in [node for node in module.graph.nodes if operator(node) == "aten.repeat_interleave.self_int"]:
        given, value = arguments(node), node.args[0]
        count, axis, shape = given["repeats"], given["dim"], known_type(value).shape
        if axis is None:
            continue
        axis, times = axis % len(shape), resolve_dims(count)
        one, wide = ((*shape[: axis + 1], size, *shape[axis + 1 :]) for size in (1, times))
        value = call_like(node, one, aten.unsqueeze.default, value, axis + 1)
        sizes = [count if at == axis + 1 else -1 for at in range(len(wide))]
        value = reshape_like(node, call_like(node, wide, aten.expand.default, value, sizes), known_type(node).shape)
        if value is not None:
            replace_node(node, value)
            hits += 1
    return hits


def _repeated(
    node: fx.Node, value: fx.Node, shape: Shape, axis: int, count: int | fx.Node
) -> tuple[fx.Node | None, Shape]:
    """Insert the repetition of an axis of more than one element; return it and its shape, or ``None``."""
    times: Dim = resolve_dims(count)
    made = (*shape[:axis], shape[axis] * times, *shape[axis + 1 :])
    if isinstance(count, int) and count <= FEW_COPIES:
        return call_like(node, made, aten.cat.default, [value] * count, axis), made
    one, wide = ((*shape[:axis], size, *shape[axis:]) for size in (1, times))
    value = call_like(node, one, aten.unsqueeze.default, value, axis)
    sizes = [count if index == axis else -1 for index in range(len(wide))]
    value = call_like(node, wide, aten.expand.default, value, sizes)
    return reshape_like(node, value, made), made


def decompose_roll(module: fx.GraphModule) -> int:
    """Decompose roll along static axes into slices and concatenations."""
    hits = [(node, found) for node in module.graph.nodes if (found := _rolled_axes(node)) is not None]
    for node, moves in hits:
        value, shape = node.args[0], known_type(node).shape
        for axis, cut in moves:
            parts = []
            for start, stop in ((cut, shape[axis]), (0, cut)):
                part = (*shape[:axis], stop - start, *shape[axis + 1 :])
                parts.append(call_like(node, part, aten.slice.Tensor, value, axis, start, stop))
            value = call_like(node, shape, aten.cat.default, parts, axis)
        replace_node(node, value)
    return len(hits)


def decompose_flip(module: fx.GraphModule) -> int:
    """Replace the reversal of static axes by a selection of their elements in reverse order."""
    hits = [
        node for node in module.graph.nodes if operator(node) == "aten.flip.default" and _reverses_static_axes(node)
    ]
    for node in hits:
        value, shape = node.args[0], known_type(node).shape
        for axis in {axis % len(shape) for axis in arguments(node)["dims"]}:
            name = add_constant(module, f"{node.name}_{axis}", torch.arange(evaluate(shape[axis], {})).flip(0))
            with module.graph.inserting_before(node):
                order = constant_node(module, name, name)
            value = call_like(node, shape, aten.index_select.default, value, axis, order)
        replace_node(node, value)
    return len(hits)


def _reverses_static_axes(node: fx.Node) -> bool:
    kind = tensor_type(node)
    return kind is not None and all(isinstance(kind.shape[axis], int) for axis in arguments(node)["dims"])


def _rolled_axes(node: fx.Node) -> list[tuple[int, int]] | None:
    """Return the axes that roll and the index that becomes first; ``None`` for dynamic sizes or a flattened roll."""
    if operator(node) != "aten.roll.default":
        return None
    given, shape = arguments(node), known_type(node).shape
    shifts, axes = given["shifts"], [axis % len(shape) for axis in given["dims"]]
    if not axes or not all(isinstance(number, int) for number in (*shifts, *(shape[axis] for axis in axes))):
        return None
    if any(shape[axis] == 0 for axis in axes):
        return None
    found = [(axis, -shift % shape[axis]) for axis, shift in zip(axes, shifts, strict=True)]
    return [(axis, cut) for axis, cut in found if cut]


def decompose_copy(module: fx.GraphModule) -> int:
    """Replace ``copy(x, y)`` and ``fill(x, y)``, y with the shape and element type of x, by a cast and an expand."""
    hits = 0
    for node in [node for node in module.graph.nodes if operator(node) in COPY_TARGETS]:
        value, kind = node.args[1], known_type(node)
        sizes = [size_of(node, dim) for dim in kind.shape]
        given = known_type(value)
        if kind.dtype not in TORCH_DTYPES or (given.shape != kind.shape and None in sizes):
            continue
        if given.dtype is not kind.dtype:
            cast, dtype = TensorType(given.shape, kind.dtype), TORCH_DTYPES[kind.dtype]
            value = call_before(node, cast, aten._to_copy.default, value, dtype=dtype)
        for _ in range(len(kind.shape) - len(given.shape)):
            value = call_like(node, (1, *known_type(value).shape), aten.unsqueeze.default, value, 0)
        if given.shape != kind.shape:
            value = call_like(node, kind.shape, aten.expand.default, value, sizes)
        replace_node(node, value)
        hits += 1
    return hits


def decompose_slice_scatter(module: fx.GraphModule) -> int:
    """Replace a write into a slice of static bounds by a concatenation of what is kept and what is written.

    If the slice leaves elements out, the concatenation is brought into the order of the result by a constant index.
    """
    hits = 0
    for node in list(module.graph.nodes):
        if _overwrites_all(node):
            replace_node(node, node.args[1])
            hits += 1
            continue
        if (order := _order_of_written(node)) is not None:
            replace_node(node, _in_order(module, node, order))
            hits += 1
            continue
        found = _written_slice(node)
        if found is None:
            continue
        (part, axis, start, stop), hits = found, hits + 1
        source, shape = node.args[0], known_type(node).shape
        parts = []
        for first, last in ((0, start), (start, stop), (stop, shape[axis])):
            if first == last:
                continue
            kept = (*shape[:axis], last - first, *shape[axis + 1 :])
            inside = first == start and last == stop
            parts.append(part if inside else call_like(node, kept, aten.slice.Tensor, source, axis, first, last))
        joined = parts[0] if len(parts) == 1 else call_like(node, shape, aten.cat.default, parts, axis)
        replace_node(node, joined)
    return hits


def _overwrites_all(node: fx.Node) -> bool:
    """Return whether a node writes a whole tensor of the same type into a tensor."""
    if operator(node) != "aten.slice_scatter.default":
        return False
    given = arguments(node)
    whole = given["start"] in (None, 0) and given["step"] == 1
    return whole and tensor_type(given["src"]) == tensor_type(node) is not None


def _order_of_written(node: fx.Node) -> list[int] | None:
    """Return where a tensor and what a node writes into every second, third, ... element of it, joined, have the
    elements of the result; ``None`` for other operators."""
    if operator(node) != "aten.slice_scatter.default" or arguments(node)["step"] == 1:
        return None
    given, shape = arguments(node), known_type(node).shape
    axis = given["dim"] % len(shape)
    bounds = (given["start"], given["end"])
    if not isinstance(shape[axis], int) or not all(bound is None or isinstance(bound, int) for bound in bounds):
        return None
    order = list(range(shape[axis]))
    written = range(*slice(*bounds, given["step"]).indices(len(order)))
    for place, position in enumerate(written):
        order[position] = len(order) + place
    return order if known_type(given["src"]).shape[axis] == len(written) else None


def _in_order(module: fx.GraphModule, node: fx.Node, order: list[int]) -> fx.Node:
    """Insert a concatenation of a tensor and what is written into it, in the order of the result."""
    given, shape = arguments(node), known_type(node).shape
    axis = given["dim"] % len(shape)
    length = len(order) + known_type(given["src"]).shape[axis]
    joined = (*shape[:axis], length, *shape[axis + 1 :])
    both = call_like(node, joined, aten.cat.default, [given["self"], given["src"]], axis)
    name = add_constant(module, f"{node.name}_order", torch.tensor(order))
    return call_like(node, shape, aten.index_select.default, both, axis, constant_node(module, name, name))


def _written_slice(node: fx.Node) -> tuple[fx.Node, int, int, int] | None:
    """Return what a node writes, and axis, start and stop of the slice; ``None`` for other operators."""
    name = operator(node)
    if name not in ("aten.slice_scatter.default", "aten.select_scatter.default"):
        return None
    given, shape = arguments(node), known_type(node).shape
    axis = given["dim"] % len(shape)
    size, part = shape[axis], given["src"]
    if not isinstance(size, int):
        return None
    if name == "aten.select_scatter.default":
        start = given["index"] % size if isinstance(given["index"], int) else None
        if start is None:
            return None
        one = (*shape[:axis], 1, *shape[axis + 1 :])
        return call_like(node, one, aten.unsqueeze.default, part, axis), axis, start, start + 1
    bounds = (given["start"] or 0, size if given["end"] is None else given["end"])
    if given["step"] != 1 or not all(isinstance(bound, int) for bound in bounds):
        return None
    start, stop, _ = slice(*bounds).indices(size)
    length = known_type(part).shape[axis]
    return (part, axis, start, stop) if stop - start == length and start < stop else None
