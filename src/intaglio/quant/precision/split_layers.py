"""Split layers that read a concatenation of operands with ranges too different for one scale.

``layer(cat(a, b))`` is ``layer_a(a) + layer_b(b)``, where each part has its columns of the weight. Both operands then
have a scale of their own, and so have the weights that read them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import isfinite

import torch
from torch import fx

from intaglio.fxgraph.node_info import constant_path, known_type, origin
from intaglio.fxgraph.nodes import (
    arguments,
    call_before,
    constant_node,
    is_constant,
    known_operands,
    known_record,
    layer_operands,
    replace_node,
)
from intaglio.fxgraph.uneven_concatenations import Extrema, is_uneven, listed_ranges
from intaglio.ir import TensorType
from intaglio.quant.annotate.regions import Annotations

aten = torch.ops.aten


def split_readers(concatenation: fx.Node, annotations: Annotations) -> list[fx.Node]:
    """Return the quantized layers that read a concatenation and can be split by its operands."""
    anchors = {region.anchor for region in annotations.regions if not region.dynamic and region.pattern is None}
    return [user for user in concatenation.users if user in anchors and _can_be_split(user, concatenation)]


def _can_be_split(layer: fx.Node, concatenation: fx.Node) -> bool:
    """Return whether a layer has a constant weight with one column for each channel of the concatenation."""
    record = known_record(layer)
    if not record.multiplies_weight or record.transposed or (record.convolves and arguments(layer)["groups"] != 1):
        return False
    if layer_operands(layer).x is not concatenation or not is_constant(layer_operands(layer).weight):
        return False
    rank = len(known_type(concatenation).shape)
    axis = int(arguments(concatenation)["dim"]) % rank
    sizes = [known_type(value).shape[axis] for value in known_operands(concatenation)]
    return axis == (rank - 1 if record.is_linear_layer else 1) and all(isinstance(size, int) for size in sizes)


def split_layers(
    module: fx.GraphModule, concatenations: Mapping[fx.Node, Sequence[Extrema]], layers: Sequence[fx.Node]
) -> None:
    """Replace layers by sums of layers that read groups of operands with similar ranges.

    Args:
        module: the graph, which is changed.
        concatenations: concatenation -> the extrema of its operands.
        layers: the layers that read them.
    """
    for layer in layers:
        joined = layer_operands(layer).x
        groups = similar_operands(concatenations[joined])
        total, *others = [_part(module, layer, joined, group, bias=not index) for index, group in enumerate(groups)]
        for other in others:
            total = call_before(layer, known_type(layer), aten.add.Tensor, total, other)
        replace_node(layer, total)
    module.graph.eliminate_dead_code()
    module.recompile()


def similar_operands(extrema: Sequence[Extrema]) -> list[list[int]]:
    """Return groups of operands, by position, whose joint scale leaves enough quantized values to each of them.

    Operands with the largest values are in the first groups.
    """
    order = sorted(
        range(len(extrema)), key=lambda place: -max((abs(end) for end in extrema[place] if isfinite(end)), default=0)
    )
    groups: list[list[int]] = []
    for place in order:
        if groups and not is_uneven([extrema[member] for member in (*groups[-1], place)]):
            groups[-1].append(place)
        else:
            groups.append([place])
    return [sorted(group) for group in groups]


def _part(module: fx.GraphModule, layer: fx.Node, joined: fx.Node, group: Sequence[int], bias: bool) -> fx.Node:
    """Insert the part of a layer that reads a group of operands, and return it."""
    values = known_operands(joined)
    axis = int(arguments(joined)["dim"]) % len(known_type(joined).shape)
    ends = list(accumulate((known_type(value).shape[axis] for value in values), initial=0))
    spans = [(ends[place], ends[place + 1]) for place in group]
    x = values[group[0]]
    if len(group) > 1:
        kind = known_type(joined)
        shape = list(kind.shape)
        shape[axis] = sum(last - first for first, last in spans)
        x = call_before(layer, TensorType(tuple(shape), kind.dtype), aten.cat.default, [values[i] for i in group], axis)
    weight = layer_operands(layer).weight
    label = ",".join(f"{first}:{last}" for first, last in spans)
    name = f"{weight.target}_{'_'.join(str(end) for span in spans for end in span)}"
    if not hasattr(module, name):
        columns = [getattr(module, str(weight.target))[:, first:last] for first, last in spans]
        module.register_buffer(name, torch.cat(columns, 1).contiguous())
    constant = constant_node(module, name, f"{constant_path(weight, str(weight.target))}[:, {label}]")
    old = layer_operands(layer).bias
    return call_before(
        layer, known_type(layer), layer.target, x, constant, old if bias else None, *layer.args[3:], **layer.kwargs
    )


def notes_on_split_layers(layers: Sequence[fx.Node], concatenations: Mapping[fx.Node, Sequence[Extrema]]) -> list[str]:
    """Return a note for each layer that is split because of the ranges of the operands that it reads."""
    return [
        f"{origin(layer).path or 'model'} ({origin(layer).operator}) reads ranges of "
        f"{listed_ranges(concatenations[layer_operands(layer).x])}, too different for one scale, and is computed as a "
        "sum of layers that read one of them each"
        for layer in layers
    ]
