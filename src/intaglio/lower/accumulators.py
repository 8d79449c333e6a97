"""Lower matrix products, and the sums and functions that consume their accumulators."""

from __future__ import annotations

import numpy as np
from torch import fx

from intaglio import numerics
from intaglio.fxgraph.node_info import known_type, origin
from intaglio.fxgraph.nodes import (
    arguments,
    call_of,
    is_constant,
    known_operands,
    known_record,
    layer_operands,
    operands,
)
from intaglio.ir import DType, Origin, QParams, TensorType
from intaglio.lower.graph_builder import GraphBuilder, flat_f32
from intaglio.ops.products.conv import output_axis
from intaglio.ops.products.grouped_linear import group_accumulator_qparams
from intaglio.quant.annotate.regions import Chain
from intaglio.quant.qdq.integer_regions import IntegerRegion, dequantized_constant, dequantized_qparams
from intaglio.quant.qdq.qparams import scale_per_output, weight_outputs_first


def lower_anchor(builder: GraphBuilder, region: IntegerRegion, stem: str) -> str:
    """Lower a convolution or linear layer to an int32 accumulator. Return the name of the accumulator.

    The weight gets its output channels as the first axis. The scale of the accumulator is scale_x * scale_w.
    """
    node, record = region.anchor, region.record
    given = layer_operands(node)
    x, (weight, scales) = builder.values[given.x], add_anchor_weight(builder, region)
    unit = tuple(map(float, numerics.accumulator_scale(builder.types[x].qparams.step, scales)))
    axis = None if len(unit) == 1 else output_axis(record.name, len(known_type(node).shape))
    plain = QParams(unit, (0,) * len(unit), -(2**31), 2**31 - 1, axis)
    acc_q = group_accumulator_qparams(unit) if record.row_groups else plain
    bias = dequantized_constant(given.bias, DType.I32)
    outputs = builder.constants[weight].shape[0]
    steps = np.zeros(outputs, np.int32) if bias is None else getattr(builder.module, bias.target).numpy()
    operand_names = [x, weight, builder.add_constant(f"{stem}_bias", steps, DType.I32)]
    operand_names += ends_of_groups(builder, node)
    attrs = record.bind(call_of(node, record))
    result = TensorType(known_type(node).shape, DType.I32, acc_q)
    return builder.add_op(record.name, operand_names, f"{stem}_acc", result, origin(node), **attrs)


def ends_of_groups(builder: GraphBuilder, node: fx.Node) -> list[str]:
    """Return the value with the ends of the groups of rows; an empty list for a layer with one weight."""
    if not known_record(node).row_groups:
        return []
    ends = operands(node)[-1]
    assert ends is not None, f"{node} has no ends of groups"
    return [builder.add_parameter(ends) if is_constant(ends) else builder.float_value(ends)]


def add_anchor_weight(builder: GraphBuilder, region: Chain) -> tuple[str, tuple[float, ...]]:
    """Add the constant s8 weight of an anchor, with output channels as the first axis.

    Returns:
        Name of the constant, and its scales: one, or one per output channel.
    """
    node = layer_operands(region.anchor).weight
    weight = dequantized_constant(node, DType.S8)
    assert weight is not None, f"the weight of {region.anchor} is not in integers"
    quantized, scales = (
        weight_outputs_first(region, getattr(builder.module, weight.target).numpy()),
        builder.scales_of(node),
    )
    scales = scales if len(scales) == 1 else tuple(map(float, scale_per_output(scales, len(quantized))))
    q = QParams(scales, (0,) * len(scales), -128, 127, 0 if len(scales) > 1 else None)
    return builder.add_weight(weight, quantized, q), scales


def lower_bmm(builder: GraphBuilder, region: IntegerRegion, stem: str) -> str:
    """Lower a batched GEMM of two activations to an int32 accumulator. Return the name of the accumulator.

    Multiplications and divisions by a number after it are folded into the scale of the accumulator.
    """
    names = [builder.values[value] for value in region.operands()]
    unit = float(numerics.accumulator_scale(*[builder.types[name].qparams.step for name in names]))
    for node in region.nodes[1:]:
        number = float(arguments(node)["other"])
        unit = unit * number if known_record(node).name == "mul_number" else unit / number
    kind = TensorType(known_type(region.anchor).shape, DType.I32, QParams((unit,), (0,), -(2**31), 2**31 - 1))
    return builder.add_op("bmm", names, f"{stem}_acc", kind, origin(region.anchor))


def lower_add(
    builder: GraphBuilder,
    node: fx.Node,
    region: IntegerRegion,
    current: str,
    stem: str,
    result: TensorType,
    low: int,
    high: int,
) -> str:
    """Lower an add. Return the name of the result.

    The accumulator, or else the first operand, becomes the first input. `alpha`, or the factor of each channel,
    multiplies the operand that is the second one in the model.
    """
    record = known_record(node)
    attrs = {"low": low, "high": high}
    left, right, *factor = known_operands(node)
    other = right if left in region.nodes or region.record.adds else left
    rest = [builder.low_bytes[builder.values[other]]] if dequantized_qparams(other, DType.U16) else []
    if factor:
        alpha = getattr(builder.module, factor[0].target).numpy().astype(np.float64).ravel()
        attrs |= record.bind(call_of(node, record))
    else:
        alpha = record.bind(call_of(node, record))["alpha"]
    if other is right:
        a, b = (current if left in region.nodes else builder.values[left]), builder.values[right]
        alphas = 1.0, alpha
    else:
        a, b, alphas = current, builder.values[left], (alpha, 1.0)
    scale_y, names = (region.result_16bit or result.qparams).step, []
    for value, weight, label in zip((a, *(rest or [b])), alphas, "ab", strict=True):
        unit = np.array(builder.types[value].qparams.scales, np.float64) * weight
        names.append(
            builder.add_constant(f"{stem}_factor_{label}", flat_f32(numerics.multiplier(unit, scale_y)), DType.F32)
        )
    return builder.add_op(
        "add", [a, b, *names, *rest], f"{stem}_add", result, origin(node), low_byte_qparams(region), **attrs
    )


def lower_activate(
    builder: GraphBuilder, node: fx.Node, scaled: fx.Node | None, acc: str, stem: str, result: TensorType, where: Origin
) -> str:
    """Lower a function that is computed in float on an accumulator, optionally times a factor per channel.

    The function is applied to the dequantized accumulator, and its result is quantized.
    """
    record = known_record(node)
    assert record.precise is not None, f"{record.name} has no precise form"
    names = [
        acc,
        builder.add_constant(f"{stem}_unit", flat_f32(np.array(builder.types[acc].qparams.scales)), DType.F32),
    ]
    if scaled is not None:
        gain = getattr(builder.module, known_operands(scaled)[1].target).numpy()
        names.append(builder.add_constant(f"{stem}_gain", flat_f32(gain), DType.F32))
    attrs = record.precise(record.bind(call_of(node, record)))
    return builder.add_op("activate", names, stem, result, where, **attrs)


def elementwise_function_of(region: IntegerRegion) -> fx.Node | None:
    """Return the elementwise function that follows the anchor, or None."""
    return next((node for node in region.nodes if known_record(node).function is not None), None)


def low_byte_qparams(region: IntegerRegion) -> QParams | None:
    """Return the parameters of a region's second result, or None if its result has only 8 bits.

    A 16-bit result is `255 * q + rest`, see `numerics.widen_to_16bit`. The second result holds the rest.
    """
    if region.result_16bit is None:
        return None
    return QParams(region.result_16bit.scale, (numerics.QUANT_STEPS // 2,), 0, numerics.QUANT_STEPS - 1)
