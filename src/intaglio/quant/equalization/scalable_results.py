"""Find the values whose channels can be divided by factors, and the readers that absorb the factors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from intaglio.fxgraph.node_info import info, known_type, size_in_example
from intaglio.fxgraph.nodes import call_of, is_constant, known_record, layer_operands, operands, record_of
from intaglio.quant.annotate.regions import Annotations, Region
from intaglio.quant.imported_weights.quantized_weight import has_imported_integers
from intaglio.quant.recipes.choices import Role


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
    return all(factors_at(use, factors) is not None for use in value.uses)


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
    return known_record(node).name == "add" and outside_operand(node, region) is not None


def outside_operand(node: fx.Node, region: Region) -> fx.Node | None:
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
    return record.name == "add" and same_axes and _is_scalable_layer(region) and outside_operand(user, region) is value


def factors_at(use: ScaledReader, factors: torch.Tensor) -> torch.Tensor | None:
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
