"""Canonical forms of operators on images and on tensors with many axes: products, padding, fold, largest elements."""

from __future__ import annotations

import operator as python_operator
from itertools import product
from math import prod
from typing import Any

import torch
from torch import fx

from intaglio.fxgraph.node_info import fixed_size, known_type, tensor_type
from intaglio.fxgraph.nodes import arguments, call_before, constant_node, is_constant, operator, replace_node, size_of
from intaglio.fxgraph.unique_names import add_constant
from intaglio.ir import DType, Shape, TensorType, numel
from intaglio.ops.opdef import numbers

aten = torch.ops.aten
MATMUL, ATTENTION = "aten.matmul.default", "aten.scaled_dot_product_attention.default"
FACTORS = {MATMUL: 2, ATTENTION: 3}
"""Number of operands that have batch axes, by operator."""
KERNEL_AXES = 4
"""Largest number of axes of a product's operands."""
PADS = ("aten.pad.default", "aten.constant_pad_nd.default")
LARGEST = {"aten.max.dim": aten.amax.default, "aten.min.dim": aten.amin.default}


def _call(old: fx.Node, shape: Shape, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """Insert a call with this shape and the element type of f32 in front of `old`."""
    return call_before(old, TensorType(shape, DType.F32), target, *args, **kwargs)


def _reshaped(old: fx.Node, value: fx.Node, shape: Shape) -> fx.Node:
    """Insert a reshape to a shape with at most one size that is not available as a number or a size of an input."""
    sizes = [size_of(old, dim) for dim in shape]
    return _call(old, shape, aten.reshape.default, value, [-1 if size is None else size for size in sizes])


def merge_batch_axes(module: fx.GraphModule) -> int:
    """Merge the leading axes of products and attention with more than four axes, as kernels take four."""
    hits = [node for node in module.graph.nodes if _has_many_axes(node)]
    for node in hits:
        count, kind = FACTORS[operator(node)], known_type(node)
        factors = [_reshaped(node, value, _merged(known_type(value).shape)) for value in node.args[:count]]
        made = _call(node, _merged(kind.shape), node.target, *factors, *node.args[count:], **node.kwargs)
        replace_node(node, _reshaped(node, made, kind.shape))
    return len(hits)


def _merged(shape: Shape) -> Shape:
    """Return the shape with four axes, the first of which has all leading elements."""
    return (numel(shape[: 1 - KERNEL_AXES]), *shape[1 - KERNEL_AXES :])


def _has_many_axes(node: fx.Node) -> bool:
    """Return whether a product of computed values has more than four axes, all leading ones equal and available."""
    if operator(node) not in FACTORS:
        return False
    values = node.args[: FACTORS[operator(node)]]
    if any(not isinstance(value, fx.Node) or is_constant(value) for value in values):
        return False
    shapes = [known_type(value).shape for value in values]
    if (
        len({len(shape) for shape in shapes}) > 1
        or len(shapes[0]) <= KERNEL_AXES
        or known_type(node).dtype is not DType.F32
    ):
        return False
    free = {dim for shape in shapes for dim in shape if not isinstance(dim, int)}
    same = len({shape[:-2] for shape in shapes}) == 1
    masked = operator(node) == ATTENTION and arguments(node)["attn_mask"] is not None
    return same and not masked and len(free) <= 1 and all(shape[0] in free or not free for shape in shapes)


def pad_with_zeros(module: fx.GraphModule) -> int:
    """Replace padding with a number by padding with zeros and the addition of a constant, which is 0 inside."""
    hits = [(node, found) for node in module.graph.nodes if (found := _filled_border(node)) is not None]
    for node, (pad, border) in hits:
        zeros = _call(node, known_type(node).shape, aten.constant_pad_nd.default, node.args[0], pad)
        name = add_constant(module, "border", border)
        constant = constant_node(module, name, node.name)
        replace_node(node, _call(node, known_type(node).shape, aten.add.Tensor, zeros, constant))
    return len(hits)


def _filled_border(node: fx.Node) -> tuple[list[int], torch.Tensor] | None:
    """Return the padding, and the number on the border of fixed axes as a tensor that broadcasts to the result."""
    if operator(node) not in PADS or known_type(node).dtype is not DType.F32:
        return None
    given, shape = arguments(node), known_type(node).shape
    pad, value = list(given["pad"]), given.get("value")
    if given.get("mode", "constant") != "constant" or not value or not all(isinstance(n, int) and n >= 0 for n in pad):
        return None
    axes = {len(shape) - 1 - i: (pad[2 * i], pad[2 * i + 1]) for i in range(len(pad) // 2)}
    padded = {axis: sides for axis, sides in axes.items() if sides != (0, 0)}
    if not padded or not all(isinstance(shape[axis], int) for axis in padded):
        return None
    border = torch.full([fixed_size(node, axis) if axis in padded else 1 for axis in range(len(shape))], float(value))
    inside = [slice(None)] * len(shape)
    for axis, (before, after) in padded.items():
        inside[axis] = slice(before, fixed_size(node, axis) - after)
    border[tuple(inside)] = 0
    return pad, border


def values_of_extrema(module: fx.GraphModule) -> int:
    """Replace the values of ``max`` and ``min`` along an axis by amax and amin where nothing reads the places."""
    hits = 0
    for node in [node for node in module.graph.nodes if operator(node) in LARGEST]:
        if not all(user.target is python_operator.getitem and user.args[1] == 0 for user in node.users):
            continue
        given = arguments(node)
        for user in list(node.users):
            values = call_before(
                user, known_type(user), LARGEST[operator(node)], node.args[0], [given["dim"]], given["keepdim"]
            )
            replace_node(user, values)
        module.graph.erase_node(node)
        hits += 1
    return hits


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
        taps = _reshaped(node, node.args[0], (batch, channels, prod(kernel), *grid))
        rows = [_sum_of_taps(node, taps, phase, kernel, stride, places) for phase in product(*map(range, stride))]
        shape: Shape = (batch, channels, prod(stride), *places)
        value = rows[0] if len(rows) == 1 else _call(node, shape, aten.cat.default, rows, 2)
        value = _reshaped(node, value, (batch, channels, *stride, *places))
        shape = (batch, channels, places[0], stride[0], places[1], stride[1])
        value = _call(node, shape, aten.permute.default, value, [0, 1, 4, 2, 5, 3])
        shape = (batch, channels, *(a * b for a, b in zip(places, stride, strict=True)))
        value = _reshaped(node, value, shape)
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
