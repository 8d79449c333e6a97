"""Apply what the calibration data decides: values in float, layers that are split, and tables in int8."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from torch import fx

from intaglio.fxgraph.graph_passes import copy_graph
from intaglio.fxgraph.node_info import info
from intaglio.fxgraph.uneven_concatenations import Extrema, notes_on_concatenations
from intaglio.quant.annotate.annotate_graph import annotate_graph
from intaglio.quant.annotate.find_sites import ValueNames
from intaglio.quant.annotate.regions import NO_DATA_FLOATS, DataFloats
from intaglio.quant.calibrate.prepare import Prepared, reprepare, with_specs
from intaglio.quant.correct.corrections import LayerBytes, TwoBytes
from intaglio.quant.precision.coarse_values import notes_on_coarse_values
from intaglio.quant.precision.first_layers import notes_on_float_layers
from intaglio.quant.precision.split_layers import notes_on_split_layers, split_layers, split_readers
from intaglio.quant.precision.two_bytes import SplitLayer, notes_on_two_bytes, split_into_bytes


def with_data_floats(
    prepared: Prepared,
    concatenations: Mapping[str, Sequence[Extrema]],
    coarse: Mapping[str, float],
    layers: Mapping[str, float] | None = None,
) -> Prepared:
    """Return the model with what its data leaves in float, besides what stays in float already.

    Args:
        prepared: the prepared model.
        concatenations: site name of a concatenation -> extrema of its operands.
        coarse: site name of a value that quantized values represent too coarsely -> signal to noise in decibels.
        layers: name of the value of a first layer -> signal to noise in the results in decibels, with its operand
            rounded.
    """
    before, layers = prepared.annotations, layers or {}
    named = _nodes_of_sites(before.module.graph, {*concatenations, *coarse, *layers})
    uneven = {node: concatenations[name] for name, node in named.items() if name in concatenations}
    lossy = {node: coarse[name] for name, node in named.items() if name in coarse}
    sensitive = {node: layers[name] for name, node in named.items() if name in layers}
    if not named:
        return prepared
    module, old = copy_graph(before.module), before.data_floats
    floats = DataFloats(
        old.concatenations.union(node.name for node in uneven),
        {**old.coarse, **{node.name: ratio for node, ratio in lossy.items()}},
        {**old.layers, **{node.name: ratio for node, ratio in sensitive.items()}},
    )
    notes = (*notes_on_concatenations(uneven), *notes_on_coarse_values(lossy), *notes_on_float_layers(sensitive))
    return reannotated(prepared, module, notes, floats)


def with_split_layers(prepared: Prepared, found: Mapping[str, Sequence[Extrema]]) -> Prepared:
    """Return the model with the layers split that read some concatenations.

    Args:
        prepared: the prepared model.
        found: site name of a concatenation -> extrema of its operands.
    """
    before = prepared.annotations
    named = _nodes_of_sites(before.module.graph, found)
    if not named:
        return prepared
    uneven = {node: found[name] for name, node in named.items()}
    layers = [layer for node in uneven for layer in split_readers(node, before)]
    module = copy_graph(before.module)
    copies = {node.name: node for node in module.graph.nodes}
    split_layers(module, {copies[node.name]: ends for node, ends in uneven.items()}, [copies[n.name] for n in layers])
    return reannotated(prepared, module, tuple(notes_on_split_layers(layers, uneven)), before.data_floats)


def with_two_bytes(prepared: Prepared, found: Mapping[str, TwoBytes]) -> Prepared:
    """Return the model with layers that read their operand in two bytes.

    Args:
        prepared: the prepared model.
        found: name of the value of a layer -> its operand.
    """
    before = prepared.annotations
    named = _nodes_of_sites(before.module.graph, found)
    if not named:
        return prepared
    layers = {node: found[name] for name, node in named.items()}
    module = copy_graph(before.module)
    copies = {node.name: node for node in module.graph.nodes}
    split_into_bytes(
        module, [SplitLayer(copies[node.name], LayerBytes(2, 1, one.low, one.high)) for node, one in layers.items()]
    )
    return reannotated(prepared, module, notes_on_two_bytes(layers), before.data_floats)


def reannotated(
    prepared: Prepared, module: fx.GraphModule, notes: tuple[str, ...] = (), floats: DataFloats = NO_DATA_FLOATS
) -> Prepared:
    """Return a prepared model with another graph, annotated anew, and with notes."""
    annotations = annotate_graph(module, prepared.quantizer, prepared.classes, floats)
    model_info = prepared.model_info.with_stage(notes)
    own = replace(prepared, annotations=with_specs(prepared, annotations), model_info=model_info)
    return reprepare(own, copy_graph(module))


def with_int8_tables(prepared: Prepared, costs: Mapping[str, float]) -> Prepared:
    """Return the model with the tables of some embeddings quantized.

    Args:
        prepared: the prepared model.
        costs: name of an embedding's value -> what its table costs in the results, in decibels.
    """
    before = prepared.annotations
    named = _nodes_of_sites(before.module.graph, costs)
    by_node = {node: costs[name] for name, node in named.items()}
    if not named:
        return prepared
    tables = tuple(replace(one, undecided=one.undecided and one.node not in by_node) for one in before.tables)
    names = {node.name for node in by_node}
    skipped = tuple(skip for skip in before.skipped if skip.node not in names)
    notes = dict.fromkeys(
        f"{one}; that costs {by_node[one.node]:.3f} dB" for one in tables if one.node in by_node and one.is_quantized
    )
    annotations = replace(before, tables=tables, skipped=skipped)
    own = replace(prepared, annotations=annotations, model_info=prepared.model_info.with_stage(tuple(notes)))
    return reprepare(own, copy_graph(before.module))


def _nodes_of_sites(graph: fx.Graph, sites: Collection[str]) -> dict[str, fx.Node]:
    """Return the operators whose results have these sites, by site name and in execution order."""
    if not sites:
        return {}
    names = ValueNames(graph)
    found = {names.of(node): node for node in graph.nodes if node.op == "call_function" and info(node).dim is None}
    return {name: node for name, node in found.items() if name in sites}
