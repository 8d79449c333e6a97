"""Lower operators on quantized values without an accumulator: elementwise, data movement, attention, user-defined."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch import fx

from intaglio import numerics
from intaglio.errors import UnsupportedError
from intaglio.fxgraph.node_info import known_type, origin
from intaglio.fxgraph.nodes import call_of, is_constant, known_operands, operands, operator
from intaglio.ir import Attrs, DType, Origin, TensorType
from intaglio.lower.graph_builder import GraphBuilder, flat_f32
from intaglio.quant.qdq.integer_regions import IntegerRegion


def lower_mul(builder: GraphBuilder, region: IntegerRegion, stem: str, result: TensorType, low: int, high: int) -> str:
    """Lower a multiplication of two quantized values."""
    names = [builder.values[value] for value in operands(region.anchor)]
    unit = numerics.accumulator_scale(*[builder.types[name].qparams.step for name in names])
    factor = builder.add_constant(f"{stem}_factor", flat_f32(numerics.multiplier(unit, result.qparams.step)), DType.F32)
    return builder.add_op("mul", [*names, factor], f"{stem}_mul", result, origin(region.anchor), low=low, high=high)


def lower_affine(
    builder: GraphBuilder, region: IntegerRegion, stem: str, result: TensorType, low: int, high: int
) -> str:
    """Lower a scale and shift per channel, folded with the scales of input and result."""
    x, scale, shift = known_operands(region.anchor)
    values = [getattr(builder.module, node.target).numpy().astype(np.float64).ravel() for node in (scale, shift)]
    step_x, step_y = builder.types[builder.values[x]].qparams.step, result.qparams.step
    factors = ((values[0] * step_x / step_y).astype(np.float32), (values[1] / step_y).astype(np.float32))
    names = [
        builder.add_constant(f"{stem}_{label}", factor, DType.F32)
        for label, factor in zip(("factor", "offset"), factors, strict=True)
    ]
    inputs, attrs = [builder.values[x], *names], region.record.bind(call_of(region.anchor, region.record))
    return builder.add_op(
        "affine", inputs, f"{stem}_affine", result, origin(region.anchor), **attrs, low=low, high=high
    )


def lower_cat(builder: GraphBuilder, region: IntegerRegion, stem: str, result: TensorType) -> str:
    """Lower a concatenation. Operands with other parameters than the result are requantized by a lookup table.

    Our annotation makes them share parameters, so this only happens for graphs that were quantized elsewhere.
    """
    node, names = region.anchor, []
    for value in operands(node):
        kind = builder.types[builder.values[value]]
        names.append(builder.values[value])
        if kind.qparams != result.qparams:
            names[-1] = builder.requantized(names[-1], result.qparams, origin(node))
    attrs = region.record.bind(call_of(node, region.record))
    return builder.add_op("cat", names, f"{stem}_cat", result, origin(node), **attrs)


def lower_host(builder: GraphBuilder, region: IntegerRegion, stem: str, result: TensorType) -> str:
    """Lower a user-defined operator, with quantized activations and float constants."""
    record, names = region.record, []
    for index, node in enumerate(region.operands()):
        if index in record.roles.x:
            names.append(builder.values[node])
        elif node is not None:
            array = getattr(builder.module, node.target).detach().numpy()
            names.append(builder.add_constant(f"{stem}_{record.operands[index]}", array, DType.F32))
    builder.hosts[record.name] = record
    attrs: dict[str, Any] = {"key": f"host{sum(op.is_host for op in builder.ops)}", "operator": record.name}
    return builder.add_op(
        "host", names, f"{stem}_{record.name}", result, region_origin(region), **region.attrs(), **attrs
    )


def lower_attention(builder: GraphBuilder, region: IntegerRegion, stem: str, result: TensorType) -> str:
    """Lower attention with quantized queries, keys and values. The mask keeps its data type."""
    *qkv, mask = (*region.operands(), None)[:4]
    names = [builder.values[value] for value in qkv]
    if mask is not None and is_constant(mask):
        array = getattr(builder.module, mask.target).detach().numpy()
        names.append(builder.add_constant(f"{stem}_mask", array, known_type(mask).dtype))
    elif mask is not None:
        names.append(builder.float_value(mask))
    return builder.add_op("attention", names, f"{stem}_attention", result, origin(region.root), **region.attrs())


def lower_single(builder: GraphBuilder, region: IntegerRegion, x: str, stem: str, result: TensorType) -> str:
    """Lower an elementwise function to a lookup table, or a pool or data movement to its operator."""
    node, record = region.anchor, region.record
    attrs, inputs = record.bind(call_of(node, record)), [x]
    if (function := record.function) is not None:
        ends = builder.types[x].qparams, result.qparams
        table = numerics.function_lut(lambda real: _checked(function, real, attrs, node, record.name), *ends)
        lut = builder.add_constant(f"{stem}_{record.name}_levels", table, DType.U8)
        return builder.add_op("table", [x, lut], f"{stem}_{record.name}", result, origin(node))
    arrays: Mapping[str, np.ndarray] = {}
    if record.constants is not None:
        given = [None if value is None else _constant(builder, value) for value in operands(node)[1:]]
        kind = builder.types[x]
        arrays, attrs = record.constants(attrs, kind.shape, given, kind.qparams.step, result.qparams.step)
    for label, array in arrays.items():
        dtype = DType.F32 if array.dtype == np.float32 else DType.I32
        inputs.append(builder.add_constant(f"{stem}_{label}", array, dtype))
    return builder.add_op(record.name, inputs, f"{stem}_{record.name}", result, origin(node), **attrs)


def _checked(
    function: Callable[[np.ndarray, Attrs], np.ndarray], values: np.ndarray, attrs: Attrs, node: fx.Node, name: str
) -> np.ndarray:
    """Return what the function of a record computes; it may be one of the user.

    Raises:
        UnsupportedError: it raises an error, or returns values of another shape or NaN only.
    """
    try:
        found = np.asarray(function(values, attrs), np.float64)
    except Exception as error:
        problem = f"the function of its record raises {type(error).__name__}: {error}"
        raise UnsupportedError(origin(node).path, name, problem, remedy=FUNCTION_OF_RECORD) from error
    if found.shape != values.shape or np.isnan(found).all():
        returned = "NaN for all values" if found.shape == values.shape else f"the shape {list(found.shape)}"
        problem = f"the function of its record returns {returned} for values of shape {list(values.shape)}"
        raise UnsupportedError(origin(node).path, name, problem, remedy=FUNCTION_OF_RECORD)
    return found


FUNCTION_OF_RECORD = (
    "give OpDef(function=...) a function of (values, attrs) that returns a number for each of the values"
)


def _constant(builder: GraphBuilder, node: fx.Node) -> np.ndarray:
    return getattr(builder.module, str(node.target)).numpy().astype(np.float64)


def region_origin(region: IntegerRegion) -> Origin:
    """Return the origin of a region: module and source line of the anchor, with the operators of the entire chain."""
    anchor = origin(region.anchor)
    return Origin(anchor.path, " + ".join(operator(node).split(".")[1] for node in region.nodes), anchor.source)
