"""Replace or add biases in a graph and in its annotations, and errors of results that they could correct."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import fx

from intaglio import numerics
from intaglio.fxgraph.graph_constants import add_constant
from intaglio.fxgraph.graph_passes import copy_graph
from intaglio.fxgraph.node_info import known_type, origin, set_info
from intaglio.fxgraph.nodes import layer_operands
from intaglio.fxgraph.padding_masks import padded_axes, visible_groups
from intaglio.ir import DType, QParams, TensorType
from intaglio.quant.annotate.find_sites import ValueNames, add_operand_sites, in_execution_order
from intaglio.quant.annotate.regions import Annotations, Region
from intaglio.quant.annotate.sites import groups
from intaglio.quant.correct.effort import is_corrected
from intaglio.quant.correct.operand_columns import OperandReader
from intaglio.quant.correct.validation_split import ValidationSplit
from intaglio.quant.qdq.qparams import anchor_sites, parameters_of
from intaglio.quant.recipes.choices import BiasCorrection
from intaglio.torch_private import schema_of


def annotated_with_biases(annotations: Annotations, biases: Mapping[str, torch.Tensor]) -> Annotations:
    """Return annotations of a copy of their graph with these biases by anchor.

    An anchor that had no bias gets a site for it; everything else stays as annotated.
    """
    module = with_biases(annotations.module, biases)
    nodes = {node.name: node for node in module.graph.nodes}
    regions = tuple(region.in_graph(nodes) for region in annotations.regions)
    sites = {(site.value, site.role): site for site in annotations.sites}
    add_operand_sites(regions, sites, ValueNames(module.graph))
    ordered = in_execution_order(module.graph, sites.values())
    tables = tuple(replace(table, node=nodes[table.node.name]) for table in annotations.tables)
    return replace(annotations, module=module, sites=ordered, regions=regions, leaders=groups(ordered), tables=tables)


def with_biases(module: fx.GraphModule, biases: Mapping[str, torch.Tensor]) -> fx.GraphModule:
    """Return a copy of a graph with these biases by anchor."""
    module = copy_graph(module)
    nodes = {node.name: node for node in module.graph.nodes}
    for anchor, values in biases.items():
        node = nodes[anchor]
        name = add_constant(module, f"{anchor}_bias", values)
        with module.graph.inserting_before(next(iter(module.graph.nodes))):
            constant = module.graph.get_attr(name)
        set_info(constant, type=TensorType(tuple(values.shape), DType.F32), path=f"{origin(node).path}.bias")
        place = [argument.name for argument in schema_of(node.target).arguments].index("bias")
        if place < len(node.args):
            node.update_arg(place, constant)
        else:
            node.update_kwarg("bias", constant)
    module.graph.eliminate_dead_code()
    module.recompile()
    return module


def with_needed_biases(annotations: Annotations) -> Annotations:
    """Return annotations in which every anchor whose bias is corrected has a bias."""
    outputs = {
        region.anchor.name: len(parameters_of(annotations.module, region)[0])
        for region in annotations.regions
        if _lacks_bias(annotations, region)
    }
    if not outputs:
        return annotations
    return annotated_with_biases(annotations, {name: torch.zeros(count) for name, count in outputs.items()})


def _lacks_bias(annotations: Annotations, region: Region) -> bool:
    """Return whether the bias of a region is to be corrected, but the region has no bias yet."""
    corrects = region.setting.bias != BiasCorrection.NONE
    if region.dynamic or region.record.roles.weight is None or not corrects:
        return False
    if layer_operands(region.anchor).bias is not None:
        return False
    return is_corrected(annotations, region)


def output_errors(
    operands: OperandReader, region: Region, split: ValidationSplit, weight: QParams
) -> tuple[tuple[torch.Tensor, ...], tuple[int, ...]]:
    """Return sums of the float anchor's results minus the quantized anchor's, and the numbers of addends.

    The sums of each batch are rounded to 2^-16 of the accumulator's step, so that they add up exactly. The first
    is over the samples to fit to, the second over those that validate.

    Args:
        operands: reads the operands of layers from an evaluation.
        region: the region of the anchor.
        split: the division of the samples.
        weight: scales of the anchor's weight.
    """
    evaluation = operands.evaluation
    x_site, _, _ = anchor_sites(evaluation.annotations, region)
    outputs = len(parameters_of(evaluation.module, region)[0])
    step = numerics.accumulator_scale(evaluation.qparams[x_site.name].step, weight.scales)
    unit = torch.from_numpy(np.broadcast_to(np.asarray(step, np.float64), outputs).copy()) * 2.0**-16
    axis = -1 if region.record.is_linear_layer else 1
    total = torch.zeros(2, outputs + 1, dtype=torch.int64)
    x = layer_operands(region.anchor).x
    input_axes, output_axes = (padded_axes(known_type(node).shape, operands.signature) for node in (x, region.anchor))
    if None in (input_axes, output_axes) or axis != -1:
        input_axes = output_axes = None

    def add_up() -> None:
        for batch, visible in enumerate(operands.visible):
            exact, found = map(torch.atleast_2d, evaluation.anchor_outputs(region, batch))
            errors = visible_groups(exact.double() - found.double(), output_axes, visible)
            inputs = visible_groups(operands.values(x, batch), input_axes, visible)
            for operand, error in zip(inputs, errors, strict=True):
                validates = split.validates(operand)
                for sums, part in zip(total, (~validates, validates), strict=True):
                    values = error.movedim(axis, 0)[:, part].flatten(1)
                    sums[:-1] += (values.sum(1) / unit).round().to(torch.int64)
                    sums[-1] += values.shape[1]

    operands.group.run_on_all_ranks(add_up)
    found = torch.from_numpy(operands.group.total(total.numpy()))
    return tuple(sums[:-1].double() * unit for sums in found), tuple(int(sums[-1]) for sums in found)
