"""Open settings of a recipe, decided by what a graph computes."""

from __future__ import annotations

from torch import fx

from intaglio.fxgraph.node_info import origin
from intaglio.fxgraph.nodes import record_of
from intaglio.quant.recipes.recipe import Recipe


def decide_recipe(recipe: Recipe, module: fx.GraphModule, decoder: bool) -> Recipe:
    """Return the recipe with all open settings of its default decided for a graph.

    Args:
        recipe: the given recipe.
        module: the graph.
        decoder: whether it is that of a decoder, whose layers have float weights.
    """
    found = [(node, record) for node in module.graph.nodes if (record := record_of(node)) is not None]
    if not decoder:
        return recipe.with_defaults(attention=any(record.is_attention for _, record in found))
    linear = {origin(node).operator for node, record in found if record.is_linear_layer}
    others = {origin(node).operator for node, record in found if not record.is_linear_layer}
    return recipe.with_decoder_defaults(sorted(linear - others))
