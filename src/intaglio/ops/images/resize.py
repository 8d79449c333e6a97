"""Upsampling of one to three axes: nearest neighbour, linear and bilinear.

The indices and weights that an output reads are computed once, exactly as torch computes them, and passed to the kernel
as tables. With a free size the operator carries sizes and scale factors instead, and its kernel computes the same
numbers in each call.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from intaglio import numerics
from intaglio.ir import Attrs, Graph, Op, Shape, TensorType
from intaglio.ir.types import F32, I32, U8
from intaglio.ir.verify import TypeRule
from intaglio.ops.images.pool import pixels_to_read
from intaglio.ops.opdef import (
    Call,
    KernelConstants,
    Layout,
    ModelConstants,
    OpDef,
    first_reason,
    rank,
    require_fixed_channels,
    require_float_operands,
)

ONE = np.float32(1)
ONE_HALF = np.float32(0.5)


def bind_resize(call: Call) -> Attrs:
    """Return the sizes of source and result, and torch's ``scale_factors``, one per axis where they are given."""
    given, (sizes, results) = call.arguments, (call.shape()[2:], call.result[2:])
    scales = given.get("scale_factors") or (None,) * len(sizes)
    align = bool(given.get("align_corners", False))
    return {"sizes": tuple(sizes), "results": tuple(results), "scales": tuple(scales), "align": align}


def is_free(attrs: Attrs) -> bool:
    """Return whether a size of source or result is only known in a call."""
    return not all(isinstance(size, int) for size in (*attrs["sizes"], *attrs["results"]))


def require_finite_factors(call: Call) -> str | None:
    """Return why scale factors are refused: they must be positive, finite numbers."""
    scales = [scale for scale in bind_resize(call)["scales"] if scale is not None]
    plain = all(isinstance(scale, (int, float)) and 0 < scale < float("inf") for scale in scales)
    return None if plain else f"the scale factors {scales} are not supported"


def nearest_tables(attrs: Attrs) -> list[np.ndarray]:
    """Return the indices along each axis."""
    axes = zip(attrs["sizes"], attrs["results"], attrs["scales"], strict=True)
    return [nearest(*axis, images=len(attrs["sizes"]) == 2) for axis in axes]


def linear_tables(attrs: Attrs) -> list[np.ndarray]:
    """Return indices and weights along each axis, alternating."""
    axes = zip(attrs["sizes"], attrs["results"], attrs["scales"], strict=True)
    return [table for axis in axes for table in linear(*axis, attrs["align"])]


def nearest_constants(
    attrs: Attrs, shape: Shape, given: ModelConstants, scale_x: float, scale_y: float
) -> KernelConstants:
    """Return the tables, or sizes and factors if a size is only known in a call."""
    return ({}, attrs) if is_free(attrs) else (_labelled(nearest_tables(attrs)), {})


def linear_constants(
    attrs: Attrs, shape: Shape, given: ModelConstants, scale_x: float, scale_y: float
) -> KernelConstants:
    """Return the tables, or sizes and factors if a size is only known in a call, followed by the multiplier."""
    factor = {"factor": np.asarray(numerics.multiplier(scale_x, scale_y), np.float32).reshape(-1)}
    return (factor, attrs) if is_free(attrs) else (_labelled(linear_tables(attrs)) | factor, {})


def _labelled(tables: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    return {f"table{index}": table for index, table in enumerate(tables)}


def nearest(size: int, result: int, scale: float | None, images: bool = False) -> np.ndarray:
    """Return the indices i32[result]: ``min(floor(float32(i) * step), size - 1)``.

    For images, torch copies equal and double sizes one by one and in pairs, regardless of the scale factor.
    """
    index = np.arange(result)
    if images and result in (size, 2 * size):
        return (index * size // result).astype(np.int32)
    return np.minimum(np.floor(index.astype(np.float32) * source_step(size, result, scale)), size - 1).astype(np.int32)


def linear(size: int, result: int, scale: float | None, align: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices i32[result, 2] of the two values that each output interpolates, and their weights f32[result,
    2].
    """
    place = np.arange(result, dtype=np.float32)
    if align:
        place = place * (np.float32(size - 1) / np.float32(result - 1) if result > 1 else np.float32(0))
    elif size != result:
        place = np.maximum(source_step(size, result, scale) * (place + ONE_HALF) - ONE_HALF, np.float32(0))
    below = np.minimum(place.astype(np.int32), size - 1)
    above = below + (below < size - 1)
    rest = np.clip(place - below.astype(np.float32), np.float32(0), ONE)
    return np.stack([below, above], 1).astype(np.int32), np.stack([ONE - rest, rest], 1)


def source_step(size: int, result: int, scale: float | None) -> Any:
    """Return the distance of neighbouring outputs in inputs, from the given scale factor or else from the sizes."""
    return np.float32(1 / scale) if scale else np.float32(size) / np.float32(result)


def resized(attrs: Attrs, shapes: Sequence[Shape]) -> Shape:
    """Return the result's shape of an operator without tables."""
    if shapes[0][2:] != attrs["sizes"]:
        raise ValueError(f"the operator is recorded for sizes {attrs['sizes']}, but its operand has shape {shapes[0]}")
    return (*shapes[0][:2], *attrs["results"])


def nearest_shape(attrs: Attrs, shapes: Sequence[Shape]) -> Shape:
    """Return the shape of the result, from the tables or the attributes."""
    if "results" in attrs:
        return resized(attrs, shapes)
    return (*shapes[0][:2], *(shape[0] for shape in shapes[1:]))


def linear_shape(attrs: Attrs, shapes: Sequence[Shape]) -> Shape:
    """Return the shape of the result, from the tables or the attributes."""
    if "results" in attrs:
        return resized(attrs, shapes)
    return (*shapes[0][:2], *(shape[0] for shape in shapes[1:-1:2]))


def nearest_reference(op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType) -> np.ndarray:
    """Copy the nearest value along each axis."""
    x, *indices = args
    if "results" in op.attrs:
        indices = nearest_tables(op.attrs)
    for axis, index in enumerate(indices, start=2):
        x = x.take(index, axis)
    return x


def linear_reference(op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType) -> np.ndarray:
    """Interpolate in float32 from the last axis to the first, using values less their zero point; then requantize."""
    x, *found, factor = args
    if "results" in op.attrs:
        found = linear_tables(op.attrs)
    value = (x.astype(np.int32) - types[0].qparams.zero).astype(np.float32)
    for axis in reversed(range(2, x.ndim)):
        index, weights = found[2 * (axis - 2) : 2 * (axis - 1)]
        spread = [-1 if i == axis else 1 for i in range(x.ndim)]
        sides = [value.take(index[:, side], axis) * weights[:, side].reshape(spread) for side in (0, 1)]
        value = sides[0] + sides[1]
    q = out.qparams
    return numerics.round_clamp_i32(value * factor.reshape(()), q.zero, q.qmin, q.qmax).astype(np.uint8)


def nearest_types(axes: int, attrs: Attrs) -> TypeRule:
    """Return the type rule: one index table per axis, or no tables if a size is free."""
    return TypeRule(((U8,), *[(I32,)] * (0 if "results" in attrs else axes)), (U8,))


def linear_types(axes: int, attrs: Attrs) -> TypeRule:
    """Return the type rule: indices and weights per axis, or no tables if a size is free; then a factor."""
    return TypeRule(((U8,), *[(I32,), (F32,)] * (0 if "results" in attrs else axes), (F32,)), (U8,))


def valid_nearest(op: Op, graph: Graph) -> None:
    """Check that indices are inside of their axis."""
    if "results" in op.attrs:
        valid_factors(op)
        return
    indices = [graph.constants[name] for name in op.inputs[1:]]
    _valid_indices(op, graph, indices, 1)


def valid_linear(op: Op, graph: Graph) -> None:
    """Check that indices are inside of their axis and that each has its weights."""
    if "results" in op.attrs:
        valid_factors(op)
        return
    tables = [graph.constants[name] for name in op.inputs[1:]]
    indices = tables[:-1:2]
    _valid_indices(op, graph, indices, 2)
    pairs = zip(indices, tables[1:-1:2], strict=True)
    if tables[-1].shape != (1,) or any(i.shape != w.shape or i.shape[1] != 2 for i, w in pairs):
        raise ValueError(
            f"%{op.output}: {op.kind} expects two indices and two weights per output, but got other shapes"
        )


def _valid_indices(op: Op, graph: Graph, indices: Sequence[np.ndarray], rank: int) -> None:
    """Check the rank of index tables and that their indices are inside of their axis."""
    for size, index in zip(graph.types[op.inputs[0]].shape[2:], indices, strict=True):
        if index.ndim != rank or not ((index >= 0) & (index < size)).all():
            raise ValueError(f"{op.kind} has indices outside of its operand {graph.types[op.inputs[0]]}")


def valid_factors(op: Op) -> None:
    """Check an operator without tables: sizes, and a scale factor or ``None`` for each axis."""
    sizes, results, scales = (op.attrs[name] for name in ("sizes", "results", "scales"))
    known = [scale is None or (isinstance(scale, (int, float)) and 0 < scale < float("inf")) for scale in scales]
    if not (len(sizes) == len(results) == len(scales) and all(known)):
        raise ValueError(
            f"{op.kind} expects sizes, results and positive scales for each axis, but got {dict(op.attrs)}"
        )


def _nearest(axes: int) -> OpDef:
    return OpDef(
        name=f"upsample_nearest{axes}d",
        targets=(f"aten.upsample_nearest{axes}d.vec",),
        operands=("input",),
        shares_qparams=True,
        bind=bind_resize,
        check=first_reason(require_float_operands, rank(axes + 2), require_fixed_channels, require_finite_factors),
        infer=nearest_shape,
        reference=nearest_reference,
        constants=nearest_constants,
        types=partial(nearest_types, axes),
        validate=valid_nearest,
        needs=pixels_to_read,
        layout=Layout.CHANNELS_LAST,
        min_pixels=1,
        in_float=lambda attrs: ("resize_f32", {**attrs, "mode": "nearest"}),
        emit="nearest",
        kernel="resize",
    )


def _linear(axes: int, name: str) -> OpDef:
    return OpDef(
        name=name,
        targets=(f"aten.{name}.vec",),
        operands=("input",),
        bind=bind_resize,
        check=first_reason(require_float_operands, rank(axes + 2), require_fixed_channels, require_finite_factors),
        infer=linear_shape,
        reference=linear_reference,
        constants=linear_constants,
        types=partial(linear_types, axes),
        validate=valid_linear,
        needs=pixels_to_read,
        layout=Layout.CHANNELS_LAST,
        min_pixels=1,
        in_float=lambda attrs: ("resize_f32", {**attrs, "mode": "linear"}),
        emit="linear",
        kernel="resize",
    )


RESIZE_OPS = (*map(_nearest, (1, 2, 3)), _linear(1, "upsample_linear1d"), _linear(2, "upsample_bilinear2d"))
