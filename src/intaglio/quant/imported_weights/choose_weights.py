"""Decide what happens to weights of a captured graph that another tool quantized."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import fx

from intaglio.fxgraph.node_info import constant_path, origin, update_info
from intaglio.fxgraph.nodes import constant_node, operands, record_of, replace_node
from intaglio.quant.imported_weights.group_operator import grouped_weight
from intaglio.quant.imported_weights.quantized_weight import QuantizedWeight
from intaglio.quant.imported_weights.weight_modules import QUANTIZED_BUFFER
from intaglio.quant.recipes.choices import ActivationMode
from intaglio.quant.recipes.quantizer import Quantizer
from intaglio.quant.recipes.recipe import Recipe
from intaglio.quant.recipes.settings import Setting


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
    for node in list(module.graph.nodes):
        if (grouped := grouped_weight(node)) is None or not node.users:
            continue
        quantized, steps = (getattr(module, str(part.target)) for part in grouped[:2])
        weight = QuantizedWeight(quantized, steps, grouped[2])
        if quantizer.annotator is not None or not _stays(node, weight, quantizer.recipe, classes):
            _to_constant(module, node, weight)


def _stays(node: fx.Node, weight: QuantizedWeight, recipe: Recipe, classes: Mapping[str, str]) -> bool:
    """Return whether all readers of a weight are linear layers that compute in float32 with the weight as it is."""
    default = ActivationMode.FLOAT if weight.int8_refusal else ActivationMode.STATIC
    filled = replace(recipe, default=recipe.default.with_defaults(Setting(activations=default)))
    for user in node.users:
        record, setting = record_of(user), filled.setting(origin(user), classes)
        linear = record is not None and record.is_linear_layer and weight.quantized.dim() == 2
        if not linear or operands(user)[1] is not node:
            return False
        if setting.activations != ActivationMode.FLOAT:
            return False
    return True


def with_imported_activations(decided: Recipe, given: Recipe, module: fx.GraphModule) -> Recipe:
    """Return a decided recipe that leaves activations open if imported weights stay as they are because of that."""
    if given.default.activations is not None or not any(map(grouped_weight, module.graph.nodes)):
        return decided
    return replace(decided, default=replace(decided.default, activations=None))


def _to_constant(module: fx.GraphModule, node: fx.Node, weight: QuantizedWeight) -> None:
    """Replace a dequantize by a float constant that remembers its integers. Calls of a module share the constant."""
    quantized = node.args[0]
    name = f"{quantized.target}_f32"
    if not hasattr(module, name):
        module.register_buffer(name, weight.dequantized())
    constant = constant_node(module, name, constant_path(quantized).removesuffix(QUANTIZED_BUFFER) + "weight")
    update_info(constant, imported=weight)
    replace_node(node, constant)
