"""SmoothQuant: divide the activations of linear layers by factors per channel when the residual stream stays float.

A layer norm's result goes to an addition unchanged, while linear layers read it divided by the factors and multiply
their weights by them. After an activation function the division runs in the epilogue of the layer in front of it,
elsewhere in the loop that quantizes the value, at the cost of one multiplication.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from intaglio.fusion.table import FUNCTION
from intaglio.fxgraph.graph_constants import in_file
from intaglio.fxgraph.node_info import constant_path, info, inherit_info, known_type, origin, update_info
from intaglio.fxgraph.nodes import (
    call_of,
    constant_node,
    is_constant,
    known_record,
    layer_operands,
    operands,
    operator,
    record_of,
)
from intaglio.ir import TensorType
from intaglio.ops.direct.hadamard_blocks import HADAMARD_TARGET
from intaglio.quant.annotate.regions import Annotations, Region
from intaglio.quant.equalization.smooth_factors import STATIC_INT8, LayerRounding
from intaglio.quant.imported_weights.quantized_weight import has_imported_integers
from intaglio.quant.recipes.choices import ResidualType, Role


@dataclass(frozen=True)
class Smoothed:
    """A value that can be divided by factors.

    Attributes:
        node: the node that computes it.
        site: name of its site.
        users: the operators that read it quantized.
        readers: the linear layers that read it, directly or through data movement.
        rounding: how these layers round it and their weights.
    """

    node: fx.Node
    site: str
    users: tuple[fx.Node, ...]
    readers: tuple[fx.Node, ...]
    rounding: LayerRounding

    @property
    def name(self) -> str:
        """Return the name of the node."""
        return self.node.name

    @property
    def weights(self) -> list[torch.Tensor]:
        """Return the weights of the readers, f32[outputs, channels]."""
        module = self.node.graph.owning_module
        return [getattr(module, str(layer_operands(reader).weight.target)) for reader in self.readers]


def smoothable(annotations: Annotations) -> list[Smoothed]:
    """Return the values that can be divided by factors, where the recipe keeps the residual stream in float."""
    member = {node: region for region in annotations.regions for node in region.nodes}
    sites = {site.value: site for site in annotations.sites if site.role in {Role.ACTIVATION, Role.TOKEN}}
    found = []
    for node in annotations.module.graph.nodes:
        region = member.get(node)
        if (
            node.name not in sites
            or operator(node) == HADAMARD_TARGET
            or (region is not None and not _ends_in_function(region, node))
        ):
            continue
        users = tuple(user for user in node.users if user in member)
        readers = [reader for user in users for reader in _readers(user, node, member)]
        alone = region is None or len(users) == len(node.users)
        if readers and alone and None not in readers and _wanted(readers, member):
            layers = tuple(reader for reader in readers if reader is not None)
            found.append(Smoothed(node, sites[node.name].name, users, layers, _rounding(layers, annotations, member)))
    return found


def _ends_in_function(region: Region, node: fx.Node) -> bool:
    """Return whether the kernel that computes the value can apply a factor."""
    return region.name == FUNCTION.name and region.root is node and region.record.is_linear_layer


def _readers(user: fx.Node, value: fx.Node, member: Mapping[fx.Node, Region]) -> list[fx.Node | None]:
    """Return the linear layers that read a value through a user; ``None`` marks any other quantized reader."""
    region, record = member.get(user), record_of(user)
    if region is None or record is None:
        return [None]
    channels = known_type(value).shape[-1]
    if record.is_linear_layer and user is region.anchor and operands(user)[0] is value:
        weight = layer_operands(user).weight
        own = is_constant(weight) and len(weight.users) == 1 and not has_imported_integers(weight)
        return [user if own else None]
    kept = record.moves_data and len(region.nodes) == 1 and known_type(user).shape[-1] == channels
    if not kept or not _keeps_channels(user):
        return [None]
    return [reader for behind in user.users for reader in _readers(behind, user, member)]


def _rounding(readers: Sequence[fx.Node], annotations: Annotations, member: Mapping[fx.Node, Region]) -> LayerRounding:
    """Return how layers round a value and their weights; of different weights, those with the fewest bits."""
    sites = [annotations.by_value[layer_operands(reader).weight.name, Role.WEIGHT] for reader in readers]
    site = min(sites, key=lambda one: one.qmax)
    largest = STATIC_INT8.largest if site.record.floating else site.qmax
    return LayerRounding(all(member[reader].dynamic for reader in readers), largest, site.group)


def _keeps_channels(user: fx.Node) -> bool:
    """Return whether data movement between a value and its readers leaves channels on the last axis."""
    record = known_record(user)
    call = call_of(user, record)
    return record.keeps_last_axis(record.bind(call), len(call.shape()))


def _wanted(readers: Sequence[fx.Node | None], member: Mapping[fx.Node, Region]) -> bool:
    """Return whether all readers have a float residual stream and are to be equalized."""
    settings = [member[reader].setting for reader in readers if reader is not None]
    return all(setting.residual == ResidualType.FLOAT and setting.equalize for setting in settings)


def smooth(module: fx.GraphModule, values: Sequence[Smoothed], factors: Mapping[str, torch.Tensor]) -> None:
    """Divide values by factors before they are quantized, and multiply the columns of their readers' weights.

    ``factors``: node name -> float64 [channels].
    """
    nodes = {node.name: node for node in module.graph.nodes}
    for value in values:
        divisor, node = factors[value.name], nodes[value.name]
        constants = []
        for label, tensor in (("shift", torch.zeros_like(divisor)), ("gain", 1 / divisor)):
            name = f"{node.name}_smooth_{label}"
            shape = (1,) * (len(known_type(node).shape) - 1) + (-1,)
            module.register_buffer(name, tensor.float().reshape(shape))
            constants.append(constant_node(module, name, f"{origin(node).path}.{label}"))
        with module.graph.inserting_after(node):
            divided = module.graph.call_function(torch.ops.aten.addcmul.default, (constants[0], node, constants[1]))
        kind = TensorType(known_type(node).shape, known_type(node).dtype)
        inherit_info(divided, node, type=kind, divides_by_smoothing=True)
        for user in value.users:
            nodes[user.name].replace_input_with(node, divided)
        for reader in value.readers:
            weight = layer_operands(nodes[reader.name]).weight
            name = f"{weight.target}_smoothed"
            module.register_buffer(name, in_file((getattr(module, str(weight.target)).double() * divisor).float()))
            path = constant_path(weight, name)
            made = constant_node(module, name, path)
            update_info(made, imported=info(weight).imported)
            nodes[reader.name].replace_input_with(weight, made)
    module.graph.eliminate_dead_code()
    module.recompile()
