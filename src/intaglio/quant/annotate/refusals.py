"""Reasons why operators stay in float, and the multiply-accumulates that they compute."""

from __future__ import annotations

import operator as python_operator
import re
from collections.abc import Iterable, Mapping

from torch import fx

from intaglio.fxgraph.float_forms import has_float_form
from intaglio.fxgraph.node_info import fixed_size, info, origin, size_in_example, tensor_type
from intaglio.fxgraph.nodes import activations, arguments, call_of, is_constant, operands, operator, record_of
from intaglio.fxgraph.passes.batch_norm_folding import BATCH_NORM
from intaglio.ir import Dim, DType
from intaglio.ops import BY_TARGET, OpDef
from intaglio.ops.direct.hadamard_blocks import HADAMARD_TARGET
from intaglio.ops.dynamic_quant import ROW_MODES
from intaglio.quant.annotate.embedding_tables import EMBEDDING_BAG_TARGETS, EmbeddingTable, bag_refusal
from intaglio.quant.annotate.per_token import dynamic_refusal
from intaglio.quant.annotate.recurrent_sites import (
    RECURRENT_CALL,
    ZERO_STATE_TARGETS,
    has_recurrent_weights,
    recurrent_macs,
    recurrent_refusal,
)
from intaglio.quant.annotate.regions import Region
from intaglio.quant.annotate.sites import Skip
from intaglio.quant.imported_weights.group_operator import grouped_weight
from intaglio.quant.recipes.choices import ActivationMode, ResidualType
from intaglio.quant.recipes.settings import Setting
from intaglio.quant.recipes.user_patterns import is_host
from intaglio.tracing.loops.while_loops import WhileLoop

FLOAT_ACTIVATIONS = "the recipe leaves activations in float"
FLOAT_BETWEEN_PRODUCTS = "the recipe leaves operators between matrix products in float"
READS_INPUT = "it reads a float input or buffer of the model"
READS_FLOAT = "it reads the result of a float operator"
QUANTIZED_ALREADY = "the model, or the callback of a pattern, has quantized its weight"
OTHER_NUMBERS = "its result is complex, or has another type that no kernel computes with"
NOT_FLOAT32 = "its result is not a float32 tensor"
CHECK_RECIPE = "check the recipe, and that the model has convolutions or linear layers with float32 weights"
USE_FLOAT32 = "convert the model with model.float(), and the data with .to(torch.float32)"
USE_BATCHES = "pass batches, of a data set for example with torch.utils.data.DataLoader(data, batch_size=8)"


def remedy_of_reasons(reasons: str) -> str:
    """Return what can be done about a model in which nothing is quantized, for these reasons."""
    if f"{NOT_FLOAT32} but {DType.F64}" in reasons:
        return USE_FLOAT32
    unbatched = re.search(r"conv(\d)d\.\w+\): the input has (\d) axes", reasons)
    if unbatched is not None and int(unbatched[2]) == int(unbatched[1]) + 1:
        return USE_BATCHES
    return CHECK_RECIPE


def refusal(node: fx.Node, setting: Setting) -> str | None:
    """Return why an operator stays in float under a setting; ``None`` if it can be quantized."""
    record = record_of(node)
    if operator(node) == BATCH_NORM or operator(node).startswith(BATCH_STATISTICS):
        return "the statistics or parameters of this batch norm are computed while the model runs"
    if operator(node) in EMBEDDING_BAG_TARGETS:
        return bag_refusal(node) or "its table stays in float"
    if isinstance(node.target, WhileLoop):
        return "the loop runs in Python while its condition holds; its body is a program of its own"
    if record is None:
        return "no int8 kernel for this operator"
    if record.recurrent and setting.quantize:
        return recurrent_refusal(node, setting)
    kind = tensor_type(node)
    if kind is not None and kind.dtype is DType.OTHER:
        return OTHER_NUMBERS
    if kind is None or kind.dtype is not DType.F32:
        return NOT_FLOAT32 + ("" if kind is None else f" but {kind.dtype}")
    if imported := _imported_weight(node, record):
        return f"weight-only quantization ({imported}, as imported): activations stay in float"
    if not setting.quantize:
        return "the recipe leaves it in float"
    if (reason := info(node).float_reason) is not None:
        return reason
    if setting.activations in ROW_MODES and (reason := dynamic_refusal(record, setting)) is not None:
        return reason
    if setting.activations == ActivationMode.FLOAT:
        own = record.roles.weight is not None
        return (
            f"weight-only quantization ({setting.weight.name}): activations stay in float" if own else FLOAT_ACTIVATIONS
        )
    behind = record.anchor or record.shares_qparams or _may_follow_product(node, record)
    if setting.residual == ResidualType.FLOAT and not behind:
        return FLOAT_BETWEEN_PRODUCTS
    if record.roles.weight is not None and _is_dequantized(operands(node)[record.roles.weight]):
        return QUANTIZED_ALREADY
    values = activations(node)
    if any(value is not None and is_constant(value) for value in values):
        return "one of its operands is a constant"
    if not values or values[0] is None:
        return "its operand is not a tensor"
    if is_host(record):
        others = [value for i, value in enumerate(operands(node)) if i not in record.roles.x and value is not None]
        if None in values or any(not is_constant(value) for value in others):
            return "an operand is computed while the model runs, but its record does not list it as an activation"
        if any(info(value).zero_points is not None for value in values):
            return "it reads an image, whose channels have a scale and a zero point each"
    return record.check(call_of(node, record))


def _imported_weight(node: fx.Node, record: OpDef) -> str | None:
    """Return the kind of weight that a layer has if another tool quantized it and it is computed with in float32."""
    weight = None if record.roles.weight is None else operands(node)[record.roles.weight]
    if weight is None or (grouped := grouped_weight(weight)) is None:
        return None
    return "s8" if fixed_size(grouped[1], 2) == 1 else f"s8 in groups of {grouped[2]}"


def _is_dequantized(value: fx.Node | None) -> bool:
    return value is not None and operator(value).startswith("quantized_decomposed.dequantize")


def divisor_refusal(node: fx.Node, module: fx.GraphModule) -> str | None:
    """Return why a divisor, or the operand of a root or logarithm, stays in float; ``None`` for other results.

    The kernels of anchors, such as convolutions, round their results all the same. Data movement follows what it reads.
    """
    record = record_of(node)
    if record is None or record.anchor or record.moves_data:
        return None
    if not _is_divisor(node) or not has_float_form(node, module):
        return None
    return "small values of a divisor, or of the operand of a root or logarithm, must not be rounded to zero"


def _is_divisor(node: fx.Node) -> bool:
    """Return whether an operator divides by a value, or takes its root or logarithm, also behind data movement."""
    for user in node.users:
        record = BY_TARGET.get(operator(user))
        if record is None:
            continue
        place = record.steep(arguments(user))
        if (record.moves_data and _is_divisor(user)) or (place is not None and operands(user, record)[place] is node):
            return True
    return False


def _may_follow_product(node: fx.Node, record: OpDef) -> bool:
    """Return whether an operator may run in the epilogue of the product in front of it."""
    source = next(iter(operands(node)), None)
    before = record_of(source) if source is not None and len(source.users) == 1 else None
    scaled = before is not None and before.accumulates and before.multiplies_activations
    return record.computes_on_accumulator or (scaled and record.multiplies_by_scalar)


def reasons_beside(
    found: Iterable[Region], quantized: Iterable[Region], reasons: Mapping[fx.Node, str | None]
) -> dict[fx.Node, str]:
    """Return why operators that can be quantized stay in float: their operands or their readers do.

    Args:
        found: all regions that could be quantized.
        quantized: those that are.
        reasons: the reasons known so far.
    """
    quantized = list(quantized)
    rounded = {region.root for region in quantized if not region.returns_float}
    inside = {node for region in quantized for node in region.computed}
    found = list(found)
    matched = {node for region in found for node in region.nodes}
    beside = {
        node: FLOAT_BETWEEN_PRODUCTS for node, reason in reasons.items() if reason is None and node not in matched
    }
    for region in found:
        reads = [value for value in region.activations() if value not in rounded]
        if region.shares_qparams and region.setting.residual == ResidualType.FLOAT:
            reason = FLOAT_BETWEEN_PRODUCTS
        elif reads:
            reason = READS_INPUT if reads[0].op == "placeholder" else READS_FLOAT
        else:
            continue
        beside.update({node: reason for node in region.nodes if node not in inside and reasons[node] is None})
    return {node: reason for node, reason in beside.items() if not _is_batch_norm(node)}


def skipped(
    regions: Iterable[Region], tables: Iterable[EmbeddingTable], reasons: Mapping[fx.Node, str | None]
) -> tuple[Skip, ...]:
    """Return the operators that stay in float, with reasons; those without a reason get a default."""
    taken = {node for region in regions for node in region.computed}
    taken |= {table.node for table in tables if table.is_quantized}
    return tuple(_skip(node, reason) for node, reason in reasons.items() if node not in taken and _counts(node))


def macs(node: fx.Node) -> int:
    """Return the multiply-accumulates of an operator, quantized or not; 0 for one that multiplies nothing.

    The batch is 1, and other free dimensions have their size in the example.
    """
    return size_in_example(_macs(node), node)


def _macs(node: fx.Node) -> Dim:
    """Return the multiply-accumulates of an operator, which may depend on free dimensions."""
    if has_recurrent_weights(node) or operator(node) == RECURRENT_CALL:
        return recurrent_macs(node)
    record = BY_TARGET.get(operator(node))
    if record is None or record.macs is None or tensor_type(node) is None:
        return 0
    call = call_of(node, record)
    if None in call.shapes[:2]:
        return 0
    return record.macs(call.arguments, [shape or () for shape in call.shapes], call.result)


def _counts(node: fx.Node) -> bool:
    """Return whether a float operator is reported: it computes a tensor of floating-point or complex numbers.

    All-zero initial states of recurrent layers are not reported.
    """
    kind = tensor_type(node)
    if operator(node) in ZERO_STATE_TARGETS and node.users and all(map(has_recurrent_weights, node.users)):
        return False
    if node.target is python_operator.getitem or info(node).dim is not None:
        return False
    if is_added_cast(node) or operator(node) == HADAMARD_TARGET:
        return False  # It is not an operator of the model.
    if operator(node).startswith("quantized_decomposed.") or grouped_weight(node):
        return False  # The node is part of the model's own quantization.
    return kind is None or kind.dtype in (DType.F32, DType.F64, DType.F16, DType.BF16, DType.OTHER)


def is_added_cast(node: fx.Node) -> bool:
    """Return whether capture added a cast to or from half precision, which is not an operator of the model."""
    if operator(node) != "aten._to_copy.default":
        return False
    where = origin(node)
    return not where.operator or (where.operator != operator(node) and where == origin(node.args[0]))


def _is_batch_norm(node: fx.Node) -> bool:
    """Return whether a node computes a part of a batch norm of the model."""
    return "batch_norm" in origin(node).operator


def _skip(node: fx.Node, reason: str | None) -> Skip:
    default = UNFOLDED_NORM if _is_batch_norm(node) else "no operator next to it is quantized"
    return Skip(node.name, reason or default, origin(node), macs(node))


BATCH_STATISTICS = "aten._native_batch_norm_legit."
"""Prefix of the operators that normalize with statistics of the batch."""

UNFOLDED_NORM = (
    "this batch norm cannot be folded: no convolution is next to it, or the convolution pads or has other readers"
)
