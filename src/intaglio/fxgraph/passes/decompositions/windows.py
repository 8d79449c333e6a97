"""Decomposition of windows of images and sequences into slices, concatenations and reshapes."""

from __future__ import annotations

from itertools import product

import torch
from torch import fx

from intaglio.fxgraph.node_info import info, known_type, tensor_type
from intaglio.fxgraph.nodes import arguments, operator, replace_node, size_along
from intaglio.fxgraph.passes.decompositions.movement import call_like, reshape_like

aten = torch.ops.aten
LARGEST_WINDOW = 64
"""Largest number of taps of a window, or of windows, that are replaced by slices."""


def decompose_unfold(module: fx.GraphModule) -> int:
    """Replace im2col (``F.unfold``) of images with at most one free size by padding and one slice for each tap."""
    hits = [node for node in module.graph.nodes if operator(node) == "aten.im2col.default" and _has_known_taps(node)]
    for node in hits:
        given, value = arguments(node), node.args[0]
        batch, channels, *sizes = known_type(value).shape
        pads = given["padding"]
        if any(pads):
            sizes = [size + 2 * pad for size, pad in zip(sizes, pads, strict=True)]
            around = (
                (batch, channels, *sizes),
                aten.constant_pad_nd.default,
                value,
                [pads[1], pads[1], pads[0], pads[0]],
            )
            value = call_like(node, *around, 0.0)
        kernel, spacing, stride = given["kernel_size"], given["dilation"], given["stride"]
        counts = [(sizes[i] - spacing[i] * (kernel[i] - 1) - 1) // stride[i] + 1 for i in range(2)]
        count = counts[0] * counts[1]
        samples, places = (-1, count) if isinstance(count, int) else (size_along(node, value, 0), -1)
        taps = []
        for place in product(*map(range, kernel)):
            tap = value
            for axis in range(2):
                start = place[axis] * spacing[axis]
                stop = start + (counts[axis] - 1) * stride[axis] + 1
                if not isinstance(stop, int):
                    stop = start - spacing[axis] * (kernel[axis] - 1) or 2**63 - 1  # counted from the end
                shape = (*known_type(tap).shape[: 2 + axis], counts[axis], *known_type(tap).shape[3 + axis :])
                tap = call_like(node, shape, aten.slice.Tensor, tap, 2 + axis, start, stop, stride[axis])
            taps.append(
                call_like(node, (batch, channels, 1, count), aten.reshape.default, tap, [samples, channels, 1, places])
            )
        joined = call_like(node, (batch, channels, len(taps), count), aten.cat.default, taps, 2)
        shape = known_type(node).shape
        replace_node(node, call_like(node, shape, aten.reshape.default, joined, [samples, shape[1], places]))
    return len(hits)


def decompose_windows(module: fx.GraphModule) -> int:
    """Replace ``x.unfold(axis, size, step)`` of a static axis by a reshape, or by one slice for each window."""
    hits = 0
    for node in [node for node in module.graph.nodes if operator(node) == "aten.unfold.default"]:
        value, made = node.args[0], known_type(node).shape
        shape, (axis, size, step) = known_type(value).shape, node.args[1:4]
        axis, count = axis % len(shape), made[axis % len(shape)]
        if not isinstance(shape[axis], int) or not isinstance(count, int) or count > LARGEST_WINDOW:
            continue
        if step == size:
            cut = (*shape[:axis], count * size, *shape[axis + 1 :])
            part = call_like(node, cut, aten.slice.Tensor, value, axis, 0, count * size)
            joined = reshape_like(node, part, (*shape[:axis], count, size, *shape[axis + 1 :]))
            if joined is None:
                continue
        else:
            one = (*shape[:axis], size, *shape[axis + 1 :])
            starts = range(0, count * step, step)
            parts = [call_like(node, one, aten.slice.Tensor, value, axis, start, start + size) for start in starts]
            parts = [
                call_like(node, (*one[:axis], 1, *one[axis:]), aten.unsqueeze.default, part, axis) for part in parts
            ]
            joined = call_like(node, (*one[:axis], count, *one[axis:]), aten.cat.default, parts, axis)
        order = [at for at in range(len(shape) + 1) if at != axis + 1] + [axis + 1]
        replace_node(node, call_like(node, made, aten.permute.default, joined, order))
        hits += 1
    return hits


def _has_known_taps(node: fx.Node) -> bool:
    """Return whether the window has few taps, whose places are known: with one step along an axis of a free size."""
    kind, given = tensor_type(node.args[0]), arguments(node)
    if kind is None or len(kind.shape) != 4 or given["kernel_size"][0] * given["kernel_size"][1] > LARGEST_WINDOW:
        return False
    steps = [given["stride"][axis] for axis in range(2) if not isinstance(kind.shape[2 + axis], int)]
    return isinstance(kind.shape[1], int) and steps in ([], [1]) and info(node).dim is None
