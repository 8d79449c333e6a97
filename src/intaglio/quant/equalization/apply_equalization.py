"""Apply an `Equalization` to a prepared model without changing its float function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from intaglio.errors import CalibrationError
from intaglio.fxgraph.graph_passes import copy_graph
from intaglio.fxgraph.node_info import constant_path, info, known_type, origin, size_in_example, update_info
from intaglio.fxgraph.nodes import (
    arguments,
    call_of,
    constant_node,
    is_constant,
    known_record,
    layer_operands,
    operands,
    operator,
    record_of,
)
from intaglio.fxgraph.passes.batch_norm_folding import insert_affine
from intaglio.ops import BY_TARGET
from intaglio.quant.annotate.regions import Annotations, Region
from intaglio.quant.calibrate.prepare import Prepared, annotate_everything, reprepare
from intaglio.quant.correct.corrections import Equalization
from intaglio.quant.equalization.smoothquant import smooth, smoothable
from intaglio.quant.imported_weights.quantized_weight import has_imported_integers
from intaglio.quant.precision.apply_decisions import with_data_floats, with_split_layers
from intaglio.quant.recipes.choices import Role


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
        return prepared
    if prepared.equalization:
        raise CalibrationError(
            "equalization", None, "the model is already equalized", remedy="start again from prepare(captured)"
        )
    if precomputed is None:
        prepared = with_split_layers(prepared, found.splits)
        prepared = with_data_floats(prepared, found.concatenations, found.coarse)
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
    return _with_report(reprepare(prepared, module), found, report)


def _with_report(made: Prepared, found: Equalization, report: str) -> Prepared:
    return replace(
        made,
        equalization=found,
        model_info=made.model_info.with_stage(corrections=report) if report else made.model_info,
    )


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


@dataclass(frozen=True)
class ScaledReader:
    """A reader of a value that absorbs its factors.

    Attributes:
        node: the reader.
        path: the operators between the value and the reader, through which the factors pass.
    """

    node: fx.Node
    path: tuple[fx.Node, ...]


@dataclass(frozen=True)
class ScalableResult:
    """The result of a region that can be divided by factors per channel."""

    region: Region
    uses: tuple[ScaledReader, ...]
    site: str

    @property
    def name(self) -> str:
        """Return the name of its node."""
        return self.region.root.name

    @property
    def axis(self) -> int:
        """Return the axis of its channels: the last one for results of linear layers and layer norms."""
        return _channel_axis(self.region)


def scalable_results(annotations: Annotations) -> list[ScalableResult]:
    """Return the results that can be divided by factors."""
    regions, by_value = annotations.regions, annotations.by_value
    member = {node: region for region in regions for node in region.nodes}
    found = []
    for region in regions:
        site = by_value.get((region.root.name, Role.ACTIVATION))
        able = site is not None and (_is_scalable_layer(region) or is_affine_layer_norm(region))
        uses = _scaled_readers(region.root, member, ()) if able else None
        if uses and site is not None and all(_reads_channels(use, region) for use in uses):
            found.append(ScalableResult(region, tuple(uses), site.name))
    return found


def _channel_axis(region: Region) -> int:
    """Return the axis of the channels of a region's result."""
    return -1 if region.record.is_linear_layer or region.record.normalizes else 1


def _reads_channels(use: ScaledReader, region: Region) -> bool:
    """Return whether the channels of a region's result are the channels of a reader.

    A linear layer reads the last axis, other readers axis 1. Factors pass through operators on axis 1 only.
    """
    value = use.path[-1] if use.path else region.root
    reads_last = known_record(use.node).is_linear_layer
    if use.path:
        rank = len(known_type(region.root).shape)
        is_first = not region.record.normalizes and (rank == 2 or (rank == 4 and _channel_axis(region) == 1))
        return is_first and (len(known_type(value).shape) == 2 or not reads_last)
    return len(known_type(value).shape) == 2 or reads_last == (_channel_axis(region) == -1)


def has_single_factors(value: ScalableResult, factors: torch.Tensor) -> bool:
    """Return whether each channel of every reader gets a single factor, and not a mix of several."""
    return all(_factors_at(use, factors) is not None for use in value.uses)


def _is_scalable_layer(region: Region) -> bool:
    """Return whether a region is a convolution or linear layer, followed by only additions and ReLUs.

    No other operator may read its weight and bias, because they are scaled. Additions have their channels on axis 1.
    """
    if region.record.roles.weight is None or not _owns_parameters(region.anchor):
        return False
    rank = len(known_type(region.root).shape)
    if not region.record.is_linear_layer and rank != 4:
        return False
    adds = not region.record.is_linear_layer or rank == 2
    return all(_rectifies(node) or (adds and _adds(node, region)) for node in region.nodes[1:])


def is_affine_layer_norm(region: Region) -> bool:
    """Return whether a region is a layer norm with its own scale and offset for each channel of the last axis."""
    if len(region.nodes) != 1 or not region.record.normalizes:
        return False
    given = [value for value in operands(region.anchor)[1:] if value is not None]
    return len(given) == 2 and all(is_constant(value) and len(value.users) == 1 for value in given)


def _owns_parameters(anchor: fx.Node) -> bool:
    """Return whether a convolution or linear layer is the only reader of its constant weight and bias, which another
    tool has not quantized."""
    if known_record(anchor).name not in ("conv2d", "linear"):
        return False
    _, weight, bias = layer_operands(anchor)
    constants = [weight] if bias is None else [weight, bias]
    return all(is_constant(c) and len(c.users) == 1 and not has_imported_integers(c) for c in constants)


def _rectifies(node: fx.Node) -> bool:
    """Return whether an operator is max(x, 0), which commutes with positive factors."""
    record = known_record(node)
    if not record.clamps:
        return False
    bounds = record.bind(call_of(node, record))
    return bounds["low"] == 0 and bounds["high"] is None


def _adds(node: fx.Node, region: Region) -> bool:
    """Return whether an operator adds a value from outside to the region's result."""
    return known_record(node).name == "add" and _other(node, region) is not None


def _other(node: fx.Node, region: Region) -> fx.Node | None:
    """Return the operand of an addition that comes from outside the region.

    The result is ``None`` if both operands come from the region, or if the region's own operand is scaled by ``alpha``.
    """
    record, (left, right) = known_record(node), operands(node)
    alpha = record.bind(call_of(node, record))["alpha"]
    if left in region.nodes and right not in region.nodes:
        return right
    return left if right in region.nodes and left not in region.nodes and alpha == 1 else None


def _scaled_readers(
    value: fx.Node, member: Mapping[fx.Node, Region], path: tuple[fx.Node, ...]
) -> list[ScaledReader] | None:
    """Return the readers of a value, found through pooling and data movement that keep channels apart.

    The result is ``None`` if one of them cannot absorb a factor.
    """
    found = []
    for user in value.users:
        if info(user).dim is not None:
            continue
        region, record = member.get(user), record_of(user)
        if region is None or record is None:
            return None
        alone = len(region.nodes) == 1 and record.passes_factors
        if alone and (not record.clamps or _rectifies(user)):
            inner = _scaled_readers(user, member, (*path, user))
            if inner is None:
                return None
            found += inner
        elif _absorbs(user, value, region):
            found.append(ScaledReader(user, path))
        else:
            return None
    return found


def _absorbs(user: fx.Node, value: fx.Node, region: Region) -> bool:
    """Return whether a reader can absorb a factor of `value`, in its weight's columns or the factor of an addition."""
    record = known_record(user)
    if user is region.anchor:
        return _owns_parameters(user) and operands(user)[record.roles.x[0]] is value
    same_axes = len(known_type(value).shape) == len(known_type(user).shape)
    return record.name == "add" and same_axes and _is_scalable_layer(region) and _other(user, region) is value


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
    arriving = {use.node.name: _factors_at(use, factors[value.name]) for value in values for use in value.uses}
    for region in regions:
        anchor = nodes[region.anchor.name]
        rows, columns = factors.get(region.root.name), arriving.get(anchor.name)
        if rows is not None or columns is not None:
            _scale(module, anchor, rows, columns)
        for node in region.nodes[1:]:
            here = arriving.get(node.name)
            if known_record(node).name == "add" and (rows is not None or here is not None):
                other = _other(node, region)
                assert other is not None, f"{node} adds nothing from outside"
                _scale_shortcut(module, nodes[node.name], nodes[other.name], rows, here)
    module.graph.eliminate_dead_code()
    module.recompile()


def _factors_at(use: ScaledReader, factors: torch.Tensor) -> torch.Tensor | None:
    """Return the factors that arrive at a reader; ``None`` if channels get several.

    They are computed by running the operators of the path on the factors; padding counts as one.
    """
    if not use.path:
        return factors
    first = use.path[0].args[0]
    shape = _example_shape(first)
    spread = factors.reshape(1, -1, *[1] * (len(shape) - 2)).expand(shape).contiguous()
    for node in use.path:
        args = [spread if value is node.args[0] else _number(value) for value in node.args]
        spread = node.target(*args, **node.kwargs)
    columns = spread.transpose(0, 1).flatten(1)
    top = columns.amax(1)
    if not ((columns == 0) | (columns - top[:, None]).abs().le(1e-12)).all():
        return None
    return torch.where(top == 0, torch.ones_like(top), top)


def _example_shape(node: fx.Node) -> tuple[int, ...]:
    """Return the shape of a value for one image, or for a batch that is fixed, with other free dimensions as in the
    example."""
    batch, *rest = known_type(node).shape
    return (batch if isinstance(batch, int) else 1, *(size_in_example(size, node) for size in rest))


def _number(value: Any) -> Any:
    """Return arguments with nodes of sizes replaced by the sizes in the example, for one image."""

    def size(node: fx.Node) -> int:
        dim = info(node).dim
        assert dim is not None, f"{node} is no size"
        return size_in_example(dim, node)

    return fx.map_arg(value, size)


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
    module.register_buffer(name, values.float())
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
