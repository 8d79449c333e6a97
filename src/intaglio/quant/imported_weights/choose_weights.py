"""Decide what happens to weights of a captured graph that another tool quantized."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import fx

from intaglio.fxgraph.node_info import constant_path, known_type, origin, set_info, update_info
from intaglio.fxgraph.nodes import constant_node, is_constant, operands, operator, record_of, replace_node
from intaglio.quant.imported_weights.group_operator import grouped_weight
from intaglio.quant.imported_weights.quantized_weight import QuantizedWeight
from intaglio.quant.imported_weights.weight_modules import QUANTIZED_BUFFER
from intaglio.quant.recipes.choices import ActivationMode
from intaglio.quant.recipes.quantizer import Quantizer
from intaglio.quant.recipes.recipe import Recipe
from intaglio.quant.recipes.settings import Setting

SELECT_TARGET = "aten.index_select.default"


def choose_imported_weights(module: fx.GraphModule, quantizer: Quantizer, classes: Mapping[str, str]) -> None:
    """Keep imported weights for float activations, or turn them into float constants for int8 products.

    Weights with one positive scale for each output channel become constants of int8 products, which take the integers
    as they are. Other weights stay as they are and are computed with in float32, unless the recipe explicitly asks for
    quantized activations: they are then rounded again. So are the weights of all layers if an annotator decides about
    them. Weights that something else than a linear layer reads become float constants.

    Args:
        module: a captured graph, which is changed in place.
        quantizer: its recipe, before open settings are filled.
        classes: module path -> class name.
    """
    gathered: dict[tuple[fx.Node, str], fx.Node] = {}
    for node in list(module.graph.nodes):
        if (grouped := grouped_weight(node)) is None or not node.users:
            continue
        quantized, steps = (getattr(module, str(part.target)) for part in grouped[:2])
        value, columns = _in_input_order(node)
        order = None if columns is None else torch.argsort(getattr(module, str(columns.target)))
        weight = QuantizedWeight(quantized, steps, grouped[2], order=order)
        if quantizer.annotator is not None or not _stays(value, weight, quantizer.recipe, classes):
            _to_constant(module, node, value, weight)
        elif columns is not None and order is not None:
            _gather_inputs(module, value, columns, order, gathered)


def _in_input_order(node: fx.Node) -> tuple[fx.Node, fx.Node | None]:
    """Return the weight with its inputs in order, which may be that of a node, and the constant with its columns."""
    user = next(iter(node.users))
    selects = len(node.users) == 1 and operator(user) == SELECT_TARGET and user.args[:2] == (node, 1)
    return (user, user.args[2]) if selects and is_constant(user.args[2]) else (node, None)


def _stays(node: fx.Node, weight: QuantizedWeight, recipe: Recipe, classes: Mapping[str, str]) -> bool:
    """Return whether all readers of a weight are linear layers that compute in float32 with the weight as it is."""
    default = ActivationMode.FLOAT if weight.int8_refusal else ActivationMode.STATIC
    filled = replace(recipe, default=recipe.default.with_defaults(Setting(activations=default)))
    for user in node.users:
        record, setting = record_of(user), filled.setting(origin(user), classes)
        linear = record is not None and record.is_linear_layer and weight.quantized.dim() == 2
        if not linear or operands(user)[1] is not node or setting.activations != ActivationMode.FLOAT:
            return False
    return True


def _gather_inputs(
    module: fx.GraphModule,
    value: fx.Node,
    columns: fx.Node,
    order: torch.Tensor,
    gathered: dict[tuple[fx.Node, str], fx.Node],
) -> None:
    """Let the readers of a weight take its columns as they are stored, and their inputs in this order.

    Args:
        module: the graph.
        value: the weight with its inputs in order.
        columns: the constant with the column of each input.
        order: the input of each column.
        gathered: inputs in another order that other layers read already, by value and order.
    """
    key = hashlib.sha256(order.numpy().tobytes()).hexdigest()
    name = f"inputs_{key[:16]}"
    if not hasattr(module, name):
        module.register_buffer(name, order)
    places = constant_node(module, name, f"{constant_path(columns)}.order")
    for layer in list(value.users):
        x = layer.args[0]
        if (x, key) not in gathered:
            where = replace(origin(layer), operator=SELECT_TARGET)
            with module.graph.inserting_after(x):
                gathered[x, key] = module.graph.call_function(torch.ops.aten.index_select.default, (x, -1, places))
            set_info(gathered[x, key], type=known_type(x), origin=where)
        layer.update_arg(0, gathered[x, key])
        layer.update_arg(1, value.args[0])
    module.graph.erase_node(value)


def with_imported_activations(decided: Recipe, given: Recipe, module: fx.GraphModule) -> Recipe:
    """Return a decided recipe that leaves activations open if imported weights stay as they are because of that."""
    if given.default.activations is not None or not any(map(grouped_weight, module.graph.nodes)):
        return decided
    return replace(decided, default=replace(decided.default, activations=None))


def _to_constant(module: fx.GraphModule, node: fx.Node, value: fx.Node, weight: QuantizedWeight) -> None:
    """Replace a dequantize by a float constant that remembers its integers. Calls of a module share the constant."""
    quantized = node.args[0]
    name = f"{quantized.target}_f32"
    if not hasattr(module, name):
        module.register_buffer(name, weight.dequantized())
    constant = constant_node(module, name, constant_path(quantized).removesuffix(QUANTIZED_BUFFER) + "weight")
    update_info(constant, imported=weight)
    replace_node(value, constant)
    if value is not node:
        module.graph.erase_node(node)
