"""Passes over the integer graph. All preserve results bit for bit, except for `approximate_functions`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from intaglio.ir import Constants, Graph, Op, TensorType, fresh
from intaglio.ops import op_def
from intaglio.ops.direct.along_axis import ARGSORT
from intaglio.ops.movement.pixel_shuffle import unfold_depth_shape
from intaglio.ops.movement.shape import SLICE, pad_shape
from intaglio.plan.graph_passes.earlier_quantizes import quantize_before_movement
from intaglio.plan.graph_passes.exchanged_halves import exchange_halves
from intaglio.plan.graph_passes.loop_merging import merge_loops
from intaglio.plan.graph_passes.lut_passes import approximate_functions, replace_loops_by_luts
from intaglio.plan.graph_passes.shared_heads import share_heads
from intaglio.plan.layouts import separate_layouts


def drop_identity(graph: Graph) -> tuple[Graph, int]:
    """Replace data movement and clamps that are identities by their input."""
    same: dict[str, str] = {}
    ops: list[Op] = []
    for op in graph.ops:
        inputs = tuple(same.get(name, name) for name in op.inputs)
        if op_def(op).changes_nothing(op, graph):
            same[op.output] = inputs[0]
        else:
            ops.append(_reading(op, inputs))
    outputs = tuple(same.get(name, name) for name in graph.outputs)
    return graph.replace(ops=tuple(ops), outputs=outputs), len(same)


def _reading(op: Op, inputs: tuple[str, ...]) -> Op:
    """Return an operator with other operands of the same types; the body of a loop gets their names too.

    Operands that become equal are one operand of a loop.
    """
    body = op.body
    if body is None or inputs == op.inputs:
        return Op(op.kind, inputs, op.outputs, op.attrs, body, op.origin)
    names = dict(zip(body.inputs, inputs, strict=True))
    for name in sorted((body.types.keys() - names.keys()) & set(inputs)):
        names[name] = fresh({**body.types, **dict.fromkeys(inputs)}, name)
    types = {names.get(name, name): kind for name, kind in body.types.items()}
    steps = tuple(
        Op(
            step.kind,
            tuple(names.get(n, n) for n in step.inputs),
            tuple(names.get(n, n) for n in step.outputs),
            step.attrs,
        )
        for step in body.ops
    )
    constants = {names.get(name, name): array for name, array in body.constants.items()}
    outputs = tuple(names.get(name, name) for name in body.outputs)
    read = tuple(dict.fromkeys(inputs))
    return Op(op.kind, read, op.outputs, op.attrs, Graph(read, outputs, types, steps, Constants(constants)), op.origin)


def sort_first_places(graph: Graph) -> tuple[Graph, int]:
    """Let an argsort find only the first places if a slice of these is its only reader."""
    users, makers = graph.users(), graph.makers()
    ops: dict[str, Op] = {op.output: op for op in graph.ops}
    count = 0
    for op in graph.ops:
        sort = makers.get(op.inputs[0]) if op_def(op) is SLICE else None
        if sort is None or op_def(sort) is not ARGSORT or len(users[sort.output]) > 1 or sort.output in graph.outputs:
            continue
        wanted = (op.attrs["axis"], op.attrs["start"], op.attrs["step"]) == (sort.attrs["axis"], 0, 1)
        if wanted and sort.attrs["count"] is None and isinstance(op.attrs["stop"], int):
            ops[op.output] = replace(sort, outputs=op.outputs, attrs={**sort.attrs, "count": op.attrs["stop"]})
            count += 1
    return graph.replace(ops=tuple(ops.values())), count


def depth_as_channels(graph: Graph) -> tuple[Graph, int]:
    """Decompose convolutions over depth: unfold the depth taps into channels, then convolve with single depth taps.

    Kernels process images, one per depth. Depth padding, and the gaps of a strided transposed convolution, are filled
    with the zero point.
    """
    types, ops = dict(graph.types), list[Op]()
    flattened: dict[str, np.ndarray] = {}
    count = 0
    for op in graph.ops:
        if not (op_def(op).convolves and len(graph.types[op.output].shape) == 5 and _has_depth(op, graph)):
            ops.append(op)
            continue
        count += 1
        x, weight, bias = op.inputs
        moves, attrs, quantized = _unfolded(op, graph.constants[weight])
        for kind, settings in moves:
            result = fresh(types, f"{x}_depth")
            shape = MOVED_SHAPES[kind](settings, [types[x].shape])
            types[result] = TensorType(shape, types[x].dtype, types[x].q)
            ops.append(Op(kind, (x,), (result,), settings, origin=op.origin))
            x = result
        flat = fresh(types, f"{weight}_flat")
        flattened[flat] = quantized
        packing = types[weight].packing
        packing = None if packing is None or packing.group else packing  # the weights of a group are not contiguous now
        types[flat] = TensorType(quantized.shape, types[weight].dtype, types[weight].q, packing)
        ops.append(Op(op.kind, (x, flat, bias), op.outputs, attrs, origin=op.origin))
    return graph.replace(ops=tuple(ops), types=types, constants=graph.constants | flattened), count


MOVED_SHAPES = {"pad": pad_shape, "unfold_depth": unfold_depth_shape}


def _has_depth(op: Op, graph: Graph) -> bool:
    """Return whether a convolution does more along depth than apply a single tap at every position."""
    transposed = op_def(op).transposed
    outer = op.attrs["output_padding"][:1] if transposed else ()
    padding = op.attrs["padding"][: 1 if transposed else 2]
    return any((*padding, *outer)) or op.attrs["stride"][0] != 1 or graph.types[op.inputs[1]].shape[2] != 1


def _unfolded(op: Op, weight: np.ndarray) -> tuple[list[tuple[str, dict[str, Any]]], dict[str, Any], np.ndarray]:
    """Return data movement before the convolution, attributes without depth, and the flattened weight.

    The weight is [outputs, taps * inputs per group, 1, taps y, taps x].
    """
    attrs, taps = op.attrs, weight.shape[2]
    stride, dilation = attrs["stride"][0], attrs["dilation"][0]
    unfold = {"groups": attrs["groups"], "taps": taps, "stride": stride, "dilation": dilation}
    if not op_def(op).transposed:
        before, after, between = attrs["padding"][0], attrs["padding"][1], 0
        flat = {**attrs, "padding": (0, 0, *attrs["padding"][2:])}
    else:
        before = dilation * (taps - 1) - attrs["padding"][0]
        after, between = before + attrs["output_padding"][0], stride - 1
        unfold["stride"], weight = 1, weight[:, :, ::-1]
        flat = {**attrs, "padding": (0, *attrs["padding"][1:]), "output_padding": (0, *attrs["output_padding"][1:])}
    flat |= {"stride": (1, *attrs["stride"][1:]), "dilation": (1, *attrs["dilation"][1:])}
    frame = {"before": (0, 0, before, 0, 0), "after": (0, 0, after, 0, 0), "between": (0, 0, between, 0, 0)}
    moves = [("pad", frame)] if before or after or between else []
    joined = weight.swapaxes(1, 2).reshape(weight.shape[0], -1, 1, *weight.shape[3:])
    return [*moves, ("unfold_depth", unfold)], flat, np.ascontiguousarray(joined)


INTEGER_PASSES = (
    drop_identity,  # first: an identity between two loops would prevent merging them
    sort_first_places,
    share_heads,  # after identities, which may be between the steps of a repetition
    depth_as_channels,  # before layouts: images have two axes after it
    quantize_before_movement,  # before merging, so that loops quantize their results
    merge_loops,
    exchange_halves,  # after merging, so that one loop reads the exchanged halves
    replace_loops_by_luts,  # after merging, which makes loops as long as possible
    approximate_functions,  # after lookup tables, whose entries come from the exact function
    separate_layouts,  # last: loops influence layouts
)
