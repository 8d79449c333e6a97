"""Lower a region between dequantize and quantize nodes, or a single quantize node."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import fx

from intaglio import numerics
from intaglio.fxgraph.node_info import info, known_type, origin
from intaglio.fxgraph.nodes import call_of, is_constant, known_record, operands
from intaglio.ir import DType, QParams, TensorType
from intaglio.lower.accumulators import (
    elementwise_function_of,
    ends_of_groups,
    low_byte_qparams,
    lower_activate,
    lower_add,
    lower_anchor,
    lower_bmm,
)
from intaglio.lower.graph_builder import GraphBuilder, flat_f32
from intaglio.lower.integer_operators import (
    lower_affine,
    lower_attention,
    lower_cat,
    lower_host,
    lower_mul,
    lower_single,
    region_origin,
)
from intaglio.quant.qdq.integer_regions import IntegerRegion, image_operands
from intaglio.quant.recipes.user_patterns import is_host


def lower_region(builder: GraphBuilder, region: IntegerRegion) -> None:
    """Lower a region to the operators of the integer graph that compute its result."""
    where, kind = region_origin(region), known_type(region.root)
    stem = where.path.replace("@", "_call") or region.record.name
    if is_host(region.record):
        builder.values[region.root] = lower_host(builder, region, stem, TensorType(kind.shape, DType.U8, region.result))
        return
    if region.record.is_attention:
        attended = TensorType(kind.shape, DType.F32 if region.result is None else DType.U8, region.result)
        builder.values[region.root] = lower_attention(builder, region, stem, attended)
        return
    if region.record.multiplies_weight:
        current = lower_anchor(builder, region, stem)
    elif region.record.accumulates:
        current = lower_bmm(builder, region, stem)
    else:
        current = builder.values[operands(region.anchor)[0]]
    if region.result is None:
        ends, real = ends_of_groups(builder, region.anchor), TensorType(kind.shape, DType.F32)
        name = "dequantize_groups" if ends else "dequantize"
        builder.values[region.root] = builder.add_op(name, [current, *ends], f"{stem}_f32", real, where)
        return
    result, finest = TensorType(kind.shape, DType.U8, region.result), region.result_16bit or region.result
    tail = {known_record(node).name: node for node in region.nodes}
    low, high = _bounds(builder, tail.get("clamp"), finest)
    if (total := next((node for node in region.nodes if known_record(node).adds), None)) is not None:
        name = lower_add(builder, total, region, current, stem, result, low, high)
    elif region.record.multiplies_weight and (function := elementwise_function_of(region)) is not None:
        name = lower_activate(builder, function, tail.get("affine"), current, stem, result, where)
    elif region.record.accumulates:
        acc = builder.types[current].qparams
        factors = flat_f32(numerics.multiplier(acc.scales, finest.step))
        factor = builder.add_constant(f"{stem}_multiplier", factors, DType.F32)
        inputs, rest = [current, factor], low_byte_qparams(region)
        name = builder.add_op("requantize", inputs, stem, result, where, rest, low=low, high=high)
    elif region.record.name == "mul":
        name = lower_mul(builder, region, stem, result, low, high)
    elif region.record.name == "affine":
        name = lower_affine(builder, region, stem, result, low, high)
    elif region.record.variadic:
        name = lower_cat(builder, region, stem, result)
    elif region.record.clamps:
        name = builder.add_op("clamp", [current], f"{stem}_clamp", result, where, low=low, high=high)
    else:
        name = lower_single(builder, region, current, stem, result)
        if region.result_16bit is not None:
            moved = TensorType(kind.shape, DType.U8, low_byte_qparams(region))
            builder.low_bytes[name] = lower_single(builder, region, builder.low_bytes[current], f"{stem}_rest", moved)
    builder.values[region.root] = name


def _bounds(builder: GraphBuilder, node: fx.Node | None, q: QParams) -> tuple[int, int]:
    if node is None:
        return q.qmin, q.qmax
    record = known_record(node)
    attrs = record.bind(call_of(node, record))
    return numerics.clamp_bounds(attrs["low"], attrs["high"], q.step, q.zero, q.qmin, q.qmax)


def quantize_node(builder: GraphBuilder, node: fx.Node, q: QParams) -> None:
    """Lower a quantize node.

    A float value is quantized, and a constant is quantized ahead of time. A quantized value is passed on if its
    parameters are equal, and requantized by a lookup table otherwise.
    """
    if image := image_operands(node):
        _pixels(builder, node, image, q)
        return
    if is_constant(node.args[0]):
        stem = str(node.args[0].target)
        quantized = numerics.quantize(getattr(builder.module, stem).detach(), q.step, q.zero, q.qmin, q.qmax)
        name = builder.values[node] = builder.add_value(f"{stem}_u8", TensorType(quantized.shape, DType.U8, q))
        builder.constants[name] = quantized.astype(np.uint8)
        return
    source = builder.values[node.args[0]]
    kind = builder.types[source]
    result = TensorType(kind.shape, DType.U8, q)
    if kind.q is None:
        if (source, q) not in builder.quantized:
            made = builder.add_op("quantize", [source], f"{source}_u8", result, origin(node))
            builder.quantized[source, q] = made
        builder.values[node] = builder.quantized[source, q]
    elif kind.q == q:
        builder.values[node] = source
    else:
        builder.values[node] = builder.requantized(source, q, origin(node))


def _pixels(builder: GraphBuilder, node: fx.Node, image: tuple[fx.Node, fx.Node, fx.Node], q: QParams) -> None:
    source, names = builder.values[image[0]], []
    for constant, label in zip(image[1:], ("gain", "shift"), strict=True):
        values = getattr(builder.module, constant.target).numpy().reshape(-1)
        names.append(builder.add_constant(f"{source}_{label}", values, DType.F32))
    result = TensorType(builder.types[source].shape, DType.U8, q)
    attrs: dict[str, Any] = {"bytes": True} if info(node.args[0]).takes_bytes else {}
    builder.values[node] = builder.add_op("pixels", [source, *names], f"{source}_u8", result, origin(node), **attrs)
