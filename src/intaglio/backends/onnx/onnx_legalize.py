"""Legalization of a reference for ONNX: passes over a copy of its graph, after which ONNX has every operator.

The functions that passes insert as operators are defined in this file; the exporter traces through them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import fx

from intaglio import numerics
from intaglio.backends.channel_zero_points import accept_bytes, fold_zero_points
from intaglio.fxgraph.graph_checker import BACKEND_GRAPH, finish_pass
from intaglio.fxgraph.graph_passes import copy_graph
from intaglio.fxgraph.node_info import constant_path, known_type, update_info
from intaglio.fxgraph.nodes import arguments, call_before, constant_node, is_constant, operator, replace_node
from intaglio.fxgraph.overloads import EMBEDDING_TARGET, LINEAR_TARGET
from intaglio.ir import DType, TensorType
from intaglio.quant.annotate.embedding_tables import table_operands
from intaglio.quant.annotate.per_token import DEQUANTIZE_ROWS_TARGET, QUANTIZE_ROWS_TARGET, dynamic_operands
from intaglio.quant.annotate.recurrent_sites import RECURRENT_CALL
from intaglio.quant.imported_weights.group_operator import dequantize_groups, grouped_weight
from intaglio.quant.qdq.qdq_normalize import DEQUANTIZE_CHANNEL, QUANTIZE_CHANNEL
from intaglio.runtime.saved.bit_packing import pack, unpack_bits
from intaglio.torch_private import quantized_decomposed

PER_CHANNEL = (
    QUANTIZE_CHANNEL,
    DEQUANTIZE_CHANNEL,
    "intaglio.quantize_per_channel.default",
    "intaglio.dequantize_per_channel.default",
)


def legalize(module: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of a reference's graph after `ONNX_PASSES`. Nodes keep their types and origins."""
    copied = copy_graph(module)
    for rewrite in ONNX_PASSES:
        for node in list(copied.graph.nodes):
            rewrite(copied, node)
        finish_pass(copied, rewrite.__name__, BACKEND_GRAPH)
    copied.recompile()
    return copied


# ---- per-token dynamic quantization --------------------------------------------------------------------------------


def legalize_token_linear(module: fx.GraphModule, node: fx.Node) -> None:
    """Rewrite a linear layer with per-token quantized input as an integer product, scaled by token and by output
    channel.

    QuantizeLinear accepts no scales that are computed at run time for each token. MatMulInteger and the two factors are
    what engines run in int8.
    """
    if operator(node) != LINEAR_TARGET:
        return
    rows, (_, weight, *bias) = dynamic_operands(node.args[0]), node.args
    if rows is None or operator(weight) != DEQUANTIZE_CHANNEL:
        return
    quantized, scales = weight.args[:2]
    columns = transposed(module, quantized)
    made = call_before(node, known_type(node), token_linear, *rows, columns, scales, *bias)
    replace_node(node, made)


def token_linear(
    x: torch.Tensor,
    row_scales: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the per-token quantized linear layer in the order of operations of `numerics.dequantize_rows`.

    Args:
        x: u8[..., k], quantized values with zero point `numerics.ROW_ZERO`.
        row_scales: f32[..., 1], scale of each token.
        weight: s8[k, n].
        scales: f32[n], scales of the weight.
        bias: f32[n].

    Returns:
        f32[..., n].
    """
    zero = torch.full((), numerics.ROW_ZERO, dtype=torch.uint8)
    shape = (*x.shape[:-1], weight.shape[1])
    acc = torch.onnx.ops.symbolic("MatMulInteger", (x, weight, zero), dtype=torch.int32, shape=shape)
    real = acc.to(torch.float32) * row_scales * scales
    return real if bias is None else real + bias


def legalize_token_qdq(module: fx.GraphModule, node: fx.Node) -> None:
    """Replace per-token quantize and dequantize by arithmetic."""
    meaning = {QUANTIZE_ROWS_TARGET: quantize_tokens, DEQUANTIZE_ROWS_TARGET: dequantize_tokens}.get(operator(node))
    if meaning is not None:
        node.target = meaning


def quantize_tokens(x: torch.Tensor, mode: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize per token, or per sample with mode "tensor", like `ops.dynamic_quant.quantize_dynamic`, except for
    values that are not finite."""
    peaks = x.abs().amax(list(range(1, x.dim())) if mode == "tensor" and x.dim() > 2 else [-1], keepdim=True)
    peaks = peaks.expand(*x.shape[:-1], 1).clamp_min(float(numerics.MIN_ROW_ABSMAX))
    most = float(numerics.ROW_STEPS)
    steps = numerics.round_clamp(x * (most / peaks), -most, most) + numerics.ROW_ZERO
    return steps.to(torch.uint8), peaks / most


def dequantize_tokens(quantized: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Dequantize per-token quantized values."""
    return (quantized.to(torch.float32) - numerics.ROW_ZERO) * scales


# ---- sorts, embeddings, recurrent layers ----------------------------------------------------------------------------


def legalize_sort(module: fx.GraphModule, node: fx.Node) -> None:
    """Replace a stable argsort by TopK of all elements, which puts equal elements in the order of their indices."""
    if operator(node) == "aten.argsort.stable":
        node.target = sorted_places


def sorted_places(x: torch.Tensor, *, stable: bool, dim: int, descending: bool) -> torch.Tensor:
    """Return the places of the elements along an axis in ascending or descending order."""
    keys = x.to(torch.int64) if x.dtype is torch.bool else x
    return keys.topk(x.shape[dim], dim, descending)[1]


def gather_quantized_embedding(module: fx.GraphModule, node: fx.Node) -> None:
    """Gather rows of a quantized embedding table before dequantizing them, so that the table stays quantized in the
    file. Its zero points are not integers, which DequantizeLinear does not support."""
    if operator(node) == EMBEDDING_TARGET and (table := table_operands(node.args[0])) is not None:
        replace_node(node, call_before(node, known_type(node), embedding_rows, *table, node.args[1]))
        return
    table, alone = table_operands(node), all(operator(user) == EMBEDDING_TARGET for user in node.users)
    if table is not None and not alone and known_type(table[2]).dtype is DType.F32:
        replace_node(node, call_before(node, known_type(node), dequantized_table, *table))


def embedding_rows(
    quantized: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """Return the dequantized rows of an embedding table for ``ids``, f32[..., d]."""
    gathered = (torch.nn.functional.embedding(ids, part) for part in (quantized, zeros[:, None], scales[:, None]))
    rows, zero, scale = gathered
    return (rows.to(torch.float32) - zero) * scale


def dequantized_table(quantized: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    """Return a whole embedding table dequantized, f32[n, d]."""
    return (quantized.to(torch.float32) - zeros[:, None]) * scales[:, None]


def legalize_recurrent(module: fx.GraphModule, node: fx.Node) -> None:
    """Replace a quantized recurrent layer by PyTorch's own on dequantized values; ONNX has no quantized ones."""
    if operator(node) == RECURRENT_CALL:
        node.target = float_recurrent


def float_recurrent(
    kind: str,
    quantized: torch.Tensor,
    scales: torch.Tensor | None,
    scale: float,
    zero: int,
    constants: list[torch.Tensor],
    states: list[torch.Tensor],
    layers: int,
    directions: int,
    batch_first: bool,
    cell: bool,
) -> tuple[torch.Tensor, ...]:
    """Compute a recurrent layer like `ops.products.recurrent.recurrent_reference`, except that hidden states are not
    rounded."""
    if scales is not None:
        x = dequantize_tokens(quantized, scales)
    else:
        x = quantized_decomposed().dequantize_per_tensor.default(quantized, scale, zero, 0, 255, torch.uint8)
    x = x[None] if cell else x
    parameters = []
    for i in range(0, len(constants), 6):
        w_x, w_h, s_x, s_h, b_x, b_h = constants[i : i + 6]
        parameters += [_dequantize_channels(w_x, s_x), _dequantize_channels(w_h, s_h), b_x, b_h]
    hidden, batch = constants[1].shape[1], x.shape[0] if batch_first and not cell else x.shape[1]
    if states:
        given = [state[None] for state in states] if cell else list(states)
    else:
        given = [x.new_zeros(layers * directions, batch, hidden)] * (2 if kind == "lstm" else 1)
    fixed = (True, layers, 0.0, False, directions == 2, batch_first and not cell)
    if kind == "lstm":
        y, *finals = torch.ops.aten.lstm.input(x, given, parameters, *fixed)
    else:
        y, *finals = getattr(torch.ops.aten, kind).input(x, given[0], parameters, *fixed)
    return tuple(state[0] for state in finals) if cell else (y, *finals)


def _dequantize_channels(quantized: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return quantized_decomposed().dequantize_per_channel.default(quantized, scales, None, 0, -127, 127, torch.int8)


# ---- products with weights ------------------------------------------------------------------------------------------


def legalize_int4_linear(module: fx.GraphModule, node: fx.Node) -> None:
    """Rewrite a weight-only linear layer of 4 bits or fewer with an int4[k, n] weight and a scale for every group.

    With a quantized input such a weight stays int8, quantized value times multiple: kernels of both engines multiply 8
    bits by 8 bits, and would dequantize a 4-bit weight and multiply in float.
    """
    if operator(node) != LINEAR_TARGET or operator(node.args[1]) != DEQUANTIZE_CHANNEL:
        return
    (x, _, *bias), dequantized = node.args, node.args[1].args
    packing = known_type(dequantized[0]).packing if is_constant(dequantized[0]) else None
    if packing is None or operator(x).startswith("quantized_decomposed.dequantize"):
        return
    stored = _tensor(module, dequantized[0]).numpy()
    packed = pack(stored, packing)
    rows, depth = stored.shape
    group = min(packing.group, depth) if packing.group else depth
    if packed is None or depth % group:
        return
    quantized = unpack_bits(packed[0], packing.bits, stored.size).astype(np.int8) + np.int8(packing.low)
    multiples = np.ones((rows, depth // group), np.float32)
    if packing.group:
        multiples = unpack_bits(packed[1], 4, multiples.size).reshape(multiples.shape).astype(np.float32) + 1
    scales = _tensor(module, dequantized[1]).numpy()[:, None] * multiples
    name = f"{dequantized[0].target}_int4"
    path = constant_path(dequantized[0], name)
    held = constant(module, name, quantized.reshape(rows, depth).T, path)
    update_info(held, int4=True)
    steps = constant(module, f"{name}_scale", scales.T, f"{path}:scale")
    made = call_before(node, known_type(node), groupwise_linear, x, held, steps, group, *bias)
    replace_node(node, made)


def legalize_grouped_weight(module: fx.GraphModule, node: fx.Node) -> None:
    """Rewrite an imported weight with scales for groups of inputs.

    DequantizeLinear dequantizes integers of 4 bits in whole groups. Other integers, and offsets, become arithmetic,
    because DequantizeLinear rounds its zero points to integers.
    """
    if (grouped := grouped_weight(node)) is None:
        return
    quantized, steps, group = grouped
    stored, values = _tensor(module, quantized), _tensor(module, steps)
    int4 = bool((stored >= -8).all() and (stored <= 7).all()) and len(values) == 1 and stored.shape[1] % group == 0
    layers = [user for user in node.users if operator(user) == LINEAR_TARGET and user.args[1] is node]
    if not int4 or len(layers) < len(node.users):
        node.target = dequantize_groups
        return
    name, path = f"{quantized.target}_int4", constant_path(quantized, str(quantized.target))
    held = constant(module, name, stored.numpy().T, path)
    update_info(held, int4=True)
    scales = constant(module, f"{name}_scale", values[0].numpy().T, f"{path}:scale")
    for layer in layers:
        x, _, *bias = layer.args
        replace_node(layer, call_before(layer, known_type(layer), groupwise_linear, x, held, scales, group, *bias))


def groupwise_linear(
    x: torch.Tensor, quantized: torch.Tensor, scales: torch.Tensor, group: int, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the weight-only linear layer with one scale for each group of weights.

    Args:
        x: f32[..., k].
        quantized: int4[k, n], the quantized weight.
        scales: f32[k / group, n].
        group: size of a group along k.
        bias: f32[n].

    Returns:
        f32[..., n].
    """
    weight = torch.onnx.ops.symbolic(
        "DequantizeLinear",
        (quantized, scales),
        {"axis": 0, "block_size": group},
        dtype=torch.float32,
        shape=quantized.shape,
        version=21,
    )
    y = torch.matmul(x, weight)
    return y if bias is None else y + bias


def legalize_matrix_linear(module: fx.GraphModule, node: fx.Node) -> None:
    """Rewrite a linear layer with more than two axes as a product with s8[k, n] and a float bias.

    ONNX has Gemm for two axes only, whose bias may be int32. ONNX Runtime runs an integer product before an addition in
    int8, whereas it would compute a Transpose after the weight's dequantize in every call.
    """
    if operator(node) != LINEAR_TARGET or len(known_type(node.args[0]).shape) == 2:
        return
    (x, _, *bias), dequantize = node.args, node.args[1]
    if operator(dequantize) != DEQUANTIZE_CHANNEL or not is_constant(dequantize.args[0]):
        return
    columns = transposed(module, dequantize.args[0])
    args = columns, *dequantize.args[1:3], 1, *dequantize.args[4:]
    kind = TensorType(known_type(columns).shape, DType.F32)
    real = call_before(node, kind, dequantize.target, *args)
    made = call_before(node, known_type(node), torch.matmul, x, real)
    if bias and bias[0] is not None:
        made = call_before(node, known_type(node), torch.ops.aten.add.Tensor, made, _float_bias(module, bias[0]))
    replace_node(node, made)


def _float_bias(module: fx.GraphModule, bias: fx.Node) -> fx.Node:
    """Return a bias as a float constant, dequantized with its scales."""
    if operator(bias) != DEQUANTIZE_CHANNEL or not is_constant(bias.args[0]):
        return bias
    quantized, scales = (_tensor(module, value) for value in bias.args[:2])
    path = constant_path(bias.args[0], str(bias.args[0].target))
    return constant(module, f"{bias.args[0].target}_f32", (quantized.to(torch.float32) * scales).numpy(), path)


def transposed(module: fx.GraphModule, matrix: fx.Node) -> fx.Node:
    """Return a constant [n, k] transposed to [k, n]."""
    path = constant_path(matrix, str(matrix.target))
    return constant(module, f"{matrix.target}_columns", _tensor(module, matrix).numpy().T, path)


# ---- parameters -----------------------------------------------------------------------------------------------------


def cast_zero_points(module: fx.GraphModule, node: fx.Node) -> None:
    """Cast zero points per channel to the element type of the quantized values, as ONNX requires."""
    if operator(node) not in PER_CHANNEL:
        return
    given = arguments(node)
    zeros, dtype = given["zero_points"], given["dtype"]
    if zeros is None or not is_constant(zeros):
        return
    values = _tensor(module, zeros)
    if values.dtype is not dtype:
        name = f"{zeros.target}_{str(dtype).rpartition('.')[2]}"
        typed = constant(module, name, values.to(dtype), constant_path(zeros, name))
        node.update_arg(2, typed)


def constant(module: fx.GraphModule, name: str, values: np.ndarray | torch.Tensor, path: str) -> fx.Node:
    """Return a new node of a constant, which is stored in the module once per name. ``path`` is its name in the
    file."""
    if not hasattr(module, name):
        held = values if isinstance(values, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(values))
        module.register_buffer(name, held)
    return constant_node(module, name, path)


def _tensor(module: fx.GraphModule, node: fx.Node) -> torch.Tensor:
    found: torch.Tensor = getattr(module, str(node.target)).detach()
    return found


ONNX_PASSES: tuple[Callable[[fx.GraphModule, fx.Node], Any], ...] = (
    accept_bytes,  # first: it recognizes images by the quantize that it removes
    fold_zero_points,
    legalize_token_linear,  # before `legalize_token_qdq`, which rewrites the remaining per-token quantizes
    legalize_token_qdq,
    legalize_sort,
    gather_quantized_embedding,
    legalize_recurrent,
    legalize_grouped_weight,
    legalize_int4_linear,  # before `legalize_matrix_linear`, which rewrites the remaining linear layers
    legalize_matrix_linear,
    cast_zero_points,  # last: the other passes create operators with zero points
)
