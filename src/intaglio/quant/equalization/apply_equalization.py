"""Apply an `Equalization` to a prepared model without changing its float function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import fx

from intaglio.errors import CalibrationError
from intaglio.fxgraph.graph_constants import in_file
from intaglio.fxgraph.graph_passes import copy_graph, drop_unused_constants
from intaglio.fxgraph.node_info import constant_path, info, known_type, origin, update_info
from intaglio.fxgraph.nodes import (
    arguments,
    call_of,
    constant_node,
    known_record,
    layer_operands,
    operands,
    operator,
)
from intaglio.fxgraph.passes.batch_norm_folding import insert_affine
from intaglio.ops import BY_TARGET
from intaglio.quant.annotate.regions import Annotations, Region
from intaglio.quant.calibrate.prepare import Prepared, annotate_everything, reprepare
from intaglio.quant.correct.corrections import Equalization
from intaglio.quant.equalization.scalable_results import ScalableResult, factors_at, outside_operand, scalable_results
from intaglio.quant.equalization.smoothquant import smooth, smoothable
from intaglio.quant.precision.apply_decisions import (
    with_data_floats,
    with_int8_tables,
    with_split_layers,
    with_two_bytes,
)
from intaglio.quant.precision.layer_bytes import with_layer_bytes
from intaglio.quant.rotation.online_rotation import with_online_rotations
from intaglio.quant.rotation.rotate import with_rotations


def apply_equalization(
    prepared: Prepared, found: Equalization, report: str = "", precomputed: tuple[Prepared, Annotations] | None = None
) -> Prepared:
    """Return the prepared model with an equalization applied, and with new observers.

    Factors go to the weights of regions in the model without float layers (`annotate_everything`), so they do not
    depend on what the recipe leaves in float.

    Args:
        prepared: a model without another equalization. With ``precomputed``, its decisions by data are applied.
        found: the equalization.
        report: what it gains, for the text "corrections" of the stage.
        precomputed: the results of `with_input_equalization` and `annotate_everything`, if the caller has them already.

    Raises:
        CalibrationError: if the model does not have an input or value that the equalization names, or cannot divide it.
    """
    if found == prepared.equalization:
        return _with_report(prepared, found, report) if report else prepared
    if prepared.equalization:
        raise CalibrationError(
            "equalization", None, "the model is already equalized", remedy="start again from prepare(captured)"
        )
    if precomputed is None:
        prepared = with_online_rotations(with_rotations(prepared, found.rotations), found.hadamards)
        prepared = with_split_layers(prepared, found.splits)
        prepared = with_data_floats(prepared, found.concatenations, found.coarse, found.layers)
        prepared = with_two_bytes(prepared, found.two_bytes)
    current = with_input_equalization(prepared, found) if precomputed is None else precomputed[0]
    if not found.factors:
        return _with_report(current, found, report)
    every = annotate_everything(current) if precomputed is None else precomputed[1]
    module = copy_graph(current.annotations.module)
    values = {value.site: value for value in scalable_results(every)}
    smoothed = {value.site: value for value in smoothable(every)}
    unknown = sorted(set(found.factors) - set(values) - set(smoothed))
    if unknown:
        raise CalibrationError(
            "equalization",
            None,
            f"the model has no values that can be scaled at {', '.join(unknown[:5])}",
            remedy=SAME_MODEL_AND_RECIPE,
        )
    in_graph_order = [site for site in (*values, *smoothed) if site in found.factors]  # files have another order
    factors = {site: torch.tensor(found.factors[site], dtype=torch.float64) for site in in_graph_order}
    own = {smoothed[site].name: tensor for site, tensor in factors.items() if site in smoothed}
    plain = {values[site].name: tensor for site, tensor in factors.items() if site not in smoothed}
    _rewrite(module, every.regions, [values[s] for s in factors if s not in smoothed], plain)
    smooth(module, [smoothed[site] for site in factors if site in smoothed], own)
    drop_unused_constants(module)
    return _with_report(reprepare(prepared, module), found, report)


def _with_report(made: Prepared, found: Equalization, report: str) -> Prepared:
    """Return an equalized model with the layers that are split, the tables that are int8, and the report."""
    made = with_int8_tables(with_layer_bytes(made, found.layer_bytes), found.tables)
    model_info = made.model_info.with_stage(corrections=report) if report else made.model_info
    return replace(made, equalization=found, model_info=model_info)


SAME_MODEL_AND_RECIPE = "use it with the model and the recipe that it was made for"


def with_input_equalization(prepared: Prepared, found: Equalization) -> Prepared:
    """Return the model with only the equalization of inputs applied."""
    if not found.inputs:
        return prepared
    module = copy_graph(prepared.annotations.module)
    nodes = [node for node in module.graph.nodes if node.op == "placeholder"]
    inputs = {entry.name: node for entry, node in zip(prepared.signature.inputs, nodes, strict=False)}
    for name, pixels in found.inputs.items():
        if name not in inputs:
            raise CalibrationError(
                "equalization", None, f"the model has no input {name!r}", remedy=SAME_MODEL_AND_RECIPE
            )
        value = insert_affine(module, inputs[name], torch.tensor(pixels.gain), torch.tensor(pixels.shift))
        update_info(value, zero_points=pixels.zero_points)
    return reprepare(prepared, module)


def _rewrite(
    module: fx.GraphModule,
    regions: Sequence[Region],
    values: Sequence[ScalableResult],
    factors: Mapping[str, torch.Tensor],
) -> None:
    """Apply factors to the rows and columns of weights, and to additions.

    ``factors``: node name -> factors, which must arrive at every reader.
    """
    nodes = {node.name: node for node in module.graph.nodes}
    arriving = {use.node.name: factors_at(use, factors[value.name]) for value in values for use in value.uses}
    for region in regions:
        anchor = nodes[region.anchor.name]
        rows, columns = factors.get(region.root.name), arriving.get(anchor.name)
        if rows is not None or columns is not None:
            _scale(module, anchor, rows, columns)
        for node in region.nodes[1:]:
            here = arriving.get(node.name)
            if known_record(node).name == "add" and (rows is not None or here is not None):
                other = outside_operand(node, region)
                assert other is not None, f"{node} adds nothing from outside"
                _scale_shortcut(module, nodes[node.name], nodes[other.name], rows, here)
    module.graph.eliminate_dead_code()
    module.recompile()


def _scale(module: fx.GraphModule, anchor: fx.Node, rows: torch.Tensor | None, columns: torch.Tensor | None) -> None:
    """Divide the weight's rows and the bias by ``rows``, and multiply the weight's columns by ``columns``.

    For a layer norm, divide its scale and offset.
    """
    if rows is not None and BY_TARGET[operator(anchor)].normalizes:
        for constant in operands(anchor)[1:]:
            if constant is not None:
                _swap(module, anchor, constant, getattr(module, constant.target).double() / rows)
        return
    _, old_weight, bias = layer_operands(anchor)
    weight = getattr(module, old_weight.target).double()
    if columns is not None:
        groups = arguments(anchor).get("groups", 1)
        each = columns.reshape(groups, 1, -1).expand(groups, weight.shape[0] // groups, weight.shape[1])
        weight = weight * each.reshape(weight.shape[:2] + (1,) * (weight.dim() - 2))
    if rows is not None:
        weight = weight / rows.reshape(-1, *[1] * (weight.dim() - 1))
        if bias is not None:
            scaled = getattr(module, bias.target).double() / rows
            _swap(module, anchor, bias, scaled)
    _swap(module, anchor, old_weight, weight)


def _swap(module: fx.GraphModule, user: fx.Node, old: fx.Node, values: torch.Tensor) -> None:
    """Replace a constant operand of a node by a new constant."""
    name = f"{old.target}_equalized"
    module.register_buffer(name, in_file(values.float()))
    made = constant_node(module, name, constant_path(old, name))
    update_info(made, imported=info(old).imported)
    user.replace_input_with(old, made)


def _scale_shortcut(
    module: fx.GraphModule,
    add: fx.Node,
    other: fx.Node,
    result_factors: torch.Tensor | None,
    other_factors: torch.Tensor | None,
) -> None:
    """Replace ``acc + alpha * other`` by ``acc + other * ratio`` with a ratio for each channel.

    At least one of the factors, those of the result or those of the other operand, must be given.
    """
    own = next(value for value in operands(add) if value is not other)
    record = known_record(add)
    alpha = record.bind(call_of(add, record))["alpha"]
    ratio = (
        alpha * (1.0 if other_factors is None else other_factors) / (1.0 if result_factors is None else result_factors)
    ).float()
    name = f"{add.name}_ratio"
    module.register_buffer(name, ratio.reshape(1, -1, *[1] * (len(known_type(add).shape) - 2)))
    constant = constant_node(module, name, f"{origin(add).path}.ratio")
    add.target = torch.ops.aten.addcmul.default
    add.args, add.kwargs = (own, other, constant), {}
