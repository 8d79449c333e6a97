"""Products of mixtures of experts, of groups of rows with a matrix each, as grouped linear layers."""

from __future__ import annotations

from collections.abc import Sequence
from operator import getitem
from typing import Any

import torch
from torch import fx

from intaglio.fxgraph.graph_constants import add_constant
from intaglio.fxgraph.grouped_operator import grouped_linear
from intaglio.fxgraph.node_info import constant_path, known_type, tensor_type
from intaglio.fxgraph.nodes import (
    arguments,
    call_before,
    constant_node,
    is_constant,
    operator,
    replace_node,
    replace_symbols,
)
from intaglio.ir import DType, TensorType, symbol, symbols_of

GROUPED_PRODUCTS = {
    "aten._grouped_mm.default": ("self", "mat2", "offs"),
    "transformers.grouped_mm_fallback.default": ("input", "weight", "offs"),
}
"""Names of the rows, the matrices and the ends of the groups among the arguments of an operator."""


def constant_grouped_mm_to_linear(module: fx.GraphModule) -> int:
    """Replace products of groups of rows with constant matrices [groups, K, N] by a grouped linear layer.

    Its weight is [groups * N, K], like that of one linear layer with the outputs of all groups.
    """
    count = 0
    for node in list(module.graph.nodes):
        if not _is_constant_product(node):
            continue
        count += 1
        x, matrices, ends = (arguments(node)[name] for name in GROUPED_PRODUCTS[operator(node)])
        name = f"{matrices.target}_outputs_first"
        if not hasattr(module, name):
            values = getattr(module, str(matrices.target)).transpose(1, 2)
            module.register_buffer(name, values.reshape(-1, values.shape[2]))
        weight = constant_node(module, name, constant_path(matrices, name))
        if known_type(ends).dtype is not DType.I64:
            wide = TensorType(known_type(ends).shape, DType.I64)
            ends = call_before(node, wide, torch.ops.aten._to_copy.default, ends, dtype=torch.int64)
        layer = call_before(node, known_type(node), grouped_linear(), x, weight, None, ends)
        replace_node(node, layer)
    return count


def _is_constant_product(node: fx.Node) -> bool:
    """Return whether rows of float32 are multiplied by constant matrices, group by group, without a bias."""
    names = GROUPED_PRODUCTS.get(operator(node))
    if names is None:
        return False
    given = arguments(node)
    x, matrices, ends = (given[name] for name in names)
    if not isinstance(ends, fx.Node) or given.get("bias") is not None or not is_constant(matrices):
        return False
    kinds = [known_type(value) for value in (x, matrices, node)]
    shapes = [len(kind.shape) for kind in kinds]
    return shapes == [2, 3, 2] and all(kind.dtype is DType.F32 for kind in kinds)


# ---- rows that are split at computed places -------------------------------------------------------------------------


def split_products_to_grouped(module: fx.GraphModule) -> int:
    """Replace linear layers of the parts of a split, whose sizes are computed, by one grouped linear layer.

    A concatenation joins their results. The number of its rows is then known: that of the rows that are split.
    """
    count = 0
    for node in [node for node in module.graph.nodes if operator(node) == "aten.cat.default"]:
        layers = _layers_of_parts(node)
        if not layers or not _join_sizes(module, layers):
            continue
        count += 1
        split = layers[0].args[0].args[0]
        sizes = _split_tensor(split)
        ends = call_before(node, known_type(sizes), torch.ops.aten.cumsum.default, sizes, 0)
        parameters = [_joined(module, [_parameter(layer, name) for layer in layers]) for name in ("weight", "bias")]
        layer = call_before(node, known_type(node), grouped_linear(), split.args[0], *parameters, ends)
        replace_node(node, layer)
    return count


def _parameter(layer: fx.Node, name: str) -> fx.Node | None:
    """Return the weight or the bias of a linear layer."""
    found: fx.Node | None = arguments(layer)[name]
    return found


def _layers_of_parts(node: fx.Node) -> list[fx.Node]:
    """Return the linear layers whose results a node concatenates, if they read all parts of one split in order."""
    given = arguments(node)
    layers = list(given["tensors"])
    if given["dim"] != 0 or not all(operator(layer) == "aten.linear.default" for layer in layers):
        return []
    parts = [layer.args[0] for layer in layers]
    if not all(part.target is getitem and part.args[1] == place for place, part in enumerate(parts)):
        return []
    split = parts[0].args[0]
    if any(part.args[0] is not split for part in parts) or _split_tensor(split) is None:
        return []
    fits = len(split.args[1]) == len(parts) and known_type(split.args[0]).dtype is DType.F32
    for name in ("weight", "bias"):
        parameters = [_parameter(layer, name) for layer in layers]
        constant = all(parameter is not None and is_constant(parameter) for parameter in parameters)
        kinds = {None if parameter is None else known_type(parameter) for parameter in parameters}
        fits = fits and len(kinds) == 1 and (constant or (name == "bias" and kinds == {None}))
    return layers if fits else []


def _split_tensor(split: fx.Node) -> fx.Node | None:
    """Return the tensor i64[groups] whose elements are the sizes of a split along the first axis, or ``None``."""
    if operator(split) != "aten.split_with_sizes.default" or arguments(split)["dim"] != 0:
        return None
    tensors = {_tensor_of_size(size, place) for place, size in enumerate(split.args[1])}
    tensor = tensors.pop() if len(tensors) == 1 else None
    whole = TensorType((len(split.args[1]),), DType.I64)
    return tensor if tensor is not None and tensor_type(tensor) == whole else None


def _tensor_of_size(size: Any, place: int) -> fx.Node | None:
    """Return the tensor with one axis that has a size at a place; ``None`` for other sizes."""
    if not isinstance(size, fx.Node) or operator(size) != "aten.item.default":
        return None
    element = size.args[0]
    unbound = element.target is getitem and operator(element.args[0]) == "aten.unbind.int"
    if not unbound and operator(element) != "aten.select.int":
        return None
    maker = element.args[0] if unbound else element
    index = element.args[1] if unbound else arguments(element)["index"]
    found: fx.Node = maker.args[0]
    return found if index == place else None


def _join_sizes(module: fx.GraphModule, layers: Sequence[fx.Node]) -> bool:
    """Make the sizes of a split's parts add up to the rows that are split, in the types of all values.

    Return whether they do: the size of the first part must be a symbol, or be known to be the rest already.
    """
    first, *others = [known_type(layer).shape[0] for layer in layers]
    rest = known_type(layers[0].args[0].args[0].args[0]).shape[0]
    for size in others:
        rest = rest - size
    if first == rest:
        return True
    name = str(first)
    if isinstance(first, int) or first != symbol(name) or name in symbols_of(rest):
        return False
    replace_symbols(module, {name: rest})
    return True


def _joined(module: fx.GraphModule, parts: Sequence[fx.Node | None]) -> fx.Node | None:
    """Return a constant with the weights or the biases of all groups; ``None`` for layers without biases."""
    constants = [part for part in parts if part is not None]
    if not constants:
        return None
    values = torch.cat([getattr(module, str(part.target)) for part in constants])
    name = add_constant(module, f"{constants[0].target}_of_groups", values)
    return constant_node(module, name, constant_path(constants[0], name))
