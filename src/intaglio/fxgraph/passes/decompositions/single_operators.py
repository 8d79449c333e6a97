"""Decomposition of operators that compute each element, or move elements, into operators with a record."""

from __future__ import annotations

import math
import operator as python_operator
from itertools import product

import torch
from torch import fx

from intaglio.fxgraph.graph_constants import add_constant
from intaglio.fxgraph.node_info import adopt_origin, inherit_info, known_type, tensor_type
from intaglio.fxgraph.nodes import (
    arguments,
    call_before,
    constant_node,
    operator,
    replace_node,
    reshape_before,
    size_along,
)
from intaglio.fxgraph.passes.decompositions.movement import call_like
from intaglio.ir import DType, Shape, TensorType, evaluate
from intaglio.ops.images.resize import RESIZE_OPS
from intaglio.ops.loop_ops.primitives import broadcast
from intaglio.ops.movement.shape import END
from intaglio.ops.opdef import numbers

aten = torch.ops.aten
RESIZES = tuple(target for record in RESIZE_OPS for target in record.targets)
"""Operators that resize each channel of each image alone."""


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
            x = call_like(user, shape, aten.reshape.default, vectors[place], ones)
            replace_node(user, call_like(user, known_type(user).shape, aten.expand.default, x, sizes))
        module.graph.erase_node(node)
    return len(hits)


def decompose_glu(module: fx.GraphModule) -> int:
    """Replace a gated linear unit by the product of its first half with the sigmoid of the second one."""
    hits = [node for node in module.graph.nodes if operator(node) == "aten.glu.default"]
    hits = [node for node in hits if isinstance(known_type(node).shape[arguments(node)["dim"]], int)]
    for node in hits:
        shape, axis = known_type(node).shape, arguments(node)["dim"] % len(known_type(node).shape)
        half = evaluate(shape[axis], {})
        first = call_like(node, shape, aten.slice.Tensor, node.args[0], axis, 0, half)
        second = call_like(node, shape, aten.slice.Tensor, node.args[0], axis, half, 2 * half)
        gate = call_like(node, shape, aten.sigmoid.default, second)
        replace_node(node, call_like(node, shape, aten.mul.Tensor, first, gate))
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
        part = call_like(node, one, aten.slice.Tensor, source, axis, index, stop)
        replace_node(node, call_like(node, known_type(node).shape, aten.squeeze.dim, part, axis))
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
        wide = [call_like(node, one, aten.unsqueeze.default, part, axis) for part in parts]
        replace_node(node, call_like(node, shape, aten.cat.default, wide, axis))
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


def clamp_by_tensors(module: fx.GraphModule) -> int:
    """Replace clamps whose bounds are tensors of the same element type by maxima and minima."""
    hits = [node for node in module.graph.nodes if operator(node) in CLAMPS_BY_TENSORS]
    hits = [node for node in hits if len({known_type(value).dtype for value in (node, *node.all_input_nodes)}) == 1]
    for node in hits:
        given, value = arguments(node), node.args[0]
        for name, target in (("min", aten.maximum.default), ("max", aten.minimum.default)):
            if (bound := given.get(name)) is not None:
                shape = broadcast(known_type(value).shape, known_type(bound).shape)
                value = call_like(node, shape, target, value, bound)
        replace_node(node, value)
    return len(hits)


CLAMPS_BY_TENSORS = ("aten.clamp.Tensor", "aten.clamp_min.Tensor", "aten.clamp_max.Tensor")


def norms_to_vector_norms(module: fx.GraphModule) -> int:
    """Replace the overload of ``torch.norm`` along axes by that of ``torch.linalg``."""
    hits = [node for node in module.graph.nodes if operator(node) == "aten.norm.ScalarOpt_dim"]
    for node in hits:
        given = arguments(node)
        order = 2 if given["p"] is None else given["p"]
        found = (node.args[0], order, given["dim"], given["keepdim"])
        replace_node(node, call_like(node, known_type(node).shape, aten.linalg_vector_norm.default, *found))
    return len(hits)


def powers_and_logarithms_of_other_bases(module: fx.GraphModule) -> int:
    """Replace powers of 2 and of another positive number, and logarithms to the bases 2 and 10, by those of e."""
    hits = 0
    for node in [node for node in module.graph.nodes if operator(node) in (*LOGARITHMS, *POWERS)]:
        name, shape = operator(node), known_type(node).shape
        if known_type(node).dtype is not DType.F32:
            continue
        if name in LOGARITHMS:
            found = call_like(node, shape, aten.log.default, node.args[0])
            found = call_like(node, shape, aten.mul.Tensor, found, 1 / math.log(LOGARITHMS[name]))
        else:
            base, exponent = (2, node.args[0]) if name == "aten.exp2.default" else node.args
            if base <= 0 or not math.isfinite(base):
                continue
            scaled = call_like(node, shape, aten.mul.Tensor, exponent, math.log(base))
            found = call_like(node, shape, aten.exp.default, scaled)
        replace_node(node, found)
        hits += 1
    return hits


LOGARITHMS = {"aten.log2.default": 2, "aten.log10.default": 10}
POWERS = ("aten.exp2.default", "aten.pow.Scalar")


def decompose_lerp(module: fx.GraphModule) -> int:
    """Replace ``lerp(a, b, w)`` by ``a + w * (b - a)``, or ``b - (1 - w) * (b - a)`` for numbers from 1/2 on."""
    hits = [node for node in module.graph.nodes if operator(node) in ("aten.lerp.Scalar", "aten.lerp.Tensor")]
    for node in hits:
        start, end, weight = node.args
        apart = call_like(node, broadcast(known_type(start).shape, known_type(end).shape), aten.sub.Tensor, end, start)
        if isinstance(weight, (int, float)) and weight >= 0.5:
            start, weight = end, weight - 1
        found = call_like(node, known_type(node).shape, aten.mul.Tensor, apart, weight)
        replace_node(node, call_like(node, known_type(node).shape, aten.add.Tensor, start, found))
    return len(hits)


def triangles_to_masks(module: fx.GraphModule) -> int:
    """Replace the triangle of float32 matrices of static sizes by a selection with a constant mask."""
    hits = [node for node in module.graph.nodes if operator(node) in ("aten.tril.default", "aten.triu.default")]
    hits = [node for node in hits if _has_static_triangle(node)]
    for node in hits:
        rows, columns = (evaluate(size, {}) for size in known_type(node).shape[-2:])
        diagonal = arguments(node)["diagonal"]
        triangle = getattr(torch.ones(rows, columns, dtype=torch.bool), operator(node).split(".")[1])
        name = add_constant(module, f"{node.name}_mask", triangle(diagonal))
        with module.graph.inserting_before(node):
            mask = constant_node(module, name, name)
        found = call_like(node, known_type(node).shape, aten.where.ScalarOther, mask, node.args[0], 0.0)
        replace_node(node, found)
    return len(hits)


def _has_static_triangle(node: fx.Node) -> bool:
    """Return whether neither the sizes of float32 matrices nor the diagonal of their triangle are computed."""
    kind = tensor_type(node)
    if kind is None or kind.dtype is not DType.F32:
        return False
    return all(isinstance(size, int) for size in (*kind.shape[-2:], arguments(node)["diagonal"]))


def exact_neighbours_to_nearest(module: fx.GraphModule) -> int:
    """Replace nearest-exact upsampling by whole factors, which copies the pixels that nearest upsampling copies."""
    hits = [node for node in module.graph.nodes if operator(node) in EXACT_NEIGHBOURS and _has_whole_factors(node)]
    for node in hits:
        node.target = EXACT_NEIGHBOURS[operator(node)]
    return len(hits)


EXACT_NEIGHBOURS = {
    f"aten._upsample_nearest_exact{axes}d.vec": getattr(aten, f"upsample_nearest{axes}d").vec for axes in (1, 2, 3)
}


def _has_whole_factors(node: fx.Node) -> bool:
    """Return whether upsampling of static sizes copies each pixel the same number of times along an axis."""
    before, after = known_type(node.args[0]).shape[2:], known_type(node).shape[2:]
    if not all(isinstance(size, int) for size in (*before, *after)):
        return False
    factors = [evaluate(result, {}) / evaluate(size, {}) for size, result in zip(before, after, strict=True)]
    given = arguments(node)["scale_factors"]
    return all(factor.is_integer() for factor in factors) and (given is None or list(given) == factors)


def channels_to_images(module: fx.GraphModule) -> int:
    """Resize one image with a free number of channels as that many images with one channel.

    Detectors resize the masks of all images of a batch in this way.
    """
    hits = [node for node in module.graph.nodes if operator(node) in RESIZES and _has_free_channels(node.args[0])]
    for node in hits:
        (one, many, *sizes), value = known_type(node.args[0]).shape, node.args[0]
        value = call_like(node, (many, one, *sizes), aten.transpose.int, value, 0, 1)
        kind = TensorType((many, one, *known_type(node).shape[2:]), known_type(node).dtype)
        value = call_before(node, kind, node.target, value, *node.args[1:], **node.kwargs)
        replace_node(node, call_like(node, known_type(node).shape, aten.transpose.int, value, 0, 1))
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
        value = rows[0] if len(rows) == 1 else call_like(node, shape, aten.cat.default, rows, 2)
        value = reshape_before(node, value, (batch, channels, *stride, *places))
        shape = (batch, channels, places[0], stride[0], places[1], stride[1])
        value = call_like(node, shape, aten.permute.default, value, [0, 1, 4, 2, 5, 3])
        shape = (batch, channels, *(a * b for a, b in zip(places, stride, strict=True)))
        value = reshape_before(node, value, shape)
        for axis in (0, 1):
            missing = padding[axis] + size[axis] - places[axis] * stride[axis]
            if missing > 0:  # pixels behind the last window
                shape = (*shape[: axis + 2], padding[axis] + size[axis], *shape[axis + 3 :])
                value = call_like(node, shape, aten.constant_pad_nd.default, value, [0, 0] * (1 - axis) + [0, missing])
            shape = (*shape[: axis + 2], size[axis], *shape[axis + 3 :])
            bounds = (padding[axis], padding[axis] + size[axis])
            value = call_like(node, shape, aten.slice.Tensor, value, axis + 2, *bounds)
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
        part = call_like(node, (batch, channels, 1, *grid), aten.slice.Tensor, taps, 2, tap, tap + 1)
        skipped = first // stride[0], second // stride[1]
        ends = [(m, p - g - m) for m, p, g in zip(skipped, places, grid, strict=True)]
        part = call_like(node, shape, aten.constant_pad_nd.default, part, [*ends[1], *ends[0]])
        total = part if total is None else call_like(node, shape, aten.add.Tensor, total, part)
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
