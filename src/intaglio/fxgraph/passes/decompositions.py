"""Decomposition of operators without a record into operators that have one."""

from __future__ import annotations

import math
import operator as python_operator
from itertools import product
from typing import Any

import torch
from torch import fx

from intaglio.fxgraph.node_info import adopt_origin, constant_path, inherit_info, known_type, tensor_type
from intaglio.fxgraph.nodes import (
    arguments,
    call_before,
    constant_node,
    is_constant,
    operator,
    replace_node,
    reshape_before,
    size_along,
)
from intaglio.ir import DType, Shape, TensorType, evaluate, numel
from intaglio.ops.images.resize import RESIZE_OPS
from intaglio.ops.loop_ops.primitives import broadcast
from intaglio.ops.movement.shape import END
from intaglio.ops.opdef import numbers

aten = torch.ops.aten
EXTREMA = {
    "aten.max.dim": (aten.amax.default, aten.argmax.default),
    "aten.min.dim": (aten.amin.default, aten.argmin.default),
}
"""Operators that compute the values and the places of extrema along an axis."""
RESIZES = tuple(target for record in RESIZE_OPS for target in record.targets)
"""Operators that resize each channel of each image alone."""


def _call(old: fx.Node, shape: Shape, target: Any, *args: Any) -> fx.Node:
    """Insert a call with this shape and the element type of `old` in front of `old`."""
    return call_before(old, TensorType(shape, known_type(old).dtype), target, *args)


def decompose_group_norm(module: fx.GraphModule) -> int:
    """Decompose group_norm into a layer norm with groups as rows, and a factor and offset per channel.

    Instance norm by the statistics of its input has one group per channel.
    """
    norms = (node for node in module.graph.nodes if operator(node) in GROUP_NORMS)
    hits = [node for node in norms if _groups_are_rows(node)]
    for node in hits:
        given, shape = _group_arguments(node), known_type(node).shape
        rows = (shape[0], given["num_groups"], shape[1] // given["num_groups"] * numel(shape[2:]))
        sizes = [size_along(node, node.args[0], axis) for axis in range(len(shape))]
        x = _call(node, rows, aten.reshape.default, node.args[0], [sizes[0], rows[1], -1])
        x = _call(node, rows, aten.layer_norm.default, x, [size_along(node, x, 2)], None, None, given["eps"])
        x = _call(node, shape, aten.reshape.default, x, sizes)
        for target, value in ((aten.mul.Tensor, given["weight"]), (aten.add.Tensor, given["bias"])):
            if value is not None:
                name = f"{value.target}_channels"
                if not hasattr(module, name):
                    each = getattr(module, str(value.target)).reshape(-1, *[1] * (len(shape) - 2))
                    module.register_buffer(name, each)
                x = _call(node, shape, target, x, constant_node(module, name, constant_path(value, name)))
        replace_node(node, x)
    return len(hits)


GROUP_NORMS = ("aten.group_norm.default", "aten.instance_norm.default")


def _group_arguments(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of a group norm, or those of an instance norm as a group norm."""
    return {"num_groups": known_type(node).shape[1], **arguments(node)}


def _groups_are_rows(node: fx.Node) -> bool:
    """Return whether the number of channels is static, and weight and bias are constant."""
    given, kind = _group_arguments(node), tensor_type(node)
    constants = [given[name] for name in ("weight", "bias") if given[name] is not None]
    if kind is None or not isinstance(kind.shape[1], int):
        return False
    return bool(given.get("use_input_stats", True)) and all(map(is_constant, constants))


def decompose_meshgrid(module: fx.GraphModule) -> int:
    """Replace each grid of ``torch.meshgrid`` by its vector, reshaped and expanded to the grid."""
    hits = [node for node in module.graph.nodes if operator(node).startswith("aten.meshgrid.")]
    for node in hits:
        vectors, swaps = node.args[0], arguments(node).get("indexing", "ij") == "xy"
        for user in list(node.users):
            place = user.args[1]
            axes = list(range(len(vectors)))
            axes[:2] = axes[1::-1] if swaps else axes[:2]  # axis of each vector in the grid
            ones = [1] * len(vectors)
            ones[axes[place]] = size_along(user, vectors[place], 0)
            shape = tuple(known_type(vectors[place]).shape[0] if n == axes[place] else 1 for n in range(len(vectors)))
            sizes = [size_along(user, vectors[axes[n]], 0) for n in range(len(vectors))]
            x = _call(user, shape, aten.reshape.default, vectors[place], ones)
            replace_node(user, _call(user, known_type(user).shape, aten.expand.default, x, sizes))
        module.graph.erase_node(node)
    return len(hits)


def decompose_glu(module: fx.GraphModule) -> int:
    """Replace a gated linear unit by the product of its first half with the sigmoid of the second one."""
    hits = [node for node in module.graph.nodes if operator(node) == "aten.glu.default"]
    hits = [node for node in hits if isinstance(known_type(node).shape[arguments(node)["dim"]], int)]
    for node in hits:
        shape, axis = known_type(node).shape, arguments(node)["dim"] % len(known_type(node).shape)
        half = evaluate(shape[axis], {})
        first = _call(node, shape, aten.slice.Tensor, node.args[0], axis, 0, half)
        second = _call(node, shape, aten.slice.Tensor, node.args[0], axis, half, 2 * half)
        gate = _call(node, shape, aten.sigmoid.default, second)
        replace_node(node, _call(node, shape, aten.mul.Tensor, first, gate))
    return len(hits)


def decompose_split(module: fx.GraphModule) -> int:
    """Replace each used part of a split by a slice."""
    hits = [n for n in module.graph.nodes if n.target is python_operator.getitem and _split_sizes(n.args[0])]
    for node in hits:
        source, index = node.args
        axis, sizes = arguments(source)["dim"] % len(known_type(source.args[0]).shape), _split_sizes(source)
        start = sum(sizes[:index])
        with module.graph.inserting_before(node):
            call = (source.args[0], axis, start, start + sizes[index])
            part = module.graph.call_function(torch.ops.aten.slice.Tensor, call)
        inherit_info(part, source, type=tensor_type(node))
        replace_node(node, part)
    return len(hits)


def _split_sizes(node: fx.Node) -> list[int]:
    """Return the sizes of a split's parts; empty for other operators, along a dynamic dimension and for sizes that the
    model computes."""
    if operator(node) not in ("aten.split.Tensor", "aten.split_with_sizes.default"):
        return []
    given = arguments(node)
    total = known_type(node.args[0]).shape[given["dim"]]
    if not isinstance(total, int):
        return []
    if operator(node) == "aten.split_with_sizes.default":
        sizes = list(given["split_sizes"])
        return sizes if all(isinstance(size, int) for size in sizes) else []  # others are nodes
    step = given["split_size"]
    return [min(step, total - at) for at in range(0, total, step)]


def decompose_select(module: fx.GraphModule) -> int:
    """Replace ``x[:, 3]`` and parts of unbind by a slice of one element and a squeeze."""
    count = 0
    for node in list(module.graph.nodes):
        found = _selected(node)  # match here, because an earlier iteration may have replaced the source
        if found is None:
            continue
        (source, axis, index), count = found, count + 1
        adopt_origin(node, node.args[0] if node.target is python_operator.getitem else node)
        shape = known_type(source).shape
        one, stop = (*shape[:axis], 1, *shape[axis + 1 :]), index + 1 or END
        part = _call(node, one, aten.slice.Tensor, source, axis, index, stop)
        replace_node(node, _call(node, known_type(node).shape, aten.squeeze.dim, part, axis))
    return count


def _selected(node: fx.Node) -> tuple[fx.Node, int, int] | None:
    """Return source, axis and index of a selected element; a negative index only if the size is dynamic."""
    taken = node.target is python_operator.getitem
    maker = node.args[0] if taken else node
    if operator(maker) != ("aten.unbind.int" if taken else "aten.select.int"):
        return None
    source, given = maker.args[0], arguments(maker)
    axis = given["dim"] % len(known_type(source).shape)
    index, size = node.args[1] if taken else given["index"], known_type(source).shape[axis]
    if not isinstance(index, int):
        return None
    return source, axis, index % size if isinstance(size, int) else index


def decompose_stack(module: fx.GraphModule) -> int:
    """Decompose stack into unsqueezes and a concatenation."""
    hits = [node for node in module.graph.nodes if operator(node) == "aten.stack.default"]
    for node in hits:
        parts, shape = node.args[0], known_type(node).shape
        axis = arguments(node)["dim"] % len(shape)
        one = (*shape[:axis], 1, *shape[axis + 1 :])
        wide = [_call(node, one, aten.unsqueeze.default, part, axis) for part in parts]
        replace_node(node, _call(node, shape, aten.cat.default, wide, axis))
    return len(hits)


def fuse_channel_shuffle(module: fx.GraphModule) -> int:
    """Fuse a view as [n, groups, c / groups, h, w], a transpose of axes 1 and 2 and a view back to channel_shuffle."""
    count = 0
    for last in list(module.graph.nodes):
        swap = last.args[0] if operator(last) == "aten.reshape.default" else None
        if not isinstance(swap, fx.Node) or operator(swap) != "aten.transpose.int" or len(swap.users) != 1:
            continue
        first = swap.args[0]
        if operator(first) != "aten.reshape.default" or len(first.users) != 1 or sorted(swap.args[1:]) != [1, 2]:
            continue
        source, split = first.args[0], known_type(first).shape
        if len(split) == 5 and tensor_type(source) == tensor_type(last) and split[3:] == known_type(source).shape[2:]:
            with module.graph.inserting_before(last):
                node = module.graph.call_function(torch.ops.aten.channel_shuffle.default, (source, split[1]))
            node.meta = dict(last.meta)
            last.replace_all_uses_with(node)
            count += 1
    return count


def split_extrema(module: fx.GraphModule) -> int:
    """Replace ``max`` and ``min`` along an axis by their values and their places, as far as these are read."""
    hits = [node for node in module.graph.nodes if operator(node) in EXTREMA]
    for node in hits:
        given = arguments(node)
        for user in list(node.users):
            target = EXTREMA[operator(node)][user.args[1]]
            axes = given["dim"] if user.args[1] else [given["dim"]]
            replace_node(user, call_before(user, known_type(user), target, node.args[0], axes, given["keepdim"]))
        module.graph.erase_node(node)
    return len(hits)


def clamp_by_tensors(module: fx.GraphModule) -> int:
    """Replace clamps whose bounds are tensors of the same element type by maxima and minima."""
    hits = [node for node in module.graph.nodes if operator(node) == "aten.clamp.Tensor"]
    hits = [node for node in hits if len({known_type(value).dtype for value in (node, *node.all_input_nodes)}) == 1]
    for node in hits:
        given, value = arguments(node), node.args[0]
        for name, target in (("min", aten.maximum.default), ("max", aten.minimum.default)):
            if (bound := given[name]) is not None:
                shape = broadcast(known_type(value).shape, known_type(bound).shape)
                value = _call(node, shape, target, value, bound)
        replace_node(node, value)
    return len(hits)


def channels_to_images(module: fx.GraphModule) -> int:
    """Resize one image with a free number of channels as that many images with one channel.

    Detectors resize the masks of all images of a batch in this way.
    """
    hits = [node for node in module.graph.nodes if operator(node) in RESIZES and _has_free_channels(node.args[0])]
    for node in hits:
        (one, many, *sizes), value = known_type(node.args[0]).shape, node.args[0]
        value = _call(node, (many, one, *sizes), aten.transpose.int, value, 0, 1)
        kind = TensorType((many, one, *known_type(node).shape[2:]), known_type(node).dtype)
        value = call_before(node, kind, node.target, value, *node.args[1:], **node.kwargs)
        replace_node(node, _call(node, known_type(node).shape, aten.transpose.int, value, 0, 1))
    return len(hits)


def _has_free_channels(value: fx.Node) -> bool:
    shape = known_type(value).shape
    return shape[0] == 1 and not isinstance(shape[1], int)


def decompose_fold(module: fx.GraphModule) -> int:
    """Replace col2im (``F.fold``) without dilation by sums of padded taps, which a reshape interleaves.

    A padded output ``q * stride + r`` adds the taps ``r + m * stride`` of the windows ``q - m``.
    """
    hits = [node for node in module.graph.nodes if operator(node) == "aten.col2im.default" and _folds(node)]
    for node in hits:
        given, kind = arguments(node), known_type(node)
        kernel, stride, padding, size = (
            numbers(given[name], 2) for name in ("kernel_size", "stride", "padding", "output_size")
        )
        grid = [(n + 2 * p - k) // s + 1 for n, p, k, s in zip(size, padding, kernel, stride, strict=True)]
        places = [g + -(-k // s) - 1 for g, k, s in zip(grid, kernel, stride, strict=True)]
        batch, channels = kind.shape[:2]
        taps = reshape_before(node, node.args[0], (batch, channels, math.prod(kernel), *grid))
        rows = [_sum_of_taps(node, taps, phase, kernel, stride, places) for phase in product(*map(range, stride))]
        shape: Shape = (batch, channels, math.prod(stride), *places)
        value = rows[0] if len(rows) == 1 else _call(node, shape, aten.cat.default, rows, 2)
        value = reshape_before(node, value, (batch, channels, *stride, *places))
        shape = (batch, channels, places[0], stride[0], places[1], stride[1])
        value = _call(node, shape, aten.permute.default, value, [0, 1, 4, 2, 5, 3])
        shape = (batch, channels, *(a * b for a, b in zip(places, stride, strict=True)))
        value = reshape_before(node, value, shape)
        for axis in (0, 1):
            missing = padding[axis] + size[axis] - places[axis] * stride[axis]
            if missing > 0:  # pixels behind the last window
                shape = (*shape[: axis + 2], padding[axis] + size[axis], *shape[axis + 3 :])
                value = _call(node, shape, aten.constant_pad_nd.default, value, [0, 0] * (1 - axis) + [0, missing])
            shape = (*shape[: axis + 2], size[axis], *shape[axis + 3 :])
            bounds = (padding[axis], padding[axis] + size[axis])
            value = _call(node, shape, aten.slice.Tensor, value, axis + 2, *bounds)
        replace_node(node, value)
    return len(hits)


def _sum_of_taps(
    node: fx.Node,
    taps: fx.Node,
    phase: tuple[int, ...],
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    places: list[int],
) -> fx.Node:
    """Insert the sum of the taps that meet at outputs with this remainder; return [n, c, 1, *places]."""
    batch, channels, _, *grid = known_type(taps).shape
    total: fx.Node | None = None
    shape: Shape = (batch, channels, 1, *places)
    for first, second in product(*(range(r, k, s) for r, k, s in zip(phase, kernel, stride, strict=True))):
        tap = first * kernel[1] + second
        part = _call(node, (batch, channels, 1, *grid), aten.slice.Tensor, taps, 2, tap, tap + 1)
        skipped = first // stride[0], second // stride[1]
        ends = [(m, p - g - m) for m, p, g in zip(skipped, places, grid, strict=True)]
        part = _call(node, shape, aten.constant_pad_nd.default, part, [*ends[1], *ends[0]])
        total = part if total is None else _call(node, shape, aten.add.Tensor, total, part)
    assert total is not None  # `_folds` takes only strides that no tap is skipped by
    return total


def _folds(node: fx.Node) -> bool:
    """Return whether a fold has no dilation, static sizes beside its batch, and a kernel of at least its stride."""
    given, kind = arguments(node), tensor_type(node)
    if kind is None or kind.dtype is not DType.F32 or len(kind.shape) != 4:
        return False
    if not all(isinstance(size, int) for size in (*kind.shape[1:], *numbers(given["output_size"], 2))):
        return False
    pairs = zip(numbers(given["kernel_size"], 2), numbers(given["stride"], 2), strict=True)
    return set(numbers(given["dilation"], 2)) == {1} and all(kernel >= stride for kernel, stride in pairs)


def mean_to_adaptive_avg_pool(module: fx.GraphModule) -> int:
    """Replace the mean over height and width by adaptive average pooling, with a flatten if the axes are dropped."""
    hits = [node for node in module.graph.nodes if operator(node) == "aten.mean.dim" and _reduces_image(node)]
    for node in hits:
        given, source = arguments(node), known_type(node.args[0])
        kept = TensorType((*source.shape[:2], 1, 1), source.dtype)
        with module.graph.inserting_before(node):
            pool = module.graph.call_function(torch.ops.aten.adaptive_avg_pool2d.default, (node.args[0], [1, 1]))
            inherit_info(pool, node, type=kept)
            result = pool
            if not given["keepdim"]:
                result = module.graph.call_function(torch.ops.aten.flatten.using_ints, (pool, 1, 3))
                inherit_info(result, node, type=tensor_type(node))
        replace_node(node, result)
    return len(hits)


def _reduces_image(node: fx.Node) -> bool:
    source, given = tensor_type(node.args[0]), arguments(node)
    if source is None or len(source.shape) != 4 or given["dim"] is None or given.get("dtype") is not None:
        return False
    return sorted(axis % 4 for axis in given["dim"]) == [2, 3]


def use_scalar_overloads(module: fx.GraphModule) -> int:
    """Replace arithmetic with a number (``x + 3``, ``2 * x``, ``1 - x``) by its Scalar overload, a unary function.

    ``x + 0``, ``x - 0``, ``x * 1`` and ``x / 1`` are removed.
    """
    hits = [node for node in module.graph.nodes if operator(node) in SCALAR_OVERLOADS and _number(node) is not None]
    for node in hits:
        number = _number(node)
        name = operator(node).split(".")[1]
        idle = (number == 0 and name in ("add", "sub")) or (number == 1 and name in ("mul", "div"))
        if idle and tensor_type(node) == tensor_type(node.args[0]):
            replace_node(node, node.args[0])
            continue
        node.target = SCALAR_OVERLOADS[operator(node)]
    return len(hits)


def _number(node: fx.Node) -> int | float | None:
    """Return the second operand if it is a number, else ``None``."""
    other = node.args[1] if len(node.args) > 1 else None
    return other if isinstance(other, (int, float)) and not isinstance(other, bool) else None


SCALAR_OVERLOADS = {
    "aten.add.Tensor": torch.ops.aten.add.Scalar,
    "aten.sub.Tensor": torch.ops.aten.sub.Scalar,
    "aten.mul.Tensor": torch.ops.aten.mul.Scalar,
    "aten.div.Tensor": torch.ops.aten.div.Scalar,
}
