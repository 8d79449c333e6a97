"""Inputs that hold results of earlier calls and stay quantized in between, such as the keys and values of a decoder."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from intaglio.errors import SelectorError
from intaglio.fxgraph.node_info import info, origin, tensor_type
from intaglio.ir import DType
from intaglio.quant.recipes.choices import CacheType
from intaglio.quant.recipes.quantizer import Quantizer


def quantized_cache(graph: fx.Graph, quantizer: Quantizer, classes: Mapping[str, str]) -> dict[fx.Node, fx.Node]:
    """Return the cached inputs whose readers have the setting ``cache = "int8"`` -> the results that later calls
    receive in their place, or themselves if another model computes these.

    Args:
        graph: a captured graph.
        quantizer: its `cached_inputs` are positions among the inputs and results of the graph.
        classes: module path -> class name, for the selectors of the recipe.

    Raises:
        SelectorError: the graph has no input or result at a position.
    """
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    results = next(node for node in graph.nodes if node.op == "output").args[0]
    found: dict[fx.Node, fx.Node] = {}
    for position, result in quantizer.cached_inputs.items():
        if not 0 <= position < len(inputs) or not 0 <= (result or 0) < len(results):
            problem = f"{{{position}: {result}}}, but the model has {len(inputs)} inputs and {len(results)} results"
            raise SelectorError("cached_inputs", None, problem, remedy="count tensors from 0")
        node = inputs[position]
        if _is_float(node) and any(_is_int8(reader, quantizer, classes) for reader in node.users):
            found[node] = node if result is None else results[result]
    return found


def _is_float(node: fx.Node) -> bool:
    kind = tensor_type(node)
    return kind is not None and kind.dtype is DType.F32


def _is_int8(reader: fx.Node, quantizer: Quantizer, classes: Mapping[str, str]) -> bool:
    """Return whether the recipe quantizes the cache that an operator reads. Readers of sizes have no part in it."""
    if reader.op != "call_function" or info(reader).dim is not None:
        return False
    setting = quantizer.recipe.setting(origin(reader), classes)
    return setting.quantize is not False and setting.cache == CacheType.INT8
