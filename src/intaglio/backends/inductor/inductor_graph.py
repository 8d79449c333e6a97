"""Legalization of a reference for the patterns of quantized operators in TorchInductor.

Inductor lowers ``dequantize -> layer -> quantize`` to one oneDNN call if scales are numbers, weights have one scale for
each output channel, biases are float and every dequantize has a single consumer. Other forms are matched in part or
incorrectly. These passes rewrite a reference into the required form without changing its results.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import fx

from intaglio.backends.channel_zero_points import accept_bytes, fold_zero_points, image_of
from intaglio.backends.inductor.unsigned_activations import use_unsigned_activations
from intaglio.fxgraph.graph_checker import BACKEND_GRAPH, finish_pass
from intaglio.fxgraph.graph_passes import copy_graph, drop_unused_constants
from intaglio.fxgraph.node_info import copy_info, origin, set_info
from intaglio.fxgraph.nodes import is_constant, operator
from intaglio.quant.annotate.per_token import DEQUANTIZE_ROWS_TARGET, UNSCALED_DEQUANTIZE_ARGUMENTS
from intaglio.quant.qdq.convert import Reference
from intaglio.quant.qdq.qdq_normalize import DEQUANTIZE_CHANNEL, DEQUANTIZE_TENSOR, QUANTIZE_TENSOR

aten = torch.ops.aten
LAYER_TARGETS = ("aten.conv1d.default", "aten.conv2d.default", "aten.linear.default")
"""Layers that oneDNN has calls for. Inductor matches a transposed convolution as an ordinary one, so it must not look
quantized."""
EMBEDDING_TARGETS = ("aten.embedding.default", "aten.embedding_bag.padding_idx", "aten.embedding_bag.default")
DATA_MOVEMENT_TARGETS = (
    "aten.view.default",
    "aten.reshape.default",
    "aten.flatten.using_ints",
    "aten.permute.default",
    "aten.transpose.int",
    "aten.unsqueeze.default",
    "aten.squeeze.dim",
    "aten.squeeze.dims",
    "aten.slice.Tensor",
    "aten.select.int",
    "aten.expand.default",
)
"""Data movement operators: their results are unchanged elements of their input."""
FLOAT8_DEQUANTIZE = ("intaglio.dequantize_per_tensor.default", "intaglio.dequantize_per_channel.default")
DTYPE_RANGES = {torch.uint8: (0, 255), torch.int8: (-128, 127)}
"""Element types that oneDNN accepts, and the range that it clamps quantized values to."""
LABEL = "intaglio"
"""Key in ``meta["custom"]`` of a node's name, which Inductor copies to the nodes it derives."""


def graph_for_inductor(reference: Reference) -> fx.GraphModule:
    """Return a legalized copy of the reference's graph that shares its constants."""
    module = fx.GraphModule(reference.module, reference.module.graph.__deepcopy__())
    for rewrite in INDUCTOR_PASSES:
        rewrite(module)
        finish_pass(module, rewrite.__name__, BACKEND_GRAPH)
    return _labelled(module)


def graph_with_byte_inputs(module: fx.GraphModule, inputs: Collection[int]) -> fx.GraphModule:
    """Return a copy of the graph of `graph_for_inductor` in which these image inputs are uint8. Constants are
    shared."""
    own = copy_graph(module)
    placeholders = [node for node in own.graph.nodes if node.op == "placeholder"]
    for node in list(own.graph.nodes):
        if image_of(node) in [placeholders[index] for index in inputs]:
            accept_bytes(own, node)
    own.graph.eliminate_dead_code()
    return _labelled(own)


def _labelled(module: fx.GraphModule) -> fx.GraphModule:
    """Remove unused constants, label every node with its name and recompile the module."""
    drop_unused_constants(module)
    for node in module.graph.nodes:
        node.meta["custom"] = {LABEL: node.name}
    module.graph.lint()
    module.recompile()
    return module


def is_int8_layer(node: fx.Node) -> bool:
    """Return whether oneDNN computes a layer in int8: 8-bit activations with per-tensor parameters, and s8 weights with
    parameters per tensor or per output channel."""
    if operator(node) not in LAYER_TARGETS:
        return False
    x, weight = node.args[0], node.args[1]
    if not (
        isinstance(x, fx.Node)
        and operator(x) == DEQUANTIZE_TENSOR
        and x.args[5] in DTYPE_RANGES
        and not is_constant(x.args[0])
    ):
        return False
    if operator(weight) == DEQUANTIZE_TENSOR:
        return is_constant(weight.args[0]) and weight.args[5] is torch.int8
    return operator(weight) == DEQUANTIZE_CHANNEL and weight.args[3] == 0 and weight.args[6] is torch.int8


def scale_tokens_after_linear(module: fx.GraphModule) -> None:
    """Rewrite ``linear(q * row_scale)`` as ``linear(q) * row_scale``, because oneDNN has no per-token scales."""
    for linear in [node for node in module.graph.nodes if operator(node) == "aten.linear.default"]:
        rows, weight, *bias = linear.args
        if operator(rows) != DEQUANTIZE_ROWS_TARGET:
            continue
        quantized, scales = rows.args
        call = functools.partial(_call_before, linear)
        x = call(
            torch.ops.quantized_decomposed.dequantize_per_tensor.default, quantized, *UNSCALED_DEQUANTIZE_ARGUMENTS
        )
        steps = call(aten.linear.default, x, weight)
        y = call(aten.mul.Tensor, steps, scales)
        if bias and bias[0] is not None:
            y = call(aten.add.Tensor, y, bias[0])
        linear.replace_all_uses_with(y)


def fold_image_zero_points(module: fx.GraphModule) -> None:
    """Rewrite convolutions of images with `fold_zero_points`, because oneDNN accepts only one zero point per tensor and
    pads with it."""
    for node in list(module.graph.nodes):
        fold_zero_points(module, node)


def remove_qdq_around_data_movement(module: fx.GraphModule) -> None:
    """Remove a dequantize and a quantize with the same parameters if only data movement is between them, so that the
    quantized values are moved."""
    for last in [node for node in module.graph.nodes if operator(node) == QUANTIZE_TENSOR]:
        chain, node = [], last.args[0]
        while operator(node) in DATA_MOVEMENT_TARGETS:
            chain.append(node)
            node = node.args[0]
        if operator(node) != DEQUANTIZE_TENSOR or node.args[1:] != last.args[1:]:
            continue
        value = node.args[0]
        for move in reversed(chain):
            with module.graph.inserting_before(last):
                value = module.graph.call_function(move.target, (value, *move.args[1:]), move.kwargs)
            copy_info(value, move, type=None)
        last.replace_all_uses_with(value)


def clamp_narrow_ranges(module: fx.GraphModule) -> None:
    """Rewrite a quantize to a range narrower than its element type as one to the full range, which oneDNN clamps to,
    followed by a clamp.

    The upper bound comes first: oneDNN's convolutions would take bounds in the other order for a hardtanh of theirs.
    """
    for node in [node for node in module.graph.nodes if operator(node) == QUANTIZE_TENSOR]:
        x, scale, zero, low, high, dtype = node.args
        if dtype not in DTYPE_RANGES or (low, high) == DTYPE_RANGES[dtype]:
            continue
        lowest, highest = DTYPE_RANGES[dtype]
        result = _call_before(node, node.target, x, scale, zero, lowest, highest, dtype)
        if high < highest:
            result = _call_before(node, aten.clamp_max.default, result, high)
        if low > lowest:
            result = _call_before(node, aten.clamp_min.default, result, low)
        node.replace_all_uses_with(result)


def subtract_negated_inputs(module: fx.GraphModule) -> None:
    """Rewrite ``layer + value`` as ``layer - (-value)`` if the value is an input or a constant.

    The result is the same. A oneDNN call would store the sum in the memory of the value, and Inductor does not notice
    that this memory must not be overwritten.
    """
    for add in [node for node in module.graph.nodes if operator(node) == "aten.add.Tensor" and not node.kwargs]:
        for value, other in itertools.permutations(add.args):
            if _is_outside(value) and isinstance(other, fx.Node) and not _is_outside(other):
                add.replace_all_uses_with(
                    _call_before(add, aten.sub.Tensor, other, _call_before(add, aten.neg.default, value))
                )
                break


def _is_outside(value: Any) -> bool:
    return isinstance(value, fx.Node) and value.op in ("placeholder", "get_attr")


def specialize_constants(module: fx.GraphModule) -> None:
    """Give each int8 layer its own weight with parameters per channel, and fold other dequantized constants to float.

    Inductor merges equal dequantizes and then decomposes one that another layer still needs.
    Quantized embedding tables are not folded, because a call reads only a few of their rows.
    """
    for node in [
        node
        for node in module.graph.nodes
        if operator(node) in (DEQUANTIZE_TENSOR, DEQUANTIZE_CHANNEL, *FLOAT8_DEQUANTIZE)
    ]:
        if not is_constant(node.args[0]) or any(operator(reader) in EMBEDDING_TARGETS for reader in node.users):
            continue
        if not all(is_int8_layer(reader) and reader.args[1] is node for reader in node.users):
            value = node.target(*[_constant_value(module, given) for given in node.args])
            node.replace_all_uses_with(_new_constant(module, node, "float", value))
            continue
        for reader in list(node.users):
            reader.replace_input_with(node, _by_channel(module, node, reader))


def _by_channel(module: fx.GraphModule, weight: fx.Node, layer: fx.Node) -> fx.Node:
    """Return a dequantize per channel of a layer's weight, whose scales and zero points belong to this layer only."""
    quantized, scales, zeros = weight.args[:3]
    low, high = weight.args[3:5] if operator(weight) == DEQUANTIZE_TENSOR else weight.args[4:6]
    count = len(_constant_value(module, quantized))
    own = torch.as_tensor(_constant_value(module, scales)).float().expand(count).clone()
    shifts = torch.as_tensor(_constant_value(module, zeros)).long().expand(count).clone()
    parameters = _new_constant(module, layer, "scales", own), _new_constant(module, layer, "zeros", shifts)
    dequantize = torch.ops.quantized_decomposed.dequantize_per_channel.default
    return _call_before(layer, dequantize, quantized, *parameters, 0, low, high, torch.int8)


def _constant_value(module: fx.GraphModule, value: Any) -> Any:
    """Return the tensor of a constant's node, or a number unchanged."""
    return getattr(module, str(value.target)) if isinstance(value, fx.Node) else value


def _new_constant(module: fx.GraphModule, node: fx.Node, label: str, value: torch.Tensor) -> fx.Node:
    name = f"{node.name}_{label}"
    module.register_buffer(name, value)
    with module.graph.inserting_before(next(iter(module.graph.nodes))):
        return module.graph.get_attr(name)


def _call_before(node: fx.Node, target: Any, *args: Any) -> fx.Node:
    with node.graph.inserting_before(node):
        made = node.graph.call_function(target, args)
    set_info(made, origin=origin(node))
    return made


INDUCTOR_PASSES: tuple[Callable[[fx.GraphModule], None], ...] = (
    use_unsigned_activations,  # first: all others see uint8 activations
    scale_tokens_after_linear,  # before the rest: it leaves ordinary layers
    fold_image_zero_points,  # before specialize_constants: it changes biases
    remove_qdq_around_data_movement,  # before clamp_narrow_ranges: it compares quantization parameters
    clamp_narrow_ranges,
    subtract_negated_inputs,  # before specialize_constants: a bias that is still dequantized is not a constant operand
    specialize_constants,  # last: only now the int8 layers are known
)
