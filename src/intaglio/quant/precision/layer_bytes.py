"""Layers whose setting asks for two bytes of their operand or their weight, and the ranges of their operands."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import fx

from intaglio.fxgraph.graph_passes import copy_graph
from intaglio.fxgraph.node_info import info, origin, update_info
from intaglio.fxgraph.nodes import layer_operands
from intaglio.fxgraph.uneven_concatenations import Extrema
from intaglio.quant.annotate.find_sites import ValueNames
from intaglio.quant.annotate.regions import Annotations, Region
from intaglio.quant.calibrate.distributed import Group
from intaglio.quant.calibrate.prepare import Prepared
from intaglio.quant.correct.calibration_cache import Calls
from intaglio.quant.correct.corrections import LayerBytes
from intaglio.quant.precision.apply_decisions import reannotated
from intaglio.quant.precision.measure_rounding import extrema_of
from intaglio.quant.precision.two_bytes import FOLLOWS_BYTES, SplitLayer, split_into_bytes, takes_two_bytes
from intaglio.quant.qdq.qparams import WeightScaleRule
from intaglio.quant.qdq.weight_grid import weight_grid
from intaglio.quant.recipes.choices import Role

RANGE_MARGIN = 1.5
"""Range of an operand of two bytes, relative to that of its values, which other data may exceed."""
NO_RANGE: Extrema = (0.0, 0.0)
"""Range of an operand that is read in one byte."""


def layers_to_split(prepared: Prepared) -> dict[str, Region]:
    """Return the layers that read two bytes of their operand or their weight, by the name of their value."""
    names = ValueNames(prepared.annotations.module.graph)
    return {names.of(one.anchor): one for one in _asking(prepared.annotations) if not _refusal(prepared, one)}


def _asking(annotations: Annotations) -> Iterator[Region]:
    """Yield the layers whose setting asks for two bytes and that are not split yet."""
    for region in annotations.regions:
        whole_layer = region.record.roles.weight is not None and info(region.anchor).part is None
        if whole_layer and region.setting.asks_for_two_bytes:
            yield region


def _refusal(prepared: Prepared, region: Region) -> str | None:
    """Return why a layer cannot be split; ``None`` if it can be."""
    if prepared.quantizer.annotator is not None or region.pattern is not None:
        return "a pattern or an annotator decides about it"
    if region.record.recurrent or not region.record.accumulates:
        return "only convolutions and linear layers are split"
    if region.dynamic:
        return "its operand is quantized while the model runs"
    if not takes_two_bytes(region.anchor):
        return "its weight is computed while the model runs"
    if region.setting.weight.name != "s8" or region.setting.group:
        return "its weight is not int8 with a scale for each channel or for the tensor"
    return None


def with_asked_bytes(
    prepared: Prepared, calls: Calls, group: Group, known: dict[str, Extrema] | None = None
) -> Prepared:
    """Return the model with the layers split whose setting asks for it.

    Args:
        prepared: the prepared model, equalized.
        calls: the tensors of each call on this rank.
        group: the ranks.
        known: ranges with margin of operands in two bytes, by the value of their layer; missing ones are measured and
            added.
    """
    found, known = layers_to_split(prepared), {} if known is None else known
    wanted = {
        name: layer_operands(region.anchor).x
        for name, region in found.items()
        if region.setting.operand_bytes == 2 and name not in known
    }
    measured = extrema_of(prepared, {x.name for x in wanted.values()}, calls, group) if wanted else {}
    for name, x in wanted.items():
        low, high = measured[x.name]
        known[name] = (RANGE_MARGIN * low, RANGE_MARGIN * high)
    split = {name: _bytes_of(region, known.get(name)) for name, region in found.items()}
    return with_layer_bytes(prepared, {name: own for name, own in split.items() if 2 in own[:2]})


def _bytes_of(region: Region, extrema: Extrema | None) -> LayerBytes:
    setting = region.setting
    operand = setting.operand_bytes or 1
    if extrema is None or not extrema[0] < extrema[1]:
        operand = 1
    ends = extrema if operand == 2 and extrema is not None else NO_RANGE
    return LayerBytes(operand, setting.weight_bytes or 1, *ends)


def with_layer_bytes(prepared: Prepared, found: Mapping[str, LayerBytes]) -> Prepared:
    """Return the model with layers split into one for each byte of their operand and their weight.

    Operators that ran in the kernels of these layers, behind them, are computed in float32.

    Args:
        prepared: the prepared model, equalized.
        found: name of the value of a layer -> its bytes. Names that the model does not have are ignored.
    """
    before = prepared.annotations
    names = ValueNames(before.module.graph)
    split = {region: found[name] for region in before.regions if (name := names.of(region.anchor)) in found}
    notes = _notes(prepared, split)
    if not split:
        return prepared if not notes else replace(prepared, model_info=prepared.model_info.with_stage(notes))
    module = copy_graph(before.module)
    copies = {node.name: node for node in module.graph.nodes}
    for region in split:
        for node in region.computed[1:]:
            update_info(copies[node.name], float_reason=FOLLOWS_BYTES)
    layers = [
        SplitLayer(copies[region.anchor.name], own, _rounded_weight(before, region) if own.weight == 2 else None)
        for region, own in split.items()
    ]
    split_into_bytes(module, layers)
    made = reannotated(prepared, module, notes, before.data_floats)
    equalization = replace(prepared.equalization, layer_bytes={**found})
    return replace(made, equalization=equalization)


def _rounded_weight(annotations: Annotations, region: Region) -> torch.Tensor:
    """Return the weight of a layer as int8 values represent it, each rounded to nearest."""
    node = layer_operands(region.anchor).weight
    weight = getattr(annotations.module, str(node.target)).detach().numpy()
    site = annotations.by_value[node.name, Role.WEIGHT]
    rule = WeightScaleRule.of(region, site)
    grid = weight_grid(weight, rule(weight), site.record, 0, rule.axis or 0)
    return torch.from_numpy(grid.nearest(weight) * grid.steps(weight.shape).astype(np.float64))


def _notes(prepared: Prepared, split: Collection[Region]) -> tuple[str, ...]:
    """Return notes on the layers that read two bytes, and on those that were asked to and cannot."""
    notes = []
    if split:
        named = ", ".join(sorted(_name(region.anchor) for region in split))
        notes.append(f"layers that read two bytes of their operand or their weight, as their setting asks: {named}")
    for region in _asking(prepared.annotations):
        if reason := _refusal(prepared, region):
            notes.append(f"{_name(region.anchor)} reads one byte, though its setting asks for two: {reason}")
    return tuple(notes)


def notes_on_unsplit_layers(prepared: Prepared) -> list[str]:
    """Return a note on the layers whose setting asks for two bytes, but which were not split."""
    if not (found := layers_to_split(prepared)):
        return []
    named = ", ".join(sorted(_name(region.anchor) for region in found.values()))
    return [
        f"layers that read one byte, though their setting asks for two, because equalize has not split them: {named}"
    ]


def _name(node: fx.Node) -> str:
    return origin(node).path or node.name
