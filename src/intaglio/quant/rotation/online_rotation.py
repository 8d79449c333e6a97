"""Rotations that run with the model, for values that no constant can rotate.

The operand of a layer behind a product or an activation function, such as the last layer of an MLP, cannot be rotated
by the weights in front of it, and queries and keys cannot be if their positions are rotary. A Hadamard matrix
multiplies them in blocks, which takes additions only (the rotations R4 and R3 of SpinQuant, Liu et al. 2024). The
matrix is its own inverse: the columns of the weights are multiplied by it, and products of queries and keys stay the
same.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from intaglio import numerics
from intaglio.errors import CalibrationError
from intaglio.fxgraph.graph_constants import add_constant, in_file
from intaglio.fxgraph.graph_passes import copy_graph, drop_unused_constants
from intaglio.fxgraph.node_info import constant_path, info, inherit_info, known_type, origin
from intaglio.fxgraph.nodes import constant_node, is_constant, layer_operands, operator
from intaglio.fxgraph.overloads import register_operators
from intaglio.ir import DType, TensorType
from intaglio.ops.direct.hadamard_blocks import LARGEST_HADAMARD
from intaglio.quant.annotate.find_sites import ValueNames
from intaglio.quant.annotate.regions import Annotations
from intaglio.quant.calibrate.prepare import Prepared
from intaglio.quant.precision.apply_decisions import reannotated
from intaglio.quant.rotation.orthogonal import block_hadamard, multiplied_rows
from intaglio.quant.rotation.rotated_values import int8_caches, is_plain_layer
from intaglio.quant.rotation.rotating_operators import is_attention, moves_rows, size_of_rows

SMALLEST_HADAMARD = 16
"""Smallest size of a block that is worth a rotation."""
ONLINE = "online"
"""The setting ``rotate`` of layers and attention whose operands are rotated at run time."""


@dataclass
class OnlinePlace:
    """Values that are multiplied by the same Hadamard matrix.

    Attributes:
        size: size of its blocks.
        values: value -> the operators that read the product instead of it.
        layers: the linear layers among them, whose weights are multiplied by the matrix too.
        attention: the attention whose queries and keys they are.
    """

    size: int
    values: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)
    layers: list[fx.Node] = field(default_factory=list)
    attention: fx.Node | None = None


def chosen_places(prepared: Prepared, rotated: Collection[str]) -> dict[str, OnlinePlace]:
    """Return what the recipe rotates at run time, by the name of the first value.

    Args:
        prepared: the model after `with_rotations`.
        rotated: names of the nodes of layers whose operands are rotated by constants.
    """

    def asked(node: fx.Node) -> bool:
        setting = prepared.quantizer.recipe.setting(origin(node), prepared.classes)
        return setting.rotate == ONLINE and setting.quantize is not False and node.name not in rotated

    found = _every_place(prepared.annotations)
    deciding = {name: place.layers if place.attention is None else [place.attention] for name, place in found.items()}
    return {name: place for name, place in found.items() if all(map(asked, deciding[name]))}


def _every_place(annotations: Annotations) -> dict[str, OnlinePlace]:
    """Return everything that can be rotated at run time, by the name of the first value."""
    graph, cached = annotations.module.graph, int8_caches(annotations)
    names = ValueNames(graph)
    found: dict[str, OnlinePlace] = {}
    for node in graph.nodes:
        if is_attention(node):
            place = _attention_place(node, cached)
            if place is not None:
                found[names.of(next(iter(place.values)))] = place
        elif is_plain_layer(node) and (x := _operand(node)) is not None:
            place = found.setdefault(names.of(x), OnlinePlace(_block(x)))
            place.values.setdefault(x, []).append(node)
            place.layers.append(node)
    return found


def _block(value: fx.Node) -> int:
    """Return the largest power of two that divides the number of channels and that kernels support, or 0."""
    channels = size_of_rows(value)
    size = min(channels & -channels, LARGEST_HADAMARD) if isinstance(channels, int) else 0
    return size if size >= SMALLEST_HADAMARD else 0


def _operand(layer: fx.Node) -> fx.Node | None:
    """Return the operand of a linear layer if it can be rotated."""
    x, weight, _ = layer_operands(layer)
    plain = info(weight).imported is None and {known_type(one).dtype for one in (x, weight)} == {DType.F32}
    return x if plain and _block(x) else None


def _attention_place(attention: fx.Node, cached: Collection[fx.Node]) -> OnlinePlace | None:
    """Return the keys and queries of an attention, as they are before keys of other calls are added."""
    queries, keys = attention.args[:2]
    new, path = _new_keys(keys, cached)
    size = _block(queries)
    if new is None or not size or queries in (new, *path):
        return None
    users = [user for user in new.users if info(user).dim is None]
    if any(user not in (attention, *path) and not (user.op == "output" and new in cached) for user in users):
        return None
    return OnlinePlace(size, {new: users, queries: [attention]}, attention=attention)


def _new_keys(keys: fx.Node, cached: Collection[fx.Node]) -> tuple[fx.Node | None, list[fx.Node]]:
    """Return the value that a call computes as its keys, and the operators behind it; ``None`` for other graphs."""
    path: list[fx.Node] = []
    size = size_of_rows(keys)
    while operator(keys) == "aten.cat.default" or moves_rows(keys):
        path.append(keys)
        operands = list(keys.args[0]) if operator(keys) == "aten.cat.default" else [keys.args[0]]
        operands = [value for value in operands if not (value.op == "placeholder" and value in cached)]
        if len(operands) != 1 or len([user for user in keys.users if info(user).dim is None]) != 1:
            return None, path
        if size_of_rows(operands[0]) != size:  # rows are split into heads here
            return path.pop(), path
        (keys,) = operands
    return (None if keys.op == "placeholder" or is_constant(keys) else keys), path


def with_online_rotations(prepared: Prepared, blocks: Mapping[str, int]) -> Prepared:
    """Return the model with values rotated at run time, which computes the same function.

    Args:
        prepared: the prepared model, without decisions by data but `with_rotations`.
        blocks: name of the first value, as `chosen_places` returns it -> the size of the blocks.

    Raises:
        CalibrationError: the model does not have these values.
    """
    if not blocks:
        return prepared
    module = copy_graph(prepared.annotations.module)
    found = _every_place(replace(prepared.annotations, module=module))
    if odd := sorted(name for name, size in blocks.items() if name not in found or found[name].size != size):
        problem = f"the model has no values that can be rotated at run time at {', '.join(odd[:5])}"
        remedy = "use it with the model and the recipe that it was made for"
        raise CalibrationError("equalization", None, problem, remedy=remedy)
    for name, place in found.items():  # files have another order, and names of nodes depend on it
        if name in blocks:
            _rotate(module, place)
    drop_unused_constants(module)
    module.graph.eliminate_dead_code()
    module.recompile()
    return reannotated(prepared, module)


def _rotate(module: fx.GraphModule, place: OnlinePlace) -> None:
    """Insert the products with the matrix, and multiply the weights behind them."""
    for value, users in place.values.items():
        with module.graph.inserting_after(value):
            rotated = module.graph.call_function(hadamard_operator().hadamard.default, (value, place.size))
        inherit_info(rotated, value, type=TensorType(known_type(value).shape, DType.F32))
        for user in users:
            user.replace_input_with(value, rotated)
    for layer in place.layers:
        old = layer_operands(layer).weight
        values = multiplied_rows(getattr(module, str(old.target)), lambda rows: block_hadamard(rows, place.size))
        name = add_constant(module, f"{old.target}_rotated", in_file(values))
        layer.replace_input_with(old, constant_node(module, name, constant_path(old, name)))


@functools.cache
def hadamard_operator() -> Any:
    """Return the namespace of the PyTorch operator, registered on first use."""
    return register_operators({"hadamard": ("(Tensor x, int size) -> Tensor", _hadamard, _fake_hadamard)})


def _hadamard(x: torch.Tensor, size: int) -> torch.Tensor:
    return torch.from_numpy(numerics.hadamard(x.detach().contiguous().numpy(), size))


def _fake_hadamard(x: torch.Tensor, size: int) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)
